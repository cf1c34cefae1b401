"""One simulated run: a workload, a profile and policies in, figures out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import PolicyConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.times import drafter_profiles
from penstock.core.lookup import LookUp
from penstock.core.loop import Instrument
from penstock.core.policies.registry import make_pipeline
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, DrafterKind
from penstock.core.types import (
    AUTO_DRAFTER,
    NO_DRAFTER,
    NO_TARGET,
    FairnessRule,
    FinishReason,
    LatencyTarget,
    Request,
    Tenant,
)
from penstock.fluid.shares import jain_index, max_min_shares
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import AcceptanceModel, of_tenants
from penstock.sim.clock import VirtualClock
from penstock.sim.drafters import DrafterCapacity
from penstock.sim.driver import SimulationResult, simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.links import DraftServer, RemoteDrafting
from penstock.sim.slowdown import by_prompt_len, seconds_alone
from penstock.sim.workloads import Workload

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setup:
    """Simulated server without its load.

    kv_tokens: KV memory in tokens; None: the profile's. block_size: tokens of a KV block; 1 is the
    papers' model of memory. drafters: names that `acceptance` knows; none: no speculation. Their
    times are the profile's; without any there, `executor.ProfiledStepTimes` says. capacities: by
    drafter. pipeline: unless off, drafters work beside the target. draft_servers: `acceptance` must
    know them too; a server with a tenant drafts for that tenant's requests, selection deals with
    the others. look_up: recorded, for all requests. fairness: between tenants, of weight 1 without
    `tenant_weights`."""

    profile: StepProfile
    admission: PolicyConfig = PolicyConfig.from_bundle("admission")
    allocation: PolicyConfig = PolicyConfig.from_bundle("allocation")
    selection: PolicyConfig = PolicyConfig.from_bundle("selection")
    kv_tokens: int | None = None
    block_size: int = 1
    acceptance: AcceptanceModel | None = None
    drafters: tuple[str, ...] = ()
    capacities: Mapping[str, DrafterCapacity] = field(default_factory=dict)
    draft_servers: tuple[DraftServer, ...] = ()
    pipeline: str = "off"
    look_up: LookUp | None = None
    fairness: FairnessRule = False
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    counted: bool = True

    @property
    def num_blocks(self) -> int:
        return (self.kv_tokens or self.profile.kv_tokens) // self.block_size

    def make_drafters(self) -> list[Drafter]:
        """Return every drafter instance. One whose reading takes time has its own KV blocks.

        The target's head has the target's."""
        heads = {d.name for d in self.profile.drafters if d.of_target}
        reading = {d.name for d in self.profile.drafters if d.per_catch_up_token} - heads
        drafters = []
        for model in self.drafters:
            capacity = self.capacities.get(model, DrafterCapacity())
            drafters += [
                Drafter(
                    name,
                    BlockPool(self.num_blocks, self.block_size) if model in reading else None,
                    has_lane=self.pipeline != "off" and model not in heads,
                    kind=DrafterKind.HEAD if model in heads else DrafterKind.LOCAL,
                    model=None if name == model else model,
                    max_num_seqs=capacity.max_num_seqs,
                )
                for name in capacity.names(model)
            ]
        return drafters


@dataclass(frozen=True)
class Report:
    """Result of a run by request, in order of arrival; seconds, NaN for what did not happen."""

    profile: StepProfile
    workload: Workload
    result: SimulationResult
    arrived_at: FloatArray
    first_token_at: FloatArray
    finished_at: FloatArray
    num_tokens: npt.NDArray[np.int64]
    refused: npt.NDArray[np.bool_]
    wall_s: float
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        return ~np.isnan(self.finished_at) & ~self.refused

    @property
    def latency(self) -> FloatArray:
        """Arrival to last token, of completed requests."""
        return (self.finished_at - self.arrived_at)[self.completed]

    @property
    def ttft(self) -> FloatArray:
        """Arrival to first token, of completed requests."""
        return (self.first_token_at - self.arrived_at)[self.completed]

    @property
    def tpot(self) -> FloatArray:
        """Seconds a token after the first, of completed requests with more than one."""
        return self.token_seconds[self.completed & (self.num_tokens > 1)]

    @property
    def token_seconds(self) -> FloatArray:
        """Seconds a token after the first, of all requests."""
        decoding = self.finished_at - self.first_token_at
        return np.asarray(decoding / np.maximum(self.num_tokens - 1, 1), dtype=np.float64)

    @property
    def slowdown(self) -> FloatArray:
        """Latency over that alone on the server without speculation, of completed requests."""
        lengths = self.workload.prompt_len[: len(self.arrived_at)]
        alone = seconds_alone(self.profile, lengths, self.num_tokens)
        return ((self.finished_at - self.arrived_at) / alone)[self.completed]

    def figures(
        self, ttft_p99: float | None = None, tpot_p99: float | None = None
    ) -> dict[str, Any]:
        """Return the dictionary of `penstock simulate --json`.

        With the comparison to given targets in seconds, tenants' shares, and met latency
        targets."""
        figures = self._figures(np.ones(len(self.arrived_at), dtype=bool))
        lengths = self.workload.prompt_len[: len(self.arrived_at)][self.completed]
        slowdown = self.slowdown
        figures |= {
            "slowdown": _summary(slowdown),
            "by_prompt_len": by_prompt_len(lengths, self.ttft, self.latency, slowdown),
            "preemptions": self.result.num_preemptions,
            "kv_peak_tokens": self.result.kv_peak_tokens,
            "steps": self.result.num_steps,
            "stalled": self.result.stalled,
            "wall_s": self.wall_s,
        }
        if ttft_p99 is not None or tpot_p99 is not None:
            figures |= self._against_targets(ttft_p99, tpot_p99)
        if self.workload.tenants is not None:
            figures |= self._by_tenant(self.workload.tenants)
        return figures

    @property
    def has_target(self) -> npt.NDArray[np.bool_]:
        """Mask of requests with a TPOT target or a deadline of their own."""
        return ~(np.isnan(self._asked(self.workload.tpot)) & np.isnan(self._deadline))

    @property
    def met_target(self) -> npt.NDArray[np.bool_]:
        """Mask of completed requests within their targets. One of one token has no TPOT to miss."""
        tpot, latency = self._asked(self.workload.tpot), self.finished_at - self.arrived_at
        is_slow = (self.num_tokens > 1) & (self.token_seconds > tpot)
        return self.has_target & self.completed & ~is_slow & ~(latency > self._deadline)

    @property
    def _deadline(self) -> FloatArray:
        return self._asked(self.workload.deadline)

    def _asked(self, column: FloatArray | None) -> FloatArray:
        num = len(self.arrived_at)
        return np.full(num, np.nan) if column is None else column[:num]

    @property
    def _seconds(self) -> float:
        return max(self.result.finished_at, 1e-12)

    def _figures(self, chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return the figures of the chosen requests, a mask of shape [requests]."""
        completed = self.completed & chosen
        several = completed & (self.num_tokens > 1)
        seconds = self._seconds
        asked = int((self.has_target & chosen).sum())
        met = int((self.met_target & chosen).sum())
        return {
            **({"latency_targets": {"requests": asked, "met": met}} if asked else {}),
            "requests_completed": int(completed.sum()),
            "requests_refused": int((self.refused & chosen).sum()),
            "requests_unfinished": int((chosen & ~self.completed & ~self.refused).sum()),
            "throughput_requests_per_s": float(completed.sum() / seconds),
            "throughput_tokens_per_s": float(self.num_tokens[chosen].sum() / seconds),
            "latency_s": _summary((self.finished_at - self.arrived_at)[completed]),
            "ttft_s": _summary((self.first_token_at - self.arrived_at)[completed]),
            "tpot_s": _summary(self.token_seconds[several]),
        }

    def _against_targets(self, ttft_p99: float | None, tpot_p99: float | None) -> dict[str, Any]:
        """Return requests a second within all targets, and for each whether p99 is within it.

        A request of one token has no TPOT to miss."""
        within = self.completed
        met = {}
        if ttft_p99 is not None:
            within = within & (self.first_token_at - self.arrived_at <= ttft_p99)
            met["ttft"] = bool(len(self.ttft) and np.percentile(self.ttft, 99) <= ttft_p99)
        if tpot_p99 is not None:
            within = within & ((self.num_tokens < 2) | (self.token_seconds <= tpot_p99))
            met["tpot"] = not len(self.tpot) or bool(np.percentile(self.tpot, 99) <= tpot_p99)
        return {"slo_goodput": float(within.sum() / self._seconds), "slo_met": met}

    def _by_tenant(self, tenants: npt.NDArray[np.str_]) -> dict[str, Any]:
        """Return figures by tenant, and those of fairness.

        `jain`: Jain's index of each tenant's service over its weighted max-min fair share.
        `sum_log_rate`: weighted, of tokens a second (None where a tenant got none). Service counts
        until the last arrival, or half of the run if that is later: in the end every policy has
        served all."""
        tenants = tenants[: len(self.arrived_at)]
        names, owner = np.unique(tenants, return_inverse=True)
        until = max(float(self.arrived_at[-1]), 0.5 * self._seconds)
        asked = np.where(self.refused, 0, self.workload.output_len[: len(owner)])
        in_time = self.completed & (self.finished_at <= until)
        demand = np.bincount(owner, asked).astype(np.float64)
        served = np.bincount(owner, np.where(in_time, self.num_tokens, 0)).astype(np.float64)
        weights = np.array([self.tenant_weights.get(str(name), 1.0) for name in names])
        fair = max_min_shares(float(served.sum()), demand, weights)
        rates = served / until
        return {
            "tenants": {str(name): self._figures(tenants == name) for name in names},
            "jain": jain_index(served[fair > 0] / fair[fair > 0]),
            "sum_log_rate": float(weights @ np.log(rates)) if (rates > 0).all() else None,
        }


