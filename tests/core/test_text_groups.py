"""Texts that decode on in a group get the tokens, the memory and the place that they get alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.test_properties import quietly
from tests.core.world import Chaos, World, make_request, make_scheduler

from penstock.core.groups import DecodeGroup
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.core.types import (
    TARGET,
    Cancel,
    DrafterUp,
    FinishReason,
    LatencyTarget,
    Request,
    SamplingParams,
)

CALM = Chaos()
BUDGET = {"max_num_batched_tokens": 64, "max_num_seqs": 16}


def make_world(
    *, groups: bool = True, chaos: Chaos = CALM, seed: int = 0, **scheduler: Any
) -> World:
    admission = scheduler.setdefault("admission", BUDGET)
    block_size = scheduler.setdefault("block_size", 4)
    depth = scheduler.pop("depth", 1)
    made = make_scheduler(groups_decodes=groups, pipeline="off", **scheduler)
    executor = ToyExecutor(block_size, {"a": ToyDrafter("a", has_kv=False)}, depth)
    return World(made, executor, chaos=chaos, seed=seed, admission=admission)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Some may not join a group."""
    shape = st.tuples(
        st.integers(1, 40),
        st.integers(1, 25),
        st.integers(0, 2),
        st.sampled_from(["us", "them"]),
        st.sampled_from([{}, {}, {}, {"sampling": SamplingParams(num_logprobs=1)}]),
        st.sampled_from([frozenset(), frozenset({3, 17})]),
    )
    return [
        make_request(f"r{i}", prompt, most, seed, tenant=tenant, stop_token_ids=stops, **more)
        for i, (prompt, most, seed, tenant, more, stops) in enumerate(
            draw(st.lists(shape, min_size=1, max_size=8))
        )
    ]


chaoses = st.builds(
    Chaos,
    cancel=st.sampled_from([0.0, 0.05, 0.3]),
    fail=st.sampled_from([0.0, 0.05]),
    patience=st.sampled_from([0.0, 0.3]),
)


@quietly
@given(
    coming=requests(),
    chaos=chaoses,
    seed=st.integers(0, 2**16),
    num_blocks=st.integers(4, 40),
    block_size=st.integers(1, 6),
    budget=st.integers(1, 64),
    most=st.integers(1, 8),
    depth=st.integers(1, 2),
    fairness=st.booleans(),
)
def test_a_group_changes_nothing(
    coming, chaos, seed, num_blocks, block_size, budget, most, depth, fairness
) -> None:
    """Not with cancels, failures and preemptions, in budgets that hold few; at `depth` 2 requests
    outside the group may go on while it is computed."""
    admission = {"max_num_batched_tokens": budget, "max_num_seqs": min(most, budget)}
    both = []
    for groups in (True, False):
        world = make_world(
            groups=groups,
            chaos=chaos,
            seed=seed,
            num_blocks=num_blocks,
            block_size=block_size,
            admission=admission,
            depth=depth,
            fairness=fairness,
        )
        world.run(coming)
        world.check_outputs()
        world.check_empty()
        both.append(world)
    if depth == 1 and not (chaos.cancel or chaos.fail):
        ends = [
            {i: (e.finish_reason, e.num_preemptions) for i, e in world.ends.items()}
            for world in both
        ]
        assert ends[0] == ends[1]
        assert len(both[0].plans) == len(both[1].plans)


def test_a_step_of_the_same_requests_is_told_as_nothing() -> None:
    world = make_world()
    world.arrive(make_request("a", 4, 20), make_request("b", 6, 20))
    world.step()
    world.step()
    plans = len(world.plans)
    for _ in range(6):
        world.step()
    told = [plan.decodes.change for plan in world.plans[plans:] if plan.decodes]
    assert len(told) == 6
    assert all(not (change.left or change.joined) for change in told)
    assert sum(len(change.new_blocks) for change in told) == 3
    assert not any(plan.items for plan in world.plans[plans:])


@pytest.mark.parametrize("prompt", [None, (1, 2, 3, 4)])
def test_lengths_are_counted_and_texts_are_known(prompt: tuple[int, ...] | None) -> None:
    state = RequestState(Request("a", 4, 20, prompt_token_ids=prompt), 0, may_group=True)
    state.append([7])
    state.kv_of(TARGET).grow(pool := BlockPool(8, 4), 1)
    state.kv_of(TARGET).num_computed_tokens = 4
    group = DecodeGroup(None, 4, is_counted=state.is_counted)
    group.join(state)
    group.grow(pool)
    assert (group.take_change() is None) is state.is_counted is (prompt is None)
    group.leave(state)
    assert state.kv[TARGET].blocks == ([] if state.is_counted else [0, 1])


def test_a_run_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    composed: list[None] = []
    policy = world.scheduler._ctx.admission
    really = policy.compose
    monkeypatch.setattr(policy, "compose", lambda step: (composed.append(None), really(step))[1])
    world.run([make_request("a", 4, 40)])
    world.check_outputs()
    assert len(world.plans) >= 40
    assert len(composed) < 8


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(num_logprobs=0)},
        {"sampling": SamplingParams(presence_penalty=1.0)},
        {"prediction": (1, 2, 3)},
        {"latency": LatencyTarget(tpot=0.1)},
    ],
)
def test_who_needs_more_than_the_next_token_decodes_alone(fields: dict[str, Any]) -> None:
    world = make_world()
    world.arrive(make_request("a", 4, 8, **fields))
    world.step()
    assert not world.scheduler.table.groups


def test_a_drafter_that_comes_ends_the_group() -> None:
    world = make_world(learn=Estimators())
    world.arrive(make_request("a", 4, 30))
    for _ in range(3):
        world.step()
    (group,) = world.scheduler.table.groups.values()
    assert not group.is_counted
    assert len(group) == 1
    world.turn(DrafterUp("a"))
    world.step()
    assert not len(group)
    assert "a" in world.scheduler.table.solo
    world.run()
    world.check_outputs()


def test_a_cancel_during_the_step_leaves_the_others_their_tokens() -> None:
    world = make_world()
    world.arrive(*[make_request(i, 4, 12, seed=n) for n, i in enumerate("abc")])
    world.step()
    world.step()
    world.executor.begin(TARGET)
    world.turn(Cancel("b"))
    world.run()
    world.check_outputs()
    world.check_empty()
    assert world.ends["b"].finish_reason is FinishReason.CANCELLED
    assert world.executor.num_rows > 10
