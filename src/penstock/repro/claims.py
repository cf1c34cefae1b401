"""A claim, what was measured, and a control of which the claim must be false.

A test that everything passes shows nothing. So a claim's test is one function, and it runs twice:
on what was measured, and on a control (the same data shuffled, a policy that lacks the property, a
law of another order). Where the control passes too, the claim is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Outcome = Literal["holds", "holds in part", "does not hold", "not shown"]
Data = TypeVar("Data")


def judge(*parts: bool) -> Outcome:
    """The outcome of a claim with several parts."""
    if all(parts):
        return "holds"
    return "holds in part" if any(parts) else "does not hold"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a claim's test says: its figures in words, and whether each part of the claim is
    true."""

    measured: str
    parts: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """The same test on something of which the claim is false, and what it came to."""

    name: str
    measured: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a paper claims, what was measured here, whether that agrees, and the control."""

    claim: str
    measured: str
    outcome: Outcome
    control: Control | None = None

    def line(self) -> str:
        line = f"[{self.outcome}] {self.claim}: {self.measured}"
        if self.control is None:
            return line
        control = self.control
        return f"{line}. Control, {control.name} [{control.outcome}]: {control.measured}"


def check(
    claim: str, test: Callable[[Data], Finding], data: Data, control: str, placebo: Data
) -> Verdict:
    """The verdict of a test on `data`, which is `not shown` where the whole claim would also hold
    of `placebo`. control: what `placebo` is."""
    found, false = test(data), test(placebo)
    control_outcome = judge(*false.parts)
    outcome: Outcome = "not shown" if control_outcome == "holds" else judge(*found.parts)
    return Verdict(
        claim, found.measured, outcome, Control(control, false.measured, control_outcome)
    )