def run(
    setup: Setup,
    workload: Workload,
    events: Sequence[Any] = (),
    instruments: Sequence[Instrument] = (),
    *,
    until: float = math.inf,
    watch: Callable[[Scheduler], Sequence[Instrument]] | None = None,
) -> Report:
    """Simulate, to the end or to a given time.

    `workload` must have arrival times. `watch` makes more instruments, with the scheduler.

    Raises: PolicyError for an unknown policy or option; ValueError without arrivals."""
    if workload.arrival_time is None:
        raise ValueError(f"workload {workload.name!r} has no arrival times")
    clock = VirtualClock()
    scheduler = make_scheduler(setup)
    executor = make_executor(setup, workload, clock)
    for server in setup.draft_servers:
        scheduler.apply(server.up(), clock.now())
    if watch is not None:
        instruments = (*instruments, *watch(scheduler))
    started = time.perf_counter()
    collecting = gc.isenabled()
    # Nothing here forms cycles, and each collection would traverse every request.
    gc.disable()
    try:
        result = simulate(
            scheduler, executor, clock, requests_of(workload, setup), events, instruments, until
        )
    finally:
        if collecting:
            gc.enable()
    return _report(setup, workload, result, time.perf_counter() - started)


def make_executor(
    setup: Setup,
    workload: Workload,
    clock: VirtualClock,
    kind: Callable[..., SimulatedExecutor] = SimulatedExecutor,
) -> SimulatedExecutor:
    """Return the executor of a setup. kind: makes it, as `SimulatedExecutor` is made."""
    drafters = setup.make_drafters()
    profiles = drafter_profiles(setup.profile, drafters)
    acceptance = setup.acceptance
    if acceptance is not None and workload.tenants is not None:
        acceptance = of_tenants(acceptance, workload.tenants.tolist())
    return kind(
        clock,
        ProfiledStepTimes(setup.profile, profiles),
        acceptance,
        RemoteDrafting(setup.draft_servers, setup.seed),
        drafters,
        profiles,
    )


