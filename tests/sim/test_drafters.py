"""Drafters of a simulated machine: times of their own, capacities, instances, lanes."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.core.loop import Instrument
from penstock.core.state import DrafterKind
from penstock.core.types import TARGET, DraftOrder, DraftSource, Request, StepPlan, VerifyItem
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.clock import VirtualClock
from penstock.sim.drafters import (
    DrafterCapacity,
    DrafterCounts,
    parse_capacities,
    parse_drafter_seconds,
)
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.run import Setup, make_scheduler, run
from penstock.sim.workloads import Workload, WorkloadError, make_workload

SMALL = DrafterProfile("small", (1, 4), (1e-3, 2e-3), 1e-4, slowdown=1.5, target_slowdown=2.0)
PROFILE = StepProfile("toy", 4096, (1, 256), (1e-2, 2e-2), drafters=(SMALL,))


def order(request: str, read: int = 1, length: int = 4, drafter: str = "small") -> DraftOrder:
    return DraftOrder(request, 0, 0, drafter, 0, read, length)


def test_a_drafting_step_counts_the_requests_that_want_it() -> None:
    times = ProfiledStepTimes(PROFILE)
    assert times.draft("small", [order("a")]) == pytest.approx(4e-3)
    four = [order(name) for name in "abcd"]
    assert times.draft("small", four) == pytest.approx(8e-3)
    # Two steps of four requests, then two of one.
    ragged = [order("a", length=4), *(order(name, length=2) for name in "bcd")]
    assert times.draft("small", ragged) == pytest.approx(2 * 2e-3 + 2 * 1e-3)


def test_reading_is_charged_by_token() -> None:
    times = ProfiledStepTimes(PROFILE)
    assert times.draft("small", [order("a", read=101)]) == pytest.approx(4e-3 + 100 * 1e-4)
    assert times.draft("small", [order("a", 101, 0)]) == pytest.approx(1e-3 + 100 * 1e-4)


@pytest.mark.parametrize("pipeline", ["off", "async"])
def test_a_head_of_the_target_has_no_text_to_read(pipeline: str) -> None:
    """It drafts in the target's step, for its steps alone, whatever else drafts beside."""
    head = DrafterProfile("mtp", (1, 4), (1e-3, 2e-3), 1e-1, of_target=True)
    lengths = Workload("long", np.full(12, 500), np.full(12, 40))
    setup = Setup(
        replace(PROFILE, drafters=(SMALL, head)),
        PolicyConfig.from_name("vllm_v1"),
        PolicyConfig.from_name("fixed", k=3),
        kv_tokens=60_000,
        drafters=("mtp",),
        acceptance=GeometricAcceptance({"mtp": 0.8}),
        pipeline=pipeline,
    )
    (drafter,) = setup.make_drafters()
    assert (drafter.pool, drafter.has_lane, drafter.kind) == (None, False, DrafterKind.HEAD)
    counts = DrafterCounts()
    steps = StepsOf()
    run(setup, make_workload(lengths, rate=2.0, seed=1), instruments=(counts, steps))
    assert counts.rounds["mtp"] > 100
    assert counts.seconds["mtp"] == pytest.approx(steps.seconds(head))
    read = replace(setup, profile=replace(PROFILE, drafters=(replace(head, of_target=False),)))
    again = DrafterCounts()
    run(read, make_workload(lengths, rate=2.0, seed=1), instruments=(again,))
    assert again.seconds["mtp"] > 10 * counts.seconds["mtp"], "a drafter reads prompts"


class StepsOf(Instrument):
    """Drafting steps by their number of requests."""

    def __init__(self) -> None:
        self._batches: list[int] = []

    def on_plan(self, plan: StepPlan) -> None:
        lengths = [i.draft.max_draft_tokens for i in plan.items if i.draft is not None]
        self._batches += [
            sum(n >= k for n in lengths) for k in range(1, max(lengths, default=0) + 1)
        ]

    def seconds(self, profile: DrafterProfile) -> float:
        return sum(profile.seconds(batch, 1) for batch in self._batches)


def executor(clock: VirtualClock, setup: Setup) -> SimulatedExecutor:
    drafters = setup.make_drafters()
    profiles = {d.name: SMALL for d in drafters}
    times = ProfiledStepTimes(PROFILE, profiles)
    return SimulatedExecutor(
        clock, times, GeometricAcceptance({"small": 1.0}), None, drafters, profiles
    )


def item(request: str) -> VerifyItem:
    return VerifyItem(request, 0, 0, 4, 1, True, DraftSource.NONE)


