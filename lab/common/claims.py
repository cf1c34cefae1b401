"""What an experiment says of a claim: what was found, against which bar or control, and whether
the claim holds.

A test that everything passes shows nothing. So a paper's claim is tested by one function that runs
twice: on what was measured, and on a control of which the claim must be false (the same data
shuffled, a policy that lacks the property, a law of another order). Where the control passes too,
the claim is not shown. What does not hold, or only in part, needs an oracle, too: something in the
same world of which the whole claim must be true. Where the oracle fails, the world cannot tell. A
bar set for this project needs no control: it is met or missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Outcome = Literal[
    "holds",
    "holds in part",
    "does not hold",
    "not shown",
    "inconclusive",
    "not measured",
    "met",
    "missed",
    "for information",
]
Data = TypeVar("Data")


def judge(*parts: bool) -> Outcome:
    """The outcome of a claim with several parts."""
    if all(parts):
        return "holds"
    return "holds in part" if any(parts) else "does not hold"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a claim's test says: its figures in words, and whether each part of the claim is
    true."""

    measured: str
    parts: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """The same test on a control or an oracle, and what it came to."""

    name: str
    measured: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """What is claimed, what was measured, whether that agrees, the control, of which the claim is
    false, and the oracle, of which it is true."""

    claim: str
    measured: str
    outcome: Outcome
    control: Control | None = None
    oracle: Control | None = None

    def line(self) -> str:
        claim = f"{self.claim}: " if self.claim else ""
        line = f"[{self.outcome}] {claim}{self.measured}"
        for kind, other in (("Control", self.control), ("Oracle", self.oracle)):
            if other is not None:
                line += f". {kind}, {other.name} [{other.outcome}]: {other.measured}"
        return line


def check(
    claim: str,
    test: Callable[[Data], Measurement],
    data: Data,
    control: str,
    placebo: Data,
    oracle: tuple[str, Data] | None = None,
) -> ClaimVerdict:
    """The verdict of a test on `data`: `not shown` where the whole claim would also hold of
    `placebo`; `inconclusive` where it does not hold wholly of `data`, nor of the oracle.
    control: what `placebo` is; oracle: its name and data."""
    found, false = test(data), test(placebo)
    outcome = judge(*found.parts)
    against = Control(control, false.measured, judge(*false.parts))
    best = None
    if oracle is not None:
        name, true = oracle[0], test(oracle[1])
        best = Control(name, true.measured, judge(*true.parts))
    if against.outcome == "holds":
        outcome = "not shown"
    elif outcome != "holds" and best is not None and best.outcome != "holds":
        outcome = "inconclusive"
    return ClaimVerdict(claim, found.measured, outcome, against, best)


def not_measured(claim: str, needs: str) -> ClaimVerdict:
    """The line of a part that cannot be measured here. needs: what is not there."""
    return ClaimVerdict(claim, f"needs {needs}", "not measured")


def bar(claim: str, measured: str, reached: bool | None) -> ClaimVerdict:
    """Against a bar, which is part of `measured`; None: no bar is set."""
    outcomes: dict[bool | None, Outcome] = {True: "met", False: "missed", None: "for information"}
    return ClaimVerdict(claim, measured, outcomes[None if reached is None else bool(reached)])


def summary(verdicts: Iterable[ClaimVerdict]) -> dict[str, object]:
    """In JSON: whether every bar is met, and a line for each claim."""
    told = list(verdicts)
    return {
        "met": all(v.outcome != "missed" for v in told),
        "lines": [v.line().partition("] ")[2] for v in told],
    }
