"""`adaptive` where to choose a drafter takes as long as several rounds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.core.selection.rounds import Machine, Rounds

from penstock.core.learn import prior
from penstock.core.learn.times import Times
from penstock.core.policies.selection.adaptive import Adaptive
from penstock.core.policies.selection.parts.pace import ReviewTime

pytestmark = pytest.mark.slow

SMALL = Machine(
    {"good": 0.1e-3, "poor": 0.1e-3}, verify=0.3e-3, per_row=0.01e-3, per_catch_up_token=1e-6
)


class Host(Adaptive):
    """Says how long the pause before a step was."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Adaptive.Options())
        self.seconds = seconds
        self.num_decided = 0
        self.pause = 0.1e-3

    def _decide(self, states: Sequence[Any], *rest: Any) -> None:
        self.num_decided += len(states)
        self.pause += self.seconds * len(states)
        super()._decide(states, *rest)

    def on_step(self, outcomes: Any, view: Any) -> None:
        super().on_step(outcomes, view)
        self.pause = 0.1e-3


def served(
    seconds: float, monkeypatch: pytest.MonkeyPatch, rates: Mapping[str, float], rounds: int = 2000
) -> tuple[float, Rounds]:
    """Decisions a request, after 64 have been served."""
    host = Host(seconds)
    monkeypatch.setattr(Times, "pause", property(lambda _: host.pause))
    world = Rounds(host, SMALL, lambda _: rates, live=1, prompt_len=30, max_tokens=32)
    while len(world.finished) < 64:
        world.round()
    before, host.num_decided = len(world.finished), 0
    world.run(rounds)
    return host.num_decided / (len(world.finished) - before), world


def test_it_is_chosen_rarely_where_a_choice_takes_longer_than_it_saves(monkeypatch) -> None:
    rates = {"good": 0.8, "poor": 0.5}
    free, _ = served(0.0, monkeypatch, rates)
    dear, world = served(0.5e-3, monkeypatch, rates)
    assert free > 2
    assert dear < 0.5
    used = Counter(name for chosen in world.played[-500:] for name in chosen.values())
    assert used["good"] > 0.95 * used.total()


def test_what_changes_is_noticed_by_the_few_that_are_chosen_for(monkeypatch) -> None:
    monkeypatch.setattr(prior, "_MEMORY", 16)
    rates = {"good": 0.8, "poor": 0.3}
    _, world = served(0.5e-3, monkeypatch, rates)
    rates.update(good=0.1, poor=0.1)
    world.run(5000)
    used = Counter(name for chosen in world.played[-500:] for name in chosen.values())
    assert used["good"] < 0.6 * used.total()


def test_the_time_of_a_review_is_what_pauses_with_one_are_longer_by() -> None:
    time = ReviewTime()
    for i in range(40):
        num = i % 3
        if num:
            time.reviewed(num)
        if i % 5 == 0:
            time.began()
        time.add_pause(1e-4 + 3e-4 * num + (0.01 if i % 5 == 0 else 0.0))
    assert time.seconds == pytest.approx(3e-4, rel=0.05)
    for _ in range(2000):
        time.add_pause(1e-4)
    assert time.seconds < 1e-4, "it is tried again in the end"
