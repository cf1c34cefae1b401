"""A drafter is not given up for good because the machine was busy when it was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from tests.products import first_fast

from penstock.config.engine import PolicyConfig
from penstock.core.types import AUTO_DRAFTER, DraftOrder, Request, StepPlan, StepResult
from penstock.fluid.step_profile import DrafterProfile, StepProfile, StepWork
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.run import Setup, make_scheduler

TOKENS, LATER = 96, 32
"""Of a request; requests behind which the rate is looked at."""
DRAFTER = DrafterProfile("a", (1, 8, 32), (4e-3, 5e-3, 9e-3), per_catch_up_token=5e-4)
QUIET = StepProfile(
    "quiet", 20_000, (1, 2, 4, 8, 64), (0.03, 0.031, 0.033, 0.04, 0.2), drafters=(DRAFTER,)
)


def busy(target: float = 1.0, rows: float = 1.0, drafter: float = 1.0) -> StepProfile:
    """The same machine while it does something else. target, drafter: factors of all that they do;
    rows: of what a step's rows take beyond the first."""
    first = QUIET.token_seconds[0]
    own = replace(
        DRAFTER,
        batch_seconds=tuple(drafter * s for s in DRAFTER.batch_seconds),
        per_catch_up_token=drafter * DRAFTER.per_catch_up_token,
    )
    seconds = tuple(target * (first + rows * (s - first)) for s in QUIET.token_seconds)
    return replace(QUIET, token_seconds=seconds, drafters=(own,))


_times_of = cache(ProfiledStepTimes)


@dataclass
class Machine:
    """Step times that depend on the time: `profile_at` says which profile holds."""

    clock: VirtualClock
    profile_at: Callable[[float], StepProfile]

    def _times(self) -> ProfiledStepTimes:
        return _times_of(self.profile_at(self.clock.now()))

    def verify(self, work: StepWork) -> float:
        return self._times().verify(work)

    def decoding(self, num_decodes: int) -> tuple[float, float]:
        return self._times().decoding(num_decodes)

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        return self._times().draft(drafter, orders)


