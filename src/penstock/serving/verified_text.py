"""The verified text of one request, whatever the order in which its pieces come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from penstock.core.types import TokenLogprob
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import PrefixDigest, decode_logprobs


class Piece(NamedTuple):
    """Verified tokens from position `start` on, of which the first `num_accepted` were drafted, and
    perhaps the end of the request (`finish_reason` is empty while it goes on; `code` says why it is
    `refused`). `logprobs`: one for each token, or none at all."""

    start: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0
    finish_reason: str = ""
    reason: str = ""
    code: pb.Refused.Code = pb.Refused.INVALID
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, verdict: pb.Verdict) -> Self:
        return cls(
            verdict.start,
            tuple(verdict.token_ids),
            verdict.num_accepted,
            verdict.finish_reason,
            verdict.reason,
            logprobs=decode_logprobs(verdict.logprobs),
        )


class VerifiedText:
    """Prompt and verified tokens. A piece from further ahead waits until the gap is filled; one
    that is known already changes nothing."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.digest = PrefixDigest(self.token_ids)
        self._ahead: dict[int, Piece] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, piece: Piece) -> list[Piece]:
        """The pieces that now follow, in order, already part of the text; without what was known
        before, and nothing behind the end of the request."""
        known = self._ahead.get(piece.start)
        if known is None or len(piece.token_ids) >= len(known.token_ids):
            self._ahead[piece.start] = piece
        news: list[Piece] = []
        while (start := min(self._ahead, default=len(self) + 1)) <= len(self):
            fresh = self._without_known(self._ahead.pop(start))
            if not fresh.token_ids and not fresh.finish_reason:
                continue
            self.token_ids += fresh.token_ids
            self.digest.extend(fresh.token_ids)
            news.append(fresh)
            if fresh.finish_reason:
                self._ahead.clear()
        return news

    def forget_ahead(self) -> None:
        """What waits for a gap to be filled will not be joined any more."""
        self._ahead.clear()

    def _without_known(self, piece: Piece) -> Piece:
        num_known = len(self) - piece.start
        return piece._replace(
            start=len(self),
            token_ids=piece.token_ids[num_known:],
            logprobs=piece.logprobs[num_known:],
            num_accepted=max(piece.num_accepted - num_known, 0),
        )
