"""Whatever arrives, whatever the limits: `World` checks after every turn that blocks are conserved
and that budgets hold; here everybody must also be served."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import Chaos, Rotating, World, make_request, make_scheduler

from penstock.core.learn import Estimators
from penstock.core.policies.registry import make_policy
from penstock.core.types import FinishReason, Request
from penstock.fluid.step_profile import DrafterProfile, StepProfile

DRAFTERS = (
    ToyDrafter("a", accuracy=0.8),
    ToyDrafter("b", accuracy=0.5, eagerness=0.8),
    ToyDrafter("n", accuracy=0.6, has_kv=False),
)
PROFILE = StepProfile(
    "a device each",
    1000,
    (0, 100),
    (0.0, 0.1),
    drafters=tuple(DrafterProfile(d.name, (0, 100), (0.0, 0.1)) for d in DRAFTERS),
)
"""Times with which micro-batches pay as soon as two requests draft."""
probabilities = st.sampled_from([0.0, 0.05, 0.3])
quietly = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(1, 40),
                st.integers(1, 25),
                st.integers(0, 2),
                st.sampled_from(["us", "them"]),
                st.sampled_from(["auto", "auto", "none", "a", "b", "n"]),
                st.sampled_from([None, 0, 1, 9]),
                st.sampled_from([None, None, None, None, "last", "mean"]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return [
        make_request(
            f"r{i}",
            prompt_len,
            max_tokens * (pooling is None),
            seed,
            tenant=tenant,
            drafter=drafter,
            max_draft_tokens=most,
            pooling=pooling,
        )
        for i, (prompt_len, max_tokens, seed, tenant, drafter, most, pooling) in enumerate(shapes)
    ]


@st.composite
def worlds(draw: st.DrawFn, chaos: st.SearchStrategy[Chaos]) -> World:
    budget = draw(st.integers(1, 64))
    admission: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, min(budget, 8))),
        "watermark": draw(st.sampled_from([0.0, 0.1, 0.5])),
    }
    allocation = draw(
        st.sampled_from(
            [("fixed", {"k": 0}), ("fixed", {"k": 7}), ("fixed", {"total": 5}), ("priced", {})]
        )
    )
    max_len, vocab_size = draw(st.sampled_from([(None, None), (24, None), (None, 38), (24, 38)]))
    limited = dataclasses.replace(DRAFTERS[1], max_len=max_len, vocab_size=vocab_size)
    drafters = (DRAFTERS[0], limited, DRAFTERS[2])
    block_size = draw(st.integers(1, 6))
    scheduler = make_scheduler(
        num_blocks=draw(st.integers(1, 40)),
        block_size=block_size,
        drafters=drafters,
        own_lanes=draw(st.sets(st.sampled_from("abn"))),
        pipeline=draw(st.sampled_from(["off", "2", "3", "auto", "async"])),
        selection=draw(st.sampled_from([None, Rotating()])),
        learn=Estimators(PROFILE),
        drafter_blocks=draw(st.sampled_from([1, 2, 5, 40])),
        admission=admission,
        allocation=make_policy("allocation", *allocation),
    )
    executor = ToyExecutor(block_size, {d.name: d for d in drafters}, draw(st.integers(1, 3)))
    seed = draw(st.integers(0, 2**16))
    return World(scheduler, executor, chaos=draw(chaos), seed=seed, admission=admission)


rough = st.builds(
    Chaos,
    cancel=probabilities,
    fail=probabilities,
    drafter_down=probabilities,
    repeat=probabilities,
    early=probabilities,
    patience=probabilities,
)


@quietly
@given(world=worlds(rough), coming=requests())
def test_all_requests_end_and_nothing_is_left(world: World, coming: list[Request]) -> None:
    world.run(coming)
    world.check_outputs()
    world.check_empty()


@pytest.mark.slow
@quietly
@given(world=worlds(st.just(Chaos())), coming=requests())
def test_in_a_calm_world_requests_finish_or_are_refused(world, coming) -> None:
    world.run(coming, max_turns=2000)
    world.check_outputs()
    world.check_empty()
    pool = world.scheduler.pool
    for request in coming:
        fits = request.prompt_len + request.max_tokens <= pool.capacity_tokens
        reason = world.ends[request.id].finish_reason
        ended = FinishReason.LENGTH if request.pooling is None else FinishReason.STOP
        assert reason is (ended if fits else FinishReason.REFUSED)


def test_no_request_starves_while_others_keep_coming() -> None:
    """A large request among a stream of small ones, in memory that holds it only just."""
    rng = random.Random(5)
    scheduler = make_scheduler(num_blocks=16, drafters=DRAFTERS[:1])
    world = World(scheduler, ToyExecutor(4, {"a": DRAFTERS[0]}), seed=1)
    small = [make_request(f"s{i}", rng.randrange(4, 12), 6, seed=i) for i in range(120)]
    world.run([*small[:20], make_request("large", 40, 20, seed=999), *small[20:]])
    world.check_outputs()
    ends = list(world.ends)
    assert ends.index("large") < 60
