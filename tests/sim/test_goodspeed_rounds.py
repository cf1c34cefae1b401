"""What GoodSpeed learns of acceptance while requests come and end."""

from typing import Any

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed
from penstock.core.scheduler import Scheduler
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload


class Acceptance:
    """An instrument that reads the estimate after every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        policy = scheduler._ctx.allocation
        assert isinstance(policy, GoodSpeed)
        self._policy = policy
        self.seen: list[float] = []

    def on_plan(self, plan: Any) -> None:
        """Plans say nothing."""

    def on_result(self, plan: Any, result: Any) -> None:
        self.seen.append(self._policy.acceptance("default"))

    def on_output(self, output: Any) -> None:
        """Outputs say nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("output_len", [16, 50, 150])
def test_acceptance_is_learned_with_outputs_of_any_length(rate: float, output_len: int) -> None:
    """The steps of a prompt and of a last token, without a draft, are no rounds."""
    num = 150 * 200 // output_len
    lengths = Workload("equal", np.full(num, 60), np.full(num, output_len))
    setup = Setup(
        load_profile("a100-llama2-7b"),
        allocation=PolicyConfig.from_name("goodspeed"),
        acceptance=GeometricAcceptance({"d": rate}, seed=1),
        drafters=("d",),
    )
    watched: list[Acceptance] = []

    def watch(scheduler: Scheduler) -> list[Acceptance]:
        watched.append(Acceptance(scheduler))
        return watched

    run(setup, make_workload(lengths, rate=16.0, seed=0), watch=watch)
    assert np.mean(watched[0].seen[100:]) == pytest.approx(rate, abs=0.01)
