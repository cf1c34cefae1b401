"""Verdicts of plans beside a live server, on known figures."""

from typing import Any

import pytest

from lab.bench.plans_live import FIGURES, verdicts

LOADS = {0.3: 10.0, 0.6: 20.0, 0.9: 50.0}


def rows(off: float, minutes: tuple[float, float]) -> list[dict[str, Any]]:
    """Live figures that grow with the load, by turn. off: of predictions over what is expected;
    minutes: what a turn's minute makes of it."""
    return [
        {
            **{"model": "m", "drafts": "none", "load": load, "turn": turn},
            **{
                name: {
                    "live": factor * value,
                    "predicted": off * value,
                    "low": 0.96 * off * value,
                    "high": 1.04 * off * value,
                }
                for name in FIGURES.values()
            },
        }
        for turn, factor in enumerate(minutes)
        for load, value in LOADS.items()
    ]


@pytest.mark.parametrize(
    ("off", "minutes", "outcome"),
    [
        (1.0, (1.02, 0.99), "holds"),
        (1.3, (1.02, 0.99), "does not hold"),
        # The machine itself is no second time what it was.
        (1.3, (1.3, 0.9), "inconclusive"),
    ],
)
def test_plans_are_held_to_what_a_second_run_comes_to(off, minutes, outcome) -> None:
    found = verdicts(rows(off, minutes))
    assert [v.outcome for v in found] == [outcome] * len(found)
    assert all(v.control is not None and v.control.outcome == "does not hold" for v in found)
