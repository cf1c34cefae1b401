"""What the whole loop's verdicts make of latencies that are known, and its days of requests."""

import numpy as np

from lab.papers import whole_loop
from lab.papers.whole_loop import BASE, PLACEBO, Latencies

NOISE = np.array([[1.0, 1.0], [1.01, 0.99], [0.99, 1.01]])


def outcomes(**gains: float) -> list[str]:
    """Of latencies that are a base's over these gains; the placebo's are its own, turned."""
    base = np.tile([2.0, 8.0], (3, 1))
    found: Latencies = {
        ("cpu", system): base / gains.get(system, 1.0) * NOISE for system in whole_loop.SYSTEMS
    }
    found["cpu", BASE] = base
    found["cpu", PLACEBO] = base * np.roll(NOISE, 1, axis=0)
    return [v.outcome for v in whole_loop.verdicts("cpu", found)]


def test_parts_that_gain_and_multiply() -> None:
    assert outcomes(admission=1.1, allocation=1.2, selection=1.3, all=1.716) == ["holds"] * 6


def test_parts_that_do_nothing_gain_nothing() -> None:
    assert outcomes() == [*["inconclusive"] * 5, "not shown"]
    assert outcomes(selection=1.3)[:3] == ["does not hold", "does not hold", "holds"]


def test_parts_that_stand_in_each_others_way() -> None:
    found = outcomes(admission=1.1, allocation=1.2, selection=1.3, all=1.2)
    assert found[3:] == ["holds", "does not hold", "does not hold"]
