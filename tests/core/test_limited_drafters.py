"""Texts that a drafter cannot read: longer than its context, or with tokens unknown to it."""

import dataclasses
from typing import Any

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import Rotating, World, make_request, make_scheduler

from lab.rivals import policy_named
from penstock.core.state import DraftStage, RequestState
from penstock.core.types import TARGET, DraftOrder, Request

PIPELINES = ("inline", "off", "2", "async")


def make_world(*drafters: ToyDrafter, pipeline: str = "inline", **options: Any) -> World:
    inline = pipeline == "inline"
    own_lanes = [] if inline else [d.name for d in drafters]
    scheduler = make_scheduler(
        drafters=drafters, own_lanes=own_lanes, pipeline="off" if inline else pipeline, **options
    )
    return World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}))


def orders_of(world: World) -> list[DraftOrder]:
    inside = [i.draft for p in world.plans for i in p.items if i.draft is not None]
    return [o for p in world.plans for o in p.drafts] + inside


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_drafts_shrink_towards_the_end_of_a_drafters_context(pipeline: str, named: bool) -> None:
    world = make_world(ToyDrafter("d", 0.0, max_len=20), pipeline=pipeline)
    world.run([make_request("r", 6, 40, drafter="d" if named else "auto")])
    world.check_outputs()
    world.check_empty()
    reached = [o.start + o.num_catch_up_tokens + o.max_draft_tokens - 1 for o in orders_of(world)]
    assert max(reached) == 20
    assert {o.max_draft_tokens for o in orders_of(world)} - {0} == {1, 2, 3, 4}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_text_with_unknown_tokens_is_not_drafted_for(pipeline: str, named: bool) -> None:
    """Those with a prompt that the drafter knows are, until their output has such a token."""
    world = make_world(ToyDrafter("d", 0.5, vocab_size=30), pipeline=pipeline)
    name = "d" if named else "auto"
    known, unknown = tuple(range(6)), (0, 1, 2, 3, 30, 4)
    for i, prompt in enumerate((known, unknown)):
        request = make_request(f"r{i}", 6, 40, drafter=name)
        world.arrive(dataclasses.replace(request, prompt_token_ids=prompt))
    world.run()
    world.check_outputs()
    world.check_empty()
    assert {o.request_id for o in orders_of(world)} == {"r0"}


POLICIES = ("single", "greedy", "epsilon_greedy", "lbss", "auto")


@pytest.mark.parametrize("policy", [*POLICIES, "rotating"])
def test_policies_choose_among_those_that_can_read(policy: str) -> None:
    selection = Rotating() if policy == "rotating" else policy_named(policy).make("selection")
    short, small = ToyDrafter("short", 0.9, max_len=16), ToyDrafter("small", 0.9, vocab_size=30)
    world = make_world(short, small, ToyDrafter("d", 0.9), selection=selection)
    seen: list[RequestState] = []

    def can_read(state: RequestState) -> None:
        drafter = world.scheduler.table.drafters.get(state.drafter or "")
        if state.draft.stage is not DraftStage.OPEN and drafter is not None:
            assert drafter.can_read(state)
            seen.append(state)

    for i in range(6):
        world.arrive(make_request(f"r{i}", 6, 40, seed=i))
    for _ in range(2000):
        world.turn()
        for state in world.scheduler.table.running.values():
            can_read(state)
        world.move()
        if not world.scheduler.num_unfinished:
            break
    world.turn()
    world.check_outputs()
    assert seen or policy == "auto"


def test_requests_of_which_only_lengths_are_known_have_readable_tokens() -> None:
    world = make_world(ToyDrafter("d", vocab_size=1, max_len=8))
    (drafter,) = world.scheduler.table.drafters.values()
    state = RequestState(Request("r", 8, 8), 0)
    assert drafter.can_read(state)
    state.num_output_tokens = 1
    assert not drafter.can_read(state)


def test_a_drafter_that_failed_inside_a_step_starts_anew() -> None:
    """Its draft is missing, the request goes on, and nothing is known of its KV."""
    world = make_world(ToyDrafter("d", 1.0))
    world.arrive(make_request("r", 6, 20))
    world.step()
    (item,) = world.plans[-1].items
    assert item.num_draft_tokens == 4
    state = world.scheduler.table.requests["r"]
    result = world.executor.end(TARGET)
    (verdict,) = result.verdicts
    # As if the first token were all that the step came to.
    text = world.executor.texts["r"]
    missing = len(verdict.token_ids) - 1
    del text.tokens[len(text.tokens) - missing :], text.hashes[len(text.hashes) - missing :]
    alone = verdict._replace(
        token_ids=verdict.token_ids[:1], drafter=None, num_proposed=0, num_accepted=0, num_decided=0
    )
    world.executor.ended[0] = failed = result._replace(verdicts=(alone,), failed_drafters=("d",))
    world.executor.report(failed)
    assert "d" in state.kv
    world.turn()
    world.turn()
    (item,) = world.plans[-1].items
    assert world.plans[-1].released == (("r", "d"),)
    assert item.draft.start == 0
    world.run()
    world.check_outputs()
    world.check_empty()
