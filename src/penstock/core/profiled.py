"""Estimators that begin with what a profile says, in the place of measurements."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.estimators import Estimators
from penstock.core.state import Drafter
from penstock.fluid.step_profile import DrafterProfile, StepProfile

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def know_profile(
    estimators: Estimators, profile: StepProfile, drafters: Iterable[Drafter] = ()
) -> None:
    """Fill in the times of the target, and of the drafters that the profile knows."""
    times = estimators.step_times
    estimators.step_model.profile = profile
    for rows in _ROWS:
        times.target.observe(rows, profile.linear(rows))
    for name, known in drafter_profiles(profile, drafters).items():
        for batch in known.batch_counts:
            times.curve_of(name).observe(batch, known.seconds(batch, 1))
        times.note_catch_up(name, known.per_catch_up_token)


def drafter_profiles(
    profile: StepProfile, drafters: Iterable[Drafter]
) -> dict[str, DrafterProfile]:
    """Of those drafters that the profile knows, by their own names: instances of one model share
    its times."""
    known = {d.name: d for d in profile.drafters}
    return {d.name: known[d.model or d.name] for d in drafters if (d.model or d.name) in known}
