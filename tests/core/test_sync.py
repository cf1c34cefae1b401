"""A host that keeps requests by itself tells the scheduler how they stand (`Scheduler.sync`)."""

import pytest
from tests.core.world import ADMISSION

from penstock.core.kv import BlockPool
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.sync import HostRequest
from penstock.core.types import (
    TARGET,
    Arrive,
    FinishReason,
    Output,
    Request,
    Status,
    StepPlan,
    StepResult,
    Verdict,
)

PROMPT = 10


def make_scheduler(*, counted: bool = True, budget: int = 64) -> Scheduler:
    return Scheduler(
        BlockPool(64, 4),
        [],
        admission=make_policy(
            "admission", "vllm_v1", ADMISSION | {"max_num_batched_tokens": budget}
        ),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed", {"k": 0}),
        max_model_len=256,
        groups_decodes=counted,
    )


def arrive(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        assert scheduler.apply(Arrive(Request(name, PROMPT, 8)), 0.0) == []


def carry_out(scheduler: Scheduler, plan: StepPlan) -> list[Output]:
    verdicts = [
        Verdict(i.request_id, i.epoch, i.round, (0,) if i.samples else ()) for i in plan.items
    ]
    return scheduler.update(plan, StepResult(plan.id, TARGET, 0.0, 1.0, tuple(verdicts)))


def decoding(counted: bool, *names: str) -> Scheduler:
    """Requests that have their first token, in a plan that has ended."""
    scheduler = make_scheduler(counted=counted)
    arrive(scheduler, *names)
    carry_out(scheduler, scheduler.schedule(0.0))
    return scheduler


@pytest.mark.parametrize("counted", [False, True])
def test_a_request_goes_on_from_where_its_host_has_it(counted: bool) -> None:
    scheduler = make_scheduler(counted=counted)
    arrive(scheduler, "a", "b")
    scheduler.sync([HostRequest("a", 0, 7, 2), HostRequest("unknown", 1, 1, 1)])
    state = scheduler.table.requests["a"]
    assert state.status is Status.RUNNING
    assert state.kv_of(TARGET).num_blocks == 2
    first, second = scheduler.schedule(0.0).items
    assert (first.request_id, first.start, first.num_scheduled_tokens) == ("a", 7, PROMPT - 7)
    assert (second.request_id, second.start, second.num_scheduled_tokens) == ("b", 0, PROMPT)


@pytest.mark.parametrize("counted", [False, True])
def test_more_tokens_than_planned_end_a_request_earlier(counted: bool) -> None:
    scheduler = decoding(counted, "a")
    scheduler.sync([HostRequest("a", 7, PROMPT + 6, 5)])
    outputs = carry_out(scheduler, scheduler.schedule(0.0))
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH]


def test_a_request_in_flight_waits_for_its_step() -> None:
    scheduler = decoding(False, "a", "b")
    scheduler.sync([HostRequest("a", 2, PROMPT + 1, 3, in_flight=True)])
    assert [i.request_id for i in scheduler.schedule(0.0).items] == ["b"]
    scheduler.sync([HostRequest("a", 2, PROMPT + 1, 3)])
    assert [i.request_id for i in scheduler.schedule(0.0).items] == ["a"]


@pytest.mark.parametrize("counted", [False, True])
def test_a_preempted_request_comes_first_and_begins_anew(counted: bool) -> None:
    scheduler = decoding(counted, "a", "b")
    arrive(scheduler, "c")
    epoch = scheduler.table.requests["b"].epoch
    scheduler.sync([], ["b", "c", "unknown"])
    state = scheduler.table.requests["b"]
    assert (state.status, state.num_computed_tokens) == (Status.PREEMPTED, 0)
    assert state.epoch > epoch
    assert scheduler.table.requests["c"].status is Status.WAITING, "it has no memory to lose"
    starts = {i.request_id: i.start for i in scheduler.schedule(0.0).items}
    assert [i for i in starts if i != "a"] == ["b", "c"]
    assert starts["b"] == 0
    assert scheduler.table.memory.num_deferred_blocks == 0


def test_a_group_keeps_requests_that_it_counts_as_the_host_does() -> None:
    scheduler = decoding(True, "a", "b", "c")
    group = next(iter(_after_a_decode(scheduler).table.groups.values()))
    assert list(group.members) == ["a", "b", "c"]
    same = HostRequest("a", 2, PROMPT + 1, 3)
    scheduler.sync([same, same._replace(request_id="b", num_output_tokens=3)])
    assert list(group.members) == ["a", "c"]
    assert scheduler.table.requests["b"].num_output_tokens == 3


def test_a_request_told_of_is_in_no_plan() -> None:
    """Its token of the step in flight is not counted: the host has left it out."""
    scheduler = _after_a_decode(decoding(True, "a", "b"))
    plan = scheduler.schedule(0.0)
    assert plan.decodes is not None
    assert plan.decodes.num_requests == 2
    scheduler.sync([HostRequest("b", 2, PROMPT + 1, 3)])
    carry_out(scheduler, plan)
    requests = scheduler.table.requests
    assert (requests["a"].num_output_tokens, requests["b"].num_output_tokens) == (3, 2)
    assert not requests["b"].plans


def _after_a_decode(scheduler: Scheduler) -> Scheduler:
    """The requests have joined a decode group, and have 2 tokens each."""
    carry_out(scheduler, scheduler.schedule(0.0))
    return scheduler
