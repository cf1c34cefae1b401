"""The host's work on drafts is not measured while nobody drafts; it is forgotten, but slowly."""

import pytest

from penstock.core.learn import Estimators
from penstock.core.types import TARGET, DraftTime, PhaseTimes, StepResult
from penstock.fluid.step_profile import StepWork

PAUSE_S, OVERHEAD_S = 0.0003, 0.001


class Steps:
    """Steps that follow each other; those with a draft begin OVERHEAD_S later than others."""

    def __init__(self) -> None:
        self.times = Estimators().times
        self._now = 0.0

    def run(self, num_steps: int, *, has_drafts: bool) -> float:
        """The overhead of drafts that is known after so many steps."""
        drafts = (DraftTime("d", 1, 3, 1, 0.003),) if has_drafts else ()
        phases = PhaseTimes(draft=0.003 if has_drafts else 0.0, verify=0.01)
        for i in range(num_steps):
            self._now += PAUSE_S + OVERHEAD_S * has_drafts
            begun, self._now = self._now, self._now + 0.014
            step = StepResult(i, TARGET, begun, self._now, phases=phases, draft_times=drafts)
            self.times.on_result(step, may_wait=False)
            self.times.observe_drafting(step)
        return self.times.draft_overhead


def test_what_drafts_cost_the_host_is_remembered_for_a_while_and_not_for_good() -> None:
    steps = Steps()
    steps.run(200, has_drafts=False)
    learned = steps.run(600, has_drafts=True)
    assert learned == pytest.approx(OVERHEAD_S, rel=0.02)
    assert steps.run(50, has_drafts=False) > 0.9 * learned
    assert steps.run(10_000, has_drafts=False) < 0.01 * learned
    assert steps.run(600, has_drafts=True) == pytest.approx(OVERHEAD_S, rel=0.02)


@pytest.mark.parametrize("num_prefill_tokens", [0, 64])
def test_what_the_beginning_of_a_request_takes_the_host_is_not_the_price_of_its_rounds(
    num_prefill_tokens: int,
) -> None:
    """Requests of twenty rounds, all with drafts, 0.3 ms after each other."""
    times, now = Estimators().times, 0.0
    first = StepWork(num_prefill_tokens, 0.0, int(not num_prefill_tokens), 64, 0)
    for i in range(2000):
        begins = i % 20 == 0
        drafts = () if begins else (DraftTime("d", 1, 3, 1, 0.003),)
        phases = PhaseTimes(draft=0.0 if begins else 0.003, verify=0.01)
        now += 0.0016 if begins else PAUSE_S
        work = first if begins else StepWork(0, 0.0, 1, 64, 3)
        step = StepResult(i, TARGET, now, now + 0.014, phases=phases, draft_times=drafts, work=work)
        times.on_result(step, may_wait=False)
        times.observe_drafting(step)
        now += 0.014
    expected = PAUSE_S if num_prefill_tokens else 0.0016
    assert times.overhead == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("is_known", [True, False])
def test_waiting_for_a_draft_beside_the_target_is_no_time_of_the_hosts(is_known: bool) -> None:
    """Drafts of 1.5 ms in a lane, whose end is known; control: a lane that nobody hears of."""
    times, now = Estimators().times, 0.0
    for i in range(200):
        drafted = now + 0.0015
        if is_known:
            times.on_result(StepResult(2 * i, "d", now, drafted), may_wait=True)
        begun, now = drafted + PAUSE_S, drafted + PAUSE_S + 0.014
        step = StepResult(2 * i + 1, TARGET, begun, now, phases=PhaseTimes(verify=0.014))
        times.on_result(step, may_wait=True)
        times.observe_drafting(step)
    assert times.overhead == pytest.approx(PAUSE_S if is_known else PAUSE_S + 0.0015, rel=0.02)
