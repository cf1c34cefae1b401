"""Deployment plans by the fluid model: thresholds, token budget, memory and load bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from penstock.config import PolicyConfig
from penstock.core.policies.declared import ThresholdOptions
from penstock.core.policies.registry import policies, policy_class
from penstock.fluid.capacity import RequestWork, capacity_bound, output_work
from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.memory import DELTA, HORIZON_S, poisson_kv_bound
from penstock.fluid.nested import (
    MAX_SEGMENTS,
    NestedThresholds,
    fluid_segments,
    nested_thresholds,
    segments_of,
)
from penstock.fluid.stages import StageRange, peak_kv_tokens, refuse_beyond
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.fluid.traffic import (
    NO_SPECULATION,
    Speculation,
    Traffic,
    TrafficType,
    traffic_from_lengths,
)
from penstock.fluid.wait import (
    WaitThresholds,
    best_wait_thresholds,
    roomy_wait_thresholds,
    wait_thresholds,
    wave_lengths,
)
from penstock.sim.acceptance import AcceptanceModel
from penstock.sim.workloads import Workload

# Bounds of searches: more stages, positions a step and draft tokens are not tried.
_MAX_STAGES, _MAX_BUDGET, _MAX_DRAFT = 64, 8192, 16
_CLOSE = 0.99
"""Share of the best throughput that a smaller budget must reach, to have shorter steps."""
_BEYOND = 4
"""Memory bounds are searched up to this multiple of the memory."""


_Thresholds = tuple[tuple[int, ...], tuple[float, ...]]
"""Lengths of types or ends of segments, and the threshold of each."""


class PlanError(ValueError):
    """No plan fits. The message is one line."""


def mean_rate(workload: Workload) -> float:
    """Return requests a second over a workload's arrivals. Raises: PlanError without any."""
    times = workload.arrival_time
    if times is None or times[-1] <= 0:
        raise PlanError(f"workload {workload.name!r} has no arrivals to take a rate from")
    return float((len(times) - 1) / times[-1])


def traffic_of(workload: Workload, rate: float) -> Traffic:
    """Return the fluid model's traffic at `rate` requests a second, by type or recorded length."""
    mix = workload.mix
    if mix is None:
        return traffic_from_lengths(workload.prompt_len, workload.output_len, rate)
    return tuple(
        TrafficType(rate * float(p), mix.prompt_len, length)
        for length, p in zip(mix.decode_lens, mix.probabilities, strict=True)
    )


def fitting(workload: Workload, kv_tokens: int) -> Workload:
    """Return the requests that fit into memory. Raises: PlanError if there are none."""
    fits = workload.prompt_len + workload.output_len <= kv_tokens
    if not fits.any():
        least = int((workload.prompt_len + workload.output_len).min())
        raise PlanError(
            f"no request of {workload.name!r} fits into {kv_tokens} KV tokens: "
            f"the smallest needs {least}"
        )
    return workload if fits.all() else workload.select(np.flatnonzero(fits))


def load_bound(
    profile: StepProfile,
    workload: Workload,
    kv_tokens: int,
    acceptance: AcceptanceModel | None = None,
    drafters: Sequence[str] = (),
) -> float:
    """Return the fluid capacity bound in requests a second. Raises: PlanError.

    Refused requests count. The largest over drafters and uniform draft lengths, drafting for
    free."""
    served = fitting(workload, kv_tokens)
    ways = [NO_SPECULATION]
    for drafter in drafters if acceptance is not None else ():
        for length in range(1, _MAX_DRAFT + 1):
            assert acceptance is not None
            ways.append(Speculation(acceptance.tokens_per_step(drafter, length), length))
    best = 0.0
    for way in ways:
        work = output_work(served.prompt_len, served.output_len, way)
        # Drafts that do not fit beside the longest request are not made.
        if work.max_context + way.num_draft_tokens <= kv_tokens:
            best = max(best, capacity_bound(profile, work, kv_tokens))
    return best * len(workload) / len(served)


