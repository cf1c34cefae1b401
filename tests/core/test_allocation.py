import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.allocate import limit
from penstock.core.learn import Estimators
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Room, View
from penstock.core.policies.registry import PolicyError, make_policy
from penstock.core.state import Drafter, Grant, Outcome, RequestState
from penstock.core.types import Request, Tenant, Verdict


def candidates(*limits: int, drafter: str = "d") -> list[DraftCandidate]:
    return [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 100), i), drafter, limit)
        for i, limit in enumerate(limits)
    ]


def work(estimators: Estimators | None = None, *, budget: int = 1000, num_rows: int = 4) -> View:
    return View({}, estimators or Estimators(), room=Room(budget, num_rows, num_rows))


def lengths_of(policy: Any, offered: Sequence[DraftCandidate], step: View) -> list[int]:
    """What everybody is granted, which a price never cuts here."""
    grants = policy.allocate(offered, step)
    assert all(grant.min_survival == 0 for grant in grants)
    return [grant.num_draft_tokens for grant in grants]


def learned(
    rates: Sequence[float],
    *,
    verify: dict[int, float],
    draft: float = 0.0,
    drafter: str = "d",
    before: Estimators | None = None,
) -> Estimators:
    """Estimators that have seen, beside what was seen before, requests r0, r1, ... accepted at
    `rates`, steps of so many rows take so long, and a drafting step `draft` seconds."""
    estimators = before or Estimators()
    for i, rate in enumerate(rates):
        for n in range(1000):
            accepted = int((n + 1) * rate) - int(n * rate)
            evidence = Verdict(
                f"r{i}", 0, 0, (), drafter, 1, accepted, num_decided=1, evidence=rate
            )
            estimators.acceptance.on_verdict(evidence)
    for rows, seconds in verify.items():
        estimators.times.target.add_measurement(rows, seconds)
    estimators.times.curve_of(drafter).add_measurement(1, draft)
    return estimators


@settings(deadline=None)
@given(
    limits=st.lists(st.integers(0, 9), max_size=8), budget=st.integers(0, 40), k=st.integers(0, 9)
)
def test_fixed_fills_the_budget_evenly(limits: list[int], budget: int, k: int) -> None:
    lengths = lengths_of(
        make_policy("allocation", "fixed", {"k": k}), candidates(*limits), work(budget=budget)
    )
    wanted = [min(k, limit) for limit in limits]
    assert sum(lengths) == min(budget, sum(wanted))
    assert all(length <= most for length, most in zip(lengths, wanted, strict=True))
    shortened = [n for n, most in zip(lengths, wanted, strict=True) if n < most]
    assert not shortened or max(lengths) - min(shortened) <= 1


@settings(deadline=None)
@given(total=st.integers(0, 30), num=st.integers(1, 7))
def test_fixed_shares_are_equal_over_a_cycle(total: int, num: int) -> None:
    policy = make_policy("allocation", "fixed", {"total": total})
    everybody = candidates(*[100] * num)
    rounds = [lengths_of(policy, everybody, work()) for _ in range(num)]
    assert {sum(r[i] for r in rounds) for i in range(num)} == {total}


FLAT = {1: 0.01, 1000: 0.01}
STEEP = {1: 0.001, 1000: 1.0}


def test_throughput_drafts_long_where_verification_is_flat_and_drafts_are_good() -> None:
    policy = make_policy("allocation", "throughput")
    estimators = learned([0.95] * 3, verify=FLAT, draft=1e-4)
    assert lengths_of(policy, candidates(20, 20, 20), work(estimators)) == [8, 8, 8]


def test_throughput_respects_limits_and_budget() -> None:
    policy = make_policy("allocation", "throughput")
    estimators = learned([0.95] * 3, verify=FLAT)
    assert lengths_of(policy, candidates(2, 0, 20), work(estimators)) == [2, 0, 8]
    assert lengths_of(policy, candidates(9, 9, 9), work(estimators, budget=4)) == [2, 1, 1]
    assert lengths_of(policy, candidates(9, 9), work(estimators, budget=0)) == [0, 0]


def test_throughput_without_measurements_drafts_as_if_rows_were_free() -> None:
    policy = make_policy("allocation", "throughput", {"k_max": 5})
    assert lengths_of(policy, candidates(20, 20), work()) == [5, 5]


def test_throughput_tries_again_what_it_has_put_aside() -> None:
    """Also where all requests had the bad luck: the drafter's own estimate must fade."""
    policy = make_policy("allocation", "throughput")
    estimators = learned([0.02] * 2, verify={1: 0.01, 100: 0.02}, draft=1e-3)
    everybody = candidates(20, 20)
    rounds = [sum(lengths_of(policy, everybody, work(estimators))) for _ in range(3000)]
    assert rounds[0] == 0
    assert any(rounds)


