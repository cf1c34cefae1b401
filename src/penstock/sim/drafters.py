"""Drafters of a simulated machine: capacities, instances and times."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config import each_once
from penstock.core.loop import Instrument
from penstock.core.types import LOOK_UP, Output, StepPlan, StepResult
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.traces import WorkloadError


@dataclass(frozen=True, slots=True)
class DrafterCapacity:
    """Capacity of a drafter.

    max_num_seqs: most requests in one instance's batch (Spin's B_j); None: no limit. instances:
    number of them, each with its own KV cache and, beside the target, its own lane."""

    max_num_seqs: int | None = None
    instances: int = 1

    def names(self, drafter: str) -> tuple[str, ...]:
        """Return the names of a drafter's instances."""
        if self.instances == 1:
            return (drafter,)
        return tuple(f"{drafter}/{i}" for i in range(1, self.instances + 1))


@dataclass(slots=True)
class DrafterCounts(Instrument):
    """Counts each drafter's work and the requests' changes of drafter."""

    rounds: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    taken_up: Counter[str] = field(default_factory=Counter)
    num_switches: int = 0
    _last: dict[str, str] = field(default_factory=dict)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        for timed in result.draft_times:
            self.seconds[timed.drafter] += timed.seconds

    def on_output(self, output: Output) -> None:
        for name, _, num_accepted in output.drafts:
            self.rounds[name] += 1
            self.accepted[name] += num_accepted
            before = self._last.get(output.request_id)
            if name not in (before, LOOK_UP):
                self.taken_up[name] += 1
                self.num_switches += before is not None
                self._last[output.request_id] = name
        if output.finish_reason is not None:
            self._last.pop(output.request_id, None)

    def figures(self, num_requests: int) -> dict[str, Any]:
        """Return the part of `penstock simulate --json` that is by drafter."""
        return {
            "drafters": {
                name: {
                    "rounds": self.rounds[name],
                    "taken_up": self.taken_up[name],
                    "accepted": self.accepted[name],
                    "seconds": self.seconds[name],
                }
                for name in self.rounds
            },
            "switches_per_request": self.num_switches / num_requests,
        }


def parse_capacities(texts: Iterable[str], drafters: Sequence[str]) -> dict[str, DrafterCapacity]:
    """Parse `NAME=B` or `NAME=BxK`: B requests for each of K instances. Raises: WorkloadError."""
    return each_once((_capacity(t, drafters) for t in texts), "--drafter-capacity", WorkloadError)


def _capacity(text: str, drafters: Sequence[str]) -> tuple[str, DrafterCapacity]:
    """Raises: WorkloadError."""
    name, _, value = text.partition("=")
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", value)
    if not found:
        raise WorkloadError(f"a drafter's capacity is NAME=B or NAME=BxK, not {text!r}")
    if name not in drafters:
        known = ", ".join(drafters) or "there is none"
        raise WorkloadError(f"a capacity names an unknown drafter {name!r}; drafters: {known}")
    return name, DrafterCapacity(int(found[1]), int(found[2] or 1))


def parse_drafter_seconds(texts: Iterable[str]) -> tuple[DrafterProfile, ...]:
    """Parse `NAME=SECONDS[:PER_CATCH_UP]`, the times of a token. Raises: WorkloadError."""
    return tuple(each_once(map(_times, texts), "--drafter-seconds", WorkloadError).values())


def _times(text: str) -> tuple[str, DrafterProfile]:
    """Raises: WorkloadError."""
    name, _, value = text.partition("=")
    step, _, reading = value.partition(":")
    try:
        seconds = (float(step), float(reading or 0))
    except ValueError:
        seconds = (-1.0, -1.0)
    if not name or not all(0 <= s < math.inf for s in seconds):
        raise WorkloadError(
            f"a drafter's times are NAME=SECONDS or NAME=SECONDS:PER_CATCH_UP, not {text!r}"
        )
    return name, DrafterProfile(name, (1,), (seconds[0],), seconds[1])
