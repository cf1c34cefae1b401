"""A deployment by the fluid model: thresholds, token budget and cap, memory bound, load bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.fluid.capacity import RequestWork, capacity_bound, output_work
from penstock.fluid.nested import (
    NestedThresholds,
    best_nested_thresholds,
    nested_thresholds,
    segments_of,
)
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.fluid.traffic import (
    NO_SPECULATION,
    Speculation,
    Traffic,
    TrafficType,
    decode_len,
    traffic_from_lengths,
)
from penstock.fluid.wait import (
    WaitThresholds,
    best_wait_thresholds,
    fractional_wait_thresholds,
    wait_thresholds,
)
from penstock.sim.acceptance import AcceptanceModel
from penstock.sim.workloads import MIXES, Workload

DELTA = 1e-3
"""Probability that memory is exceeded within the horizon, where nobody asks for another."""
HORIZON_S = 3600.0

_MAX_BUDGET = 8192
_CLOSE = 0.99
_HEADROOMS = (0.1, 0.05, 0.02, 0.0)
_MAX_DRAFT = 16


class PlanError(ValueError):
    """No plan fits. The message is one line."""


# --- traffic --------------------------------------------------------------------------------------


def mean_rate(workload: Workload) -> float:
    """Requests a second over the arrivals of a workload. Raises: PlanError if that is none."""
    times = workload.arrival_time
    if times is None or times[-1] <= 0:
        raise PlanError(f"workload {workload.name!r} has no arrivals to take a rate from")
    return float((len(times) - 1) / times[-1])


def traffic_of(workload: Workload, rate: float) -> Traffic:
    """What the fluid model sees of a workload at `rate` requests a second: the types of a named
    mix, or recorded lengths as an empirical distribution."""
    mix = MIXES.get(workload.name)
    if mix is None:
        return traffic_from_lengths(workload.prompt_len, workload.output_len, rate)
    return tuple(
        TrafficType(rate * float(p), mix.prompt_len, decode_len(length))
        for length, p in zip(mix.output_lens, mix.probabilities, strict=True)
    )


def fitting(workload: Workload, kv_tokens: int) -> Workload:
    """The requests that memory can hold at all. Raises: PlanError if there are none."""
    fits = workload.prompt_len + workload.output_len <= kv_tokens
    if not fits.any():
        least = int((workload.prompt_len + workload.output_len).min())
        raise PlanError(
            f"no request of {workload.name!r} fits into {kv_tokens} KV tokens: "
            f"the smallest needs {least}"
        )
    return workload if fits.all() else workload.take(np.flatnonzero(fits))


def load_bound(
    profile: StepProfile,
    workload: Workload,
    kv_tokens: int,
    acceptance: AcceptanceModel | None = None,
    drafters: Sequence[str] = (),
) -> float:
    """The fluid capacity bound in requests a second, those that memory refuses included.

    With drafters: the largest over them and over draft lengths that are equal for all requests,
    drafting itself for nothing. Raises: PlanError.
    """
    served = fitting(workload, kv_tokens)
    ways = [NO_SPECULATION]
    for drafter in drafters if acceptance is not None else ():
        for length in range(1, _MAX_DRAFT + 1):
            assert acceptance is not None
            ways.append(Speculation(acceptance.tokens_per_step(drafter, length), length))
    best = 0.0
    for way in ways:
        work = output_work(served.prompt_len, served.output_len, way)
        # Drafts that would not fit beside the longest request are not made.
        if work.max_context + way.num_draft_tokens <= kv_tokens:
            best = max(best, capacity_bound(profile, work, kv_tokens).requests_per_s)
    return best * len(workload) / len(served)


# --- thresholds -----------------------------------------------------------------------------------


def threshold_options(
    admission: str, profile: StepProfile, workload: Workload, rate: float, kv_tokens: int
) -> dict[str, Any]:
    """Options that give a threshold policy the fluid model's own thresholds; none for any other
    policy.

    The literal algorithms take whole thresholds, a stage being one step. Those that serve take
    fractions, with as much headroom as fits. Raises: PlanError where no thresholds fit.
    """
    planners = {
        "wait": _wait,
        "wait_gated": _wait_gated,
        "nested_wait": _nested,
        "nested_wait_gated": _nested_gated,
    }
    if admission not in planners:
        return {}
    traffic = traffic_of(fitting(workload, kv_tokens), rate)
    try:
        return planners[admission](profile, traffic, kv_tokens)
    except ValueError as error:
        raise PlanError(f"{admission} at {rate:g} requests a second: {error}") from error


def _wait(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> dict[str, Any]:
    found = wait_thresholds(profile, traffic, kv_tokens)
    return _wait_options(found, tuple(int(n) for n in found.thresholds))


def _wait_gated(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> dict[str, Any]:
    refusal: ValueError | None = None
    for headroom in _HEADROOMS:
        try:
            found = fractional_wait_thresholds(profile, traffic, kv_tokens, headroom)
        except ValueError as error:
            refusal = error
        else:
            return _wait_options(found, tuple(float(n) for n in found.thresholds))
    raise refusal or PlanError("no thresholds fit")


def _wait_options(found: WaitThresholds, thresholds: tuple[float, ...]) -> dict[str, Any]:
    return {"output_lens": tuple(t.output_len for t in found.traffic), "thresholds": thresholds}


def _nested(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> dict[str, Any]:
    """The number of segments with the smallest memory bound, in waves of one step. Where none is
    bounded by the memory, the algorithm still runs: its thresholds need only keep up."""
    shortest = profile.seconds(StepWork(num_prefill_tokens=min(t.prompt_len for t in traffic)))
    iterations = max(1, round(HORIZON_S / shortest))
    found, refusal = [], None
    for count in range(1, len({t.decode_len for t in traffic}) + 1):
        segments = segments_of(traffic, count)
        try:
            found.append(nested_thresholds(profile, segments, kv_tokens, DELTA, iterations))
        except ValueError as error:
            refusal = error
    if not found:
        raise refusal or PlanError("no thresholds fit")
    best = min(found, key=lambda policy: policy.kv_bound_tokens)
    return {"segment_ends": _segment_ends(best), "thresholds": best.thresholds}


def _nested_gated(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> dict[str, Any]:
    refusal: ValueError | None = None
    for headroom in _HEADROOMS:
        try:
            found = best_nested_thresholds(profile, traffic, kv_tokens, DELTA, HORIZON_S, headroom)
        except ValueError as error:
            refusal = error
        else:
            return _nested_gated_options(found)
    raise refusal or PlanError("no thresholds fit")


def _nested_gated_options(found: NestedThresholds) -> dict[str, Any]:
    """A stage of a wave is several steps: so many prompts start in one of them."""
    thresholds = tuple(n / found.segments.wave for n in found.thresholds)
    return {"segment_ends": _segment_ends(found), "thresholds": thresholds}


def _segment_ends(found: NestedThresholds) -> tuple[int, ...]:
    """Output tokens after the last stage of each segment: the prefill makes one too."""
    return tuple(end + 1 for end in found.segments.ends)


def length_classes(options: dict[str, Any], workload: Workload, num_classes: int = 4) -> list[int]:
    """Output tokens that part requests into classes: a nested policy's segments, or a type's
    lengths, or quantiles of the workload's output lengths."""
    ends = options.get("segment_ends") or options.get("output_lens")
    if ends and len(ends) <= 2 * num_classes:
        return list(ends)
    shares = np.arange(1, num_classes + 1) / num_classes
    return sorted({int(q) for q in np.quantile(workload.output_len, shares, method="higher")})


