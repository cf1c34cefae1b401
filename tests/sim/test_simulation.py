from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.core.fakes import ToyDrafter
from tests.core.world import make_scheduler, replace_policies

from penstock.core.kv import hash_blocks
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.step import Step
from penstock.core.types import (
    Cancel,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    Event,
    FinishReason,
    Output,
    Request,
    StepPlan,
    StepResult,
    VerifyItem,
)
from penstock.fluid.step_profile import StepWork
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import SimulationResult, simulate
from penstock.sim.executor import SimulatedExecutor


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """A fixed cost for each step and one for each row, in seconds; a drafter pays its own once for
    each token of its longest draft."""

    verify_fixed: float
    verify_per_row: float = 0.0
    draft_fixed: float = 0.0
    draft_per_row: float = 0.0

    def verify(self, work: StepWork) -> float:
        rows = work.num_prefill_tokens + work.num_decodes + work.num_draft_tokens
        return self.verify_fixed + self.verify_per_row * rows

    def decoding(self, num_decodes: int) -> tuple[float, float]:
        return self.verify_fixed + self.verify_per_row * num_decodes, 0.0

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        steps = max(1, *(o.max_draft_tokens for o in orders))
        rows = sum(o.num_catch_up_tokens + max(0, o.max_draft_tokens - 1) for o in orders)
        return self.draft_fixed * steps + self.draft_per_row * rows


TIMES = LinearStepTimes(
    verify_fixed=0.01, verify_per_row=1e-4, draft_fixed=1e-3, draft_per_row=1e-5
)
ACCEPTANCE = GeometricAcceptance({"a": 0.8, "b": 0.4}, seed=7)
DRAFTERS = (ToyDrafter("a"), ToyDrafter("b"))


def make_trace(num: int = 30, every: float = 0.02, **fields: Any) -> list[Request]:
    return [
        Request(
            id=f"r{i}",
            prompt_len=10 + 7 * i % 50,
            max_tokens=5 + 3 * i % 20,
            arrival_time=every * i,
            tenant="us" if i % 3 else "them",
            block_hashes=hash_blocks(range(8), 4, str(i % 4)),
            drafter="ab"[i % 2],
            **fields,
        )
        for i in range(num)
    ]


@dataclass
class Log:
    """Everything that passes the loop."""

    entries: list[StepPlan | StepResult | Output] = field(default_factory=list)

    def on_plan(self, plan: StepPlan) -> None:
        self.entries.append(plan)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self.entries.append(result._replace(work=None, work_seconds=0.0))

    def on_output(self, output: Output) -> None:
        self.entries.append(output)

    @property
    def plans(self) -> list[StepPlan]:
        return [e for e in self.entries if isinstance(e, StepPlan)]


def make(own_lanes: Sequence[str] = (), **options: Any) -> Scheduler:
    options.setdefault("num_blocks", 80)
    options.setdefault("allocation", make_policy("allocation", "priced"))
    return make_scheduler(drafters=DRAFTERS, own_lanes=own_lanes, **options)


def run(
    scheduler: Scheduler,
    requests: Iterable[Request],
    events: Iterable[tuple[float, Event]] = (),
    log: Log | None = None,
    times: LinearStepTimes = TIMES,
) -> SimulationResult:
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, times, ACCEPTANCE)
    return simulate(scheduler, executor, clock, requests, events, [log] if log else [])


def test_one_request_by_hand() -> None:
    scheduler = make_scheduler()
    times = LinearStepTimes(verify_fixed=0.5, verify_per_row=0.25)
    request = Request("r", 6, 3, arrival_time=2.0)
    result = run(scheduler, [request], times=times)
    record = result.records["r"]
    assert record.request is request
    assert record.first_token_time == pytest.approx(2.0 + 0.5 + 6 * 0.25)
    assert record.finish_time == pytest.approx(4.0 + 2 * 0.75)
    assert (record.num_tokens, record.finish_reason) == (3, FinishReason.LENGTH)
    assert result.finished_at == record.finish_time
    assert result.kv_peak_tokens == 8, "two blocks of 4"
    assert result.num_preemptions == 0


def test_drafts_take_time_and_bring_tokens() -> None:
    times = LinearStepTimes(verify_fixed=1.0, draft_fixed=0.125)
    scheduler = make_scheduler(drafters=DRAFTERS[:1])
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, times, GeometricAcceptance({"a": 1.0}))
    record = simulate(scheduler, executor, clock, [Request("r", 6, 11)]).records["r"]
    # The prompt, then twice four drafts and five tokens.
    assert record.finish_time == pytest.approx(1.0 + 2 * (4 * 0.125 + 1.0))
    assert (record.num_proposed, record.num_accepted) == (8, 8)