def threshold_options(
    admission: PolicyConfig, profile: StepProfile, workload: Workload, rate: float, kv_tokens: int
) -> dict[str, Any]:
    """Return options with the fluid model's thresholds; none for a policy without thresholds.

    Literal algorithms take whole thresholds, with a stage of one step; gated ones take fractions
    with as much headroom as fits. Raises: PlanError where no thresholds fit."""
    policy = admission.make("admission")
    if policy.thresholds is None:
        return {}
    is_literal = policy.may_idle
    if policy.thresholds.by == "segment":
        planner = _whole_by_segment if is_literal else fluid_segments
    else:
        planner = _whole_by_type if is_literal else _roomy_by_type
    traffic = traffic_of(fitting(workload, kv_tokens), rate)
    try:
        return _as_options(policy.thresholds, *planner(profile, traffic, kv_tokens))
    except ValueError as error:
        raise PlanError(f"{admission.name} at {rate:g} requests a second: {error}") from error


def _as_options(
    names: ThresholdOptions, lengths: tuple[int, ...], thresholds: tuple[float, ...]
) -> dict[str, Any]:
    return {names.lengths: lengths, names.thresholds: thresholds}


def _whole_by_type(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> _Thresholds:
    found = wait_thresholds(profile, traffic, kv_tokens)
    return _output_lens(found), tuple(int(n) for n in found.thresholds)


def _roomy_by_type(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> _Thresholds:
    found = roomy_wait_thresholds(profile, traffic, kv_tokens)
    return _output_lens(found), tuple(float(n) for n in found.thresholds)


def _output_lens(found: WaitThresholds) -> tuple[int, ...]:
    return tuple(t.output_len for t in found.traffic)


def _whole_by_segment(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> _Thresholds:
    """Return segments with the smallest memory bound, in waves of one step."""
    shortest = profile.seconds(StepWork(num_prefill_tokens=min(t.prompt_len for t in traffic)))
    iterations = max(1, round(HORIZON_S / shortest))
    found = []
    for count in range(1, len({t.decode_len for t in traffic}) + 1):
        segments = segments_of(traffic, count)
        try:
            policy = nested_thresholds(profile, segments, _BEYOND * kv_tokens, DELTA, iterations)
        except ValueError:
            continue
        if policy.batch_kv_tokens <= kv_tokens:
            found.append(policy)
    if not found:
        raise ValueError(
            f"no thresholds fit: with any number of segments they fall behind, or hold more than "
            f"the {kv_tokens} KV tokens there are; lower the rates"
        )
    best = min(found, key=lambda policy: policy.kv_bound_tokens)
    return _segment_ends(best), best.thresholds


def _least_nested(
    profile: StepProfile, traffic: Traffic, kv_tokens: int, delta: float
) -> NestedThresholds | None:
    """Return Nested WAIT's thresholds with the smallest memory bound, over segments and waves.

    The bound may exceed the memory. None where no segments keep up: at high load the places kept
    for requests that finished early are too many."""
    last_step = max(t.decode_len for t in traffic)
    iterations = max(1, round(HORIZON_S / profile.seconds(StepWork(num_prefill_tokens=1))))
    found = []
    for wave in wave_lengths(last_step + 1):
        if last_step > wave * _MAX_STAGES:
            continue
        for count in range(1, MAX_SEGMENTS + 1):
            try:
                segments = segments_of(traffic, count, wave)
                limit = _BEYOND * kv_tokens
                found.append(nested_thresholds(profile, segments, limit, delta, iterations))
            except ValueError:
                continue
    return min(found, key=lambda policy: policy.kv_bound_tokens, default=None)


def _fluid_kv_bound(profile: StepProfile, traffic: Traffic, delta: float) -> float:
    """Return `poisson_kv_bound` of requests that take one stage a fluid iteration."""
    seconds = equilibrium(profile, traffic).iteration_s
    kv = np.concatenate([t.prompt_len + np.arange(t.decode_len + 1) for t in traffic])
    means = np.repeat([t.rate * seconds for t in traffic], [t.decode_len + 1 for t in traffic])
    return poisson_kv_bound(kv, means, seconds, delta)


def _segment_ends(found: NestedThresholds) -> tuple[int, ...]:
    """Return output tokens after each segment's last stage, the prefill's token included."""
    return tuple(end + 1 for end in found.segments.ends)


def check_thresholds_fit(
    admission: PolicyConfig, profile: StepProfile, workload: Workload, kv_tokens: int
) -> None:
    """Raises: PlanError where a literal algorithm's full stages exceed the memory."""
    policy = admission.make("admission")
    names = policy.thresholds
    if names is None or not policy.may_idle:
        return
    thresholds = getattr(policy.options, names.thresholds)
    ends = getattr(policy.options, names.lengths)
    prompt = round(float(fitting(workload, kv_tokens).prompt_len.mean()))
    starts = (0, *ends[:-1]) if names.by == "segment" else (0,) * len(ends)
    ranges = [StageRange(prompt, a, b - 1) for a, b in zip(starts, ends, strict=True)]
    held = peak_kv_tokens(ranges, thresholds)
    if held > kv_tokens:
        raise PlanError(
            f"{admission.name}: thresholds {','.join(map(str, thresholds))} hold up to "
            f"{held} KV tokens, memory has {kv_tokens}; choose lower ones"
        )
    try:
        refuse_beyond(profile, ranges, thresholds)
    except ValueError as error:
        raise PlanError(f"{admission.name}: {error}") from error


def length_classes(admission: PolicyConfig, workload: Workload, num_classes: int = 4) -> list[int]:
    """Return output tokens that divide requests into classes: segments, types or quantiles."""
    names = policy_class("admission", admission.name).thresholds
    ends = None if names is None else admission.options.get(names.lengths)
    if ends and len(ends) <= 2 * num_classes:
        return list(ends)
    shares = np.arange(1, num_classes + 1) / num_classes
    return sorted({int(q) for q in np.quantile(workload.output_len, shares, method="higher")})


@dataclass(frozen=True)
class StaticBudget:
    """Positions a step and concurrent requests, for a server with fixed limits."""

    token_budget: int
    max_num_seqs: int


def static_budget(profile: StepProfile, work: RequestWork, kv_tokens: int) -> StaticBudget:
    """Return the token budget with the highest throughput within memory, and its requests.

    They are as many at most as recurrent states have room. Prefill and decoding share a step as the
    requests need both. Throughput peaks at every corner of the profile's staircase; the smallest
    budget within 1% of the highest peak is taken for short steps. Raises: PlanError where memory
    holds no step."""
    rates: list[float] = []
    granule = profile.granularity
    for budget in range(granule, _MAX_BUDGET + 1, granule):
        step, held = _balanced_step(work, budget, profile.most_requests)
        if held > kv_tokens:
            break
        rates.append(step.num_positions / profile.seconds(step))
    if not rates:
        raise PlanError(f"{kv_tokens} KV tokens hold no step of these requests")
    padded = [0.0, *rates, 0.0]
    peaks = [i for i, r in enumerate(rates) if padded[i] <= r >= padded[i + 2]]
    highest = max(rates)
    budget = granule * (1 + next(i for i in peaks if rates[i] >= _CLOSE * highest))
    step, _ = _balanced_step(work, budget, profile.most_requests)
    prompts = step.num_prefill_tokens / work.prefill_tokens
    most = min(budget, profile.most_requests)
    return StaticBudget(budget, int(max(1, min(most, round(step.num_decodes + prompts)))))


def _balanced_step(work: RequestWork, budget: int, most: float) -> tuple[StepWork, float]:
    """Return a step in the proportions of a mean request, and its KV.

    It has `budget` positions, or fewer if those are of more than `most` requests."""
    each = work.prefill_tokens + work.decode_steps
    positions = round(min(budget, max(1.0, most / (1 + work.decode_steps) * each)))
    requests = positions / each
    decodes = round(requests * work.decode_steps)
    prefill = positions - decodes
    kv = requests * work.kv_token_steps
    context = work.prefill_context * prefill / work.prefill_tokens
    return StepWork(prefill, context, decodes, round(kv)), kv + prefill


@dataclass(frozen=True)
class PlannedMemory:
    """KV tokens of the fluid model.

    mean: M* of eq. 5, the mean at this load. batch: M^π, with every stage as full as the thresholds
    allow. bound: the most held, except with probability `delta` within an hour (0: never); it may
    exceed the memory. basis: full stages (`stages`), with queues between segments (`queues`,
    theorem 5.1), both of literal algorithms; or Poisson arrivals without waiting (`arrivals`)."""

    mean: float
    batch: float
    bound: float
    delta: float
    basis: Literal["stages", "queues", "arrivals"]


@dataclass(frozen=True)
class DeploymentPlan:
    """Plan of a deployment. thresholds: an algorithm and its options.

    Those are prompts by type or segment at every stage of `stage_steps` steps. static: for servers
    without thresholds. kv_tokens: the memory."""

    thresholds: dict[str, Any]
    memory: PlannedMemory
    static: StaticBudget
    kv_tokens: int

    @property
    def configurations(self) -> dict[str, PolicyConfig]:
        """Admission policies for the plan, by the names of `serve_flags`."""
        vllm = PolicyConfig.from_bundle("admission", "vllm")
        limits = policy_class("admission", vllm.name).limits.given(**asdict(self.static))
        return {
            "penstock": PolicyConfig.from_bundle("admission"),
            "penstock_config": self._gated(),
            "vllm": vllm.with_defaults(limits),
        }

    def serve_flags(self, kv_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return flags or a configuration file for Penstock, flags for vLLM.

        kv_tokens: memory by the names of `configurations`."""
        budget, seqs = self.static.token_budget, self.static.max_num_seqs
        engine = {
            "kv_tokens": kv_tokens["penstock_config"],
            "admission": self._gated().model_dump(),
        }
        return {
            "penstock": f"--kv-tokens {kv_tokens['penstock']}",
            "penstock_config": {"engine": engine},
            "vllm": f"--max-num-batched-tokens {budget} --max-num-seqs {seqs}",
        }

    def _gated(self) -> PolicyConfig:
        options = dict(self.thresholds)
        algorithm, steps = options.pop("algorithm"), options.pop("stage_steps")
        policy = policy_class("admission", algorithm)
        names = policy.thresholds
        options[names.thresholds] = tuple(n / steps for n in options[names.thresholds])
        options |= policy.limits.given(token_budget=self.static.token_budget)
        return PolicyConfig.from_name(algorithm, **{names.gate: True}, **options)


def plan_deployment(
    profile: StepProfile, workload: Workload, rate: float, kv_tokens: int, delta: float = DELTA
) -> DeploymentPlan:
    """Return the plan of a workload at a load.

    Thresholds are WAIT's by type for a named mix; Nested WAIT's segments for recorded lengths, with
    theorem 5.1's bound, or, at loads where those cannot keep up, the fluid's own fractions.

    Raises: PlanError where the load is too high, or nothing fits."""
    served = fitting(workload, kv_tokens)
    traffic = traffic_of(served, rate)
    static = static_budget(profile, output_work(served.prompt_len, served.output_len), kv_tokens)
    try:
        mean = equilibrium(profile, traffic).kv_tokens
        if workload.mix is not None:
            wait = best_wait_thresholds(profile, traffic, kv_tokens)
            thresholds = _thresholds("type", wait.wave, _output_lens(wait), wait.thresholds)
            memory = PlannedMemory(mean, wait.kv_tokens, wait.kv_tokens, 0.0, "stages")
            return DeploymentPlan(thresholds, memory, static, kv_tokens)
        nested = _least_nested(profile, traffic, kv_tokens, delta)
        if nested is None:
            thresholds = _thresholds("segment", 1, *fluid_segments(profile, traffic, kv_tokens))
            bound = _fluid_kv_bound(profile, traffic, delta)
            memory = PlannedMemory(mean, mean, bound, delta, "arrivals")
        else:
            ends, wave = _segment_ends(nested), nested.segments.wave
            thresholds = _thresholds("segment", wave, ends, nested.thresholds)
            batch, bound = nested.batch_kv_tokens, nested.kv_bound_tokens
            memory = PlannedMemory(mean, batch, bound, delta, "queues")
        return DeploymentPlan(thresholds, memory, static, kv_tokens)
    except ValueError as error:
        most = load_bound(profile, workload, kv_tokens)
        raise PlanError(
            f"at {rate:g} requests a second: {error}; no policy serves more than {most:.4g}"
        ) from error


def _thresholds(
    by: str, stage_steps: int, lengths: tuple[int, ...], thresholds: tuple[float, ...]
) -> dict[str, Any]:
    """Return the first policy that has such thresholds, and its options."""
    for algorithm, policy in policies("admission").items():
        if policy.thresholds is not None and policy.thresholds.by == by:
            options = _as_options(policy.thresholds, lengths, thresholds)
            return {"algorithm": algorithm, "stage_steps": stage_steps, **options}
    raise PlanError(f"no admission policy has thresholds by {by}")
