"""`lab.bench.learned_times`: machines whose steps scatter, and what is learned of them."""

from __future__ import annotations

import pytest

from lab.bench import learned_times
from lab.bench.learned_times import served


def test_the_error_is_that_of_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a steady machine next to nothing where the times are told, little where they are learned.
    The control: half of the steps take three times as long, and what is known follows them."""
    monkeypatch.setattr(learned_times, "_NUM_REQUESTS", 250)
    for name, steady in (("_SCATTER", 0.0), ("_SWING", 0.0), ("_STALL", 1.0)):
        monkeypatch.setattr(learned_times, name, steady)
    told, learned = (served("line", "fluid_guided", how, 40.0, 0) for how in (False, True))
    assert told[2] < 0.01
    assert told[2] < learned[2] < 0.05
    assert learned[0] == pytest.approx(told[0], rel=0.1)
    monkeypatch.setattr(learned_times, "_STALL", 3.0)
    monkeypatch.setattr(learned_times, "_STALL_EVERY", 2)
    slow = served("line", "fluid_guided", False, 20.0, 0)
    assert slow[2] > 0.3
    assert slow[0] > 1.5 * told[0]
