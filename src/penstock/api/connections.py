"""Connections that do not wait for ever for their clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.api.errors import ApiError

_UNSENT_BYTES = 16 * 1024
"""What the kernel takes ahead of the client. Its own default is megabytes, and whole streams would
disappear in it before it shows that nobody reads them."""


class Connection(H11Protocol):
    """uvicorn's connection, closed when a request's head is not complete in time, or when the
    client reads nothing for a while; its request is then cancelled like that of any other client
    that goes away. `with_timeouts` makes the class for a server.

    header_s: from the connection, or the first byte after a response, to the end of the head
    write_s:  without a byte read, while some wait to be
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
        # Whatever is not sent at once counts as unread.
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
        """A head is due at first, and when part of one has come; between requests uvicorn has a
        limit of its own."""
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

    # --- what is not read -----------------------------------------------------------------------

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