def survivals_of(estimators: Estimators, everybody: Sequence[DraftCandidate]) -> list[list[float]]:
    survival = estimators.acceptance.survival
    return [survival(c.state.request.id, "d", 16) for c in everybody]


def rate_of(
    lengths: Sequence[int], survivals: Sequence[Sequence[float]], estimators: Estimators
) -> float:
    """Expected tokens per second, written out."""
    gained = (sum(s[:n]) for s, n in zip(survivals, lengths, strict=True))
    tokens = len(lengths) + sum(gained)
    times = estimators.times
    batch = sum(n > 0 for n in lengths)
    seconds = times.overhead + times.target(len(lengths) + sum(lengths))
    return tokens / (seconds + max(lengths) * times.curve_of("d")(batch))


@pytest.mark.parametrize("seed", range(40))
def test_throughput_is_as_good_as_any_prefix_and_near_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    num, k_max, overhead = 3, 4, 3e-4
    rows = sorted(rng.sample(range(1, 16), 4))
    seconds = sorted(rng.uniform(0.001, 0.02) for _ in rows)
    estimators = learned(
        [rng.random() for _ in range(num)],
        verify=dict(zip(rows, seconds, strict=True)),
        draft=rng.choice([0.0, 3e-4, 3e-3]),
    )
    everybody = candidates(*(rng.randrange(k_max + 1) for _ in range(num)))
    survivals = survivals_of(estimators, everybody)
    estimators.times.overhead = overhead
    policy = make_policy("allocation", "throughput", {"k_max": k_max, "margin": 0.0})
    chosen = lengths_of(policy, everybody, work(estimators, num_rows=num))

    def value(lengths: Sequence[int]) -> float:
        return rate_of(lengths, survivals, estimators)

    ordered = [(g, -i) for i, c in enumerate(everybody) for g in survivals[i][: c.limit]]
    prefix = [0] * num
    prefixes = [list(prefix)]
    for _, i in sorted(ordered, reverse=True):
        prefix[-i] += 1
        prefixes.append(list(prefix))
    assert value(chosen) >= max(map(value, prefixes)) * (1 - 1e-9)

    every = itertools.product(*(range(c.limit + 1) for c in everybody))
    assert value(chosen) >= 0.9 * max(map(value, every))


def test_throughput_does_not_draft_on_for_a_few() -> None:
    """Each further step of the drafter takes its time, rows of the target take none."""
    num, k_max = 40, 8
    estimators = learned(
        [0.9, 0.85, *[0.45] * (num - 2)], verify={1: 0.010, 400: 0.010}, draft=5e-4
    )
    estimators.times.overhead = 1e-6
    everybody = candidates(*[k_max] * num)
    survivals = survivals_of(estimators, everybody)
    policy = make_policy("allocation", "throughput", {"k_max": k_max, "margin": 0.0})
    chosen = lengths_of(policy, everybody, work(estimators, num_rows=num))
    equal = [rate_of([n] * num, survivals, estimators) for n in range(k_max + 1)]
    assert rate_of(chosen, survivals, estimators) >= max(equal) * (1 - 1e-9)
    # The control: as many of the likeliest as are worth it.
    ordered = sorted(((g, -i) for i in range(num) for g in survivals[i]), reverse=True)
    prefix, best = [0] * num, 0.0
    for _, i in ordered:
        prefix[-i] += 1
        best = max(best, rate_of(prefix, survivals, estimators))
    assert best < 0.97 * max(equal)


