"""What `priced` counts as the cost of drafts: rows and drafting steps, not the step's prefill, but
the drafter's own reading, and drafts that come to nothing."""

from typing import Any

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.test_allocation import FLAT, STEEP, candidates, learned, lengths_of, work
from tests.core.world import World, make_request, make_scheduler

from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.policies.allocation.priced import Priced
from penstock.core.policies.base import DraftCandidate, Room, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Drafter, RequestState
from penstock.core.types import Request, Verdict

STEPS = {1: 0.002, 2: 0.0026, 4: 0.004, 64: 0.046, 300: 0.2116}
"""From two rows on each takes 0.7 ms."""
READING_S = 0.001
"""A token."""


def priced(**options: Any) -> Priced:
    return Priced(Priced.Options(**options))


def test_drafts_are_long_where_rows_are_free_and_none_where_they_are_dear() -> None:
    good = learned([0.95] * 3, verify=FLAT, draft=1e-4)
    assert lengths_of(priced(), candidates(20, 20, 20), work(good)) == [8, 8, 8]
    assert lengths_of(priced(), candidates(2, 0, 20), work(good)) == [2, 0, 8]
    assert lengths_of(priced(), candidates(9, 9, 9), work(good, budget=4)) == [2, 1, 1]
    assert lengths_of(priced(), candidates(9, 9), work(good, budget=0)) == [0, 0]
    dear = learned([0.5] * 2, verify=STEEP, draft=2e-4)
    assert lengths_of(priced(), candidates(8, 8), work(dear)) == [0, 0]
    assert lengths_of(priced(k_max=5), candidates(20, 20), work()) == [5, 5], "nothing measured"


def test_what_hardly_pays_is_left_out() -> None:
    """A draft token takes the step from 2.3 to 3.3 ms: it must be right in over 43%, and 45% are
    a gain of 1%."""
    for rate, length in ((0.40, 0), (0.44, 0), (0.60, 1)):
        estimators = learned([rate], verify={1: 0.002, 2: 0.003})
        estimators.times.overhead = 3e-4
        assert lengths_of(priced(k_max=1), candidates(1), work(estimators, num_rows=1)) == [length]


def test_it_does_not_draft_on_for_a_few() -> None:
    """Each further step of the drafter takes its time, rows of the target take none: two of forty
    requests, with more survival, are not worth one."""
    rates = [0.9, 0.85, *[0.45] * 38]
    estimators = learned(rates, verify={1: 0.010, 400: 0.010}, draft=5e-4)
    lengths = lengths_of(priced(), candidates(*[8] * 40), work(estimators, num_rows=40))
    assert min(lengths) == max(lengths) > 0


def test_each_drafter_is_charged_for_its_own_longest_draft() -> None:
    estimators = learned([0.9, 0.9], verify=FLAT, drafter="cheap", draft=1e-5)
    learned([0.9, 0.9], verify=FLAT, drafter="dear", draft=0.05, before=estimators)
    first, second = candidates(8, 8)
    mixed = [first._replace(drafter="cheap"), second._replace(drafter="dear")]
    assert lengths_of(priced(), mixed, work(estimators, num_rows=2)) == [8, 0]


def with_prompt_rows(view: View, num_rows: int) -> View:
    return view._replace(room=Room(1000, num_rows, view.room.num_sampled))


@pytest.mark.parametrize("rate", [0.2, 0.3])
def test_prefill_in_the_step_makes_no_draft_worth_its_time(rate: float) -> None:
    """A row takes as long beside a prompt, so it is worth as little."""
    estimators = learned([rate] * 4, verify=STEPS, draft=1e-4)
    view = work(estimators)
    assert lengths_of(priced(), candidates(8, 8, 8, 8), view) == [0] * 4
    beside = with_prompt_rows(view, 200)
    assert lengths_of(priced(), candidates(8, 8, 8, 8), beside) == [0] * 4


