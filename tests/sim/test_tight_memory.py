"""Prompts nearly as large as memory, among short ones: they wait, but not without bound."""

from typing import Any

import numpy as np
import pytest
from tests.products import first_fast

from penstock.config import PolicyConfig
from penstock.core.scheduler import Scheduler
from penstock.core.types import Output, StepPlan, StepResult
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload

CPU = load_profile("zoo-large")
LONG = 1800


def mixed(rate: float, num: int = 150) -> Workload:
    """Every twelfth prompt takes nearly all of 2,048 tokens."""
    rng = np.random.default_rng(0)
    prompts = np.where(rng.random(num) < 0.08, LONG, rng.integers(20, 120, num)).astype(np.int64)
    outputs = rng.integers(100, 200, num).astype(np.int64)
    times = np.concatenate([[0.0], np.cumsum(rng.exponential(1 / rate, num - 1))])
    return Workload("mixed", prompts, outputs, times)


def served(
    workload: Workload,
    policy: str,
    pipeline: str,
    kv_tokens: int,
    watch: Any = None,
    **options: Any,
) -> Report:
    setup = Setup(
        CPU,
        PolicyConfig.from_name(policy, **options),
        kv_tokens=kv_tokens,
        block_size=16,
        drafters=("draft",),
        acceptance=GeometricAcceptance({"draft": 0.7}, seed=1),
        pipeline=pipeline,
    )
    return run(setup, workload, watch=watch)


class EndsBeforeTurn:
    """How many requests end while another is first in order, over those that ran when it became
    the first: none is let in before it, so each end brings it nearer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.first: str | None = None
        self.num_running = self.num_ends = 0
        self.excess: list[int] = []

    def on_plan(self, plan: StepPlan) -> None:
        state = self.scheduler.table.waiting.queue().first
        first = None if state is None else state.request.id
        if first != self.first:
            if self.first is not None:
                self.excess.append(self.num_ends - self.num_running)
            self.first, self.num_ends = first, 0
            self.num_running = len(self.scheduler.table.running)

    def on_output(self, output: Output) -> None:
        self.num_ends += output.finish_reason is not None

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", first_fast(["2", "off"]))
def test_the_first_in_order_waits_for_no_more_ends_than_requests_ran(pipeline: str) -> None:
    watches: list[EndsBeforeTurn] = []

    def watch(scheduler: Scheduler) -> list[EndsBeforeTurn]:
        watches.append(EndsBeforeTurn(scheduler))
        return watches

    served(mixed(8.0, 60), "fluid_guided", pipeline, 2048, watch, order="arrival")
    assert max(watches[0].excess) <= 0
    assert len(watches[0].excess) > 20
