"""Thresholds for known output lengths (WAIT, section 4 and appendix C)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.queues import mean_excess
from penstock.fluid.stages import iteration_seconds, peak_kv_tokens, refuse_beyond, stages_of
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import Traffic, offered_throughput, scaled

_HEADROOMS = (0.1, 0.05, 0.02, 0.0)
"""Headroom of the thresholds above the fluid's, tried in this order."""


@dataclass(frozen=True)
class WaitThresholds:
    """A policy π = [n_1, …, n_m] and its bounds.

    thresholds:  prompts of each type at each stage, n_j of eq. 7 and Algorithm 1; whole numbers
                 from `wait_thresholds`, fractions from `fractional_wait_thresholds`.
    wave:        steps of a stage and of an iteration (see `stages`); 1 in the paper.
    iteration_s: ΔT, the `wave` steps with every stage of every type full.
    kv_tokens:   M^π, the most KV tokens that prompts in the system hold, as a stage k ≥ 1 never
                 holds more than n_j prompts, running or paused."""

    traffic: Traffic
    thresholds: tuple[float, ...]
    iteration_s: float
    kv_tokens: float
    wave: int = 1

    def queue_bounds(self, iterations: float = math.inf) -> tuple[float, ...]:
        """Bound the expected number of prompts of each type that wait for their prefill.

        2 n_j + λ_j ΔT / (2 (n_j − λ_j ΔT)), and at equality 2 n_j + √(n_j · iterations)."""
        arrivals = [t.rate * self.iteration_s for t in self.traffic]
        return tuple(
            2 * n + mean_excess(a, n - a, iterations)
            for n, a in zip(self.thresholds, arrivals, strict=True)
        )

    def latency_bounds_s(self) -> tuple[float, ...]:
        """Bound the mean latency of each type by Little's law on the queue and on all stages.

        A type pauses until its threshold is met, so a stage takes n_j / λ_j and not ΔT."""
        queues = self.queue_bounds()
        stages = [stages_of(t, self.wave).num_stages for t in self.traffic]
        return tuple(
            (q + n * k) / t.rate
            for q, n, k, t in zip(queues, self.thresholds, stages, self.traffic, strict=True)
        )

    def throughput_gap(self, horizon_s: float) -> float:
        """Bound Throughput* − E[throughput], tokens/s, over the first `horizon_s` (eq. 8).

        The missing tokens are those of waiting prompts, which the paper counts as prompts, and
        those still to come from prompts at each stage, which it leaves out."""
        owed = 0.0
        queues = self.queue_bounds(horizon_s / self.iteration_s)
        for queue, n, kind in zip(queues, self.thresholds, self.traffic, strict=True):
            decoding = range(self.wave, kind.decode_len + 1, self.wave)
            owed += (queue + n) * kind.output_len
            owed += n * sum(kind.decode_len - (k - 1) for k in decoding)
        return min(owed / horizon_s, offered_throughput(self.traffic))


def wait_thresholds(
    profile: StepProfile, traffic: Traffic, kv_tokens: int, wave: int = 1
) -> WaitThresholds:
    """Return the smallest whole thresholds with ΔT(n) < n_j / λ_j for every type (eq. 7).

    Both sides grow with n, so repeating n_j ← ⌊λ_j ΔT(n)⌋ + 1 from 1 ends at the smallest solution,
    the same for all types. Raises ValueError where no thresholds fit into `kv_tokens`."""
    _check(traffic)
    equilibrium(profile, traffic)
    ranges = [stages_of(t, wave) for t in traffic]
    counts = [1] * len(traffic)
    while True:
        kv = peak_kv_tokens(ranges, counts)
        _refuse_beyond(kv_tokens, kv)
        refuse_beyond(profile, ranges, counts)
        seconds = iteration_seconds(profile, ranges, counts)
        needed = [
            max(n, math.floor(t.rate * seconds) + 1) for n, t in zip(counts, traffic, strict=True)
        ]
        if needed == counts:
            return WaitThresholds(traffic, tuple(counts), seconds, kv, wave)
        counts = needed


def best_wait_thresholds(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> WaitThresholds:
    """Return the thresholds whose wave (a power of 2) has the smallest mean latency bound.

    A long wave is best at light load: with a wave of 1 every token of a request would wait for
    another arrival. Raises ValueError where no wave's thresholds fit."""
    _check(traffic)
    found, refusal = [], None
    for wave in wave_lengths(max(stages_of(t).num_stages for t in traffic)):
        try:
            found.append(wait_thresholds(profile, traffic, kv_tokens, wave))
        except ValueError as error:
            refusal = error
    if not found:
        raise refusal or ValueError("no thresholds fit")
    rates = [t.rate for t in traffic]
    return min(found, key=lambda policy: sum(map(mul, rates, policy.latency_bounds_s())))


def wave_lengths(num_steps: int) -> list[int]:
    """Return 1, 2, 4, … up to the first that covers a whole request."""
    return [2**i for i in range(math.ceil(math.log2(max(num_steps, 1))) + 1)]


def fractional_wait_thresholds(
    profile: StepProfile, traffic: Traffic, kv_tokens: int, headroom: float = 0.0
) -> WaitThresholds:
    """Return n_j = λ_j (1 + headroom) ΔT: the fluid's thresholds, fractions of a prompt.

    headroom: share by which rates may be higher, for shorter queues and wrong rates.
    With no headroom eq. 7 holds with equality: the paper's π = [n_j* / (l'_j + 1)], whose queues
    grow like √iterations. Raises ValueError where they do not fit into `kv_tokens`."""
    _check(traffic)
    fluid = equilibrium(profile, scaled(traffic, 1 + headroom))
    _refuse_beyond(kv_tokens, fluid.kv_tokens)
    refuse_beyond(profile, [stages_of(t) for t in traffic], fluid.per_stage)
    return WaitThresholds(traffic, fluid.per_stage, fluid.iteration_s, fluid.kv_tokens)


def roomy_wait_thresholds(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> WaitThresholds:
    """Return `fractional_wait_thresholds` with as much headroom as fits. Raises ValueError."""
    refusal: ValueError | None = None
    for headroom in _HEADROOMS:
        try:
            return fractional_wait_thresholds(profile, traffic, kv_tokens, headroom)
        except ValueError as error:
            refusal = error
    raise refusal or ValueError("no thresholds fit")


def _check(traffic: Traffic) -> None:
    if not traffic:
        raise ValueError("thresholds need at least one type of request")


def _refuse_beyond(kv_tokens: int, needed: float) -> None:
    if needed > kv_tokens:
        raise ValueError(
            f"no thresholds fit: they hold at least {needed:.0f} KV tokens, memory has "
            f"{kv_tokens}; lower the rates or shorten the outputs"
        )
