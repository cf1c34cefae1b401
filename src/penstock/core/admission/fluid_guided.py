"""Penstock's own admission: prompts bought at the fluid price, memory kept for expected growth.

Nothing is tuned for a workload: the price of a prompt token comes from the step-time profile, what
is expected of memory from the output lengths seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.core.admission import AdmissionPolicy
from penstock.core.step import Step
from penstock.fluid.step_profile import StepProfile


class FluidGuided(AdmissionPolicy):
    """Decode always; add prompt tokens while they are cheap for what waits; never admit what memory
    is not expected to hold.

    The time of a step is a staircase in its positions, so the next prompt tokens are sometimes
    free and sometimes dear, while every prompt has to be computed at some time. In the fluid model
    the best mixture of steps lies on the lower convex envelope of the staircase above the
    decoding requests, and its slope where it meets the prompts' arrival is their price: a step
    takes the prompt tokens that cost less than that. Under overload the price is that of the most
    efficient step there is.
    """

    name: ClassVar[str] = "fluid_guided"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_batched_tokens: most positions in a step.
        horizon: steps in which waiting prompts should be computed.
        confidence: standard deviations of KV growth for which memory is kept.
        ttft_p99, tpot_p99: targets in seconds; None asks for nothing."""

        max_num_batched_tokens: int = 4096
        horizon: float = 4.0
        confidence: float = 3.0
        ttft_p99: float | None = None
        tpot_p99: float | None = None

        def __post_init__(self) -> None:
            if self.max_num_batched_tokens < 1:
                raise ValueError("max_num_batched_tokens must be at least 1")
            if not self.horizon >= 1 or not self.confidence >= 0:
                raise ValueError("horizon must be at least 1 and confidence not negative")
            for target in (self.ttft_p99, self.tpot_p99):
                if target is not None and not target > 0:
                    raise ValueError(f"a target must be positive, not {target}")

    def __init__(self, options: Options) -> None:
        self.options = options
        self._inflow = 0.0
        self._last_backlog = 0.0
        self._corners: tuple[StepProfile, list[int]] | None = None

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens

    def compose(self, step: Step) -> None:
        budget = max(self.options.max_num_batched_tokens, step.num_decodes())
        num_decodes = step.schedule_decodes(budget)
        prefills = step.prefills()
        if not prefills and not step.waiting:
            self._inflow *= 0.9
            self._last_backlog = 0.0
            step.repeatable = not step.num_preempted
            return
        backlog = sum(s.num_due_tokens for s in prefills) + self._waiting_tokens(step)
        tokens = self._prompt_tokens(step, num_decodes, backlog)
        tokens -= step.schedule_prefills(tokens)
        if tokens > 0 and not step.num_preempted:
            self._admit(step, tokens)
        self._last_backlog = backlog - (step.num_tokens - num_decodes)

    # --- how many prompt tokens -----------------------------------------------------------------

    def _waiting_tokens(self, step: Step) -> int:
        """Prompt tokens that wait to be admitted, as far as they could matter to this step."""
        total = 0
        for state in step.waiting.queue():
            total += step.num_missing_tokens(state)
            if total >= self.options.max_num_batched_tokens:
                break
        return total

    def _prompt_tokens(self, step: Step, num_decodes: int, backlog: int) -> int:
        """Prompt tokens worth computing in this step."""
        most = min(backlog, self.options.max_num_batched_tokens - num_decodes)
        if most <= 0:
            return 0
        self._inflow += 0.1 * (max(0.0, backlog - self._last_backlog) - self._inflow)
        profile = step.estimators.step_model.profile
        # Without anybody who decodes a step without prompts would be no step.
        points = [(0, profile.linear(num_decodes))] if num_decodes else []
        for count in self._efficient_counts(profile):
            if num_decodes < count < num_decodes + most:
                points.append((count - num_decodes, profile.linear(count)))
        points.append((most, profile.linear(num_decodes + most)))
        hull = _lower_hull(points)
        if len(hull) == 1:
            return most
        wanted = max(self._inflow, backlog / self.options.horizon)
        price = self._price(step, hull, wanted)
        return max(hull, key=lambda p: price * p[0] - p[1])[0]

    def _price(self, step: Step, hull: list[tuple[int, float]], wanted: float) -> float:
        """Seconds that a prompt token is worth: what it will cost in the mixture of steps that
        keeps up with arrivals, and what its request gains by being a step earlier, shared by
        everybody whom the step delays."""
        slope = 0.0
        for (p0, t0), (p1, t1) in zip(hull, hull[1:], strict=False):
            slope = (t1 - t0) / (p1 - p0)
            if wanted <= p1:
                break
        num_requests = len(step.running) + len(step.waiting)
        earlier = hull[0][1] / (step.estimators.traffic.mean_prompt_len * num_requests)
        return min(slope, self._best_price(step)) + earlier

    def _best_price(self, step: Step) -> float:
        """Seconds a position in the most efficient step that there is, constant costs included."""
        model = step.estimators.step_model
        profile, constant = model.profile, model.profile.decode_fixed + max(model.shift, 0.0)
        return min(
            (profile.linear(count) + constant) / count
            for count in self._efficient_counts(profile)
            if count <= self.options.max_num_batched_tokens
        )

    def _efficient_counts(self, profile: StepProfile) -> list[int]:
        """Positions of a step just before it would take longer."""
        if self._corners is None or self._corners[0] is not profile:
            counts, seconds = profile.token_counts, profile.token_seconds
            ends = [
                counts[i] for i in range(len(counts) - 1) if seconds[i + 1] > 1.002 * seconds[i]
            ]
            self._corners = (profile, [*ends, counts[-1]])
        return self._corners[1]

    # --- who is admitted ------------------------------------------------------------------------

    def _admit(self, step: Step, budget: int) -> None:
        growth = _Growth(step, self.options.confidence)
        queue = step.waiting.queue()
        while queue and budget > 0:
            state = queue[0]
            missing = step.num_missing_tokens(state)
            if step.running and not growth.holds(state.num_known_tokens, state.num_output_tokens):
                return
            tokens = min(missing, budget)
            if not step.can_admit(state, tokens):
                return
            step.admit(state, tokens)
            growth.add(state.num_known_tokens, state.num_output_tokens)
            budget -= tokens


