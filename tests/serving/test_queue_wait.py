from __future__ import annotations

import pytest

from penstock.serving import intake
from penstock.serving.intake import QueueFull, QueueWait


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(intake, "time", made)
    return made


def test_a_queue_takes_as_long_as_its_length_over_the_rate(clock: _Clock) -> None:
    departures = QueueWait()
    for _ in range(1000):
        clock.now += 0.1
        departures.add()
    assert departures.seconds_for(40) == pytest.approx(4, rel=0.02)
    assert departures.seconds_for(400) == pytest.approx(40, rel=0.02)


def test_a_queue_that_stands_still_takes_ever_longer(clock: _Clock) -> None:
    departures = QueueWait()
    for _ in range(10):
        clock.now += 0.1
        departures.add()
    moving = departures.seconds_for(10)
    clock.now += 20
    assert departures.seconds_for(10) > 10 * moving
    clock.now += 20
    assert departures.seconds_for(10) == 60


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1), (7.5, 7.5), (1e9, 60)])
def test_what_is_told_is_bounded(seconds: float, told: float) -> None:
    assert QueueFull("full", seconds).retry_after_s == told
