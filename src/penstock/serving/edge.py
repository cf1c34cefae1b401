"""Requests of a draft server's own users, made by the verification server over the link.

The text of a request lives here. When the stream breaks it is kept, and opened again on the next
one with all that has been verified as its prompt: the user notices a pause, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.types import NO_DRAFTER, FinishReason, Output, Request
from penstock.serving.client import OutputStream
from penstock.serving.draft_server import DraftServer
from penstock.serving.messages import EngineStats, Ready
from penstock.serving.refusals import EngineUnavailable, NotTaken, QueueFull
from penstock.serving.tracked import Tracked
from penstock.serving.verified_text import Piece, VerifiedText
from penstock.serving.waiting_room import WaitingRoom
from penstock.transport.checks import Limits, Refusal, check_open
from penstock.transport.v1 import drafting_pb2 as pb

_CONNECT_WAIT_S = 30.0
_MAX_TRIES = 5
"""A request that the verification server gives up so often, with no token between, is hopeless."""

_NOT_TAKEN: dict[pb.Refused.Code, type[NotTaken]] = {
    pb.Refused.BUSY: QueueFull,
    pb.Refused.UNAVAILABLE: EngineUnavailable,
}
"""Refusals for no fault of the request's."""

_RETRY_S = 0.2
_STOPPED = "the server was stopped before this request was finished"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _EdgeRequest:
    """One request, and where its outputs go. num_tries: since the last token."""

    request: Request
    stream: OutputStream
    tracked: Tracked
    is_open: bool = False
    num_tries: int = 0
    retry: asyncio.TimerHandle | None = None

    @property
    def num_remaining(self) -> int:
        return self.request.prompt_len + self.request.max_tokens - len(self.tracked.text)

    def opening(self) -> pb.Open:
        return self.tracked.opening(self.num_remaining, self.request.stop_token_ids)


