"""Base classes of the four kinds of policies, and what they see of the scheduler.

A policy is one file with a `name`, an `Options` dataclass and the required methods of its kind.
Everything that a `View` gives is read-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.queues import ArrivalQueue, OrderName, make_queue
from penstock.core.state import Drafter, Grant, Outcome, RequestState
from penstock.core.step import Step
from penstock.core.types import Replayed, StepResult, Tenant
from penstock.fluid.shares import max_min_shares

_ROUNDING = 1e-9


class DraftCandidate(NamedTuple):
    """A request that could draft with `drafter`, at most `limit` tokens this round, of which the
    first `num_at_hand` need not be waited for."""

    state: RequestState
    drafter: str
    limit: int
    num_at_hand: int = 0


class Room(NamedTuple):
    """What the step holds besides drafts: `budget` draft positions may join the `num_rows` target
    positions that are certain, of which `num_sampled` end in a token."""

    budget: int = 0
    num_rows: int = 0
    num_sampled: int = 0


NO_ROOM = Room()


@dataclass(frozen=True, slots=True)
class View:
    """The moment of a decision. drafters: by name; some may be down or silent. loads: running
    requests by drafter's name, those to be decided on included. beside: drafters with lanes of
    their own, which work at the same time as the target. room: of the step that is composed.
    is_fair: what is short is shared out between tenants, by weight."""

    drafters: Mapping[str, Drafter]
    learn: Estimators
    now: float = 0.0
    loads: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    room: Room = NO_ROOM
    is_fair: bool = False

    def is_beside(self, drafter: Drafter) -> bool:
        """Whether it works beside the target, not inside its step."""
        return drafter.name in self.beside

    def budgets(
        self, candidates: Sequence[DraftCandidate], wanted: Sequence[int]
    ) -> list[tuple[list[int], int]]:
        """Groups of candidates, by index, each with its part of the budget: one group with all of
        it, or where it is short of what is wanted and tenants share it, weighted max-min fair
        parts of a group for each tenant."""
        everybody = [(list(range(len(candidates))), self.room.budget)]
        if not self.is_fair or sum(wanted) <= self.room.budget:
            return everybody
        groups: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            groups.setdefault(candidate.state.request.tenant, []).append(i)
        if len(groups) == 1:
            return everybody
        demands = np.array([sum(wanted[i] for i in g) for g in groups.values()], dtype=float)
        weights = np.array([self.tenants[name].weight for name in groups])
        shares = max_min_shares(self.room.budget, demands, weights)
        budgets = np.floor(shares + _ROUNDING)
        # What rounding leaves goes to those from whom it took most.
        left = self.room.budget - int(budgets.sum())
        for i in np.argsort(budgets - shares, kind="stable")[:left]:
            budgets[i] += 1
        return [(g, int(b)) for g, b in zip(groups.values(), budgets, strict=True)]


class Loads(Mapping[str, int]):
    """Running requests by drafter's name, counted on first use."""

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


class AdmissionPolicy(ABC):
    """Base of admission policies; only `compose` is required."""

    name: ClassVar[str]
    cuts_prompts: bool = True
    """Whether it may schedule part of a prompt; if not, a step must have room for all of it."""
    may_idle: bool = False
    """Whether it may leave requests waiting for ever, as a paper's rule to the letter may. Fairness
    between tenants does not apply to such a policy."""
    order: OrderName = "arrival"
    """In which order the requests of a queue are tried."""
    token_budget = 0
    """Positions of a step, drafts included; 0: no speculation."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def compose(self, step: Step) -> None:
        """Schedule the step."""

    def is_steady(self, step: Step) -> bool:
        """Whether `compose`, asked again for the step after this one, would do the same as long as
        no request arrives or ends: then many steps are planned at once where nothing else
        happens in them."""
        return False

    def draft_budget(self, num_tokens: int) -> int:
        """Draft positions that may join a step of so many known tokens."""
        return max(0, self.token_budget - num_tokens)

    def queue_of(self, state: RequestState) -> Hashable:
        """Key of the queue in which a request waits."""
        return None

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        """What keeps a waiting request out for longer than a step, as `Step.shortage`."""
        return step.shortage(state)

    def new_queue(self, estimators: Estimators) -> ArrivalQueue:
        """An empty queue, which keeps the order."""
        return make_queue(self.order, estimators)


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


class Pipeline(ABC):
    """Decides whom a lane drafts for, whether the target waits for drafts, and for which."""

    name: ClassVar[str]

    @dataclass(frozen=True, slots=True)
    class Options:
        """None."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def drafts_beside(self) -> bool:
        """Whether the drafters of this machine that have lanes use them; else they draft inside the
        target's step. It may change when a step has ended."""
        return True

    def divide(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Take in who drafts in a lane now: decoding requests with their drafters."""

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """For whom a lane drafts in its next step, of those whose drafts are due."""
        return due

    @abstractmethod
    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        """Until when to wait, unless a draft comes or is given up before; None: verify now.

        ready: decoding requests that the target could verify, with or without a draft; pending:
        those whose drafts are on their way."""

    def joins(self, state: RequestState) -> bool:
        """Whether a request may be verified in the step that `hold_until` let start."""
        return True

    def stepped(  # noqa: B027
        self, running: Iterable[RequestState], view: View, result: StepResult
    ) -> None:
        """A target step has ended."""
