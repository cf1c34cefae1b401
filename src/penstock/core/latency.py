"""Pace that a request needs to meet its client's target: remaining seconds and tokens.

TPOT is a mean over the output after the first token."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.state import RequestState


class Remaining(NamedTuple):
    """Seconds until the last of `tokens` more is due; not positive if missed."""

    seconds: float
    tokens: float

    @property
    def rate(self) -> float:
        """Tokens a second that are needed; 0 if the target is missed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def remaining(state: RequestState, now: float, mean_tokens: float) -> Remaining | None:
    """Return a decoding request's remaining seconds and tokens, by the stricter target."""
    tpot, deadline = state.request.latency
    found = []
    if tpot is not None:
        tokens = max(mean_tokens, 1.0)
        due = state.first_token_at + tpot * (state.num_output_tokens - 1 + tokens)
        found.append(Remaining(due - now, tokens))
    if deadline is not None:
        tokens = _tokens_to_deadline(state, mean_tokens)
        found.append(Remaining(state.request.arrival_time + deadline - now, tokens))
    return min(found, key=lambda left: left.seconds / left.tokens, default=None)


def _tokens_to_deadline(state: RequestState, mean_tokens: float) -> float:
    """Return the expected tokens, as told or usual, up to the request's maximum."""
    expected = state.request.expected_output_tokens
    tokens = mean_tokens if expected is None else expected - state.num_output_tokens
    return max(1.0, min(tokens, state.num_remaining_tokens))