def test_everybody_finishes_and_peaks_and_preemptions_show() -> None:
    result = run(make(num_blocks=24), make_trace(40, every=0.0))
    assert all(r.finish_reason is FinishReason.LENGTH for r in result.records.values())
    assert all(r.num_tokens == r.request.max_tokens for r in result.records.values())
    assert result.num_preemptions > 0
    assert 60 < result.kv_peak_tokens <= 96
    assert list(result.records) == [f"r{i}" for i in range(40)]


def test_refused_and_cancelled_requests_are_recorded() -> None:
    requests = [Request("large", 400, 9), Request("r", 6, 40), Request("s", 6, 40)]
    result = run(make(), requests, [(0.05, Cancel("r"))])
    assert result.records["large"].finish_reason is FinishReason.REFUSED
    assert result.records["large"].finish_time == 0.0
    cancelled = result.records["r"]
    assert (cancelled.finish_reason, cancelled.finish_time) == (FinishReason.CANCELLED, 0.05)
    assert 0 < cancelled.num_tokens < 40
    assert result.records["s"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("own_lanes", [(), ("a",), ("a", "b")])
def test_lanes_and_lost_drafters(own_lanes: Sequence[str]) -> None:
    log = Log()
    events = [(0.05, DrafterDown("a")), (0.3, DrafterUp("a"))]
    scheduler = make(own_lanes)
    result = run(scheduler, make_trace(), events, log)
    assert all(r.finish_reason is FinishReason.LENGTH for r in result.records.values())
    assert {p.lane for p in log.plans} == {"target", *own_lanes}
    assert all(p.num_used_blocks == 0 for p in scheduler.table.memory.pools.values())


def test_drafter_lanes_overlap_the_target() -> None:
    """Where every row costs, two requests that take turns on two lanes are done much sooner."""
    times = LinearStepTimes(verify_fixed=0.0, verify_per_row=0.002, draft_per_row=0.0025)
    requests = [
        Request("r", 6, 200, drafter="a"),
        Request("s", 6, 200, drafter="a", arrival_time=0.015),
    ]

    def finished_at(own_lanes: Sequence[str]) -> float:
        fixed = make_policy("allocation", "fixed", {"k": 4})
        scheduler = make(own_lanes, allocation=fixed, num_blocks=120)
        return run(scheduler, requests, times=times).finished_at

    assert finished_at(["a"]) < 0.7 * finished_at([])


def test_a_repeated_id_is_refused() -> None:
    with pytest.raises(ValueError, match="'r' is used twice"):
        run(make(), [Request("r", 4, 4), Request("r", 4, 4)])


def test_a_scheduler_that_waits_for_nothing_is_noticed() -> None:
    class Idle(AdmissionPolicy):
        name = "idle"

        def compose(self, step: Step) -> None:
            return None

        def draft_budget(self, num_tokens: int) -> int:
            return 0

    scheduler = make()
    replace_policies(scheduler, admission=Idle())
    with pytest.raises(RuntimeError, match=r"idles at 0.0 s with 1 requests unfinished"):
        run(scheduler, [Request("r", 4, 4)])


def test_a_policy_may_wait() -> None:
    """`wake_at` moves the clock although nothing else happens."""
    inner = make_policy("admission", "vllm_v1")

    class Patient(AdmissionPolicy):
        name = "patient"

        def compose(self, step: Step) -> None:
            if step.now < 5.0:
                step.wake_at = 5.0
            else:
                inner.compose(step)

        def draft_budget(self, num_tokens: int) -> int:
            return int(inner.draft_budget(num_tokens))

    scheduler = make()
    replace_policies(scheduler, admission=Patient())
    record = run(scheduler, [Request("r", 4, 1)]).records["r"]
    assert record.first_token_time is not None
    assert record.first_token_time > 5.0


def test_geometric_acceptance() -> None:
    items = [
        VerifyItem(f"r{i}", 1, 3, 0, 1, True, drafter="a", num_draft_tokens=4) for i in range(4000)
    ]
    model = GeometricAcceptance({"a": 0.7}, seed=1)
    counts = [model.num_accepted(item, 0) for item in items]
    for length in range(1, 5):
        share = sum(c >= length for c in counts) / len(counts)
        assert share == pytest.approx(0.7**length, abs=0.03)
    assert counts == [model.num_accepted(item, 0) for item in items]
    assert counts != [GeometricAcceptance({"a": 0.7}, 2).num_accepted(item, 0) for item in items]
    assert GeometricAcceptance({"a": 0.0}).num_accepted(items[0], 0) == 0
    assert GeometricAcceptance({"a": 1.0}).num_accepted(items[0], 0) == 4
    assert model.num_accepted(items[0]._replace(num_draft_tokens=0), 0) == 0


@pytest.mark.parametrize("own_lanes", [(), ("a", "b")])
def test_the_same_seed_gives_an_identical_event_log(own_lanes: Sequence[str]) -> None:
    logs = [Log(), Log()]
    for log in logs:
        run(make(own_lanes, num_blocks=24), make_trace(), log=log)
    assert logs[0].entries == logs[1].entries
    assert repr(logs[0].entries) == repr(logs[1].entries)
