"""Bodies bounded in size, before anything reads them whole."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.errors import ApiError


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` bytes is refused with 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ApiError(413, self._message).response()(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._message)
            return message

        await self._app(scope, limited, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"
