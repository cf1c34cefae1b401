"""Requests of a draft server's own users, sent to the verification server over the link.

The text of a request lives here. When the stream breaks, the request is opened again on the next
one with all verified tokens as its prompt, so the user only notices a pause."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from penstock.core.types import NO_DRAFTER, FinishReason, Output, Request
from penstock.serving.client import EngineUnavailable, OutputStream, RequestClient
from penstock.serving.draft_server import DraftService
from penstock.serving.limits import QueueFull, RequestRejected, WaitingRoom
from penstock.serving.messages import Ready
from penstock.serving.tracked import Piece, TrackedRequest, VerifiedText
from penstock.transport.checks import Limits, Refusal, check_open
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import encode_sampling, encode_stop

_MAX_TRIES = 5
"""Attempts without a new token after which a request fails."""
_REJECTIONS: dict[pb.Refused.Code, type[RequestRejected]] = {
    pb.Refused.BUSY: QueueFull,
    pb.Refused.UNAVAILABLE: EngineUnavailable,
}
"""Errors of refusals that are not the request's fault."""
_RETRY_S = 0.2
_LEAST_DEADLINE_S = 1e-3
"""For a request whose deadline passed while the link was down: it is late in any case."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _EdgeRequest:
    """Request and its text. num_tries: since the last token."""

    request: Request
    tracked: TrackedRequest
    is_open: bool = False
    num_tries: int = 0
    retry: asyncio.TimerHandle | None = None
    started_at: float = field(default_factory=time.monotonic)

    @classmethod
    def from_request(cls, request: Request) -> Self:
        if request.prompt_token_ids is None:
            raise ValueError("a request needs its prompt's tokens, not only its length")
        tracked = TrackedRequest(
            request.id,
            VerifiedText(request.prompt_token_ids),
            request.sampling,
            max_draft_tokens=0 if request.drafter == NO_DRAFTER else request.max_draft_tokens,
        )
        return cls(request, tracked)

    @property
    def num_remaining(self) -> int:
        return self.request.prompt_len + self.request.max_tokens - len(self.tracked.text)

    def opening(self) -> pb.Open:
        """Return the message that asks for the remaining tokens; its id is still to be set."""
        request, text = self.request, self.tracked.text
        expected = request.expected_output_tokens
        if expected is not None:
            expected = min(max(expected + request.prompt_len - len(text), 1), self.num_remaining)
        stop = request.stop
        if stop is not None:
            stop = stop._replace(num_made=len(text) - request.prompt_len)
        tpot, deadline = request.latency
        if deadline is not None:
            deadline = max(_LEAST_DEADLINE_S, deadline + self.started_at - time.monotonic())
        return pb.Open(
            prompt_token_ids=text.token_ids,
            max_tokens=self.num_remaining,
            stop_token_ids=sorted(request.stop_token_ids),
            num_logprobs=request.sampling.num_logprobs,
            sampling=encode_sampling(request.sampling),
            expected_output_tokens=expected,
            tpot=tpot,
            deadline=deadline,
            stop=None if stop is None else encode_stop(stop),
        )


class EdgeClient(RequestClient):
    """Client over a draft server's link. max_waiting: most requests without a first token."""

    def __init__(self, server: DraftService, info: Ready, *, max_waiting: int) -> None:
        super().__init__(WaitingRoom(max_waiting))
        self._info = info
        self._server = server
        self._requests: dict[str, _EdgeRequest] = {}
        server.on_connected = self._on_connected
        server.on_lost = self._on_lost
        if server.link.problem is None:
            self._ready.set()

    @property
    def info(self) -> Ready:
        return self._info

    @property
    def drafters(self) -> tuple[str, ...]:
        return self._info.drafters

    @property
    def num_restarts(self) -> int:
        return self._server.link.num_losses

    @property
    def _failure(self) -> str | None:
        return self._server.link.problem

    def _start(self, request: Request) -> None:
        edge = self._requests[request.id] = _EdgeRequest.from_request(request)
        edge.tracked.listener = partial(self._take, edge)
        self._open_waiting()

    def _stop(self, request_id: str) -> None:
        # Later, so that requests stopped together do not replace each other.
        asyncio.get_running_loop().call_soon(self._open_waiting)

    def _fault_of(self, request: Request) -> str | None:
        sampling = request.sampling
        if sampling.reads_text or sampling.min_p or sampling.num_prompt_logprobs is not None:
            return (
                "a draft server does not pass on structured output, min_p, min_tokens, logit_bias, "
                "penalties, or echo with logprobs; send such a request to the verification server"
            )
        message = _EdgeRequest.from_request(request).opening()
        message.request_id = "0"
        limits = self._server.limits
        try:
            check_open(message, Limits(limits.vocab_size, limits.max_request_tokens), ())
        except Refusal as refusal:
            return refusal.reason
        return None

    def _on_connected(self) -> None:
        self._ready.set()
        self._open_waiting()

    def _on_lost(self) -> None:
        self._ready.clear()
        for edge in self._requests.values():
            edge.is_open = False

    def _open_waiting(self) -> None:
        """Open further requests, the oldest first, up to the verification server's limit."""
        if self._server.link.problem is not None:
            return
        num_open = sum(edge.is_open for edge in self._requests.values())
        for edge in list(self._requests.values()):
            if num_open >= self._server.limits.max_open_requests:
                break
            if not edge.is_open and edge.retry is None:
                self._open_one(edge)
                num_open += edge.is_open

    def _open_one(self, edge: _EdgeRequest) -> None:
        if edge.num_remaining <= 0:
            self._route(Output(edge.request.id, finish_reason=FinishReason.LENGTH))
            return
        edge.is_open = True
        self._server.open(edge.tracked, edge.opening())

    def _retry(self, edge: _EdgeRequest) -> None:
        edge.retry = None
        self._open_waiting()

    def _take(self, edge: _EdgeRequest, piece: Piece) -> None:
        if piece.token_ids:
            edge.num_tries = 0
        if piece.finish_reason and self._is_temporary(edge, piece.finish_reason):
            self._hand_on(edge, piece, None)
            self._retry_later(edge, piece.reason)
            return
        finish = FinishReason(piece.finish_reason) if piece.finish_reason else None
        if piece.code in _REJECTIONS:
            sink = self._sinks[edge.request.id]
            self._forget(edge.request.id)
            assert isinstance(sink, OutputStream)
            sink.fail(_REJECTIONS[piece.code](piece.reason))
        else:
            self._hand_on(edge, piece, finish)
        if finish is not None:
            self._open_waiting()

    def _is_temporary(self, edge: _EdgeRequest, finish_reason: str) -> bool:
        if self._stopping or edge.num_tries >= _MAX_TRIES:
            return False
        return finish_reason in ("cancelled", "error", "refused")

    def _retry_later(self, edge: _EdgeRequest, reason: str) -> None:
        delay = _RETRY_S * 2**edge.num_tries
        edge.num_tries += 1
        edge.is_open = False
        _log.warning("a request failed (%s); opening it again in %.1f s", reason, delay)
        edge.retry = asyncio.get_running_loop().call_later(delay, self._retry, edge)

    def _hand_on(self, edge: _EdgeRequest, piece: Piece, finish: FinishReason | None) -> None:
        if piece.token_ids or finish is not None:
            self._route(
                Output(
                    edge.request.id,
                    token_ids=piece.token_ids,
                    num_tokens=len(piece.token_ids),
                    finish_reason=finish,
                    error=piece.reason or None,
                    drafter=self._server.limits.drafter if piece.num_drafted else None,
                    num_proposed=piece.num_drafted,
                    num_accepted=min(piece.num_accepted, piece.num_drafted),
                    logprobs=piece.logprobs,
                    num_stop_chars=piece.num_stop_chars,
                )
            )

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        edge = self._requests.pop(request_id)
        if edge.retry is not None:
            edge.retry.cancel()
        self._server.close(edge.tracked)
