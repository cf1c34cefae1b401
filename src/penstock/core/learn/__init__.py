"""Estimators that learn while the engine runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.core.learn.acceptance import AcceptanceEstimator
from penstock.core.learn.links import LinkTimes
from penstock.core.learn.times import Times, drafter_profiles
from penstock.core.learn.traffic import OutputLengths, Traffic
from penstock.core.state import Drafter
from penstock.fluid.step_profile import UNKNOWN, StepProfile

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batches at which the profile is sampled


class Estimators:
    """All estimators of policies. `profile`: step times of the target known beforehand."""

    def __init__(self, profile: StepProfile | None = None) -> None:
        self.acceptance = AcceptanceEstimator()
        self.links = LinkTimes()
        self.times = Times(profile or UNKNOWN, self.links)
        self.traffic = Traffic()
        self.lengths = OutputLengths()

    def state(self) -> dict[str, Any]:
        """Return what outlives requests: numbers, in lists and mappings."""
        return {
            "times": self.times.state(),
            "acceptance": self.acceptance.state(),
            "lengths": self.lengths.state(),
        }

    def restore(self, state: Any, *, times: bool = True) -> None:
        """Take over a `state` as priors, before any request.

        Raises ValueError, TypeError, KeyError or AttributeError, and is then of no use."""
        if times:
            self.times.restore(state["times"])
        self.acceptance.restore(state["acceptance"])
        self.lengths.restore(state["lengths"])


def seed_estimators(
    estimators: Estimators, profile: StepProfile, drafters: Iterable[Drafter] = ()
) -> None:
    """Seed step times from a profile, as guesses until steps of this machine are measured."""
    times = estimators.times
    times.profile = profile
    for rows in _ROWS:
        times.target.add_measurement(rows, profile.linear(rows))
    for name, known in drafter_profiles(profile, drafters).items():
        for batch in known.batch_counts:
            times.curve_of(name).add_measurement(batch, known.seconds(batch, 1))
        times.note_catch_up(name, known.per_catch_up_token)
    times.doubt_all()