def _lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Lower convex envelope of points with rising first coordinates."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


class _Growth:
    """KV that the running requests are expected to hold as they go on, with nobody new."""

    _AHEAD = np.concatenate(([0, 1], 2 ** np.arange(1, 13)))

    def __init__(self, step: Step, confidence: float) -> None:
        self._confidence = confidence
        self._capacity = step.pool.num_blocks * step.pool.block_size
        running = step.running.values()
        self._known = [s.num_known_tokens for s in running]
        lengths = step.estimators.lengths
        self._survival = lengths.survival(s.num_output_tokens for s in running)
        self._ages = [s.num_output_tokens for s in running]
        self._mean = np.zeros(len(self._AHEAD))
        self._variance = np.zeros(len(self._AHEAD))
        self._add(np.array(self._known, dtype=np.int64), np.array(self._ages, dtype=np.int64))

    def holds(self, num_known_tokens: int, num_output_tokens: int) -> bool:
        """Whether memory is expected to hold one request more."""
        mean, variance = self._of(np.array([num_known_tokens]), np.array([num_output_tokens]))
        spread = self._confidence * np.sqrt(self._variance + variance)
        return bool((self._mean + mean + spread <= self._capacity).all())

    def add(self, num_known_tokens: int, num_output_tokens: int) -> None:
        self._add(np.array([num_known_tokens]), np.array([num_output_tokens]))

    def _add(self, known: np.ndarray, ages: np.ndarray) -> None:
        mean, variance = self._of(known, ages)
        self._mean += mean
        self._variance += variance

    def _of(self, known: np.ndarray, ages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the tokens held, by steps ahead."""
        last = len(self._survival) - 1
        now = self._survival[np.minimum(ages, last)]
        later = self._survival[np.minimum(ages[:, None] + self._AHEAD, last)]
        alive = later / np.maximum(now, 1e-12)[:, None]
        held = known[:, None] + self._AHEAD
        return (held * alive).sum(axis=0), (held**2 * alive * (1 - alive)).sum(axis=0)


POLICY = FluidGuided
