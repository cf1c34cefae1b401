"""Reading time of drafters, and ageing of what is known of unused ones."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.policies.base import DraftCandidate, View

_STEP_TOKENS = 2  # tokens that a drafter has not read after a round: part of its first step


def reading_seconds(candidate: DraftCandidate, view: View) -> float:
    """Return a drafter's seconds to read the text, beyond usual drafting; 0 while unknown."""
    state, drafter = candidate.state, candidate.drafter
    if drafter is None:
        return 0.0
    per_token = view.learn.times.catch_up_of(drafter)
    if not per_token:
        return 0.0
    return max(0, state.num_unread(drafter) - _STEP_TOKENS) * per_token


def fade_unused(
    candidates: Sequence[DraftCandidate],
    lengths: Sequence[int],
    view: View,
    num_rounds: int = 1,
    trials: Sequence[float] | None = None,
) -> None:
    """Age estimates without drafts by some rounds, slower the longer their `trials` take."""
    acceptance = view.learn.acceptance
    longest: dict[str, int] = {}
    least: dict[str, float] = {}
    for i, (candidate, length) in enumerate(zip(candidates, lengths, strict=True)):
        drafter = candidate.drafter
        if drafter is None:
            continue
        longest[drafter] = max(length, longest.get(drafter, 0))
        if length == 0:
            trial = 0.0 if trials is None else trials[i]
            least[drafter] = min(trial, least.get(drafter, trial))
            acceptance.fade(candidate.state.request.id, drafter, num_rounds, trial)
    for drafter, length in longest.items():
        if length == 0:
            acceptance.fade_drafter(drafter, num_rounds, least[drafter])