# --- a static server ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticBudget:
    """Positions a step and requests at once, for a server whose limits are fixed."""

    token_budget: int
    max_num_seqs: int


def static_budget(profile: StepProfile, work: RequestWork, kv_tokens: int) -> StaticBudget:
    """The budget whose steps serve most requests a second, when prefill and decoding share them as
    the requests need both, within memory. The throughput has a peak at every corner of the
    profile's staircase; of the peaks within 1% of the highest the smallest, whose steps are the
    shortest, is taken. The cap is the number of requests in such a step.

    Raises: PlanError where memory holds no step.
    """
    rates: list[float] = []
    granule = profile.granularity
    for budget in range(granule, _MAX_BUDGET + 1, granule):
        step, held = _balanced_step(work, budget)
        if held > kv_tokens:
            break
        rates.append(budget / profile.seconds(step))
    if not rates:
        raise PlanError(f"{kv_tokens} KV tokens hold no step of these requests")
    padded = [0.0, *rates, 0.0]
    peaks = [i for i, r in enumerate(rates) if padded[i] <= r >= padded[i + 2]]
    highest = max(rates)
    budget = granule * (1 + next(i for i in peaks if rates[i] >= _CLOSE * highest))
    step, _ = _balanced_step(work, budget)
    prompts = step.num_prefill_tokens / work.prefill_tokens
    return StaticBudget(budget, max(1, min(budget, round(step.num_decodes + prompts))))


