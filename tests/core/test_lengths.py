import numpy as np
import pytest

from penstock.core.learn.traffic import OutputLengths

NOBODY = np.zeros(0, dtype=np.int64)


def test_before_anything_has_ended_lengths_are_geometric() -> None:
    survival = OutputLengths().survival(NOBODY)
    assert survival[0] == 1.0
    assert survival[100] / survival[50] == pytest.approx(survival[150] / survival[100])


def test_learns_the_curve_of_what_has_ended() -> None:
    rng = np.random.default_rng(0)
    lengths = OutputLengths()
    for length in rng.choice([100, 200, 300], p=[0.5, 0.3, 0.2], size=3000):
        lengths.ended(int(length))
    survival = lengths.survival(NOBODY)
    assert survival[99] == pytest.approx(1.0, abs=0.02)
    assert survival[100] == pytest.approx(0.5, abs=0.05)
    assert survival[250] == pytest.approx(0.2, abs=0.05)
    assert survival[300] == pytest.approx(0.0, abs=0.01)
    assert lengths.mean == pytest.approx(170, rel=0.05)
    # E[X²] / 2E[X] of the three lengths.
    assert lengths.mean_residual == pytest.approx(103, rel=0.08)


def test_running_requests_count_for_what_they_have_reached() -> None:
    """Ten short ones have ended, thirty are far beyond."""
    lengths = OutputLengths()
    for _ in range(10):
        lengths.ended(10)
    survival = lengths.survival(np.full(30, 400, dtype=np.int64))
    assert survival[10] == pytest.approx(0.75, abs=0.05)


def test_follows_a_change() -> None:
    lengths = OutputLengths(memory=200.0)
    for length in [50] * 1000 + [400] * 1000:
        lengths.ended(length)
        survival = lengths.survival(NOBODY)
    assert survival[50] > 0.95


def test_the_mean_of_what_has_ended_needs_no_curve() -> None:
    lengths = OutputLengths(memory=100.0)
    assert lengths.mean_ended == 200.0
    for n in (40, 60) * 2000:
        lengths.ended(n)
    assert lengths.mean_ended == pytest.approx(50.0, abs=0.2)
    for _ in range(1000):
        lengths.ended(400)
    assert lengths.mean_ended == pytest.approx(400.0, rel=0.001)
