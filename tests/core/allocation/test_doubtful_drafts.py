"""What a step takes without drafts is found out though every step drafts, and what it takes with
them is not mistaken for it."""

import random

import pytest
from tests.core.test_allocation import candidates, work

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.priced import Priced
from penstock.core.types import TARGET, DraftTime, PhaseTimes, StepResult, Verdict

BATCH = 8
HOST_S, ROW_S, DRAFT_S = 2e-4, 6e-5, 2e-4
"""Of a step without drafts on the host; of a row of the target; of a drafting step."""


class Machine:
    """Steps of eight requests on the virtual clock. on_drafts_s: what the host has to do for
    drafts; first_s: what the target takes beside its rows."""

    def __init__(self, rate: float, on_drafts_s: float, first_s: float = 5e-4) -> None:
        self.rate = rate
        self._on_drafts_s = on_drafts_s
        self._first_s = first_s
        self._rng = random.Random(5)
        self._policy = Priced(Priced.Options())
        self.learn = Estimators()
        self._now = 0.0

    def run(self, num_steps: int) -> float:
        """The share of so many steps that have drafts."""
        return sum(self._step() for _ in range(num_steps)) / num_steps

    def _step(self) -> bool:
        offered = candidates(*[8] * BATCH)
        grants = self._policy.allocate(offered, work(self.learn, num_rows=BATCH))
        lengths = [g.num_draft_tokens for g in grants]
        steps = max(lengths)
        drafts = (DraftTime("d", BATCH, steps, BATCH, steps * DRAFT_S),) if steps else ()
        for i, length in enumerate(lengths):
            if length:
                self.learn.acceptance.on_verdict(self._verdict(f"r{i}", length))
        rows = BATCH + sum(lengths)
        phases = PhaseTimes(draft=steps * DRAFT_S, verify=self._first_s + rows * ROW_S)
        begun = self._now + HOST_S + (self._on_drafts_s if steps else 0.0)
        self._now = begun + phases.draft + phases.verify
        result = StepResult(
            0, TARGET, begun, self._now, phases=phases, draft_times=drafts, num_rows=rows
        )
        self.learn.times.on_result(result, may_wait=False)
        self.learn.times.observe_drafting(result)
        return bool(steps)

    def _verdict(self, request_id: str, length: int) -> Verdict:
        accepted = 0
        while accepted < length and self._rng.random() < self.rate:
            accepted += 1
        decided = min(accepted + 1, length)
        return Verdict(request_id, 0, 0, (), "d", length, accepted, decided, float(accepted))


@pytest.mark.parametrize("first_s", [0.0, 5e-4])
def test_drafts_that_only_seem_to_pay_end(first_s: float) -> None:
    """The host's work on drafts takes as long as all else together."""
    machine = Machine(rate=0.7, on_drafts_s=1e-3, first_s=first_s)
    machine.run(400)
    assert machine.run(600) < 0.1
    assert machine.learn.times.overhead == pytest.approx(HOST_S, rel=0.01)


def test_drafts_that_pay_are_hardly_ever_left_out() -> None:
    machine = Machine(rate=0.9, on_drafts_s=2e-4, first_s=1e-3)
    machine.run(400)
    assert machine.run(640) >= 1 - 1 / 64


def test_drafts_that_pay_beyond_doubt_are_never_left_out() -> None:
    """They would if the host did nothing in a step without: there is nothing to find out."""
    machine = Machine(rate=0.9, on_drafts_s=0.0, first_s=4e-3)
    machine.run(40)
    assert machine.run(600) == 1.0
