"""What the crossed settings' verdicts make of known rates, and that their runs repeat."""

import itertools

import numpy as np

from lab.papers import crossed
from lab.papers.crossed import BASE, NO_DRAFTS, PLACEBO, SETTINGS, SYSTEMS, WAIT, WAIT_ALONE, Speeds

NOISE = np.array([1.0, 1.01, 0.99])


def outcomes(**gains: float) -> list[str]:
    """Of systems that make so many times the base's tokens in every setting."""
    found: Speeds = {
        (where, system): 100 * gains.get(system, 1.0) * NOISE
        for where, system in itertools.product(SETTINGS, SYSTEMS)
    }
    for where in SETTINGS:
        found[where, PLACEBO] = 100 * np.roll(NOISE, 1)
        found[where, BASE] = np.full(3, 100.0)
    own = SETTINGS[0]
    found[own, WAIT_ALONE] = found[own, WAIT]
    found[own, NO_DRAFTS] = found[own, BASE] / 2
    return [v.outcome for v in crossed.verdicts(found)]


def test_who_gains_everywhere_holds() -> None:
    gains = dict.fromkeys(crossed.SYSTEMS, 1.3)
    assert outcomes(**gains) == ["holds"] * 7


def test_what_changes_nothing_cannot_be_told_but_where_another_gains() -> None:
    assert outcomes() == [*["cannot be told here"] * 6, "holds"]
    assert outcomes(auto=1.3) == [*["does not hold"] * 5, "holds", "holds"]
