"""Queues hold whom they should, whatever the order, the admission policy and what is learned."""

import random
import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.fakes import ToyExecutor
from tests.core.world import ADMISSIONS, World, make_request
from tests.products import first_fast

import penstock.sim.run
from penstock.config import PolicyConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.policies.registry import make_policy, option_types
from penstock.core.queues import OrderName
from penstock.core.scheduler import Scheduler
from penstock.core.types import Cancel, Event, LatencyTarget, Reconfigure, Request, Tenant
from penstock.fluid.step_profile import StepProfile
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, requests_of, run
from penstock.sim.workloads import Workload, make_workload

ORDERS = typing.get_args(OrderName)
IN_ORDER = [n for n, _ in ADMISSIONS.values() if "order" in option_types("admission", n)]
CASES = [(name, {"order": order}) for name in IN_ORDER for order in ORDERS]
CASES += [case for case in ADMISSIONS.values() if case[0] not in IN_ORDER]
NO_LIMITS = {"max_num_batched_tokens": 10**6, "max_num_seqs": 10**6}


def profile(seconds: float) -> StepProfile:
    """Steps that take so long, and as long again for every hundred positions."""
    return StepProfile("toy", 160, (0, 100), (seconds, 2 * seconds))


def request(rng: random.Random, request_id: str) -> Request:
    deadline = rng.choice([None, rng.uniform(0.1, 20)])
    return make_request(
        request_id,
        rng.randint(1, 24),
        rng.randint(1, 25),
        rng.randrange(3),
        tenant=rng.choice(["us", "them"]),
        expected_output_tokens=rng.choice([None, None, rng.randint(1, 25)]),
        latency=LatencyTarget(deadline=deadline),
    )


def happenings(rng: random.Random, world: World, num_arrived: int) -> list[Event]:
    events: list[Event] = []
    if rng.random() < 0.6:
        events += world.arrivals([request(rng, f"r{num_arrived}")])
    live = sorted(world.scheduler_ids)
    if live and rng.random() < 0.15:
        events.append(Cancel(rng.choice(live)))
    if rng.random() < 0.1:
        events.append(Reconfigure((Tenant("us", rng.uniform(0.2, 5), max_running_requests=3),)))
    return events


@pytest.mark.parametrize("case", first_fast(CASES, 4))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), fairness=st.booleans())
def test_who_waits_is_found_again_when_estimates_have_moved(case, seed, fairness) -> None:
    """Arrivals, cancels, preemption in tight memory, tenants with other weights."""
    name, options = case
    rng, learn = random.Random(seed), Estimators(profile(0.1))
    scheduler = Scheduler(
        BlockPool(14, 4),
        [],
        admission=make_policy("admission", name, options),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed"),
        max_model_len=56,
        tenants=[Tenant("us", max_running_requests=3)] if rng.random() < 0.5 else (),
        learn=learn,
        fairness=fairness,
    )
    world = World(scheduler, ToyExecutor(4), seed=seed, admission=NO_LIMITS)
    for _ in range(80):
        world.turn(*happenings(rng, world, len(world.requests)))
        world.move()
        learn.lengths.ended(rng.choice([1, 5, 300]))
        learn.times.profile = profile(rng.choice([0.001, 0.1, 3.0]))
    live = sorted(world.scheduler_ids, key=lambda _: rng.random())
    for request_id in live:
        world.turn(Cancel(request_id))
    assert not scheduler.num_unfinished
    assert not list(scheduler.table.waiting)
    assert all(queue.first is None for queue in scheduler.table.waiting.queues)


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["vllm_v1", "sarathi"])
def test_deadlines_by_lengths_that_are_not_foretold(monkeypatch, admission) -> None:
    rng, num = np.random.default_rng(0), 400
    lengths = Workload(
        "deadlines",
        rng.integers(50, 1500, num),
        rng.integers(5, 200, num),
        deadline=np.where(rng.random(num) < 0.7, rng.uniform(1, 30, num), np.nan),
    )

    def unforetold(workload: Workload, setup: Setup) -> list[Request]:
        return [replace(r, expected_output_tokens=None) for r in requests_of(workload, setup)]

    monkeypatch.setattr(penstock.sim.run, "requests_of", unforetold)
    policy = PolicyConfig.from_name(admission, order="slack")
    setup = Setup(load_profile("a100-llama2-7b"), policy)
    report = run(setup, make_workload(lengths, rate=60.0, seed=0))
    assert report.completed.all()
