"""Acceptance by recorded ranks of the target's tokens among the drafter's guesses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.types import DraftOrder, VerifyItem


@dataclass(frozen=True, slots=True)
class RankedAcceptance:
    """Replays ranks by position: 0 is the drafter's first choice, 1 its runner-up, 2 neither.

    A draft made ahead is thus right exactly where one made later would be. ranks: by drafter; each
    request begins at an offset by its id and `seed`, and wraps around."""

    ranks: Mapping[str, Sequence[int]]
    seed: int = 0

    def rank(self, drafter: str, request_id: str, position: int) -> int:
        """Return the rank of the token at a position of the request's output."""
        record = self.ranks[drafter]
        key = f"{self.seed}/{request_id}".encode()
        begin = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return record[(begin + position) % len(record)]

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if item.drafter is None:
            return 0
        for accepted in range(item.num_draft_tokens):
            if self.rank(item.drafter, item.request_id, position + accepted):
                return accepted
        return item.num_draft_tokens

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        """Count positions where a draft that begins there would be right at once."""
        if item.drafter is None:
            return 0
        behind = range(position + num_accepted + 1, position + item.num_draft_tokens)
        return sum(self.rank(item.drafter, item.request_id, p) == 0 for p in behind)

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        return sum(self.rank(order.drafter, order.request_id, p) == 0 for p in positions)

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        """Return the mean over the record, walked from its start."""
        record = self.ranks[drafter]
        position = rounds = 0
        while position < len(record):
            accepted = 0
            while accepted < num_draft_tokens and not record[(position + accepted) % len(record)]:
                accepted += 1
            position += accepted + 1
            rounds += 1
        return position / rounds