def _balanced_step(work: RequestWork, budget: int) -> tuple[StepWork, float]:
    """A step of `budget` positions in the proportions of a mean request, and the KV it holds."""
    requests = budget / (work.prefill_tokens + work.decode_steps)
    decodes = round(requests * work.decode_steps)
    prefill = budget - decodes
    kv = requests * work.kv_token_steps
    context = work.prefill_context * prefill / work.prefill_tokens
    return StepWork(prefill, context, decodes, round(kv)), kv + prefill


# --- the whole plan -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeploymentPlan:
    """thresholds: the policy that takes them and its options, and how many steps a stage has.
    kv_bound_tokens: the memory that the thresholds need at most, but for a probability `delta`
    within an hour (0: never more). static: for servers without thresholds."""

    thresholds: dict[str, Any]
    kv_bound_tokens: float
    delta: float
    static: StaticBudget

    @property
    def serve_flags(self) -> dict[str, str]:
        """Flags for Penstock, whose own policy needs no figures, and for vLLM."""
        budget, seqs = self.static.token_budget, self.static.max_num_seqs
        return {
            "penstock": "--admission fluid_guided",
            "vllm": f"--max-num-batched-tokens {budget} --max-num-seqs {seqs}",
        }


def plan_deployment(
    profile: StepProfile, workload: Workload, rate: float, kv_tokens: int, delta: float = DELTA
) -> DeploymentPlan:
    """WAIT's thresholds by type for a named mix, Nested WAIT's segments for recorded lengths, and
    the limits of a static server. Raises: PlanError where no thresholds fit.
    """
    served = fitting(workload, kv_tokens)
    traffic = traffic_of(served, rate)
    static = static_budget(profile, output_work(served.prompt_len, served.output_len), kv_tokens)
    try:
        if workload.name in MIXES:
            wait = best_wait_thresholds(profile, traffic, kv_tokens)
            thresholds = {"algorithm": "wait", "stage_steps": wait.wave}
            thresholds |= _wait_options(wait, wait.thresholds)
            return DeploymentPlan(thresholds, wait.kv_tokens, 0.0, static)
        nested = best_nested_thresholds(profile, traffic, kv_tokens, delta, HORIZON_S)
    except ValueError as error:
        raise PlanError(f"at {rate:g} requests a second: {error}") from error
    thresholds = {
        "algorithm": "nested_wait",
        "stage_steps": nested.segments.wave,
        "segment_ends": _segment_ends(nested),
        "thresholds": nested.thresholds,
    }
    return DeploymentPlan(thresholds, nested.kv_bound_tokens, delta, static)
