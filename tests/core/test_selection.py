from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import World, make_request, make_scheduler

from penstock.core.learn import Estimators
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Drafter, DrafterStatus, RequestState
from penstock.core.types import DrafterDown, DraftSource, Request

STATES = [RequestState(Request(name, 4, 4), i) for i, name in enumerate("rs")]


def test_single_takes_the_first_drafter() -> None:
    policy = make_policy("selection", "single")
    drafters = {"a": Drafter("a"), "b": Drafter("b")}
    assert policy.select(STATES, View(drafters, Estimators())) == {"r": "a", "s": "a"}
    assert policy.select(STATES, View({}, Estimators())) == {"r": None, "s": None}


def test_single_takes_the_one_that_is_named_while_it_is_up() -> None:
    policy = make_policy("selection", "single", {"drafter": "b"})
    drafters = {"a": Drafter("a"), "b": Drafter("b")}
    assert policy.select(STATES, View(drafters, Estimators())) == {"r": "b", "s": "b"}
    drafters["b"].status = DrafterStatus.DOWN
    assert policy.select(STATES, View(drafters, Estimators())) == {"r": None, "s": None}


def test_a_request_keeps_its_drafter_through_a_round() -> None:
    """Whatever the policy says meanwhile: the order in flight is answered first."""

    class Fickle(SelectionPolicy):
        name = "fickle"
        calls = 0

        def select(self, states, view):  # type: ignore[no-untyped-def]
            self.calls += 1
            return {s.request.id: ["a", "b"][self.calls % 2] for s in states}

    drafters = [ToyDrafter("a"), ToyDrafter("b")]
    scheduler = make_scheduler(drafters=drafters, own_lanes=["a"], selection=Fickle())
    world = World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}))
    world.run([make_request(f"r{i}", max_tokens=12, seed=i) for i in range(4)])
    world.check_outputs()
    orders = [(o.request_id, o.round) for p in world.plans for o in p.drafts]
    items = [i for p in world.plans for i in p.items if i.source is DraftSource.HELD]
    assert len(orders) > 4
    assert sorted(orders) == sorted((i.request_id, i.round) for i in items)


def test_a_named_drafter_that_is_down_is_not_waited_for() -> None:
    drafter = ToyDrafter("a")
    scheduler = make_scheduler(drafters=[drafter], own_lanes=["a"])
    world = World(scheduler, ToyExecutor(4, {"a": drafter}))
    world.turn(DrafterDown("a"), DrafterDown("unknown"))
    world.run([make_request("r", drafter="a")])
    world.check_outputs()
    assert not any(p.drafts for p in world.plans)
