"""Policies that nobody serves with and papers compare with: a file each, loaded by its path.

penstock simulate --selection lab/rivals/greedy.py ...
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.config import PolicyConfig
from penstock.core.policies.selection.parts.goodput import model_of
from penstock.core.policies.selection.parts.places import Places
from penstock.core.state import RequestState


def policy_named(name: str, /, **options: Any) -> PolicyConfig:
    """A rival of this folder, or else a policy of the package."""
    rival = Path(__file__).with_name(f"{name}.py")
    return PolicyConfig.from_name(str(rival) if rival.is_file() else name, **options)


def by_preference(places: Places, state: RequestState, models: Iterable[str]) -> str | None:
    """Take a place with the first model that has room, best with the present drafter."""

    def first(name: str) -> tuple[bool, float]:
        (left,) = places.room([name])
        return name != state.drafter, float("-inf") if left is None else -left

    names = list(places.drafters)
    models_of = {name: model_of(drafter) for name, drafter in places.drafters.items()}
    names.sort(key=first)
    return places.first_with_room(n for m in models for n in names if models_of[n] == m)
