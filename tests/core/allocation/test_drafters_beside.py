"""Drafters with lanes of their own work at the same time: a step waits for the slowest, not for the
sum."""

from dataclasses import replace

from tests.core.test_allocation import candidates, lengths_of, work

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.throughput import Throughput

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
    step = replace(work(estimators()), beside=frozenset(beside))
    return lengths_of(Throughput(Throughput.Options()), offered, step)


def test_beside_the_target_all_drafters_are_worth_their_time() -> None:
    assert all(granted(*NAMES))


def test_inside_the_step_they_wait_for_each_other() -> None:
    assert not any(granted())


def test_one_inside_comes_on_top_of_those_beside() -> None:
    lengths = granted("a", "b", "c")
    assert all(lengths[:3])
    assert lengths[3] == 0
