"""What is not used is not forgotten for good: estimates age, so that it is tried again."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.view import DraftCandidate, View


def fade_unused(
    candidates: Sequence[DraftCandidate], lengths: Sequence[int], view: View, num_rounds: int = 1
) -> None:
    """Age what is known of requests without a draft, and of drafters that nobody uses, by so many
    rounds."""
    acceptance = view.learn.acceptance
    longest: dict[str, int] = {}
    for candidate, length in zip(candidates, lengths, strict=True):
        longest[candidate.drafter] = max(length, longest.get(candidate.drafter, 0))
        if length == 0:
            acceptance.fade(candidate.state.request.id, candidate.drafter, num_rounds)
    for drafter, length in longest.items():
        if length == 0:
            acceptance.fade_drafter(drafter, num_rounds)
