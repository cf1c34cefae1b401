"""Drafts that begin with looked-up tokens: how many of these, and how many of the drafter's."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from tests.core.test_allocation import STEEP, candidates, learned

from penstock.core.learn import Estimators
from penstock.core.policies.base import DraftCandidate, Room, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Drafter, DrafterKind, Grant

DRAFTERS = {"d": Drafter("d", max_draft_tokens=3)}


def view_of(learn: Estimators, num: int, budget: int = 1000) -> View:
    return View(DRAFTERS, learn, room=Room(budget, num, num))


def granted(asked: Sequence[DraftCandidate], view: View) -> list[Grant]:
    return list(make_policy("allocation", "priced").allocate(asked, view))


Part = tuple[int, int]
"""Looked-up tokens, and the drafter's behind them."""


def tokens_of(candidate: DraftCandidate, part: Part, learn: Estimators) -> float:
    survival = [1.0, *candidate.survival]
    behind = learn.acceptance.survival(candidate.state.request.id, "d", 3)
    looked_up, drafted = part
    return sum(survival[: looked_up + 1]) + survival[looked_up] * sum(behind[:drafted])


def rater(asked: Sequence[DraftCandidate], learn: Estimators) -> Callable[[Sequence[Part]], float]:
    """Tells the expected tokens a second of a step with given drafts: the definition."""
    num, times = len(asked), learn.times
    parts = [*itertools.product(range(4), range(4))]
    tokens = [{p: tokens_of(c, p, learn) for p in parts if p[0] <= len(c.survival)} for c in asked]

    @cache
    def seconds(rows: int, num_drafting: int, most: int) -> float:
        target = times.target(num) + float(times.added(num, np.array([rows]))[0])
        return target + most * times.curve_of("d")(max(1, num_drafting))

    def rate(drafts: Sequence[Part]) -> float:
        drafted = [b for _, b in drafts]
        rows = num + sum(a for a, _ in drafts) + sum(drafted)
        made = sum(of[part] for of, part in zip(tokens, drafts, strict=True))
        return made / seconds(rows, num - drafted.count(0), max(drafted))

    return rate


def world(rng: np.random.Generator, num: int) -> tuple[list[DraftCandidate], Estimators]:
    rise = np.cumsum(rng.uniform(0.0, 0.004, 24))
    verify = {rows + 1: 0.01 + float(seconds) for rows, seconds in enumerate(rise)}
    rates = rng.uniform(0.2, 0.95, num).tolist()
    learn = learned(rates, verify=verify, draft=float(rng.uniform(0.0, 0.005)))
    asked = []
    for candidate in candidates(*[3] * num):
        found = rng.uniform(0.1, 0.98, rng.integers(0, 4)).cumprod()
        asked.append(candidate._replace(survival=found.tolist()))
    return asked, learn


@pytest.mark.parametrize("num", [1, 2, 3])
def test_drafts_of_a_step_are_nearly_the_best_of_all(num: int) -> None:
    rng, shares, alone = np.random.default_rng(num), [], []
    for _ in range(60):
        asked, learn = world(rng, num)
        each = [[*itertools.product(range(len(c.survival) + 1), range(4))] for c in asked]
        rate = rater(asked, learn)
        best = max(map(rate, itertools.product(*each)))
        found = [(g.num_looked_up, g.num_draft_tokens) for g in granted(asked, view_of(learn, num))]
        shares.append(rate(found) / best)
        without = itertools.product([(0, b) for b in range(4)], repeat=num)
        alone.append(max(map(rate, without)) / best)
    assert min(shares) > 0.96
    assert np.mean(shares) > 0.995
    assert np.mean(alone) < np.mean(shares) - 0.02, "as if nothing were ever looked up"


def test_what_is_looked_up_needs_no_drafter() -> None:
    asked = [candidates(0)[0]._replace(drafter=None, survival=[0.9, 0.8], most=2)]
    cheap = {rows: 0.01 + 1e-4 * rows for rows in (1, 50)}
    view = view_of(learned([], verify=cheap), 1)
    assert granted(asked, view) == [Grant(0, num_looked_up=2)]
    assert granted(asked, view_of(learned([], verify=cheap), 1, budget=1))[0].num_looked_up == 1
    dear = view_of(learned([], verify=STEEP), 1)
    assert granted(asked, dear) == [Grant(0)]


def test_a_long_match_makes_a_long_draft() -> None:
    """Longer than any drafter's."""
    survival = [0.99**n for n in range(1, 65)]
    asked = [candidates(3)[0]._replace(survival=survival)]
    learn = learned([0.5], verify={1: 0.04, 9: 0.05, 65: 0.12}, draft=0.01)
    assert granted(asked, view_of(learn, 1))[0].num_looked_up > 40


def test_a_drafter_goes_on_behind_look_up_if_it_is_surer() -> None:
    asked = [candidates(3)[0]._replace(survival=[0.95, 0.3, 0.1])]
    learn = learned([0.9], verify={1: 0.04, 9: 0.048}, draft=0.002)
    grant = granted(asked, view_of(learn, 1))[0]
    assert (grant.num_looked_up, grant.num_draft_tokens) == (1, 3)


def test_the_drafters_price_counts_what_comes_before() -> None:
    """Its own tokens survive only where those in front do."""
    ending = {"d": Drafter("d", kind=DrafterKind.ENDING)}
    learn = learned([0.7, 0.7], verify={2: 0.04, 40: 0.08}, draft=1e-4)
    behind, first = candidates(8, 8)
    asked = [behind._replace(survival=[0.9, 0.1]), first]
    view = View(ending, learn, room=Room(1000, 2, 2))
    grants = granted(asked, view)
    assert grants[0].num_looked_up == 1
    assert grants[0].min_survival == pytest.approx(grants[1].min_survival / 0.9)


@pytest.mark.parametrize("name", ["fixed", "goodspeed"])
def test_policies_that_do_not_weigh_sources_take_what_is_found_first(name: str) -> None:
    asked = [candidates(3)[0]._replace(survival=[0.9, 0.8], most=8)]
    options = {"k": 4} if name == "fixed" else {"total": 4}
    view = View(DRAFTERS, learned([], verify={1: 0.01}), room=Room(10, 1, 1))
    (grant,) = make_policy("allocation", name, options).allocate(asked, view)
    assert (grant.num_looked_up, grant.num_draft_tokens) == (2, 2)
