"""HTTP below the application: connections, body limits, common headers and API keys."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.api.errors import ApiError
from penstock.config import DEFAULT_TENANT, TenantConfig, hash_of_key
from penstock.serving.limits import Shares, network_of_host
from penstock.serving.logs import ACCESS_LOG, request_id

_UNSENT_BYTES = 16 * 1024
"""TCP_NOTSENT_LOWAT. The kernel's default of megabytes would hide a client that stops reading."""
_BODIES = 16
"""Memory for bodies that are being read, in bodies of the maximum size."""

REQUEST_ID = "X-Request-Id"

IGNORED_FIELDS = "X-Penstock-Ignored-Fields"

EXPECTED_OUTPUT_TOKENS = "X-Penstock-Expected-Output-Tokens"
"""Request header for the body's field of that name; the body's own takes precedence."""

_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

_ORIGIN = re.compile(r"https?://[^/]*", re.IGNORECASE)

trace_parent: ContextVar[str | None] = ContextVar("trace_parent", default=None)
"""W3C's traceparent header of the current request."""

_log = logging.getLogger(__name__)
_access_log = logging.getLogger(ACCESS_LOG)


class Connection(H11Protocol):
    """HTTP connection of uvicorn with timeouts for the request's head and for stalled clients.

    header_s: from the connection, or the first byte after a response, to the end of the head
    write_s:  without progress while bytes wait to be sent
    """

    header_s: ClassVar[float]
    write_s: ClassVar[float]

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeouts(cls, header_s: float, write_s: float) -> type[Connection]:
        return type(cls.__name__, (cls,), {"header_s": header_s, "write_s": write_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # `pause_writing` is called as soon as the socket's buffer is full.
        transport.set_write_buffer_limits(high=0)
        sock: socket.socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    # --- the head -------------------------------------------------------------------------------

    def _watch_head(self) -> None:
        """Time the head of a first request, or of one that has begun (else uvicorn's own limit)."""
        is_first = self.cycle is None
        is_between = not is_first and self.cycle.response_complete
        is_due = is_first or (is_between and bool(self.conn.trailing_data[0]))
        if not is_due or self.transport.is_closing():
            self._end_head()
        elif self._head is None:
            self._head = self.loop.call_later(self.header_s, self._refuse_head)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _refuse_head(self) -> None:
        if self.conn.our_state is h11.IDLE:
            error = ApiError(408, f"the request's head took longer than {self.header_s:g} s")
            answer = error.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            events: list[Any] = [
                h11.Response(status_code=408, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ]
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    # --- clients that do not read ---------------------------------------------------------------

    def _watch_writing(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.write_s, self._check_stall, unread)

    def _check_stall(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._watch_writing()
        else:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def client_network(scope: Scope) -> str:
    """Return the client's network."""
    client = scope.get("client")
    return "" if client is None else network_of_host(client[0])


class BodyLimit:
    """ASGI middleware that limits bodies.

    Status 413: over max_bytes. 408: over timeout_s. 415: compressed. 429: over the client's share
    of the memory."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._memory = Shares(_BODIES * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        coding = Headers(scope=scope).get("content-encoding", "identity")
        if coding.lower() != "identity":
            message = f"Content-Encoding: {coding[:64]!r} is not read; send the body uncompressed"
            await ApiError(415, message).response(scope["path"])(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ApiError(413, self._too_large).response(scope["path"])(scope, receive, send)
            return
        body = _BodyReader(self._memory, client_network(scope), self._max_bytes)
        deadline = asyncio.get_running_loop().time() + self._timeout_s

        async def limited() -> Message:
            if body.is_read:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                late = f"the body took longer than {self._timeout_s:g} s"
                raise HTTPException(408, late, {"Connection": "close"}) from error
            if not body.add(message):
                raise HTTPException(413, self._too_large)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            body.release()

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"


class _BodyReader:
    def __init__(self, memory: Shares, client: str, max_bytes: int) -> None:
        self.is_read = False
        self._memory = memory
        self._client = client
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, message: Message) -> bool:
        """Count a chunk; False if too large in sum. Raises: HTTPException if memory is short."""
        num = len(message.get("body", b""))
        if self._num_bytes + num > self._max_bytes:
            return False
        if num and not self._memory.reserve(self._client, num):
            raise HTTPException(429, "too many large bodies are on their way; try again later")
        self._num_bytes += num
        self.is_read = not message.get("more_body", False)
        if self.is_read:
            self.release()
        return True

    def release(self) -> None:
        self._memory.release(self._client, self._num_bytes)
        self._num_bytes = 0


class ResponseHeaders:
    """ASGI middleware that sets `X-Request-Id` and `X-Penstock-Ignored-Fields`, and logs accesses.

    The id is the client's own if it is valid, and in all log lines about the request. Endpoints
    put ignored fields into the request's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _ORIGIN.match(scope["path"]):  # as clients of proxies send it
            scope["path"] = _ORIGIN.sub("", scope["path"]) or "/"
        sent = Headers(scope=scope)
        given = sent.get(REQUEST_ID, "")
        own_id = given if _VALID_ID.fullmatch(given) else uuid4().hex
        began_at = time.perf_counter()
        # Not reset: a failure is logged later in the same task.
        request_id.set(own_id)
        trace_parent.set(sent.get("traceparent"))
        state = scope.setdefault("state", {})
        told = {"method": scope["method"], "path": scope["path"], "status": 0}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = own_id
                if state.get("ignored_fields"):
                    headers[IGNORED_FIELDS] = state["ignored_fields"]
                status = message["status"]
                told["status"] = status
                if status >= 500 and status not in (501, 503):
                    _log.error("%s %r: status %d", scope["method"], scope["path"], status)
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        finally:
            told["seconds"] = round(time.perf_counter() - began_at, 6)
            _access_log.debug("%s %s", scope["method"], scope["path"], extra={"fields": told})


class Caller(NamedTuple):
    """Sender of a request.

    tenant: owner of its requests. client: holder of places in the server: a tenant where there are
    keys, else a network."""

    tenant: str
    client: str


class ApiKeys:
    """Maps API keys to tenants. Without any key, all requests are of the default tenant.

    operators: hashes of keys for data of all tenants; without any, every tenant's key is one"""

    def __init__(self, tenants: Mapping[str, TenantConfig], operators: Iterable[str] = ()) -> None:
        # Looked up by a digest that others cannot compute: in constant time, that is to say in
        # one that tells nothing about the keys.
        self._secret = secrets.token_bytes(32)
        self.change(tenants, operators)

    def change(self, tenants: Mapping[str, TenantConfig], operators: Iterable[str]) -> None:
        """Replace all keys at once."""
        known = {
            self._blinded(key): name for name, tenant in tenants.items() for key in tenant.api_keys
        }
        self._tenants, self._operators = (
            known,
            frozenset(map(self._blinded, operators)) or known.keys(),
        )

    def caller(self, authorization: str | None, network: str) -> Caller:
        """Return the sender by `Authorization` header and network. Raises: ApiError with 401."""
        if not self._tenants:
            return Caller(DEFAULT_TENANT, network)
        tenant = self._tenants.get(self._blinded(_hash_in(authorization)))
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return Caller(tenant, tenant)

    def viewer(self, authorization: str | None) -> str | None:
        """Return the only tenant that a key may view; None: all. Raises: ApiError with 401."""
        if self._is_operator(authorization):
            return None
        if not self._tenants:
            self.check_operator(authorization)
        return self.caller(authorization, "").tenant

    def check_operator(self, authorization: str | None) -> None:
        """Raises: ApiError with 401."""
        if not self._is_operator(authorization):
            raise ApiError(401, "this API key is none for metrics", code="invalid_api_key")

    def _is_operator(self, authorization: str | None) -> bool:
        """Raises: ApiError with 401."""
        return not self._operators or self._blinded(_hash_in(authorization)) in self._operators

    def _blinded(self, key_hash: str) -> bytes:
        return hmac.digest(self._secret, key_hash.encode(), "sha256")


def _hash_in(authorization: str | None) -> str:
    """Return the hash of the key in an `Authorization` header. Raises: ApiError with 401."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        message = "an API key is required: send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="missing_api_key")
    return hash_of_key(key.strip())
