"""What is not used is not forgotten for good: estimates age, so that it is tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.view import DraftCandidate, View


def fade_unused(
    candidates: Sequence[DraftCandidate],
    lengths: Sequence[int],
    view: View,
    num_rounds: int = 1,
    trial: Callable[[DraftCandidate], float] | None = None,
) -> None:
    """Age what is known of requests without a draft, and of drafters that nobody uses, by so many
    rounds. trial: rounds that it would take to try a candidate; the more, the more slowly."""
    acceptance = view.learn.acceptance
    longest: dict[str, int] = {}
    trials: dict[str, float] = {}
    for candidate, length in zip(candidates, lengths, strict=True):
        drafter = candidate.drafter
        longest[drafter] = max(length, longest.get(drafter, 0))
        if length == 0:
            cost = 0.0 if trial is None else trial(candidate)
            trials[drafter] = min(cost, trials.get(drafter, cost))
            acceptance.fade(candidate.state.request.id, drafter, num_rounds, cost)
    for drafter, length in longest.items():
        if length == 0:
            acceptance.fade_drafter(drafter, num_rounds, trials[drafter])
