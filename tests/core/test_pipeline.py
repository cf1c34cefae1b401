"""When the target waits for drafts."""

import math

import pytest

from penstock.core.learn import Estimators
from penstock.core.policies.base import View
from penstock.core.policies.pipeline.asynchronous import Asynchronous
from penstock.core.policies.registry import make_pipeline
from penstock.core.state import DraftRound, DraftStage, RequestState
from penstock.core.types import DraftOrder, Request
from penstock.fluid.step_profile import StepProfile


def estimators(step_s: float, draft_s: float) -> Estimators:
    """Steps take `step_s` whatever is in them; drafts of every server come after `draft_s`."""
    found = Estimators(StepProfile("p", 1000, (0,), (step_s,)))
    for name in "abcdefgh":
        for _ in range(50):
            found.links.add_transfer(name, 4, draft_s)
    return found


def held(name: str) -> RequestState:
    state = RequestState(Request(name, 4, 100), 0)
    state.drafter = name
    state.draft = DraftRound(DraftStage.HELD, num_draft_tokens=4)
    return state


def coming(name: str, ordered_at: float) -> RequestState:
    state = RequestState(Request(name, 4, 100), 0)
    order = DraftOrder(name, 0, 0, name, 5, 0, 4)
    state.draft = DraftRound(DraftStage.ORDERED, order, ordered_at)
    return state


def hold(step_s: float, draft_s: float, ready: str, pending: dict[str, float]) -> float | None:
    """At time 0; `pending`: when each order was sent."""
    on_their_way = [coming(n, at) for n, at in pending.items()]
    pipeline = Asynchronous(Asynchronous.Options())
    view = View({}, estimators(step_s, draft_s))
    return pipeline.hold_until([held(n) for n in ready], on_their_way, view)


def test_one_group_waits_for_all_its_drafts() -> None:
    view, rounds = View({}, estimators(0.03, 0.1)), make_pipeline("off")
    assert rounds.hold_until([held("a")], [coming("b", 0.0)], view) == math.inf
    assert rounds.hold_until([held("a")], [], view) is None


def test_a_cheap_step_goes_at_once_and_a_dear_one_waits() -> None:
    pending = {"b": -0.06, "c": -0.06, "d": -0.06}
    assert hold(0.02, 0.1, "a", pending) is None
    until = hold(1.0, 0.1, "a", pending)
    assert until == pytest.approx(0.04, abs=0.01), "until the last of them is expected"


def test_only_those_are_waited_for_that_are_worth_it() -> None:
    pending = {"b": -0.095, "c": -0.095, "d": 0.0}
    until = hold(0.06, 0.1, "a", pending)
    assert until == pytest.approx(0.005, abs=0.005), "two are nearly here, the third is not"
    early = {"b": -0.08, "c": -0.08}
    assert hold(0.06, 0.1, "a", early) is not None
    assert hold(0.06, 0.1, "aefgh", early) is None, "too many would wait for two"


def test_an_overdue_draft_is_not_waited_for_for_ever() -> None:
    first = hold(0.5, 0.1, "a", {"b": -0.11})
    assert first is not None
    later = hold(0.5, 0.1, "a", {"b": -4.0})
    assert later is None


def test_a_draft_that_is_due_just_now_is_waited_for() -> None:
    """Rounding of the clock must not start a step without the draft that it waited for."""
    due = estimators(0.5, 0.1).links.seconds("b", 4)
    for left in (1e-12, 0.0, -1e-12):
        until = hold(0.5, 0.1, "a", {"b": left - due})
        assert until is not None
        assert until > 0.01


def test_a_step_waits_for_drafts_that_would_keep_the_target_when_its_own_are_back() -> None:
    """Two groups in turn would take two steps a round, one group a draft and a step."""
    assert hold(0.1, 0.06, "a", {"b": 0.0}) is not None
    assert hold(0.1, 0.11, "a", {"b": -0.05}) is None, (
        "its draft is back when the other step is over"
    )


def test_nothing_ready_is_nothing_to_start() -> None:
    assert hold(0.03, 0.1, "", {"b": 0.0}) is None


def test_unknown_pipelines_are_named() -> None:
    with pytest.raises(ValueError, match="choose from async, auto, micro_batches, off"):
        make_pipeline("sometimes")


@pytest.mark.parametrize("text", ["0%", "100%", "5.5%", "-5%", "%", "٥%"])
def test_other_percentages_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1% to 99% of the target's throughput"):
        make_pipeline(text)
