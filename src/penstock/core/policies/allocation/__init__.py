"""How many tokens each request may draft in a round. One file a policy, with `name`, an `Options`
dataclass and `allocate(candidates, view)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from penstock.core.state import Outcome, RequestState
from penstock.core.view import DraftCandidate, View


class Grant(NamedTuple):
    """What one request may draft: so many tokens, but none once the predicted probability that all
    of them are accepted falls under `min_survival`."""

    num_draft_tokens: int
    min_survival: float = 0.0


class AllocationPolicy(ABC):
    """Decides how many tokens each request may draft. weighs_time: it grants nothing where drafting
    takes longer than it saves; drafters without grants are then measured by `Trials`."""

    name: ClassVar[str]
    weighs_time: ClassVar[bool] = False

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        """A grant for each candidate, together within `view.room.budget`. Where drafters have
        lanes of their own the candidates are all requests that speculate, whether or not they may
        start a draft now: the same prices hold for everybody."""

    def reserve(self, state: RequestState) -> int:
        """Most tokens that a request would ever be granted: by default the option `k_max`."""
        return int(self.options.k_max)

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:  # noqa: B027
        """Take in all verdicts of one target step."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """A request is over."""