def test_throughput_charges_each_drafter_for_its_own_longest_draft() -> None:
    policy = make_policy("allocation", "throughput")
    estimators = learned([0.9, 0.9], verify=FLAT, drafter="cheap", draft=1e-5)
    learned([0.9, 0.9], verify=FLAT, drafter="dear", draft=0.05, before=estimators)
    first, second = candidates(8, 8)
    mixed = [first._replace(drafter="cheap"), second._replace(drafter="dear")]
    assert lengths_of(policy, mixed[:1], work(estimators, num_rows=1)) == [8]
    assert lengths_of(policy, mixed[1:], work(estimators, num_rows=1)) == [0]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("fixed", {"k": -1}, "k must be a whole number from 0 to 1024, not -1"),
        (
            "fixed",
            {"total": -2},
            "total must be a whole number from 0 to 1000000000, or null, not -2",
        ),
        ("throughput", {"k_max": -1}, "k_max must be a whole number from 0 to 1024, not -1"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make_policy("allocation", name, options)


def test_a_margin_keeps_off_what_hardly_pays() -> None:
    def drafted(margin: float, rate: float) -> int:
        estimators = learned([rate], verify={1: 0.002, 2: 0.003})
        estimators.times.overhead = 3e-4
        policy = make_policy("allocation", "throughput", {"k_max": 1, "margin": margin})
        return lengths_of(policy, candidates(1), work(estimators, num_rows=1))[0]

    # A draft token takes the step from 2.3 to 3.3 ms: it must be right in over 43%.
    assert [drafted(0.0, rate) for rate in (0.40, 0.46, 0.60)] == [0, 1, 1]
    assert [drafted(0.1, rate) for rate in (0.40, 0.46, 0.60)] == [0, 0, 1]


def served(
    policy: AllocationPolicy,
    *,
    seconds_of: Callable[[int], float],
    accepted_of: Sequence[int],
    proposed_of: int,
    num_steps: int = 400,
    unread: int = 0,
    start: float = 0.0,
) -> tuple[list[list[Grant]], float]:
    """Grants of steps of requests whose drafts come to so much each, on a clock of its own, and the
    share of the time that drafts took."""
    num = len(accepted_of)
    estimators = learned([], verify={r: seconds_of(r) for r in (1, 3, 6, 9, 12, 30)}, draft=1e-4)
    estimators.times.note_catch_up("d", 1e-4)
    drafters = {"d": Drafter("d", stops_early=True)}
    offered = candidates(*[20] * num)
    for candidate in offered:
        candidate.state.drafter = "d"
        candidate.state.append((1, 2, 3))
        known = candidate.state.num_known_tokens
        candidate.state.kv_of("d").num_computed_tokens = known - unread
    view = View(drafters, estimators, room=Room(1000, num, num))
    now, drafting = start, 0.0
    found = []
    for _ in range(num_steps):
        grants = policy.allocate(offered, view)
        found.append(grants)
        num_drafting = sum(g.num_draft_tokens > 0 for g in grants)
        longer = seconds_of(num + proposed_of * num_drafting) - seconds_of(num)
        longer += 1e-4 * (proposed_of + 1) * bool(num_drafting)
        now, drafting = now + seconds_of(num) + longer, drafting + longer
        verdicts = [
            Verdict(c.state.request.id, 0, 0, (1,) * (accepted + 1), "d", proposed_of, accepted, 1)
            if grant.num_draft_tokens and proposed_of
            else Verdict(c.state.request.id, 0, 0, (1,))
            for c, grant, accepted in zip(offered, grants, accepted_of, strict=True)
        ]
        outcomes = [Outcome(c.state, v) for c, v in zip(offered, verdicts, strict=True)]
        policy.on_step(outcomes, now)
    return found, drafting / (now - start)


def drafting_share(found: list[list[Grant]], request: int) -> float:
    """Of the later steps."""
    later = found[len(found) // 2 :]
    return sum(grants[request].num_draft_tokens > 0 for grants in later) / len(later)


def test_confident_drafts_where_it_pays_at_one_price_for_all() -> None:
    policy = make_policy("allocation", "confident")
    found, _ = served(
        policy, seconds_of=lambda r: 0.01 + 1e-4 * r, accepted_of=[2] * 3, proposed_of=3
    )
    for grants in found[200:]:
        assert len({g.min_survival for g in grants}) == 1
        assert 0 < grants[0].min_survival < 1
        assert [g.num_draft_tokens for g in grants] == [8, 8, 8]


def test_confident_leaves_out_requests_whose_drafts_do_not_pay() -> None:
    """A position costs a third to half of a token: three accepted of three pay, none does not."""
    policy = make_policy("allocation", "confident")
    found, _ = served(
        policy,
        seconds_of=lambda r: 0.004 + 4e-4 * r,
        accepted_of=[3, 0, 3, 0],
        proposed_of=3,
        num_steps=1000,
    )
    shares = [drafting_share(found, request) for request in range(4)]
    assert min(shares[0], shares[2]) > 0.9
    assert max(shares[1], shares[3]) < 0.1


@pytest.mark.parametrize("proposed", [0, 3])
def test_confident_tries_what_does_not_pay_for_a_small_share_of_the_time(proposed: int) -> None:
    """Whether drafts are not accepted, or end before their first token."""
    policy = make_policy("allocation", "confident")
    found, share = served(
        policy,
        seconds_of=lambda r: 0.001 + 5e-4 * r,
        accepted_of=[0] * 3,
        proposed_of=proposed,
        num_steps=4000,
    )
    assert any(g.num_draft_tokens for grants in found[3000:] for g in grants), "a trial"
    assert share < 0.007


def test_confident_tries_nothing_where_a_position_costs_more_than_a_token() -> None:
    policy = make_policy("allocation", "confident")
    found, share = served(
        policy, seconds_of=lambda r: 0.001 * r, accepted_of=[1] * 3, proposed_of=1
    )
    assert share == 0
    assert not any(g.num_draft_tokens for grants in found for g in grants)


@pytest.mark.parametrize(("position", "expected"), [(1e-5, 8), (5e-2, 0)])
def test_confident_does_not_draft_because_a_step_takes_long_anyway(position, expected) -> None:
    """The time of its prefill is lost either way; a position costs what it costs."""
    for num_rows in (3, 500):
        policy = make_policy("allocation", "confident")
        verify = {r: 1e-2 + position * r for r in (3, 6, 15, 500, 1000)}
        view = View(
            {"d": Drafter("d", stops_early=True)},
            learned([], verify=verify, draft=1e-3),
            room=Room(1000, num_rows, 3),
        )
        grants = policy.allocate(candidates(20, 20, 20), view)
        assert [g.num_draft_tokens for g in grants] == [expected] * 3


def test_confident_counts_what_its_drafter_must_read_first() -> None:
    """Two more tokens a round are worth 6 ms."""
    for unread, expected in ((0, 1.0), (97, 1.0), (40_000, 0.0)):
        policy = make_policy("allocation", "confident")
        found, _ = served(
            policy,
            seconds_of=lambda r: 0.01 + 1e-4 * r,
            accepted_of=[2] * 3,
            proposed_of=3,
            num_steps=40,
            unread=unread,
        )
        assert drafting_share(found, 0) == expected


def test_confident_forgets_a_request_that_is_over() -> None:
    policy = make_policy("allocation", "confident")

    def play(start: float) -> int:
        """In how many of the first steps the worst request drafts."""
        found, _ = served(
            policy,
            seconds_of=lambda r: 0.004 + 4e-4 * r,
            accepted_of=[3, 3, 3, 0],
            proposed_of=3,
            start=start,
        )
        return sum(grants[3].num_draft_tokens > 0 for grants in found[:3])

    play(0.0)
    before = play(100.0)
    policy.release_request("r3")
    assert play(200.0) > before


def test_confident_keeps_to_limits_and_budget() -> None:
    policy = make_policy("allocation", "confident")
    drafters = {"d": Drafter("d", stops_early=True)}
    for budget, expected in ((1000, [2, 8, 8]), (9, [2, 3, 4]), (0, [0, 0, 0])):
        view = View(drafters, learned([], verify=FLAT, draft=1e-4), room=Room(budget, 3, 3))
        grants = policy.allocate(candidates(2, 20, 20), view)
        assert [g.num_draft_tokens for g in grants] == expected


def test_confident_is_throughput_for_drafters_that_do_not_end_by_themselves() -> None:
    estimators = learned([0.95] * 3, verify=FLAT, draft=1e-4)
    view = View({"d": Drafter("d")}, estimators, room=Room(1000, 4, 4))
    offered = candidates(20, 5, 20)
    expected = make_policy("allocation", "throughput").allocate(offered, view)
    assert make_policy("allocation", "confident").allocate(offered, view) == expected


def of_tenants(num: dict[str, int], limit: int = 8) -> list[DraftCandidate]:
    names = [name for name, n in num.items() for _ in range(n)]
    return [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 100, tenant=name), i), "d", limit)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("policy", ["throughput", "fixed"])
