"""What a drafter has to read before it can draft for a request."""

from __future__ import annotations

from penstock.core.view import DraftCandidate, View

_STEP_TOKENS = 2
"""Tokens that a drafter has not read after a round: they are part of its first step."""


def reading_seconds(candidate: DraftCandidate, view: View) -> float:
    """Until the candidate's drafter has read what it has not of the request, beyond what is part of
    drafting; 0 while that was not measured."""
    state, drafter = candidate.state, candidate.drafter
    per_token = view.learn.times.catch_up_of(drafter)
    if not per_token:
        return 0.0
    kv = state.kv.get(drafter)
    unread = state.num_known_tokens - (0 if kv is None else kv.num_computed_tokens)
    return max(0, unread - _STEP_TOKENS) * per_token
