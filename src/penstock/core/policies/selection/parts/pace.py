"""How fast the target decodes, and how much of its time can be saved by drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.state import Outcome
from penstock.core.view import View

_DECAY = 0.99
_MOST_OVERHEAD = 2.0
"""Most time of a step that counts, over what its rows and drafts should take: more is no work."""
_UNDRAFTED_WEIGHT = 0.1
"""Of a step without drafts, towards the time for replays, which hardly pay where drafts do not."""


@dataclass(slots=True)
class Pace:
    """What the target's decoding steps are like: rows and requests, faded; and their seconds in
    all, each step counting for no more than twice what its rows and drafts take by themselves, and
    for little where nobody drafted: then there is little to find out about drafters."""

    rows: float = 0.0
    requests: float = 0.0
    steps: float = 0.0
    total_s: float = 0.0
    last: float | None = None

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        passed = math.inf if self.last is None else view.now - self.last
        self.last = view.now
        rows = 0
        drafts: dict[str, list[int]] = {}
        for state, verdict in outcomes:
            if state.num_output_tokens == len(verdict.token_ids):
                return
            rows += 1 + verdict.num_proposed
            if verdict.drafter is not None:
                drafts.setdefault(verdict.drafter, []).append(verdict.num_proposed)
        if not outcomes:
            return
        times = view.learn.times
        seconds = times.target(rows)
        for drafter, lengths in drafts.items():
            seconds += max(lengths) * times.curve_of(drafter)(len(lengths))
        counted = 1.0 if drafts else _UNDRAFTED_WEIGHT
        self.total_s += counted * min(passed, _MOST_OVERHEAD * seconds)
        self.rows = _DECAY * self.rows + rows
        self.requests = _DECAY * self.requests + len(outcomes)
        self.steps = _DECAY * self.steps + 1
