"""Headers that every response has, and what the log says of a request."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "X-Request-Id"
IGNORED_FIELDS = "X-Penstock-Ignored-Fields"

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_log = logging.getLogger(__name__)


class ResponseHeaders:
    """ASGI middleware. Every response has `X-Request-Id`: the client's own where it is printable
    and short, else a new one; it is in all log lines about the request. `X-Penstock-Ignored-Fields`
    is what the endpoint left in the request's state under `ignored_fields`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid4().hex
        # Not reset: a failure is logged after this has been left, in the same task.
        _request_id.set(request_id)
        state = scope.setdefault("state", {})

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if state.get("ignored_fields"):
                    headers[IGNORED_FIELDS] = state["ignored_fields"]
                status = message["status"]
                if status >= 500 and status != 503:
                    _log.error("%s %r: status %d", scope["method"], scope["path"], status)
            await send(message)

        await self._app(scope, receive, with_headers)


class LogFormatter(logging.Formatter):
    """One style for all lines; those about an HTTP request begin with its id."""

    def __init__(self) -> None:
        super().__init__("penstock: %(levelname)s: %(request)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id.get()
        record.request = "" if request_id is None else f"request {request_id}: "
        return super().format(record)


def configure_logging() -> None:
    """Log to standard error in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[handler])
