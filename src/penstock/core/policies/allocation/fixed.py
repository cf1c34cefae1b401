"""Equal draft lengths: k for each request, or C shared with a rotating remainder (Fixed-S)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.declared import LimitOptions
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt
from penstock.core.state import Grant, RequestState


class Fixed(AllocationPolicy):
    """Gives every request the same draft length."""

    name: ClassVar[str] = "fixed"
    limits = LimitOptions(max_draft_tokens="k")

    @dataclass(frozen=True, slots=True)
    class Options:
        k: MaxDraftTokens = 4  # draft tokens for each request
        total: NonNegativeInt | None = None  # draft tokens a round, shared equally; None: no bound

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._turn = 0

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        wanted = [self.options.k] * len(candidates)
        if self.options.total is not None and candidates:
            wanted = self._share(self.options.total, len(candidates))
        lengths = [min(w, c.longest) for w, c in zip(wanted, candidates, strict=True)]
        for group, budget in view.budgets(candidates, lengths):
            cut = cut_to_budget([lengths[i] for i in group], budget)
            for i, length in zip(group, cut, strict=True):
                lengths[i] = length
        return [c.grant(n) for c, n in zip(candidates, lengths, strict=True)]

    def reserve(self, state: RequestState) -> int:
        return self.options.k

    def _share(self, total: int, num: int) -> list[int]:
        each, extra = divmod(total, num)
        with_extra = {(self._turn + i) % num for i in range(extra)}
        self._turn += extra
        return [each + (i in with_extra) for i in range(num)]


def cut_to_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Shorten the longest drafts until their sum fits."""
    cap = max(lengths, default=0)
    while sum(min(n, cap) for n in lengths) > budget:
        cap -= 1
    cut = [min(n, cap) for n in lengths]
    spare = budget - sum(cut)
    for i, length in enumerate(lengths):
        if spare and length > cap:
            cut[i] += 1
            spare -= 1
    return cut


POLICY = Fixed
