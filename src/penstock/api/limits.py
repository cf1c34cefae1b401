"""Bodies bounded in size and in time, before anything reads them whole."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.errors import ApiError
from penstock.serving.waiting_room import Shares
from penstock.transport.service import network_of_host

_BODIES = 16
"""So many of the largest bodies may be in memory while they are read."""


def client_network(scope: Scope) -> str:
    """The network that a request comes from."""
    client = scope.get("client")
    return "" if client is None else network_of_host(client[0])


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` bytes is refused with 413, one that takes
    longer than `timeout_s` seconds with 408, and with 429 one of a client whose bodies take more
    than its share of the memory for all that are being read."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._memory = Shares(_BODIES * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ApiError(413, self._too_large).response()(scope, receive, send)
            return
        body = _Body(self._memory, client_network(scope), self._max_bytes)
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


class _Body:
    """One body while it is read."""

    def __init__(self, memory: Shares, client: str, max_bytes: int) -> None:
        self.is_read = False
        self._memory = memory
        self._client = client
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, message: Message) -> bool:
        """Whether a piece still fits. Raises: HTTPException where memory is short."""
        num = len(message.get("body", b""))
        if self._num_bytes + num > self._max_bytes:
            return False
        if num and not self._memory.take(self._client, num):
            raise HTTPException(429, "too many large bodies are on their way; try again later")
        self._num_bytes += num
        self.is_read = not message.get("more_body", False)
        if self.is_read:
            self.release()
        return True

    def release(self) -> None:
        self._memory.release(self._client, self._num_bytes)
        self._num_bytes = 0
