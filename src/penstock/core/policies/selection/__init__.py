"""Which drafter a request gets. One file a policy, with `name`, an `Options` dataclass and
`select(states, view)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed
from penstock.core.view import View


@dataclass(frozen=True, slots=True)
class ReplayProposal:
    """A drafter should read a request's verified text, if it has time: to have its KV ready, or
    also to `evaluate` what it would have drafted."""

    state: RequestState
    drafter: str
    evaluate: bool = False


class SelectionPolicy(ABC):
    """Chooses a drafter for every request that leaves the choice open. weighs_time: it leaves out
    drafters that take longer than they save; those without requests are then measured by `Trials`.
    """

    name: ClassVar[str]
    weighs_time: ClassVar[bool] = False

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def proposes_replays(self) -> bool:
        """Whether it is worth asking for `replays` now."""
        return type(self).replays is not SelectionPolicy.replays

    @abstractmethod
    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        """A drafter's name, or None for no draft, by request id; asked once a round for each."""

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:  # noqa: B027
        """Take in all verdicts of one target step."""

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        """What should be read beside drafting; the least important last."""
        return []

    def replayed(self, state: RequestState, replayed: Replayed) -> None:  # noqa: B027
        """Take in the result of a replay."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request has ended."""


def usable(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Those that can take a request now."""
    return {n: d for n, d in drafters.items() if d.up and not d.silent}
