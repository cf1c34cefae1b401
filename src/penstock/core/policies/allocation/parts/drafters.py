"""What a drafter has to read before it can draft, and what becomes of what is not used."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.policies.base import DraftCandidate, View

_STEP_TOKENS = 2
"""Tokens that a drafter has not read after a round: they are part of its first step."""


def reading_seconds(candidate: DraftCandidate, view: View) -> float:
    """Until the candidate's drafter has read what it has not of the request, beyond what is part of
    drafting; 0 while that was not measured."""
    state, drafter = candidate.state, candidate.drafter
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
    """Age what is known of requests without a draft, and of drafters that nobody uses, by so many
    rounds. trials: rounds that it would take to try each; the more, the more slowly."""
    acceptance = view.learn.acceptance
    longest: dict[str, int] = {}
    least: dict[str, float] = {}
    for i, (candidate, length) in enumerate(zip(candidates, lengths, strict=True)):
        drafter = candidate.drafter
        longest[drafter] = max(length, longest.get(drafter, 0))
        if length == 0:
            trial = 0.0 if trials is None else trials[i]
            least[drafter] = min(trial, least.get(drafter, trial))
            acceptance.fade(candidate.state.request.id, drafter, num_rounds, trial)
    for drafter, length in longest.items():
        if length == 0:
            acceptance.fade_drafter(drafter, num_rounds, least[drafter])