def make_scheduler(setup: Setup) -> Scheduler:
    """Return the scheduler of a setup. Raises: PolicyError."""
    estimators = Estimators(setup.profile)
    drafters = setup.make_drafters()
    if drafters or setup.draft_servers or setup.look_up is not None:
        # A live engine measures itself before it serves.
        seed_estimators(estimators, setup.profile, drafters)
    return Scheduler(
        BlockPool(setup.num_blocks, setup.block_size),
        drafters,
        admission=setup.admission.make("admission"),
        selection=setup.selection.make("selection"),
        allocation=setup.allocation.make("allocation"),
        pipeline=make_pipeline(setup.pipeline),
        max_model_len=setup.num_blocks * setup.block_size,
        learn=estimators,
        groups_decodes=setup.counted,
        tenants=[Tenant(name, weight) for name, weight in setup.tenant_weights.items()],
        fairness=setup.fairness,
        max_num_seqs=setup.profile.state_slots,
        look_up=setup.look_up,
    )


def requests_of(workload: Workload, setup: Setup) -> Iterator[Request]:
    """Yield the requests of a workload. Their expected output (for `wait`) is the true one."""
    arrived_at = workload.arrival_time
    assert arrived_at is not None
    tenants = workload.tenants
    speculates = setup.drafters or setup.draft_servers or setup.look_up is not None
    drafter = AUTO_DRAFTER if speculates else NO_DRAFTER
    own_servers = {s.tenant: s.name for s in setup.draft_servers}
    targets = _targets(workload)
    rows = zip(
        workload.prompt_len.tolist(), workload.output_len.tolist(), arrived_at.tolist(), strict=True
    )
    for i, (prompt_len, output_len, time_) in enumerate(rows):
        tenant = "default" if tenants is None else str(tenants[i])
        yield Request(
            str(i),
            prompt_len,
            output_len,
            time_,
            tenant,
            drafter=own_servers.get(tenant, drafter),
            expected_output_tokens=output_len,
            latency=NO_TARGET if targets is None else targets[i],
        )


def _targets(workload: Workload) -> list[LatencyTarget] | None:
    if workload.tpot is None and workload.deadline is None:
        return None
    columns = (workload.tpot, workload.deadline)
    nothing = np.full(len(workload), np.nan)
    given = np.stack([nothing if column is None else column for column in columns], axis=1)
    return [LatencyTarget(*[None if math.isnan(s) else s for s in row]) for row in given.tolist()]


def _report(setup: Setup, workload: Workload, result: SimulationResult, wall_s: float) -> Report:
    records = result.records.values()
    return Report(
        profile=setup.profile,
        workload=workload,
        result=result,
        arrived_at=np.array([r.request.arrival_time for r in records]),
        first_token_at=np.array([_or_nan(r.first_token_time) for r in records]),
        finished_at=np.array([_or_nan(r.finish_time) for r in records]),
        num_tokens=np.array([r.num_tokens for r in records], dtype=np.int64),
        refused=np.array([r.finish_reason is FinishReason.REFUSED for r in records], dtype=bool),
        wall_s=wall_s,
        tenant_weights=setup.tenant_weights,
    )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _summary(values: FloatArray) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p99", "p999", "max"))
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9]).tolist()
    most = float(values.max())
    return {"mean": float(values.mean()), "p50": p50, "p99": p99, "p999": p999, "max": most}
