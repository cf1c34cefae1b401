"""Pace that a request needs to meet its client's latency target.

TPOT is a mean over the output after the first token."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.state import RequestState


class Remaining(NamedTuple):
    """Seconds until the last of `tokens` more is due; not positive if that was missed."""

    seconds: float
    tokens: float

    @property
    def rate(self) -> float:
        """Tokens per second that are needed; 0 where none would do."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def remaining(state: RequestState, now: float, mean_tokens: float) -> Remaining | None:
    """Return the stricter target of a request that has its first token; None without one.

    mean_tokens: output still expected, where nothing else is known; TPOT does not read it."""
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
    """Return the client's estimate, or the usual length, limited to what the request may make."""
    expected = state.request.expected_output_tokens
    tokens = mean_tokens if expected is None else expected - state.num_output_tokens
    return max(1.0, min(tokens, state.num_remaining_tokens))