class Watch:
    """Seconds of the target's steps, and tokens, of requests from a certain one on."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.seconds, self.num_tokens, self.num_drafted = 0.0, 0, 0

    def on_plan(self, plan: StepPlan) -> None: ...

    def on_output(self, output: object) -> None: ...

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        for verdict in result.verdicts:
            if int(verdict.request_id) >= self._first:
                self.seconds += result.finished_at - result.started_at
                self.num_tokens += len(verdict.token_ids)
                self.num_drafted += verdict.num_proposed


def served(
    policies: dict[str, PolicyConfig],
    at_start: StepProfile,
    profile_at: Callable[[float], StepProfile] = lambda _: QUIET,
    num_before: int = LATER,
    rate: float = 0.8,
) -> Watch:
    """One request after the other, with 30 tokens of prompt; what the last 16 came to."""
    setup = Setup(
        QUIET,
        drafters=("a",),
        acceptance=GeometricAcceptance({"a": rate}),
        block_size=16,
        **policies,
    )
    clock = VirtualClock()
    scheduler = make_scheduler(replace(setup, profile=at_start))
    executor = SimulatedExecutor(
        clock, Machine(clock, profile_at), setup.acceptance, drafters=setup.make_drafters()
    )
    requests = [
        Request(str(i), 30, TOKENS, 4.0 * i, drafter=AUTO_DRAFTER) for i in range(num_before + 16)
    ]
    watch = Watch(num_before)
    simulate(scheduler, executor, clock, requests, instruments=[watch])
    return watch


VLLM = {"admission": PolicyConfig.from_name("vllm_v1")}
"""It cuts no prompt by a profile, which is as wrong as it was given."""
POLICIES = {"priced": VLLM | {"selection": PolicyConfig.from_name("single")}, "auto": VLLM}
NOISE = {
    "all three times as long": busy(3.0, 1.0, 3.0),
    "the drafter six times": busy(drafter=6.0),
    "rows ten times": busy(rows=10.0),
    "all, and the drafter more": busy(2.0, 4.0, 6.0),
}


@cache
def quiet_start(name: str, num_before: int = LATER) -> Watch:
    return served(POLICIES[name], QUIET, num_before=num_before)


@pytest.mark.slow
@pytest.mark.parametrize("noise", first_fast(NOISE))
@pytest.mark.parametrize("name", POLICIES)
def test_a_busy_start_is_forgotten_within_32_requests(name: str, noise: str) -> None:
    quiet = quiet_start(name)
    later = served(POLICIES[name], NOISE[noise])
    assert quiet.num_drafted > 1000
    assert later.num_tokens / later.seconds >= 0.97 * quiet.num_tokens / quiet.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_load_that_comes_and_goes_is_followed_within_64_requests(name: str) -> None:
    """For 20 of each 40 seconds, until the 64th request, drafting takes too long to pay."""
    slow, until = busy(1.5, 4.0, 8.0), 64 * 4.0
    quiet = quiet_start(name, num_before=128)
    later = served(
        POLICIES[name],
        slow,
        lambda now: slow if now < until and now % 40 < 20 else QUIET,
        num_before=128,
    )
    assert later.num_tokens / later.seconds >= 0.97 * quiet.num_tokens / quiet.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_where_drafts_do_not_pay_little_time_is_spent_on_them(name: str) -> None:
    """With a drafter that is hardly ever right, and times that are right from the start."""
    later = served(POLICIES[name], QUIET, rate=0.05)
    alone = served(VLLM | {"allocation": PolicyConfig.from_name("fixed", k=0)}, QUIET)
    assert 0 < later.num_drafted < 0.05 * later.num_tokens
    assert later.num_tokens / later.seconds >= 0.98 * alone.num_tokens / alone.seconds


class Orders:
    """Orders of drafts, and the largest step."""

    def __init__(self) -> None:
        self.orders: list[DraftOrder] = []
        self.most_rows = 0

    def on_plan(self, plan: StepPlan) -> None:
        self.most_rows = max(self.most_rows, plan.num_rows)
        self.orders += [i.draft for i in plan.items if i.draft is not None]

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...

    def on_output(self, output: object) -> None: ...


def crowd(*, budget: int = 64, wrong: StepProfile | None = None) -> Orders:
    """Eight requests arrive together and begin to draft together, and others come later."""
    setup = Setup(
        wrong or busy(rows=10.0, drafter=6.0),
        PolicyConfig.from_name("vllm_v1", max_num_batched_tokens=budget, max_num_seqs=8),
        drafters=("a",),
        acceptance=GeometricAcceptance({"a": 0.8}),
        block_size=16,
    )
    clock, drafters = VirtualClock(), setup.make_drafters()
    scheduler = make_scheduler(setup)
    machine = Machine(clock, lambda _: QUIET)
    executor = SimulatedExecutor(clock, machine, setup.acceptance, drafters=drafters)
    requests = [
        Request(str(i), 30, TOKENS, max(0.0, i / 8 - 1), drafter=AUTO_DRAFTER) for i in range(64)
    ]
    orders = Orders()
    result = simulate(scheduler, executor, clock, requests, instruments=[orders])
    assert all(r.num_tokens == TOKENS for r in result.records.values())
    return orders


def test_one_request_is_enough_for_a_trial() -> None:
    orders = crowd(wrong=busy(rows=100.0, drafter=100.0)).orders
    first = orders[0].request_id
    assert [o.request_id for o in orders[:2]] == [first, first]
    assert [o.max_draft_tokens for o in orders[:2]] == [4, 4]


@pytest.mark.parametrize("budget", first_fast([8, 9, 10]))
def test_a_trial_keeps_to_the_token_budget(budget: int) -> None:
    orders = crowd(budget=budget)
    assert orders.orders
    assert orders.most_rows <= budget
