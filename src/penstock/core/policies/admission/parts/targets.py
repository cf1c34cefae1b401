"""Latency targets: which prompts can be on time, and how long a step may last.

TTFT is met or missed once. TPOT is a mean: output token n + 1 is in time if it comes within n times
the target after the first. A step may last until the first of these deadlines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.latency import remaining
from penstock.core.state import RequestState
from penstock.core.step import Step
from penstock.core.types import NO_TARGET

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Chosen by hand.
_LATE_AFTER_TARGETS = 20.0  # TTFT targets after which a late request may come before all others
_LATE_EVERY_TARGETS = 2.0
"""TTFT targets between two late requests that come first, so that not all become late."""
_TARGET_MARGIN = 0.95  # share of the TPOT target aimed at, because steps differ from predictions


def time_left_of_own(step: Step, decoding: float) -> float:
    """Return the seconds that the step may take for requests with their own targets."""
    latest = math.inf
    for state in step.ungrouped():
        if not state.num_output_tokens or state.request.latency == NO_TARGET:
            continue
        left = remaining(state, step.now, step.learn.lengths.mean_residual)
        tokens = state.num_output_tokens / max(1, state.round)
        if left is None or left.seconds * tokens < left.tokens * decoding:
            continue
        tpot = state.request.latency.tpot
        if tpot is None:
            rest = max(0.0, left.tokens / tokens - 1) * decoding
            latest = min(latest, step.now + left.seconds - rest)
        else:
            due = _TARGET_MARGIN * tpot * (state.num_output_tokens - 1 + tokens)
            latest = min(latest, state.first_token_at + due)
    return latest - step.now


class Order(NamedTuple):
    """Prompts in order of service; `seconds` until all but the late ones are computed."""

    prompts: list[RequestState]
    num_late: int
    seconds: float


@dataclass(slots=True)
class Targets:
    """Operator's targets in seconds, or None."""

    ttft_p99: float | None
    tpot_p99: float | None
    _turn: tuple[str, float] = ("", -math.inf)

    def order(
        self, prompts: Iterable[RequestState], now: float, seconds: Callable[[RequestState], float]
    ) -> Order:
        """Return the prompts in order of service.

        First those whose next token is overdue and a late request whose turn it is, then those that
        can be on time, then the others, each oldest first. Requests that would make most others
        late are late (Moore and Hodgson). seconds: of the rest of a prompt."""
        assert self.ttft_p99 is not None
        oldest = sorted(prompts, key=lambda s: s.request.arrival_time)
        first = [s for s in oldest if s.num_output_tokens]
        fresh = [s for s in oldest if not s.num_output_tokens]
        turn = self._turn_of(fresh, now, self.ttft_p99)
        first += turn
        on_time: list[tuple[float, int, RequestState]] = []
        late: list[tuple[int, RequestState]] = []
        finished_at = now + sum(map(seconds, first))
        for i, state in enumerate(fresh[len(turn) :]):
            due = state.request.arrival_time + self.ttft_p99
            if due <= now:
                late.append((i, state))
                continue
            taken = seconds(state)
            heapq.heappush(on_time, (-taken, i, state))
            finished_at += taken
            if finished_at > due:
                longest, i, state = heapq.heappop(on_time)
                finished_at += longest
                late.append((i, state))
        on_time.sort(key=lambda entry: entry[1])
        late.sort(key=lambda entry: entry[0])
        in_order = [*first, *(entry[2] for entry in on_time), *(entry[1] for entry in late)]
        return Order(in_order, len(late), finished_at - now)

    def _turn_of(self, oldest: list[RequestState], now: float, target: float) -> list[RequestState]:
        """Return the oldest prompt if it is overdue and its turn has come, else nothing."""
        if not oldest or now <= oldest[0].request.arrival_time + _LATE_AFTER_TARGETS * target:
            return []
        first = oldest[0].request.id
        if first != self._turn[0]:
            if now < self._turn[1]:
                return []
            self._turn = (first, now + _LATE_EVERY_TARGETS * target)
        return oldest[:1]

    def time_left(self, step: Step, decoding: float) -> float:
        """Return the seconds until the first deadline that can be met or made up for."""
        if self.tpot_p99 is None:
            return math.inf
        ahead, _ = self._ahead(step)
        lengths = step.learn.lengths
        gained = max(0.0, _TARGET_MARGIN * self.tpot_p99 - decoding / lengths.per_step)
        ahead = ahead[ahead + gained * lengths.mean_residual >= decoding]
        return float(ahead.min()) if len(ahead) else math.inf

    def num_lost(self, step: Step, seconds: float, decoding: float) -> float:
        """Return the expected number of requests that `seconds` without a token make late."""
        assert self.tpot_p99 is not None
        # Each step gains on as many deadlines as it makes tokens.
        gained = _TARGET_MARGIN * self.tpot_p99 - decoding / step.learn.lengths.per_step
        if gained <= 0:
            return math.inf
        ahead, num_tokens = self._ahead(step)
        survival = step.learn.lengths.survival(num_tokens)

        def catch_up(behind: FloatArray) -> FloatArray:
            missing = np.ceil(np.maximum(behind, 0.0) / gained).astype(np.int64)
            return survival.take(num_tokens + missing, mode="clip")

        without, with_it = catch_up(decoding - ahead), catch_up(decoding - ahead + seconds)
        now = np.maximum(survival.take(num_tokens, mode="clip"), 1e-12)
        return float(((without - with_it) / now).sum())

    def _ahead(self, step: Step) -> tuple[FloatArray, IntArray]:
        """Return seconds to the next token's deadline, and output tokens, by request."""
        assert self.tpot_p99 is not None
        first_at, num_tokens = step.output_times()
        return first_at + _TARGET_MARGIN * self.tpot_p99 * num_tokens - step.now, num_tokens
