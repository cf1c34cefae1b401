"""Algorithms 1 and 2 of the WAIT paper by counts, many runs side by side: for what rests on whole
paths and on rare events, where the scheduler itself would take hours.

Requests of a stage are alike, so that a run is how many of them are at each stage. An iteration
takes d0 + d1 × KV tokens (eq. 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.common.statistics import FloatArray
from penstock.fluid.nested import NestedThresholds
from penstock.fluid.stages import stages_of
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import Traffic
from penstock.fluid.wait import WaitThresholds

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def seconds_of(profile: StepProfile, kv_tokens: FloatArray | IntArray) -> FloatArray:
    """Of iterations that hold so many KV tokens, prompts included."""
    return np.asarray(profile.token_seconds[0] + profile.per_kv_token * kv_tokens)


def lindley(steps: IntArray, floor: float) -> FloatArray:
    """W ← max(floor, W + step), from `floor` on. steps: [runs, S]; returns [runs, S + 1]."""
    path = np.empty((steps.shape[0], steps.shape[1] + 1))
    path[:, 0] = floor
    for s, step in enumerate(steps.T):
        path[:, s + 1] = np.maximum(floor, path[:, s] + step)
    return path


def gathered(arrivals: IntArray, threshold: int) -> IntArray:
    """W ← W + Y, less the threshold where it is reached, from 0 on. arrivals: [runs, S]; returns
    [runs, S + 1]."""
    path = np.zeros((arrivals.shape[0], arrivals.shape[1] + 1), dtype=np.int64)
    for s, come in enumerate(arrivals.T):
        waiting = path[:, s] + come
        path[:, s + 1] = waiting - threshold * (waiting >= threshold)
    return path


# --- Algorithm 1 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WaitRuns:
    """arrived: times of arrivals, [runs, types, arrivals]. began, ended: of batches with a type,
    [runs, types, batches], in order; infinity at the end of a row that has fewer."""

    arrived: FloatArray
    began: FloatArray
    ended: FloatArray

    def waiting(
        self, run: int, kind: int, times: FloatArray, threshold: int, until: str
    ) -> IntArray:
        """W_(j) at some times: requests whose prefill has not ended, as the paper's recursion
        counts them (`until` "ends"), or has not begun ("begins")."""
        batches = (self.ended if until == "ends" else self.began)[run, kind]
        come = np.searchsorted(self.arrived[run, kind], times, side="right")
        gone = np.searchsorted(batches, times, side="right")
        return np.asarray(come - threshold * gone)


def wait_runs(
    found: WaitThresholds, profile: StepProfile, horizon_s: float, runs: int, seed: int
) -> WaitRuns:
    """Algorithm 1 from an empty system up to a horizon."""
    rng = np.random.default_rng(seed)
    counts = np.array([int(n) for n in found.thresholds])
    rates = np.array([kind.rate for kind in found.traffic])
    # Beyond the horizon by eight standard deviations, and by one threshold.
    most = float(rates.max() * horizon_s)
    num = int(most + 8 * most**0.5 + counts.max() + 10)
    gaps = rng.exponential(size=(runs, len(rates), num)) / rates[:, None]
    arrived = gaps.cumsum(axis=2)
    held = [_held(found.traffic, j) for j in range(len(counts))]
    time, taken = np.zeros(runs), np.zeros((runs, len(counts)), dtype=np.int64)
    began: list[FloatArray] = []
    ended: list[FloatArray] = []
    while (time < horizon_s).any():
        due = np.minimum(taken + counts - 1, num - 1)
        ready = np.take_along_axis(arrived, due[:, :, None], axis=2)[:, :, 0]
        time = np.maximum(time, ready.min(axis=1))
        joins = ready <= time[:, None]
        batches = taken // counts
        kv = sum(
            joins[:, j] * counts[j] * held[j][np.minimum(batches[:, j], len(held[j]) - 1)]
            for j in range(len(counts))
        )
        began.append(np.where(joins, time[:, None], np.inf))
        time = time + seconds_of(profile, np.asarray(kv))
        taken += joins * counts
        ended.append(np.where(joins, time[:, None], np.inf))
    rows = (np.sort(np.stack(times, axis=2), axis=2) for times in (began, ended))
    return WaitRuns(arrived, *rows)


def _held(traffic: Traffic, kind: int) -> IntArray:
    """KV tokens of one request at each stage that the b-th batch of a type has filled."""
    prompt, last = traffic[kind].prompt_len, stages_of(traffic[kind]).last
    return np.cumsum(prompt + np.arange(last + 1))


# --- Algorithm 2 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NestedRuns:
    """horizons_s: [horizons]. gap: tokens/s of what had arrived that were not made, [runs,
    horizons]; latency_s: mean, by Little's law, [runs, horizons]. peak_kv: the most KV tokens held
    at once, [runs, horizons]. queues: requests that had waited at most before segments 2 to L when
    a batch began, [runs, L − 1]. iterations: [runs]."""

    horizons_s: FloatArray
    gap: FloatArray
    latency_s: FloatArray
    peak_kv: IntArray
    queues: IntArray
    iterations: IntArray


class _Nested:
    """State of the runs: how many requests take step k next, [runs, steps]."""

    def __init__(self, policy: NestedThresholds, traffic: Traffic, runs: int, seed: int) -> None:
        ends = np.array(policy.segments.ends)
        self.counts = np.array(policy.thresholds)
        self.firsts = np.array([0, *(ends[:-1] + 1)])
        steps = np.arange(ends[-1] + 1)
        self.segment = np.searchsorted(ends, steps)
        self.limit = self.counts[self.segment]
        self.context = max(policy.segments.prompt_lens) + steps
        self.going_on = _going_on(traffic, len(steps))
        self.rate = sum(kind.rate for kind in traffic)
        self.mean_tokens = sum(kind.rate * kind.output_len for kind in traffic) / self.rate
        self.rng = np.random.default_rng(seed)
        self.stages = np.zeros((runs, len(steps)), dtype=np.int64)
        self.time, self.waited = np.zeros(runs), np.zeros(runs)
        self.tokens, self.arrived, self.peak = (np.zeros(runs, dtype=np.int64) for _ in range(3))
        self.queues = np.zeros((runs, len(ends) - 1), dtype=np.int64)

    def gather(self) -> None:
        """Where the first segment has too few prompts, time goes on until it has enough."""
        missing = np.maximum(self.counts[0] - self.stages[:, 0], 0)
        seconds = self.rng.standard_gamma(missing) / self.rate
        self.waited += seconds * (self.stages.sum(axis=1) + missing / 2)
        self.time += seconds
        self.stages[:, 0] += missing
        self.arrived += missing

    def iterate(self, profile: StepProfile) -> None:
        """One batch of every run, and what arrives during it."""
        ready = np.logical_and.accumulate(self.stages[:, self.firsts] >= self.counts, axis=1)
        taken = np.minimum(self.stages, self.limit) * ready[:, self.segment]
        paused = self.stages - taken
        running = taken @ self.context
        held = running + paused[:, 1:] @ (self.context[1:] - 1)
        self.peak = np.maximum(self.peak, held)
        self.queues = np.maximum(self.queues, self.stages[:, self.firsts[1:]])
        seconds = seconds_of(profile, running)
        come = self.rng.poisson(self.rate * seconds)
        self.waited += seconds * (self.stages.sum(axis=1) + come / 2)
        self.time += seconds
        self.tokens += taken.sum(axis=1)
        self.arrived += come
        self.stages = paused
        for k in range(len(self.limit) - 1):
            p = self.going_on[k]
            self.stages[:, k + 1] += taken[:, k] if p == 1 else self.rng.binomial(taken[:, k], p)
        self.stages[:, 0] += come


def _going_on(traffic: Traffic, num_steps: int) -> FloatArray:
    """Probability that a request which took step k takes another, [steps]."""
    ending = np.zeros(num_steps)
    for kind in traffic:
        ending[kind.decode_len] += kind.rate
    reaching = ending[::-1].cumsum()[::-1]
    return np.asarray(1 - ending / reaching)


def nested_runs(
    policy: NestedThresholds,
    traffic: Traffic,
    profile: StepProfile,
    horizons_s: Sequence[float],
    runs: int,
    seed: int,
) -> NestedRuns:
    """Algorithm 2 from an empty system, with memory that never ends, up to the last horizon.
    `traffic` has one prompt length, and may have more types than `policy` has segments."""
    state = _Nested(policy, traffic, runs, seed)
    shape = (runs, len(horizons_s))
    gap, latency = np.full(shape, np.nan), np.full(shape, np.nan)
    peak = np.zeros(shape, dtype=np.int64)
    iterations = np.zeros(runs, dtype=np.int64)
    while (state.time <= horizons_s[-1]).any():
        state.gather()
        owed = state.arrived * state.mean_tokens - state.tokens
        before, arrived, waited = state.time.copy(), state.arrived.copy(), state.waited.copy()
        iterations += before <= horizons_s[-1]
        state.iterate(profile)
        for h, horizon in enumerate(horizons_s):
            now = np.isnan(gap[:, h]) & (state.time > horizon)
            # What the unfinished batch makes comes after the horizon, what arrives until then not.
            late = np.maximum(horizon - before, 0) * state.rate * state.mean_tokens
            gap[now, h] = ((owed + late) / horizon)[now]
            latency[now, h] = (waited / np.maximum(arrived, 1))[now]
            peak[now, h] = state.peak[now]
    return NestedRuns(np.array(horizons_s), gap, latency, peak, state.queues, iterations)