@pytest.mark.parametrize(
    ("weights", "expected"), [((1.0, 1.0), (12, 28)), ((1.0, 9.0), (4, 36)), ((9.0, 1.0), (12, 28))]
)
def test_a_short_budget_is_shared_out_by_weight(policy, weights, expected) -> None:
    """Two requests of a tenant, whose drafts are seldom accepted, could use 12 positions."""
    offered = of_tenants({"quiet": 2, "greedy": 10}, limit=6)
    estimators = learned([0.5] * 2 + [0.9] * 10, verify=FLAT)
    tenants = {n: Tenant(n, w) for n, w in zip(("quiet", "greedy"), weights, strict=True)}
    options = {"k": 6} if policy == "fixed" else {"k_max": 6}

    def drafted(budget: int, *, is_fair: bool) -> tuple[int, int]:
        step = View({}, estimators, tenants=tenants, room=Room(budget, 12, 12), is_fair=is_fair)
        lengths = lengths_of(make_policy("allocation", policy, options), offered, step)
        return sum(lengths[:2]), sum(lengths[2:])

    assert drafted(40, is_fair=True) == expected
    assert drafted(40, is_fair=False) == ((0, 40) if policy == "throughput" else (8, 32))
    assert drafted(100, is_fair=True) == (12, 60), "nothing is short"


@pytest.mark.parametrize(("made", "most"), [(5, 4), (9, 0), (10, 0)])
def test_no_draft_is_shorter_than_none(made: int, most: int) -> None:
    """Where steps overlap all tokens that are left, and more, may be on their way."""
    state = RequestState(Request("r", 4, 10, 0.0), 0)
    state.num_output_tokens = made
    assert limit(state, Drafter("d")) == most
    state.num_output_tokens = 12
    assert limit(state, Drafter("d", max_len=4)) == 0
