"""Drafters with lanes of their own, and draft servers, work at the same time: a step waits for the
slowest, not for the sum, and not for one that is late."""

from tests.core.test_allocation import candidates, lengths_of, work

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.priced import Priced

NAMES = ("a", "b", "c", "d")


def estimators() -> Estimators:
    """Drafts by one of four drafters pay, by all four one after the other they do not."""
    known = Estimators()
    for rows in (1, 4, 8, 32):
        known.times.target.add_measurement(rows, 0.010)
    for name in NAMES:
        known.times.curve_of(name).add_measurement(1, 0.004)
    return known


def granted(*beside: str) -> list[int]:
    offered = [
        candidate._replace(drafter=name)
        for candidate, name in zip(candidates(4, 4, 4, 4), NAMES, strict=True)
    ]
    step = work(estimators())._replace(beside=frozenset(beside))
    return lengths_of(Priced(Priced.Options()), offered, step)


def test_beside_the_target_all_drafters_are_worth_their_time() -> None:
    assert all(granted(*NAMES))


def test_inside_the_step_they_wait_for_each_other() -> None:
    assert not any(granted())


def test_one_inside_comes_on_top_of_those_beside() -> None:
    lengths = granted("a", "b", "c")
    assert all(lengths[:3])
    assert lengths[3] == 0


def of_servers(
    round_trips: list[float], *, verify_s: float, at_hand: int = 0, budget: int = 100
) -> list[int]:
    """Grants of a request at each draft server, of 5 ms a token; the last has sent some ahead."""
    known = Estimators()
    for i, trip in enumerate(round_trips):
        for num in (1, 2, 4, 8) * 40:
            known.links.add_transfer(f"s{i}", num, trip + 0.005 * num)
    for rows in (1, 30):
        known.times.target.add_measurement(rows, verify_s)
    num = len(round_trips)
    asked = [c._replace(drafter=f"s{i}") for i, c in enumerate(candidates(*[6] * num))]
    asked[-1] = asked[-1]._replace(num_at_hand=at_hand)
    servers = frozenset(c.drafter for c in asked)
    step = work(known, budget=budget, num_rows=num)._replace(beside=servers)
    return lengths_of(Priced(Priced.Options()), asked, step)


def test_a_late_servers_draft_is_not_waited_for() -> None:
    lengths = of_servers([0.005, 0.005, 2.0], verify_s=0.03)
    assert min(lengths[:2]) >= 1
    assert lengths[2] == 0
    assert of_servers([0.005, 0.005, 2.0], verify_s=0.03, at_hand=3)[2] == 3, "it is here"


def test_a_slow_target_is_worth_longer_drafts() -> None:
    quick, slow = (sum(of_servers([0.005] * 3, verify_s=s)) for s in (0.02, 0.5))
    assert 0 < quick < slow
    assert sum(of_servers([0.005] * 3, verify_s=0.5, budget=4)) == 4
