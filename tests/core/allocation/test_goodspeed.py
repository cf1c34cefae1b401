from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import first_fast, slow

from lab.common.rounds import GeometricClients, play
from lab.rivals import policy_named
from penstock.core.learn import Estimators
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Room, View
from penstock.core.policies.registry import PolicyError
from penstock.core.state import Grant, Outcome, RequestState
from penstock.core.types import Request, Tenant, Verdict

FAIR = ("goodspeed", "random")


def candidates(
    *tenants: str, limit: int = 20, names: Sequence[str] | None = None
) -> list[DraftCandidate]:
    names = names or [f"r{i}" for i in range(len(tenants))]
    return [
        DraftCandidate(RequestState(Request(n, 4, 1000, tenant=t), i), t, limit)
        for i, (n, t) in enumerate(zip(names, tenants, strict=True))
    ]


def work(budget: int, *, weights: dict[str, float] | None = None) -> View:
    tenants = {n: Tenant(n, w) for n, w in (weights or {}).items()}
    return View({}, Estimators(), tenants=tenants, room=Room(budget, 4, 4))


def outcome(candidate: DraftCandidate, proposed: int, accepted: int) -> Outcome:
    drafter = candidate.drafter if proposed else None
    decided = min(proposed, accepted + 1)
    verdict = Verdict(
        candidate.state.request.id,
        0,
        0,
        (0,) * (accepted + 1),
        drafter,
        proposed,
        accepted,
        decided,
        float(accepted),
        float(accepted),
    )
    return Outcome(candidate.state, verdict)


def lengths(grants: Sequence[Grant]) -> list[int]:
    return [g.num_draft_tokens for g in grants]