class EdgeClient:
    """A `RequestClient` over a draft server's link.

    info: of the model whose output users get
    max_waiting: requests that may be without a first token at once
    """

    def __init__(self, server: DraftServer, info: Ready, *, max_waiting: int) -> None:
        self.info = info
        self.room = WaitingRoom(max_waiting)
        self._server = server
        self._requests: dict[str, _EdgeRequest] = {}
        self._connected = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self.num_restarts = 0
        server.on_connected = self._on_connected
        server.on_lost = self._on_lost
        if server.link.problem is None:
            self._connected.set()

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.info.drafters

    @property
    def problem(self) -> str | None:
        return "the server is shutting down" if self._stopping else self._server.link.problem

    @property
    def num_open(self) -> int:
        return len(self._requests)

    async def stats(self) -> EngineStats | None:
        """Always None: the engine is elsewhere."""
        return None

    async def drain(self, grace_s: float) -> None:
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for edge in list(self._requests.values()):
            self._end(edge, Output(edge.request.id, (), 0, FinishReason.CANCELLED, _STOPPED))

    async def submit(self, client: str, requests: Sequence[Request]) -> OutputStream:
        """Have requests made, after waiting a while for the link if it is broken.

        Raises: QueueFull, EngineUnavailable.
        """
        ids = [request.id for request in requests]
        self.room.enter(client, ids)
        try:
            await self._wait_until_connected()
        except BaseException:
            self.room.leave(ids)
            raise
        stream = OutputStream(self, ids)
        for request in requests:
            self._add(request, stream)
        self._open_waiting()
        return stream

    def cancel(self, request_id: str) -> None:
        edge = self._requests.get(request_id)
        if edge is not None:
            self._forget(edge)
            self._open_waiting()

    async def _wait_until_connected(self) -> None:
        if self.problem is not None and not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._connected.wait(), _CONNECT_WAIT_S)
        if self.problem is not None:
            raise EngineUnavailable(self.problem)

    # --- opening --------------------------------------------------------------------------------

    def _add(self, request: Request, stream: OutputStream) -> None:
        if request.prompt_token_ids is None:
            raise ValueError("a request needs its prompt's tokens, not only its length")
        tracked = Tracked(
            request.id,
            VerifiedText(request.prompt_token_ids),
            request.sampling,
            max_draft_tokens=0 if request.drafter == NO_DRAFTER else request.max_draft_tokens,
        )
        edge = _EdgeRequest(request, stream, tracked)
        problem = self._problem_of(edge)
        if problem is not None:
            self.room.leave([request.id])
            stream.put(Output(request.id, (), 0, FinishReason.REFUSED, problem))
            return
        tracked.listener = lambda piece, num_proposed: self._take(edge, piece, num_proposed)
        self._requests[request.id] = edge
        self._idle.clear()

    def _problem_of(self, edge: _EdgeRequest) -> str | None:
        """Why the verification server would never take a request."""
        message = edge.opening()
        message.request_id = "0"
        limits = self._server.limits
        try:
            check_open(message, Limits(limits.vocab_size, limits.max_request_tokens), ())
        except Refusal as refusal:
            return refusal.reason
        return None

    def _on_connected(self) -> None:
        self._connected.set()
        self._open_waiting()

    def _on_lost(self) -> None:
        self._connected.clear()
        self.num_restarts += 1
        for edge in self._requests.values():
            edge.is_open = False

    def _open_waiting(self) -> None:
        """Open what is not, the oldest first, as far as the verification server allows."""
        if self._server.link.problem is not None:
            return
        num_open = sum(edge.is_open for edge in self._requests.values())
        for edge in list(self._requests.values()):
            if num_open >= self._server.limits.max_open_requests:
                break
            if not edge.is_open and edge.retry is None:
                self._open(edge)
                num_open += edge.is_open

    def _open(self, edge: _EdgeRequest) -> None:
        if edge.num_remaining <= 0:
            self._end(edge, Output(edge.request.id, (), 0, FinishReason.LENGTH))
            return
        edge.is_open = True
        self._server.open(edge.tracked, edge.opening())

    def _retry(self, edge: _EdgeRequest) -> None:
        edge.retry = None
        self._open_waiting()

    # --- what comes back ------------------------------------------------------------------------

    def _take(self, edge: _EdgeRequest, piece: Piece, num_proposed: int) -> None:
        if piece.token_ids:
            edge.num_tries = 0
            self.room.answered(edge.request.id)
        if piece.finish_reason and self._is_passing(edge, piece.finish_reason):
            self._put(edge, piece, num_proposed, None)
            self._set_aside(edge, piece.reason)
            return
        finish = FinishReason(piece.finish_reason) if piece.finish_reason else None
        if finish is not None:
            self._forget(edge)
        if piece.code in _NOT_TAKEN:
            edge.stream.fail(_NOT_TAKEN[piece.code](piece.reason))
        else:
            self._put(edge, piece, num_proposed, finish)
        if finish is not None:
            self._open_waiting()

    def _is_passing(self, edge: _EdgeRequest, finish_reason: str) -> bool:
        """Whether an end is none of the request's own doing: its engine died, is being shut down,
        or has too much to do. (What would always be refused was never sent.)"""
        if self._stopping or edge.num_tries >= _MAX_TRIES:
            return False
        return finish_reason in ("cancelled", "error", "refused")

    def _set_aside(self, edge: _EdgeRequest, reason: str) -> None:
        """Open a request again after a while."""
        delay = _RETRY_S * 2**edge.num_tries
        edge.num_tries += 1
        edge.is_open = False
        _log.warning("a request was given up (%s); opening it again in %.1f s", reason, delay)
        edge.retry = asyncio.get_running_loop().call_later(delay, self._retry, edge)

    def _put(
        self, edge: _EdgeRequest, piece: Piece, num_proposed: int, finish: FinishReason | None
    ) -> None:
        if not piece.token_ids and finish is None:
            return
        edge.stream.put(
            Output(
                edge.request.id,
                token_ids=piece.token_ids,
                num_tokens=len(piece.token_ids),
                finish_reason=finish,
                error=piece.reason or None,
                drafter=self._server.limits.drafter if num_proposed else None,
                num_proposed=num_proposed,
                num_accepted=min(piece.num_accepted, num_proposed),
                logprobs=piece.logprobs,
            )
        )

    def _end(self, edge: _EdgeRequest, output: Output) -> None:
        self._forget(edge)
        edge.stream.put(output)

    def _forget(self, edge: _EdgeRequest) -> None:
        del self._requests[edge.request.id]
        self.room.leave([edge.request.id])
        if edge.retry is not None:
            edge.retry.cancel()
        self._server.close(edge.tracked)
        if not self._requests:
            self._idle.set()
