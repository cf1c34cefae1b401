import itertools
from typing import Any

import numpy as np
import pytest

from penstock.core.learn import Estimators
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Room, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Grant, Outcome, RequestState
from penstock.core.types import Request, Verdict


def make(**options: Any) -> AllocationPolicy:
    policy = make_policy("allocation", "deadline", options)
    assert isinstance(policy, AllocationPolicy)
    return policy


def candidates(num: int, limit: int = 6) -> list[DraftCandidate]:
    return [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 1000, tenant=f"t{i}"), i), f"d{i}", limit)
        for i in range(num)
    ]


def measured(
    round_trips: list[float], per_token: list[float], verify: dict[int, float]
) -> Estimators:
    estimators = Estimators()
    for i, (trip, each) in enumerate(zip(round_trips, per_token, strict=True)):
        for tokens in (1, 2, 4, 8) * 40:
            estimators.links.add_transfer(f"d{i}", tokens, trip + each * tokens)
    for rows, seconds in verify.items():
        estimators.times.target.add_measurement(rows, seconds)
    return estimators


def work(estimators: Estimators, num: int, budget: int = 100, now: float = 0.0) -> View:
    return View({}, estimators, now, room=Room(budget, num, num))


def lengths(grants: list[Grant]) -> list[int]:
    return [g.num_draft_tokens for g in grants]


def worth(asked: list[DraftCandidate], estimators: Estimators, s: tuple[int, ...]) -> float:
    """Of lengths in a first round, where nothing is known of anybody: equal goodput x, acceptance
    one half, and a second costs N in units of x."""
    links, verify = estimators.links, estimators.times.target
    num = len(asked)
    goodput = 1 / (max(links.seconds(c.drafter, 1) for c in asked) + verify(num))
    gain = sum(0.5**k for n in s for k in range(1, n + 1)) / goodput
    waits = [links.seconds(c.drafter, n) for c, n in zip(asked, s, strict=True) if n]
    return gain - num * (max(waits, default=0) + verify(num + sum(s)))


def test_it_is_the_best_of_all_lengths() -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        num, budget = 3, int(rng.integers(0, 10))
        trips, each = rng.uniform(0, 0.05, num).tolist(), rng.uniform(0.001, 0.03, num).tolist()
        estimators = measured(trips, each, {3: 0.02, 20: 0.02 + rng.uniform(0, 0.1)})
        asked = candidates(num, limit=4)
        found = lengths(make().allocate(asked, work(estimators, num, budget)))
        every = [s for s in itertools.product(range(5), repeat=num) if sum(s) <= budget]
        best = max(worth(asked, estimators, s) for s in every)
        assert sum(found) <= budget
        assert worth(asked, estimators, tuple(found)) == pytest.approx(best, abs=1e-9)


def test_a_hopeless_straggler_is_not_waited_for() -> None:
    estimators = measured([0.005, 0.005, 2.0], [0.005, 0.005, 0.005], {3: 0.03, 30: 0.03})
    found = lengths(make().allocate(candidates(3), work(estimators, 3)))
    assert found[2] == 0
    assert min(found[:2]) >= 1


def test_a_slow_target_is_worth_longer_drafts() -> None:
    totals = []
    for verify in (0.005, 0.5):
        estimators = measured([0.005] * 3, [0.02] * 3, {3: verify, 30: verify})
        totals.append(sum(lengths(make().allocate(candidates(3), work(estimators, 3)))))
    assert totals[0] < totals[1]


def test_it_learns_acceptance_and_the_pace() -> None:
    estimators = measured([0.005] * 2, [0.01] * 2, {2: 0.03, 30: 0.09})
    policy, asked = make(), candidates(2)
    now = 0.0
    drafted = [0, 0]
    for t in range(100):
        found = lengths(policy.allocate(asked, work(estimators, 2, now=now)))
        now += 0.05 + 0.01 * max(found)
        outcomes = []
        for c, n, most in zip(asked, found, (6, 0), strict=True):
            k = min(n, most)
            drafter = c.drafter if n else None
            verdict = Verdict(
                c.state.request.id, 0, t, (0,) * (k + 1), drafter, n, k, min(n, k + 1), float(k)
            )
            outcomes.append(Outcome(c.state, verdict))
        policy.on_step(outcomes, now)
        if t >= 40:
            drafted = [d + n for d, n in zip(drafted, found, strict=True)]
    assert drafted[0] > 40
    assert drafted[1] < 0.2 * drafted[0]


def test_caps_are_kept_and_nothing_is_possible() -> None:
    estimators = measured([0.0] * 3, [0.001] * 3, {3: 0.03, 30: 0.03})
    assert sum(lengths(make(total=4).allocate(candidates(3), work(estimators, 3)))) <= 4
    assert max(lengths(make(k_max=2).allocate(candidates(3), work(estimators, 3)))) <= 2
    assert lengths(make().allocate(candidates(3, limit=0), work(estimators, 3))) == [0, 0, 0]
    assert make().allocate([], work(estimators, 0)) == []
    # Without any measurement time is free.
    assert sum(lengths(make().allocate(candidates(2), work(Estimators(), 2, budget=5)))) == 5
