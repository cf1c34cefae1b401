"""What `lab.bench.never_behind` compares: systems by their names, and cells to compare them in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from lab.common.cells import Figures
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.policies.admission.fluid_guided import FluidGuided
from penstock.core.policies.allocation import priced
from penstock.core.policies.allocation.parts.values import TokenValues
from penstock.core.policies.bundles import BUNDLES
from penstock.core.policies.registry import policies

_NO_DRAFTER = "none"


@dataclass(frozen=True)
class Cell:
    """A load and a server without its policies.

    measure: figures of a system with a seed; `value`, where more is better, among them. without:
    prices and values that matter here. unit: of the value; seconds: of one over it. kind: of its
    scene. held_out: no constant is tuned on it."""

    name: str
    measure: Callable[[str, int], Figures]
    rivals: Sequence[str]
    without: Sequence[str] = ()
    unit: str = "tokens/s"
    kind: str = ""
    held_out: bool = False


def decisions(system: str, remote: bool = False) -> dict[str, Any]:
    """Fields of a `Setup` by a system's name. remote: drafts come from draft servers.

    A bundle, or ADMISSION, LENGTHS[, SELECTION]; the selection is a policy's, or one drafter."""
    if system in BUNDLES:
        found = BUNDLES[system]
        return {
            "admission": PolicyConfig.from_bundle("admission", system),
            "selection": PolicyConfig.from_bundle("selection", system),
            "allocation": PolicyConfig.from_bundle("allocation", system),
            # Only draft servers are known to have devices of their own.
            "pipeline": found.pipeline if remote else "off",
        }
    admission, lengths, *chosen = system.split(", ")
    name, _, k = lengths.partition(" ")
    fixed = PolicyConfig.from_name("fixed", k=int(k or 1))
    selection = PolicyConfig.from_name("single")
    for own in (name for name in chosen if name != _NO_DRAFTER):
        is_policy = own in policies("selection")
        selection = policy_named(own) if is_policy else policy_named("single", drafter=own)
    return {
        "admission": PolicyConfig.from_name(admission),
        "selection": selection,
        "allocation": fixed if name in ("fixed", "none") else policy_named(name),
        "pipeline": "off",
    }


def has_drafts(system: str) -> bool:
    """Return True if the system has a drafter."""
    return not system.endswith(f", {_NO_DRAFTER}")


def looks_up(system: str) -> bool:
    """Return True if the system has look-up where the cell has: without a drafter, too."""
    return system in BUNDLES or system.split(", ")[1] != _NO_DRAFTER


# --- prices and values ----------------------------------------------------------------------------


def _all_tokens(offers: Any) -> Any:
    """Draft lengths where a second costs nothing: every token that adds value and has room."""
    most = min(len(offers.owners), offers._view.room.budget)
    caps = np.full(len(offers.groups), np.inf)
    return offers.lengths(caps, most - 1), offers.plain_value / offers.plain_s


def _valued(**changed: float) -> Any:
    right = TokenValues.__init__
    return lambda self, fairness, in_time: right(
        self, **{"fairness": fairness, "in_time": in_time, **changed}
    )


_right_values = TokenValues.of_tokens
WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the price of a second": lambda: patch.object(priced._Offers, "_best_plan", _all_tokens),
    "the price of memory": lambda: patch.object(
        FluidGuided, "_admissible", lambda _, step, waiting: list(itertools.islice(waiting, 256))
    ),
    "the margin of memory": lambda: patch.object(FluidGuided, "_confidence", lambda *_: 0.0),
    "a drafter's reading": lambda: patch.object(priced, "reading_seconds", lambda *_: 0.0),
    "values of tenants": lambda: patch.object(TokenValues, "__init__", _valued(fairness=0.0)),
    "values of targets": lambda: patch.object(TokenValues, "__init__", _valued(in_time=0.0)),
    "the right values": lambda: patch.object(
        TokenValues, "of_tokens", lambda *args: np.roll(_right_values(*args), 1)
    ),
}


def measured(cell: Cell, system: str, seed: int) -> Figures:
    """Figures of a system, or of `SYSTEM without PRICE`."""
    name, _, missing = system.partition(" without ")
    with WITHOUT[missing]() if missing else nullcontext():
        return cell.measure(name, seed)