def test_what_begins_beside_the_other_side_is_slowed() -> None:
    clock = VirtualClock()
    world = executor(clock, Setup(PROFILE, drafters=("small",), pipeline="async"))
    requests = (Request("a", 4, 9), Request("b", 4, 9))
    alone = PROFILE.linear(1)
    world.submit(StepPlan(1, TARGET, 0.0, items=(item("a"),), new_requests=requests))
    assert world.next_completion == pytest.approx(alone)
    world.submit(StepPlan(2, "small", 0.0, drafts=(order("b"),)))
    assert world.next_completion == pytest.approx(4e-3 * 1.5), "beside the target"
    clock.advance_to(4e-3 * 1.5)
    (drafted,) = world.collect()
    assert drafted.draft_times[0].seconds == pytest.approx(4e-3 * 1.5)
    clock.advance_to(alone)
    (verified,) = world.collect()
    assert verified.work_seconds == pytest.approx(alone), "what had begun goes on at its speed"
    world.submit(StepPlan(3, "small", clock.now(), drafts=(order("b"),)))
    assert world.next_completion == pytest.approx(alone + 4e-3), "nobody works beside it"
    world.submit(StepPlan(4, TARGET, clock.now(), items=(item("a"),)))
    clock.advance_to(alone + 2 * alone)
    assert [r.plan_id for r in world.collect()] == [3, 4]
    assert world.next_completion is None


def test_what_is_only_read_is_answered_and_evaluated_once() -> None:
    clock = VirtualClock()
    world = executor(clock, Setup(PROFILE, drafters=("small",), pipeline="async"))
    read = DraftOrder("a", 0, 3, "small", 0, 10, 0, evaluate=True)
    again = read._replace(start=8, num_catch_up_tokens=6)
    unasked = read._replace(start=14, num_catch_up_tokens=2, evaluate=False)
    requests = (Request("a", 4, 30),)
    found = []
    for number, wanted in enumerate((read, again, unasked)):
        world.submit(
            StepPlan(number, "small", clock.now(), drafts=(wanted,), new_requests=requests)
        )
        requests = ()
        assert world.next_completion is not None
        clock.advance_to(world.next_completion)
        (result,) = world.collect()
        assert result.drafts == ()
        assert result.draft_times[0].steps == 0
        found += result.replays
    # Output tokens 4..9 of the text, then 10..13; all are guessed, since all drafts are accepted.
    assert [(r.num_tokens, r.num_matched) for r in found] == [(6, 6), (4, 4), (0, 0)]


def test_instances_share_a_model_and_have_a_capacity_each() -> None:
    setup = Setup(PROFILE, drafters=("small", "other"), capacities={"small": DrafterCapacity(3, 2)})
    first, second, other = setup.make_drafters()
    assert (first.name, first.model, first.max_num_seqs) == ("small/1", "small", 3)
    assert (second.name, second.model) == ("small/2", "small")
    assert first.pool is not second.pool
    assert (other.name, other.model, other.max_num_seqs, other.pool) == ("other", None, None, None)
    estimators = make_scheduler(setup).learn
    assert estimators.times.curve_of("small/2")(4) == pytest.approx(2e-3)
    assert estimators.times.catch_up_of("small/1") == pytest.approx(1e-4)


def test_a_full_drafter_leaves_requests_to_the_other_instance() -> None:
    workload = Workload("six", *(make_workload("low", num_requests=6, rate=1e6).prompt_len,) * 2)
    workload = make_workload(workload, rate=1e6)
    setup = Setup(
        PROFILE,
        drafters=("small",),
        acceptance=GeometricAcceptance({"small": 0.8}),
        capacities={"small": DrafterCapacity(2, 2)},
        allocation=PolicyConfig.from_name("fixed"),
        selection=PolicyConfig.from_name("single", drafter="small"),
    )
    counts = DrafterCounts()
    run(setup, workload, instruments=[counts])
    assert set(counts.rounds) == {"small/1", "small/2"}
    assert counts.num_switches == 0
    full = DrafterCounts()
    run(replace(setup, capacities={"small": DrafterCapacity(2)}), workload, instruments=[full])
    assert set(full.rounds) == {"small"}
    assert full.taken_up["small"] <= 6


@pytest.mark.parametrize(
    "text", ["small", "small=", "small=0", "small=2x0", "small=x2", "small=-1"]
)
def test_a_capacity_that_is_none(text: str) -> None:
    with pytest.raises(WorkloadError, match="NAME=B or NAME=BxK"):
        parse_capacities([text], ["small"])


def test_capacities_and_seconds_from_text() -> None:
    assert parse_capacities(["a=8", "b=4x2"], ["a", "b"]) == {
        "a": DrafterCapacity(8),
        "b": DrafterCapacity(4, 2),
    }
    with pytest.raises(WorkloadError, match="unknown drafter 'c'; drafters: a, b"):
        parse_capacities(["c=8"], ["a", "b"])
    assert parse_drafter_seconds(["a=0.002:1e-5", "b=0.1"]) == (
        DrafterProfile("a", (1,), (0.002,), 1e-5),
        DrafterProfile("b", (1,), (0.1,)),
    )
    for text in ("a", "a=x", "a=-1", "=1", "a=1:x", "a=inf"):
        with pytest.raises(WorkloadError, match="NAME=SECONDS"):
            parse_drafter_seconds([text])
