"""Which drafter a request gets. One file a policy.

A policy has `name`, an `Options` dataclass and `select(states, work)`; what else it needs to hear
(`observe`, `replayed`, `forget`), and what it wants read in idle time (`replays`), is optional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.core.learn import Estimators
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed


@dataclass(frozen=True, slots=True)
class SelectionWork:
    """What a choice is made from.

    drafters: those open to the requests, by name; some may be down or silent.
    loads: running requests by drafter's name, those to be chosen for included (they may stay).
    """

    drafters: Mapping[str, Drafter]
    estimators: Estimators
    now: float = 0.0
    loads: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplayWish:
    """A drafter should read a request's verified text, if it has time: to have its KV ready, or
    also to `evaluate` what it would have drafted."""

    state: RequestState
    drafter: str
    evaluate: bool = False


class Loads(Mapping[str, int]):
    """Running requests by drafter's name, counted when somebody asks."""

    def __init__(self, running: Mapping[str, RequestState]) -> None:
        self._running = running
        self._counts: Counter[str] | None = None

    def _counted(self) -> Counter[str]:
        if self._counts is None:
            self._counts = Counter(s.drafter for s in self._running.values() if s.drafter)
        return self._counts

    def __getitem__(self, name: str) -> int:
        return self._counted()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted())

    def __len__(self) -> int:
        return len(self._counted())


class SelectionPolicy(ABC):
    """Chooses a drafter for every request that leaves the choice open."""

    name: ClassVar[str]

    @property
    def has_wishes(self) -> bool:
        """Whether it is worth asking for `replays` now."""
        return type(self).replays is not SelectionPolicy.replays

    @abstractmethod
    def select(self, states: Sequence[RequestState], work: SelectionWork) -> dict[str, str | None]:
        """A drafter's name, or None for no draft, by request id; asked once a round for each."""

    def observe(self, outcomes: Sequence[Outcome], work: SelectionWork) -> None:  # noqa: B027
        """Take in all verdicts of one target step."""

    def replays(self, states: Sequence[RequestState], work: SelectionWork) -> list[ReplayWish]:
        """What should be read beside drafting; the least important last."""
        return []

    def replayed(self, state: RequestState, replayed: Replayed) -> None:  # noqa: B027
        """Take in what a wish came to."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request has ended."""


def usable(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Those that can take a request now."""
    return {n: d for n, d in drafters.items() if d.up and not d.silent}
