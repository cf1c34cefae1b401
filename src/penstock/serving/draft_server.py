"""Draft server: drafts for the requests that a verification server assigns to it.

Messages may come twice, late and in any order. Verdicts are joined by position, assignments wait
for the text that they refer to, and the highest (epoch, round) counts. Every assignment gets one
answer, an empty draft if it is too late, since a silent draft server counts as dead."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from penstock.core.drafting.lines import SessionOrder
from penstock.core.drafting.sessions import DraftingSessions, SessionDraft, SessionLines
from penstock.core.types import SamplingParams
from penstock.serving.drafting import DraftingThread
from penstock.serving.link import Endpoint, VerifierLink
from penstock.serving.tracked import Piece, TrackedRequest, VerifiedText
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import decode_sampling, encode_pieces, in_effect

_MAX_REMEMBERED = 1024
"""Most verdicts kept for requests that are not known yet, and most releases remembered."""
_REFUSAL_GRACE_S = 0.1

_log = logging.getLogger(__name__)


class DraftService:
    """Drafts for all requests of one link."""

    def __init__(self, endpoint: Endpoint, hello: pb.Hello, sessions: DraftingSessions) -> None:
        self.link = VerifierLink(endpoint, hello, self)
        self.welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        """From the first stream."""
        self.on_connected: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.limits = pb.Welcome()
        """From the last stream."""
        self._takes_assignments = hello.takes_assignments
        self._drafting = DraftingThread(sessions, self._send_drafts, self._send_lines)
        self._by_wire_id: dict[str, TrackedRequest] = {}
        self._by_key: dict[str, TrackedRequest] = {}
        self._early_verdicts: OrderedDict[tuple[str, int], Piece] = OrderedDict()
        self._released: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._num_opened = 0

    async def run(self) -> None:
        """Draft until cancelled. Raises: LinkRefused, and the drafting thread's exceptions."""
        self._drafting.start()
        link = asyncio.create_task(self.link.run())
        try:
            await asyncio.wait((link, self._drafting.failed), return_when=asyncio.FIRST_COMPLETED)
            (link if link.done() else self._drafting.failed).result()
        finally:
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
            await self._drafting.stop()

    @property
    def num_ahead(self) -> int:
        """Number of tokens that were sent ahead."""
        return self._drafting.num_ahead

    def open(self, tracked: TrackedRequest, message: pb.Open) -> None:
        """Open a request of this server's own users on the present stream; sets its id."""
        self._num_opened += 1
        tracked.begin_stream(f"{self._num_opened:x}")
        self._by_wire_id[tracked.wire_id] = tracked
        params = in_effect(tracked.sampling, trusted=self.limits.trusted)
        if tracked.drafted_as != params:
            self._begin(tracked, params)
        message.request_id = tracked.wire_id
        self.link.send(pb.Up(open=message))

    def close(self, tracked: TrackedRequest) -> None:
        """End a request whose text is not wanted any more."""
        if self._by_wire_id.get(tracked.wire_id) is tracked:
            self._answer(tracked)
            self.link.send(pb.Up(close=pb.Close(request_id=tracked.wire_id)))
        self._forget(tracked)

    def connected(self, welcome: pb.Welcome) -> None:
        """Begin a new stream, for which everything sent before is void."""
        self.limits = welcome
        self._drafting.post(lambda sessions: sessions.proposer.limit_vocab(welcome.vocab_size))
        self._drafting.post(DraftingSessions.begin_stream)
        if not self.welcome.done():
            self.welcome.set_result(welcome)
        self.on_connected()

    def lost(self) -> None:
        for tracked in list(self._by_wire_id.values()):
            if tracked.listener is None:
                self._forget(tracked)
        self._by_wire_id.clear()
        self._early_verdicts.clear()
        self._released.clear()
        self.on_lost()

    def received(self, message: pb.Down) -> None:
        match message.WhichOneof("message"):
            case "opened":
                self._opened(message.opened)
            case "assign":
                self._assign(message.assign)
            case "verdict":
                self._verdict(message.verdict)
            case "release":
                self._release(message.release.request_id)
            case "refused":
                self._refuse(message.refused)
            case _:
                pass

    def _opened(self, opened: pb.Opened) -> None:
        tracked = self._by_wire_id.get(opened.request_id)
        if tracked is not None:
            tracked.is_taken = True

    def _assign(self, assign: pb.Assign) -> None:
        tracked = self._by_wire_id.get(assign.request_id) or self._adopt(assign)
        if tracked is None or not tracked.is_newer(assign):
            return
        tracked.is_taken = True
        if not assign.num_draft_tokens:
            return  # a text to read: an order for a draft of this round comes later
        self._answer(tracked)
        tracked.asked, tracked.newest = assign, (assign.epoch, assign.round)
        self._order(tracked)

    def _adopt(self, assign: pb.Assign) -> TrackedRequest | None:
        """Begin a request of central ingress, if this is the first of its assignments."""
        request_id = assign.request_id
        released = self._released.get(request_id, (-1, -1))
        is_first = bool(assign.prefix_token_ids) and (assign.epoch, assign.round) > released
        if not is_first or not self._takes_assignments:
            return None
        params = decode_sampling(assign.sampling)
        text = VerifiedText(assign.prefix_token_ids)
        tracked = TrackedRequest(request_id, text, params, wire_id=request_id)
        self._by_wire_id[request_id] = tracked
        self._begin(tracked, params)
        for key in [k for k in self._early_verdicts if k[0] == request_id]:
            self._advance(tracked, self._early_verdicts.pop(key))
        return tracked

    def _verdict(self, verdict: pb.VerifiedTokens) -> None:
        tracked = self._by_wire_id.get(verdict.request_id)
        if tracked is not None:
            tracked.is_taken = True
            self._advance(tracked, Piece.from_verdict(verdict))
        else:
            self._early_verdicts[verdict.request_id, verdict.start] = Piece.from_verdict(verdict)
            if len(self._early_verdicts) > _MAX_REMEMBERED:
                self._early_verdicts.popitem(last=False)

    def _release(self, request_id: str) -> None:
        tracked = self._by_wire_id.get(request_id)
        if tracked is not None and tracked.listener is None:
            self._drop(tracked)

    def _refuse(self, refused: pb.Refused) -> None:
        """Apply a refusal after a while, unless the request is open: it was of another message."""
        _log.debug("request %s: refused: %s", refused.request_id, refused.reason)
        tracked = self._by_wire_id.get(refused.request_id)
        if tracked is not None and not tracked.is_taken:
            loop = asyncio.get_running_loop()
            loop.call_later(_REFUSAL_GRACE_S, self._apply_refusal, tracked, refused)

    def _apply_refusal(self, tracked: TrackedRequest, refused: pb.Refused) -> None:
        if self._by_wire_id.get(refused.request_id) is tracked and not tracked.is_taken:
            at = len(tracked.text)
            piece = Piece(
                start=at,
                token_ids=(),
                finish_reason="refused",
                reason=refused.reason,
                code=refused.code,
            )
            self._advance(tracked, piece)

    def _advance(self, tracked: TrackedRequest, piece: Piece) -> None:
        for fresh in tracked.text.add_piece(piece):
            if fresh.token_ids:
                self._drafting.post(partial(_extend, tracked.key, fresh))
            self._order(tracked)
            if fresh.finish_reason:
                self._finish(tracked)
            if tracked.listener is not None:
                tracked.listener(fresh)

    def _finish(self, tracked: TrackedRequest) -> None:
        """End a request on this stream. One of edge ingress may be opened again."""
        if tracked.listener is None:
            self._drop(tracked)
        else:
            self._answer(tracked)
            self._by_wire_id.pop(tracked.wire_id, None)

    def _drop(self, tracked: TrackedRequest) -> None:
        self._answer(tracked)
        self._released[tracked.wire_id] = tracked.newest
        if len(self._released) > _MAX_REMEMBERED:
            self._released.popitem(last=False)
        self._forget(tracked)

    def _order(self, tracked: TrackedRequest) -> None:
        """Pass an assignment to the drafting thread when the text is as long as it says."""
        assign = tracked.asked
        if assign is None or assign.prefix_len > len(tracked.text):
            return
        if assign.prefix_len < len(tracked.text):
            self._answer(tracked)
        elif not tracked.is_ordered:
            tracked.is_ordered = True
            limit = assign.num_draft_tokens
            if tracked.max_draft_tokens is not None:
                limit = min(limit, tracked.max_draft_tokens)
            order = SessionOrder(tracked.tag, assign.prefix_len, limit, assign.min_survival)
            self._drafting.post(lambda sessions: sessions.order(tracked.key, order))

    def _send_lines(self, found: list[SessionLines]) -> None:
        ahead = pb.DraftAhead()
        for key, pieces in found:
            tracked = self._by_key.get(key)
            if tracked is not None and self._by_wire_id.get(tracked.wire_id) is tracked:
                ahead.lines.add(request_id=tracked.wire_id, pieces=encode_pieces(pieces))
        if ahead.lines:
            self.link.send(pb.Up(ahead=ahead))

    def _send_drafts(self, drafts: list[SessionDraft]) -> None:
        for draft in drafts:
            tracked = self._by_key.get(draft.key)
            if tracked is not None and tracked.asked is not None and draft.tag == tracked.tag:
                self._answer(tracked, draft)

    def _answer(self, tracked: TrackedRequest, draft: SessionDraft | None = None) -> None:
        message = tracked.answer(draft)
        if message is not None:
            self.link.send(pb.Up(draft=message))

    def _begin(self, tracked: TrackedRequest, params: SamplingParams) -> None:
        self._by_key[tracked.key] = tracked
        tracked.drafted_as = params
        token_ids = tuple(tracked.text.token_ids)
        # Requests with their own limit get orders only, which respect it.
        sends_lines = self.limits.max_ahead_tokens > 0 and tracked.max_draft_tokens is None
        self._drafting.post(
            lambda sessions: sessions.begin(tracked.key, token_ids, params, sends_lines=sends_lines)
        )

    def _forget(self, tracked: TrackedRequest) -> None:
        self._by_wire_id.pop(tracked.wire_id, None)
        self._by_key.pop(tracked.key, None)
        self._drafting.post(lambda sessions: sessions.release_session(tracked.key))


def _extend(key: str, piece: Piece, sessions: DraftingSessions) -> None:
    sessions.extend(key, piece.token_ids, piece.num_accepted)
