"""Request that a draft server drafts for: its verified text, and its state on the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from penstock.core.drafting.sessions import SessionDraft
from penstock.core.types import SamplingParams, TokenLogprob
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import PrefixDigest, decode_logprobs, encode_weights


class Piece(NamedTuple):
    """Verified tokens from position `start` on, and perhaps the end of the request.

    The first `num_accepted` are those of a draft of `num_drafted`. finish_reason: empty while it
    goes on; `code` is the reason of `refused`. logprobs: one for each token, or none at all."""

    start: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0
    finish_reason: str = ""
    reason: str = ""
    code: pb.Refused.Code = pb.Refused.INVALID
    logprobs: tuple[TokenLogprob, ...] = ()
    num_drafted: int = 0
    num_stop_chars: int = 0

    @classmethod
    def from_verdict(cls, verdict: pb.VerifiedTokens) -> Self:
        return cls(
            start=verdict.start,
            token_ids=tuple(verdict.token_ids),
            num_accepted=verdict.num_accepted,
            finish_reason=verdict.finish_reason,
            reason=verdict.reason,
            logprobs=decode_logprobs(verdict.logprobs),
            num_drafted=verdict.num_drafted,
            num_stop_chars=verdict.num_stop_chars,
        )


class VerifiedText:
    """Prompt and verified tokens. A piece behind a gap waits; a known piece changes nothing."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.digest = PrefixDigest(self.token_ids)
        self._ahead: dict[int, Piece] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_piece(self, piece: Piece) -> list[Piece]:
        """Return the pieces that the text has grown by, in order, up to the end of the request."""
        known = self._ahead.get(piece.start)
        if known is None or len(piece.token_ids) >= len(known.token_ids):
            self._ahead[piece.start] = piece
        joined: list[Piece] = []
        while (start := min(self._ahead, default=len(self) + 1)) <= len(self):
            fresh = self._without_known(self._ahead.pop(start))
            if not fresh.token_ids and not fresh.finish_reason:
                continue
            self.token_ids += fresh.token_ids
            self.digest.extend(fresh.token_ids)
            joined.append(fresh)
            if fresh.finish_reason:
                self._ahead.clear()
        return joined

    def forget_ahead(self) -> None:
        """Drop the pieces that wait behind a gap."""
        self._ahead.clear()

    def _without_known(self, piece: Piece) -> Piece:
        num_known = len(self) - piece.start
        return piece._replace(
            start=len(self),
            token_ids=piece.token_ids[num_known:],
            logprobs=piece.logprobs[num_known:],
            num_accepted=max(piece.num_accepted - num_known, 0),
            num_drafted=max(piece.num_drafted - num_known, 0),
        )


Listener = Callable[[Piece], None]
"""Callback for the pieces of a text as they are verified."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request.

    key: of its drafting session. listener: of a request of edge ingress. max_draft_tokens: longest
    draft; 0 for none at all. drafted_as: sampling of its session, which depends on the link.

    wire_id: its name on the present stream. is_taken: the other side has it, so a refusal means
    another message. asked: the assignment without an answer; `is_ordered` when it is being drafted
    for. newest: (epoch, round) of the last assignment."""

    key: str
    text: VerifiedText
    sampling: SamplingParams
    listener: Listener | None = None
    max_draft_tokens: int | None = None
    drafted_as: SamplingParams | None = None
    wire_id: str = ""
    is_taken: bool = False
    asked: pb.Assign | None = None
    is_ordered: bool = False
    newest: tuple[int, int] = (-1, -1)

    @property
    def tag(self) -> tuple[str, int, int]:
        """Unique name of the last assignment in this process."""
        return (self.wire_id, *self.newest)

    def begin_stream(self, wire_id: str) -> None:
        """Reset the state of the last stream."""
        self.wire_id = wire_id
        self.is_taken = self.is_ordered = False
        self.asked, self.newest = None, (-1, -1)
        self.text.forget_ahead()

    def is_newer(self, assign: pb.Assign) -> bool:
        return (assign.epoch, assign.round) > self.newest

    def answer(self, draft: SessionDraft | None) -> pb.DraftTokens | None:
        """Return the answer to the open assignment, and close it."""
        assign, self.asked, self.is_ordered = self.asked, None, False
        if assign is None:
            return None
        message = pb.DraftTokens(
            request_id=self.wire_id,
            epoch=assign.epoch,
            round=assign.round,
            prefix_len=assign.prefix_len,
            prefix_digest=self.text.digest.digest(),
        )
        if draft is not None:
            message.token_ids.extend(draft.token_ids)
            message.weights.extend(encode_weights(draft.sources))
        return message
