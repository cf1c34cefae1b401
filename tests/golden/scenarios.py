"""Runs that cover every policy: simulated ones, and ones of an executor that keeps real KV."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import ADMISSIONS, Chaos, Rotating, World, make_request, make_scheduler
from tests.golden.record import Recorder

from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.policies.registry import policies
from penstock.core.types import Cancel, DrafterDown, DrafterUp
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import DriftingAcceptance, GeometricAcceptance
from penstock.sim.drafters import DrafterCapacity
from penstock.sim.links import DraftServer, Link
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload

Scenario = Callable[[], list[str]]

PROFILE = load_profile("a100-llama2-7b")
SMALL = load_profile("zoo-large")
LITERAL = ("wait", "nested_wait")
TARGETS = {"ttft_p99": 0.5, "tpot_p99": 0.05}


def simulated(setup: Setup, workload: Workload, events: tuple[Any, ...] = ()) -> list[str]:
    recorder = Recorder()
    report = run(replace(setup, counted=False), workload, events, [recorder])
    result = report.result
    end = f"{result.finished_at:.9g} s, {result.num_preemptions} preemptions, {result.stalled}"
    return [*recorder.lines, end]


def counted(setup: Setup, workload: Workload) -> list[str]:
    """Of requests that are advanced together only times are known: those of every request."""
    report = run(setup, workload)
    times = zip(report.first_token_at, report.finished_at, strict=True)
    return [f"{i}: {first:.9g} {last:.9g}" for i, (first, last) in enumerate(times)]


def long_prompts(num: int = 100) -> Workload:
    rng = np.random.default_rng(5)
    lengths = Workload("long", rng.integers(1, 3000, num), rng.integers(1, 150, num))
    return make_workload(lengths, rate=2.5, seed=2)


def with_tenants(workload: Workload, num: int = 4) -> Workload:
    """Of which the first send most."""
    shares = 1 / np.arange(1, num + 1) ** 1.5
    owner = np.random.default_rng(0).choice(num, len(workload), p=shares / shares.sum())
    return replace(workload, tenants=np.array([f"t{i}" for i in owner]))


def admission_options(admission: str, name: str) -> dict[str, Any]:
    """Thresholds for those that have them."""
    lengths = {"high": (101, 201, 301), "long": (50, 100, 150)}[name]
    policy, options = ADMISSIONS[admission]
    thresholds = tuple(0.3 if options else 1 for _ in lengths)
    if policy == "wait":
        return {"output_lens": lengths, "thresholds": thresholds, **options}
    if policy == "nested_wait":
        return {"segment_ends": lengths, "thresholds": thresholds, **options}
    return {}


def of_admission() -> Iterator[tuple[str, Scenario]]:
    high = make_workload("high", num_requests=120, rate=40, seed=3)
    workloads = {"high": (high, 8000, 1), "long": (long_prompts(), 4256, 16)}
    for admission in sorted(ADMISSIONS):
        for name, (workload, kv_tokens, block_size) in workloads.items():
            options = admission_options(admission, name)
            setup = Setup(
                PROFILE,
                PolicyConfig.from_name(ADMISSIONS[admission][0], **options),
                kv_tokens=kv_tokens,
                block_size=block_size,
            )
            yield f"admission {admission}, {name}", lambda s=setup, w=workload: simulated(s, w)
            yield f"counted {admission}, {name}", lambda s=setup, w=workload: counted(s, w)
            if admission in LITERAL or name == "long":
                continue
            shared = with_tenants(workload)
            fair = replace(setup, fairness=True, tenant_weights={"t1": 3.0, "t3": 0.2})
            yield (f"admission {admission}, tenants", lambda s=fair, w=shared: simulated(s, w))
            yield (f"counted {admission}, tenants", lambda s=fair, w=shared: counted(s, w))
    for admission in ("fluid_guided", "vllm_v1", "vllm_v0", "sarathi"):
        by_size = Setup(PROFILE, policy_named(admission, order="size_aware"), kv_tokens=4256)
        yield f"admission {admission}, by size", lambda s=by_size: simulated(s, long_prompts())
    told = Setup(PROFILE, PolicyConfig.from_name("fluid_guided", **TARGETS), kv_tokens=9000)
    in_order = Setup(
        PROFILE, PolicyConfig.from_name("fluid_guided", **TARGETS, order="arrival"), kv_tokens=9000
    )
    yield "admission fluid_guided, targets", lambda: simulated(told, long_prompts())
    yield "admission fluid_guided, targets in order", lambda: simulated(in_order, long_prompts())
    yield (
        "admission fluid_guided, turns",
        lambda: simulated(
            Setup(
                SMALL,
                PolicyConfig.from_name("fluid_guided"),
                fairness="strict",
                tenant_weights={"t1": 10.0},
            ),
            with_tenants(make_workload("low", num_requests=120, rate=80, seed=3), 2),
        ),
    )
    waiting = Workload(
        "memory",
        np.array([1000, 3900, 20, 3000]),
        np.array([200, 20, 90, 10]),
        np.array([0.0, 0.5, 0.6, 0.7]),
        np.array(["t0", "t1", "t0", "t1"]),
    )
    yield (
        "admission vllm_v1, turns without memory",
        lambda: simulated(
            Setup(
                SMALL,
                PolicyConfig.from_name("vllm_v1"),
                kv_tokens=4096,
                fairness="strict",
                tenant_weights={"t1": 10.0},
            ),
            waiting,
        ),
    )


DRAFTERS = ("a", "b", "c")
BESIDE = tuple(
    DrafterProfile(name, (1, 64), (seconds, 3 * seconds), reading, 1.2, 1.1)
    for name, seconds, reading in (("a", 4e-4, 2e-6), ("b", 8e-4, 3e-6), ("c", 2e-4, 0.0))
)
RATES = {"a": (0.8, 0.3), "b": (0.7,), "c": (0.35, 0.6, 0.1)}


def drafting(**changes: Any) -> Setup:
    changes.setdefault("kv_tokens", 6400)
    return Setup(
        replace(SMALL, drafters=BESIDE),
        block_size=16,
        drafters=DRAFTERS,
        acceptance=DriftingAcceptance(RATES, dwell=12, seed=1),
        **changes,
    )


def short_texts(num: int = 50, rate: float = 20.0) -> Workload:
    rng = np.random.default_rng(3)
    lengths = Workload("short", rng.integers(8, 200, num), rng.integers(4, 60, num))
    return make_workload(lengths, rate=rate, seed=1)


COMINGS = (
    (0.3, DrafterDown("a")),
    (0.4, Cancel("3")),
    (0.6, Cancel("9")),
    (0.9, DrafterUp("a")),
    (1.2, DrafterDown("b")),
    (1.3, Cancel("20")),
    (1.5, DrafterUp("b")),
)


def of_drafters() -> Iterator[tuple[str, Scenario]]:
    some = {"a": DrafterCapacity(4), "b": DrafterCapacity(3, instances=2)}
    for selection in sorted((*policies("selection"), "greedy", "epsilon_greedy")):
        chosen = drafting(selection=policy_named(selection))
        yield f"selection {selection}", lambda s=chosen: simulated(s, short_texts(), COMINGS)
        beside = drafting(selection=policy_named(selection), pipeline="auto", capacities=some)
        yield f"selection {selection}, beside", lambda s=beside: simulated(s, short_texts())
    for allocation in sorted((*policies("allocation"), "random")):
        shared = drafting(
            selection=PolicyConfig.from_name("auto"),
            allocation=policy_named(allocation),
            kv_tokens=1600,
        )
        yield f"allocation {allocation}", lambda s=shared: simulated(s, short_texts())
    shared = drafting(allocation=PolicyConfig.from_name("goodspeed", total=12))
    yield "goodspeed, 12 in all", lambda s=shared: simulated(s, short_texts())
    for pipeline in ("off", "async", "2", "4", "auto"):
        beside = drafting(selection=PolicyConfig.from_name("auto"), pipeline=pipeline)
        yield f"pipeline {pipeline}", lambda s=beside: simulated(s, short_texts(), COMINGS)
        scarce = drafting(
            selection=PolicyConfig.from_name("lbss"), pipeline=pipeline, kv_tokens=1024
        )
        yield f"pipeline {pipeline}, scarce", lambda s=scarce: simulated(s, short_texts())
    for admission in ("fluid_guided", "sarathi"):
        fair = drafting(
            admission=PolicyConfig.from_name(
                admission,
                **({"token_budget": 40, "max_num_seqs": 24} if admission == "sarathi" else {}),
            ),
            selection=PolicyConfig.from_name("auto"),
            fairness=True,
            tenant_weights={"t1": 3.0},
        )
        yield (
            f"drafts of tenants, {admission}",
            lambda s=fair: simulated(s, with_tenants(short_texts(rate=60.0))),
        )


SERVERS = (
    DraftServer("near", 2e-3, Link(1e-3), tenant="near"),
    DraftServer("far", 1e-3, Link(2e-2, 5e-3), tenant="far", draft_ahead=4),
    DraftServer("lossy", 1e-3, Link(5e-3, 1e-3, 0.05), tenant="lossy"),
    DraftServer("shared", 1e-3, Link(3e-3)),
)
SERVED = GeometricAcceptance({"near": 0.8, "far": 0.6, "lossy": 0.4, "shared": 0.7}, seed=2)
OUTAGES = (
    (0.5, DrafterDown("far")),
    (0.7, Cancel("2")),
    (1.0, SERVERS[1].up()),
    (1.5, DrafterDown("shared")),
    (2.0, SERVERS[3].up()),
)


def at_the_edge(num: int = 24) -> Workload:
    rng = np.random.default_rng(4)
    owners = np.array([("near", "far", "lossy", "nobody")[i % 4] for i in range(num)])
    lengths = Workload("edge", rng.integers(8, 60, num), rng.integers(10, 80, num), tenants=owners)
    return make_workload(lengths, rate=12.0, seed=1)


def of_draft_servers() -> Iterator[tuple[str, Scenario]]:
    for allocation in sorted((*policies("allocation"), "random")):
        shares_total = allocation in ("random", "goodspeed", "fixed")
        for pipeline in ("off", "async"):
            setup = Setup(
                SMALL,
                allocation=policy_named(allocation, **({"total": 10} if shares_total else {})),
                draft_servers=SERVERS,
                acceptance=SERVED,
                pipeline=pipeline,
                kv_tokens=3200,
                block_size=16,
                tenant_weights={"far": 2.0},
            )
            yield (
                f"draft servers, {allocation}, {pipeline}",
                lambda s=setup: simulated(s, at_the_edge(), OUTAGES),
            )


TOYS = (ToyDrafter("first"), ToyDrafter("second", 0.4), ToyDrafter("lookup", 0.5, has_kv=False))
ROUGH = Chaos(cancel=0.02, fail=0.004, drafter_down=0.01, repeat=0.05, early=0.1, patience=0.2)


def in_the_world(seed: int, own_lanes: tuple[str, ...], pipeline: str, chaos: Chaos) -> list[str]:
    scheduler = make_scheduler(
        num_blocks=40,
        drafters=TOYS,
        drafter_blocks=30,
        own_lanes=own_lanes,
        pipeline=pipeline,
        selection=Rotating(),
    )
    executor = ToyExecutor(4, {d.name: d for d in TOYS}, depth=1)
    world = World(scheduler, executor, chaos=chaos, seed=seed)
    recorder = Recorder()
    world.loop._instruments = (*world.loop._instruments, recorder)
    requests = [
        make_request(
            f"r{i}",
            4 + 3 * (i % 7),
            5 + i % 11,
            seed=i % 5,
            tenant=f"t{i % 2}",
            stop_token_ids=frozenset({3}) if i % 3 else frozenset(),
        )
        for i in range(24)
    ]
    world.run(requests)
    return recorder.lines


def of_real_kv() -> Iterator[tuple[str, Scenario]]:
    lanes = {"inside": (), "beside": ("first", "second"), "one beside": ("second",)}
    for name, own in lanes.items():
        for pipeline in ("off", "async", "2") if own else ("off",):
            for seed, chaos in enumerate((Chaos(), ROUGH, ROUGH)):
                yield (
                    f"real KV, {name}, {pipeline}, {seed}",
                    lambda s=seed, o=own, p=pipeline, c=chaos: in_the_world(s, o, p, c),
                )


SCENARIOS: dict[str, Scenario] = {
    name: scenario
    for family in (of_admission, of_drafters, of_draft_servers, of_real_kv)
    for name, scenario in family()
}
