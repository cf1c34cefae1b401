"""Tenants whose settings change while their requests run."""

from dataclasses import replace

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import Rotating, World, make_request, make_scheduler

from penstock.core.accounts import Accounts
from penstock.core.learn import Estimators
from penstock.core.state import Drafter, RequestState
from penstock.core.types import Reconfigure, Request, Tenant

BOTH = [ToyDrafter("small"), ToyDrafter("large")]


def make_world(*drafters: ToyDrafter, tenants: tuple[Tenant, ...]) -> World:
    scheduler = make_scheduler(
        drafters=drafters,
        tenants=tenants,
        selection=Rotating() if drafters else None,
        num_blocks=256,
    )
    return World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}))


def test_service_counts_at_the_weight_of_its_time() -> None:
    tenants = {"a": Tenant("a")}
    accounts = Accounts(tenants, Estimators(), {}, is_fair=True)
    account = accounts.account_of(RequestState(Request("r", 1, 1, tenant="a"), 0))
    account.charge(100)
    tenants["a"] = replace(tenants["a"], weight=4.0)
    accounts.tenants_changed()
    assert account.counter == 100, "what was served is not made cheaper"
    account.charge(100)
    assert account.counter == 125


@pytest.mark.parametrize("changed", [True, False])
def test_a_new_limit_holds_from_now_on(changed: bool) -> None:
    world = make_world(tenants=(Tenant("t", max_running_requests=4),))
    world.arrive(*(make_request(f"r{i}", seed=i, tenant="t", max_tokens=4 + i) for i in range(10)))
    assert len(world.scheduler.table.running) == 4
    if changed:
        world.scheduler.apply(Reconfigure((Tenant("t", max_running_requests=1),)), 0.0)
    last = make_request("last", tenant="t", max_tokens=3)
    most = []
    world.arrive(last)
    while world.scheduler.num_unfinished:
        world.turn()
        world.move()
        if len(world.ends) > 3:
            most.append(len(world.scheduler.table.running))
    assert max(most) == (1 if changed else 4)
    world.check_outputs()


def drafted_for(world: World) -> set[tuple[str, str]]:
    """Requests, and who drafted for them."""
    orders = [i.draft for p in world.plans for i in p.items if i.draft is not None]
    return {(o.request_id, o.drafter) for o in orders if o.max_draft_tokens}


@pytest.mark.parametrize("named", [True, False])
def test_a_tenant_has_the_drafters_that_it_may(named: bool) -> None:
    world = make_world(*BOTH, tenants=(Tenant("t", drafters=frozenset({"small"})),))
    world.run(
        [
            make_request("in", tenant="t", max_tokens=40, drafter="large" if named else "auto"),
            make_request("free", tenant="u", max_tokens=40),
        ]
    )
    found = drafted_for(world)
    assert found >= {("free", "small"), ("free", "large")}
    assert (("in", "small") in found) is not named
    assert ("in", "large") not in found
    world.check_outputs()


def test_drafters_can_be_taken_from_a_tenant() -> None:
    world = make_world(*BOTH, tenants=(Tenant("t"),))
    world.arrive(make_request("r", tenant="t", max_tokens=60))
    world.scheduler.apply(Reconfigure((Tenant("t", drafters=frozenset()),)), 0.0)
    num = len(world.plans)
    world.run()
    assert not [i for p in world.plans[num + 1 :] for i in p.items if i.num_draft_tokens]
    world.check_outputs()


def test_the_streams_of_a_draft_server_have_its_name() -> None:
    tenant = Tenant("t", drafters=frozenset({"edge"}))
    names = ("edge", "edge#2", "edges", "ledge#2")
    assert [Drafter(n).may_serve(tenant) for n in names] == [True, True, False, False]
    assert not Drafter("edge", tenant="other").may_serve(tenant)
