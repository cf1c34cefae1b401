from dataclasses import dataclass, field

from tests.core.fakes import ToyExecutor
from tests.core.world import make_request, make_scheduler, replace_policies

from penstock.core.loop import Loop
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.step import Step
from penstock.core.types import TARGET, Arrive, Cancel, FinishReason, Output, StepPlan, StepResult
from penstock.sim.clock import VirtualClock


@dataclass
class Watcher:
    seen: list[str] = field(default_factory=list)

    def on_plan(self, plan: StepPlan) -> None:
        self.seen.append(f"plan {plan.id}")

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.id == result.plan_id
        self.seen.append(f"result {plan.id}")

    def on_output(self, output: Output) -> None:
        self.seen.append(f"output {output.request_id}")


def test_a_turn_applies_submits_and_collects() -> None:
    executor, watcher = ToyExecutor(4), Watcher()
    loop = Loop(make_scheduler(), executor, VirtualClock(), [watcher])
    turn = loop.turn([Arrive(make_request("r", max_tokens=1))])
    assert (turn.submitted, turn.collected, turn.outputs) == (1, 0, ())
    assert loop.num_plans_in_flight == 1
    executor.run(TARGET)
    turn = loop.turn([])
    assert (turn.submitted, turn.collected) == (0, 1)
    assert [o.finish_reason for o in turn.outputs] == [FinishReason.LENGTH]
    assert watcher.seen == ["plan 0", "result 0", "output r"]
    assert loop.num_plans_in_flight == 0


def test_while_no_lane_can_take_a_plan_only_events_and_results_are_left_of_a_turn() -> None:
    executor, watcher = ToyExecutor(4), Watcher()
    loop = Loop(make_scheduler(), executor, VirtualClock(), [watcher])
    loop.turn([Arrive(make_request("r", max_tokens=1))])
    assert loop.take_in([Arrive(make_request("large", 10_000))]) == 0
    assert loop.scheduler.num_unfinished == 1, "what does not fit is refused at once"
    executor.run(TARGET)
    assert loop.take_in([Arrive(make_request("s", seed=1))]) == 1
    assert watcher.seen == ["plan 0", "output large", "result 0", "output r"]
    assert loop.turn([]).submitted == 1, "the next turn starts what has come"


def test_news_reach_the_executor_without_work() -> None:
    executor = ToyExecutor(4)
    loop = Loop(make_scheduler(num_blocks=4), executor, VirtualClock())
    loop.turn([Arrive(make_request("r", 12, 2)), Arrive(make_request("s", 12, 2, seed=1))])
    executor.run(TARGET)
    loop.turn([])
    turn = loop.turn([Cancel("r"), Cancel("s")])
    assert turn.submitted == 0
    assert not executor.texts
    assert not executor.tables


def test_the_earliest_wake_up_is_reported() -> None:
    class Sleepy(AdmissionPolicy):
        name = "sleepy"

        def compose(self, step: Step) -> None:
            step.wake_at = step.now + 2.5

        def draft_budget(self, num_tokens: int) -> int:
            return 0

    scheduler = make_scheduler()
    replace_policies(scheduler, admission=Sleepy())
    loop = Loop(scheduler, ToyExecutor(4), VirtualClock())
    turn = loop.turn([Arrive(make_request("r"))])
    assert (turn.submitted, turn.wake_at) == (0, 2.5)
