"""A mean that chooses its own memory."""

import numpy as np
import pytest

from penstock.core.learn.running import RunningMean


def mean_of(*values: float) -> RunningMean:
    made = RunningMean()
    for value in values:
        made.add(value)
    return made


def test_a_few_values_count_alike() -> None:
    assert mean_of(4.0).value == 4.0
    assert mean_of(1.0, 2.0, 6.0).value == pytest.approx(3.0)
    assert mean_of(1.0, 1.0, 1.0).error == 0.0


def test_noise_is_averaged_over_a_long_memory_and_a_change_is_followed_by_a_short_one() -> None:
    """A weight of 0.05 leaves a standard error of 0.016, and 0.36 of a change after 20 values."""
    rng = np.random.default_rng(0)
    mean, found = RunningMean(), []
    for value in rng.normal(1.0, 0.1, 4000):
        mean.add(float(value))
        found.append(mean.value)
    assert np.std(found[500:]) < 0.01
    assert mean.error == pytest.approx(0.1, rel=0.15)
    assert mean.standard_error == pytest.approx(0.1 / 255**0.5, rel=0.15)
    for value in rng.normal(2.0, 0.1, 20):
        mean.add(float(value))
    assert mean.value == pytest.approx(2.0, abs=0.2)
    for value in rng.normal(2.0, 0.1, 2000):
        mean.add(float(value))
    assert mean.value == pytest.approx(2.0, abs=0.03)


def test_a_prior_counts_for_as_many_values_as_it_is_said_to() -> None:
    mean = RunningMean(1.0, 3)
    mean.add(5.0)
    assert mean.value == pytest.approx(2.0)
    mean.move(0.5)
    assert mean.value == pytest.approx(2.5)
    mean.restart(7.0, 1)
    mean.add(9.0)
    assert mean.value == pytest.approx(8.0)