def unread(
    prompt_len: int, left: int, estimators: Estimators, reading_s: float = READING_S
) -> tuple[DraftCandidate, View]:
    """A request with so many tokens to come, whose drafter has read nothing of its prompt."""
    state = RequestState(Request("r0", prompt_len, left), 0)
    drafters = {"d": Drafter("d", BlockPool(100, 16))}
    estimators.times.note_catch_up("d", reading_s)
    view = View(drafters, estimators, room=Room(100, 1, 1))
    return DraftCandidate(state, "d", 8), view


@pytest.mark.parametrize(
    ("prompt_len", "left", "drafts"),
    [(2000, 20, False), (2000, 4000, True), (10, 20, True), (2, 2, True)],
)
def test_reading_must_pay_within_the_tokens_to_come(prompt_len, left, drafts) -> None:
    """A draft saves 6 ms or so a round; 2,000 tokens take two seconds."""
    estimators = learned([0.8], verify=FLAT, draft=1e-4)
    for _ in range(50):
        estimators.lengths.ended(4000)  # no request is expected to end early
    candidate, view = unread(prompt_len, left, estimators)
    assert bool(lengths_of(priced(), [candidate], view)[0]) == drafts
    candidate.state.kv_of("d").num_computed_tokens = candidate.state.num_known_tokens - 1
    assert lengths_of(priced(), [candidate], view)[0] > 0, "what is read costs nothing"


def test_one_request_that_is_not_worth_reading_keeps_no_other_from_drafting() -> None:
    estimators = learned([0.8, 0.6], verify=FLAT, draft=1e-4)
    long, view = unread(5000, 20, estimators)
    short = DraftCandidate(RequestState(Request("r1", 2, 20), 1), "d", 8)
    view = view._replace(room=Room(100, 2, 2))
    first, second = lengths_of(priced(), [long, short], view)
    assert (first, second > 0) == (0, True)


def test_a_drafter_that_mostly_has_nothing_must_draft_for_little() -> None:
    """Its own time is spent in any case; a row is verified only where there is a draft."""
    for seconds, drafts in ((0.002, False), (1e-5, True)):
        estimators = learned([0.8], verify=FLAT, draft=seconds)
        view = work(estimators, num_rows=1)
        assert lengths_of(priced(), candidates(8), view)[0] > 0
        right = Verdict("r0", 0, 0, (), "d", 1, 1, num_decided=1, evidence=1.0)
        for _ in range(100):
            estimators.acceptance.on_verdict(right)
            for _ in range(4):
                estimators.acceptance.observe_empty("r0", "d")
        assert bool(lengths_of(priced(), candidates(8), view)[0]) == drafts


@pytest.mark.parametrize("own_lanes", [(), ("d",)], ids=["inside", "beside"])
@pytest.mark.parametrize("eagerness", [0.0, 0.5, 1.0])
def test_what_drafts_come_to_is_learned_though_nothing_was_verified(eagerness, own_lanes) -> None:
    drafter = ToyDrafter("d", accuracy=1.0, eagerness=eagerness)
    allocation = make_policy("allocation", "fixed", {"k": 1})
    scheduler = make_scheduler(drafters=[drafter], own_lanes=own_lanes, allocation=allocation)
    world = World(scheduler, ToyExecutor(4, {"d": drafter}))
    world.run([make_request(f"r{i}", 6, 60, i) for i in range(10)])
    found = scheduler.learn.acceptance.found("another", "d")
    assert found == pytest.approx(eagerness, abs=0.15)


def steps_until_tried(draft_s: float, reading_s: float, most: int = 20_000) -> int:
    estimators = learned([0.02], verify=FLAT, draft=draft_s)
    candidate, view = unread(100, 10**6, estimators, reading_s)
    policy = priced()
    return next(i for i in range(most) if lengths_of(policy, [candidate], view)[0])


def test_what_was_put_aside_is_tried_the_more_rarely_the_more_a_trial_takes() -> None:
    cheap, dear = steps_until_tried(1e-4, 1e-6), steps_until_tried(1e-4, 5e-3)
    assert 10 < cheap < 1000
    trial = 100 * 5e-3 / FLAT[1]
    assert dear > 25 * trial, "at most a few per cent of the time"
