"""Lanes that work at the same time: turns on a model, sleep and sign, and drafters that fail."""

import gc
import select
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small_family import make_unreliable
from tests.engine.test_exactness import SAMPLINGS, load, make_loop, make_requests, run

from penstock.core.types import DraftOrder, Request, StepPlan
from penstock.engine.build import Engine
from penstock.engine.lanes import Lanes, TicketQueue
from penstock.engine.verifier import Verifier

PATIENCE_S = 30


@pytest.fixture(scope="module")
def engine(family: dict[str, Path]) -> Engine:
    return load(family, "auto", num_threads=2, pipeline="2")


def test_changes_wait_for_the_turns_before_them() -> None:
    turns, seen = TicketQueue(), []
    turns.change(lambda: seen.append("idle"))
    assert seen == ["idle"], "at once"
    first = turns.next_ticket()
    turns.change(lambda: seen.append("between"))
    second = turns.next_ticket()
    turns.change(lambda: seen.append("after"))
    assert seen == ["idle"]
    first.begin()
    assert seen == ["idle"], "a plan that is inside keeps what it reads"
    first.end()
    second.begin()
    assert seen == ["idle", "between"]
    second.end()
    turns.change(lambda: seen.append("last"))
    assert seen == ["idle", "between", "after", "last"]


def test_lanes_work_at_the_same_time_and_give_a_sign() -> None:
    threads: Lanes[str] = Lanes()
    meet = threading.Barrier(2)

    def job(name: str) -> str:
        meet.wait(PATIENCE_S)
        return name

    threads.start("a", lambda: job("a"))
    assert threads.is_busy("a")
    assert threads.num_busy == 1
    assert not select.select([threads.wakeup], [], [], 0)[0]
    threads.start("b", lambda: job("b"))
    done: list[str] = []
    while len(done) < 2:
        assert select.select([threads.wakeup], [], [], PATIENCE_S)[0]
        done += threads.pop_results()
    assert sorted(done) == ["a", "b"]
    assert threads.num_busy == 0
    assert not select.select([threads.wakeup], [], [], 0)[0], "it has been heard"


def test_what_a_lane_raises_is_raised_where_it_is_collected() -> None:
    threads: Lanes[str] = Lanes()

    def fail() -> str:
        raise RuntimeError("no memory")

    threads.start("a", fail)
    threads.wakeup.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="no memory"):
        threads.pop_results()


def test_threads_end_with_their_executor() -> None:
    threads: Lanes[str] = Lanes()
    threads.start("ends-with-it", lambda: "done")
    threads.wakeup.wait(PATIENCE_S)
    threads.pop_results()
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("ends-with-it"))
    del threads
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.slow
def test_drafter_and_target_are_at_work_together(engine, monkeypatch) -> None:
    """Each waits inside its step until the other is inside, too."""
    meet = threading.Barrier(2)
    together: list[str] = []
    drafter = engine.executor.drafters["near"]
    draft, forward = drafter.draft, Verifier.forward

    def met(name: str, call: Any, *args: Any) -> Any:
        if not together:
            try:
                meet.wait(1.0)
                together.append(name)
            except threading.BrokenBarrierError:
                meet.reset()
        return call(*args)

    monkeypatch.setattr(drafter, "draft", lambda *a: met("near", draft, *a))
    monkeypatch.setattr(Verifier, "forward", lambda *a: met("target", forward, *a))
    run(
        make_loop(engine, own_lane=True, pipeline="2"),
        make_requests(SAMPLINGS["greedy"], 4, "near"),
    )
    assert together


@pytest.mark.parametrize("failing", [{2, 3, 5}, set(range(1000))])
def test_a_drafter_that_fails_loses_no_request(engine, monkeypatch, failing) -> None:
    """Some of its steps, or all: before and after it has taken note of new blocks."""
    expected, _ = run(make_loop(engine), make_requests(SAMPLINGS["coupled"], 6, "none"))
    drafter = engine.executor.drafters["near"]
    make_unreliable(monkeypatch, drafter, ["draft"], failing)
    loop = make_loop(engine, own_lane=True, pipeline="2")
    outputs, accepted = run(loop, make_requests(SAMPLINGS["coupled"], 6, "near"))
    assert outputs == expected
    broken = engine.executor.take_broken()
    if len(failing) > 10:
        assert broken == ["near"]
        assert accepted == 0
    else:
        assert broken == []
        assert accepted > 0
    assert engine.executor.take_broken() == [], "said once"


def test_a_draft_for_a_request_that_has_ended_is_not_kept(engine, monkeypatch) -> None:
    executor, drafter = engine.executor, engine.executor.drafters["near"]
    go_on, draft = threading.Event(), drafter.draft

    def slow(orders: Any, texts: Any) -> Any:
        assert go_on.wait(PATIENCE_S)
        return draft(orders, texts)

    monkeypatch.setattr(drafter, "draft", slow)
    request = Request("gone", 3, 8, prompt_token_ids=(1, 2, 3), sampling=SAMPLINGS["greedy"])
    order = DraftOrder("gone", 1, 0, "near", 0, 3, 2, (0,))
    executor.submit(StepPlan(9100, "near", 0.0, drafts=(order,), new_requests=(request,)))
    executor.submit(StepPlan(9101, "target", 0.0, forgotten=("gone",)))
    go_on.set()
    executor.wait(PATIENCE_S)
    (result,) = executor.collect()
    assert result.drafts[0].num_draft_tokens == 2
    assert len(executor._held) == 0


def test_a_plan_inside_a_lane_keeps_its_table(engine, monkeypatch) -> None:
    """Its request is cancelled, and its id comes again, while it waits to be carried out."""
    executor, drafter = engine.executor, engine.executor.drafters["near"]
    entered, go_on, drafted = threading.Event(), threading.Event(), []
    draft = drafter.draft

    def slow(orders: Any, texts: Any) -> Any:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        drafts = draft(orders, texts)
        drafted.append([o.request_id for o in orders])
        return drafts

    def plan(number: int, order: DraftOrder, **news: Any) -> StepPlan:
        return StepPlan(number, "near", 0.0, drafts=(order,), **news)

    monkeypatch.setattr(drafter, "draft", slow)
    request = Request("x", 3, 8, prompt_token_ids=(1, 2, 3), sampling=SAMPLINGS["greedy"])
    executor.submit(
        plan(9000, DraftOrder("x", 1, 0, "near", 0, 3, 2, (0,)), new_requests=(request,))
    )
    assert entered.wait(PATIENCE_S)
    executor.submit(
        StepPlan(
            9001,
            "target",
            0.0,
            released=(("x", "near"),),
            forgotten=("x",),
            new_requests=(request,),
        )
    )
    executor.submit(plan(9002, DraftOrder("x", 2, 0, "near", 0, 3, 2, (1,))))
    go_on.set()
    results = []
    while len(results) < 2:
        executor.wait(PATIENCE_S)
        results += executor.collect()
    assert drafted == [["x"], ["x"]]
    assert not any(r.failures for r in results)
    assert [r.drafts[0].epoch for r in results] == [1, 2]
    executor.submit(StepPlan(9003, "target", 0.0, released=(("x", "near"),), forgotten=("x",)))
