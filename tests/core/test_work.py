from __future__ import annotations

from tests.core.fakes import ToyDrafter
from tests.core.test_admission import advance, make_world
from tests.core.world import make_request

from penstock.core.learn.times import step_work
from penstock.core.types import TARGET, Verdict


def test_drafts_are_as_long_as_they_turned_out() -> None:
    world = make_world(ToyDrafter("d", accuracy=1.0), budget=64, seqs=4)
    world.arrive(make_request("a", 6, 30))
    advance(world)
    plan = next(p for p in reversed(world.plans) if p.lane == TARGET)
    (item,) = plan.items
    granted = step_work(plan)
    assert granted.num_draft_tokens == item.num_draft_tokens > 1
    short = step_work(plan, [Verdict("a", item.epoch, item.round, num_proposed=1)])
    assert (short.num_draft_tokens, short.num_decodes) == (1, granted.num_decodes)