def make(name: str, **options: Any) -> AllocationPolicy:
    policy = policy_named(name, **options).make("allocation")
    assert isinstance(policy, AllocationPolicy)
    return policy


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(FAIR),
    limits=st.lists(st.integers(0, 9), max_size=7),
    budget=st.integers(0, 30),
    total=st.none() | st.integers(0, 20),
    k_max=st.integers(0, 6),
)
def test_every_cap_is_kept(name, limits, budget, total, k_max) -> None:
    policy = make(name, total=total, k_max=k_max)
    asked = [
        c._replace(limit=n)
        for c, n in zip(candidates(*"abcdefg"[: len(limits)]), limits, strict=True)
    ]
    for _ in range(3):
        found = lengths(policy.allocate(asked, work(budget)))
        assert len(found) == len(asked)
        assert all(0 <= n <= min(m, k_max) for n, m in zip(found, limits, strict=True))
        assert sum(found) <= min(budget, budget if total is None else total)
        policy.on_step([outcome(c, n, n // 2) for c, n in zip(asked, found, strict=True)], 0.0)
    assert policy.reserve(candidates("a")[0].state) == k_max


def test_random_lengths_use_the_budget_evenly_in_the_mean() -> None:
    policy = make("random", seed=3)
    asked = candidates("a", "b", "c", "d", limit=100)
    drawn = [lengths(policy.allocate(asked, work(12))) for _ in range(2000)]
    means = [sum(column) / 2000 for column in zip(*drawn, strict=True)]
    # Five equal parts of 12, of which one is left.
    assert means == pytest.approx([12 / 5] * 4, abs=0.25)
    assert len({tuple(d) for d in drawn}) > 500


def test_goodspeed_follows_equations_3_to_5() -> None:
    policy = make("goodspeed", beta=0.5, eta=0.2)
    asked = candidates("a", "b")
    assert lengths(policy.allocate(asked, work(4))) == [2, 2]
    policy.on_step([outcome(asked[0], 2, 2), outcome(asked[1], 2, 0)], 1.0)
    # α̂ = .5 + .2 (1 - .5) = .6 and .4; X = (1 + 3)/2 = 2 and (1 + 1)/2 = 1.
    # Gains .3, .18, .108, ... against .4, .16, .064, ...
    assert lengths(policy.allocate(asked, work(1))) == [0, 1]
    assert lengths(policy.allocate(asked, work(2))) == [1, 1]
    assert lengths(policy.allocate(asked, work(3))) == [2, 1]
    assert lengths(policy.allocate(asked, work(4))) == [2, 2]
    assert lengths(policy.allocate(asked, work(5))) == [3, 2]


@pytest.mark.parametrize(("evidence", "share"), [("all", 2.7 / 4), ("decided", 2 / 3)])
def test_equation_3_smooths_the_mean_over_positions(evidence: str, share: float) -> None:
    policy = make("goodspeed", evidence=evidence, eta=0.1)
    asked = candidates("a")[0].state
    verdict = Verdict("r0", 0, 0, (0,) * 3, "a", 4, 2, 3, evidence=2.0, evidence_all=2.7)
    policy.on_step([Outcome(asked, verdict)], 1.0)
    assert policy.acceptance("a") == pytest.approx(0.9 * 0.5 + 0.1 * share)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rate", "overlaps"), [(0.4, False), *slow([0.6, 0.8], [True])])
def test_equation_3_over_all_positions_is_right_in_the_mean(rate: float, overlaps: bool) -> None:
    """Over the decided ones it is not: a draft that fails early has few of them, all the worse."""
    found = {}
    for evidence in ("all", "decided"):
        policy = make("goodspeed", evidence=evidence, eta=0.02)
        world = GeometricClients(np.full((4000, 2), rate), seed=1, overlaps=overlaps)
        seen: list[float] = []

        def watch(policy: Any = policy, seen: list[float] = seen) -> None:
            seen.append(policy.acceptance("c0"))

        play(policy, world.clients(), 8, 4000, watch=watch)
        found[evidence] = float(np.mean(seen[500:]))
    assert found["all"] == pytest.approx(rate, abs=0.02)
    assert found["decided"] < rate - 0.05


@pytest.mark.parametrize(("clients", "budget"), [(8, 20), (8, 6), *slow([16, 32], [8])])
def test_a_client_that_was_useless_for_a_while_is_not_starved(clients: int, budget: int) -> None:
    rates = np.full((1000, clients), 0.7)
    rates[:300, :2], rates[300:, :2] = 0.02, 0.85
    played = play(make("goodspeed"), GeometricClients(rates, 0).clients(), budget, 1000)
    drafted = np.flatnonzero(played.lengths[300:, 0])
    assert np.diff(drafted, prepend=-1, append=700).max() <= 20


@pytest.mark.parametrize("budget", first_fast([6, 16]))
def test_rounds_without_a_grant_say_nothing_of_acceptance(budget: int) -> None:
    """C below the number of clients leaves some out of every round; α̂ when they draft is right."""
    rates = np.tile([0.3, 0.6, 0.9, 0.45], 2)
    sums, counts = np.zeros(8), np.zeros(8)
    for seed in range(3):
        policy = make("goodspeed", total=budget)
        seen: list[list[float]] = []

        def watch(policy: Any = policy, seen: list[list[float]] = seen) -> None:
            seen.append([policy.acceptance(f"c{i}") for i in range(8)])

        world = GeometricClients(np.tile(rates, (2000, 1)), seed)
        played = play(policy, world.clients(), budget, 2000, watch=watch)
        drafted = played.lengths[300:] > 0
        sums += (np.array(seen)[300:] * drafted).sum(axis=0)
        counts += drafted.sum(axis=0)
    assert (counts < 3 * 1700).any()
    assert sums / counts == pytest.approx(rates, abs=0.02)


def test_goodput_is_summed_over_a_tenants_requests() -> None:
    policy = make("goodspeed", beta=1.0, eta=0.001)
    asked = candidates("a", "a", "b")
    policy.allocate(asked, work(6))
    policy.on_step([outcome(c, 2, 1) for c in asked], 1.0)
    # X is 4 for a and 2 for b: gains .125 and .25 each.
    assert lengths(policy.allocate(asked, work(1))) == [0, 0, 1]


def test_decreasing_steps_follow_assumption_3() -> None:
    policy = make("goodspeed", beta=0.8, beta_decay=0.6, eta=0.5, eta_decay=1.0)
    asked = candidates("a", "b")
    goodput = 1.0
    for t in range(1, 5):
        policy.allocate(asked, work(4))
        policy.on_step([outcome(c, 2, 2) for c in asked], float(t))
        goodput += 0.8 * t**-0.6 * (3 - goodput)
        assert policy.goodput("a") == pytest.approx(goodput)  # type: ignore[attr-defined]


def test_a_round_without_a_draft_raises_hope_but_not_the_estimate() -> None:
    policy = make("goodspeed", beta=1.0, eta=0.5)
    asked = candidates("a", "b")
    assert lengths(policy.allocate(asked, work(1))) == [1, 0]
    policy.on_step([outcome(asked[0], 1, 1), outcome(asked[1], 0, 0)], 1.0)
    assert policy.acceptance("b") == 0.5  # type: ignore[attr-defined]
    assert policy.goodput("b") == 1.0  # type: ignore[attr-defined]
    # a: α̂ = .75, X = 2: .375, .28; b: 1 - .5 · .5 = .75, X = 1: .75, .56, .42, .316, not .5, .25.
    assert lengths(policy.allocate(asked, work(4))) == [1, 3]


def test_a_step_in_which_a_request_could_not_draft_is_no_round() -> None:
    """Of its prompt, of its last token, without a drafter, and where its draft did not come."""
    policy = make("goodspeed", total=8)
    ending = candidates("a", limit=0)
    decoding = candidates("a", names=["r1"])
    late = candidates("a", names=["r2"])
    policy.allocate([*ending, *decoding, *late], work(8))
    prompt = candidates("a", names=["r3"])
    nothing = [outcome(c, 0, 0) for c in (*ending, *late, *prompt)]
    policy.on_step(nothing, 1.0)
    assert policy.acceptance("a") == 0.5  # type: ignore[attr-defined]
    assert policy.goodput("a") == 1.0  # type: ignore[attr-defined]
    policy.on_step([*nothing, outcome(decoding[0], 2, 1)], 2.0)
    assert policy.acceptance("a") == 0.5  # type: ignore[attr-defined]
    assert policy.goodput("a") == 1.5, "(1 + 2) / 2"  # type: ignore[attr-defined]
    decoding[0].state.next_round()
    policy.on_step([outcome(decoding[0], 0, 0)], 3.0)
    assert policy.acceptance("a") == 0.5, "another round"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be a finite number above 0 to 1, not 0.0"),
        ({"eta": 1.5}, "eta must be a finite number above 0 to 1, not 1.5"),
        ({"beta_decay": 0.3}, "beta_decay must be 0, or a finite number above 0.5 to 1"),
        ({"beta_decay": 0.9, "eta_decay": 0.6}, "eta_decay must exceed"),
        ({"total": -1}, "total must be a whole number from 0"),
        ({"k_max": -1}, "k_max must be"),
        ({"fairness": -1.0}, "fairness must be"),
        ({"evidence": "some"}, "evidence must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make("goodspeed", **options)
