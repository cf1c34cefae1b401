"""Base classes of the four kinds of policies, and what they see of the scheduler.

A policy is one file with a `name`, an `Options` dataclass and the required methods of its kind.
Everything that a `View` gives is read-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.policies.declared import Gauge, LimitOptions, ThresholdOptions
from penstock.core.queues import ArrivalQueue, OrderName, make_queue
from penstock.core.state import Drafter, Grant, Outcome, RequestState
from penstock.core.step import Step
from penstock.core.types import Replayed, StepResult, Tenant
from penstock.fluid.shares import max_min_shares

MOST_DRAFT_TOKENS = 64
"""Longest draft of a request, looked-up tokens included: more rows cost as much as they save."""
_ROUNDING = 1e-9


class DraftCandidate(NamedTuple):
    """A request that could draft in this round.

    limit: of its drafter's tokens, of which the first `num_at_hand` were sent ahead. survival: of
    looked-up tokens, which come before these. most: tokens of both together."""

    state: RequestState
    drafter: str | None
    limit: int
    num_at_hand: int = 0
    survival: Sequence[float] = ()
    most: int = 1 << 20

    @property
    def longest(self) -> int:
        """Longest draft."""
        return min(self.most, len(self.survival) + self.limit)

    def grant(self, num_tokens: int) -> Grant:
        """Return a draft of so many tokens: looked-up ones, then the drafter's."""
        num_looked_up = min(num_tokens, len(self.survival))
        return Grant(min(self.limit, num_tokens - num_looked_up), num_looked_up=num_looked_up)


class Room(NamedTuple):
    """Contents of the step besides drafts.

    budget: draft positions that may join. num_rows: target positions that are certain, of which
    `num_sampled` yield a token."""

    budget: int = 0
    num_rows: int = 0
    num_sampled: int = 0


NO_ROOM = Room()


class View(NamedTuple):
    """Read-only state at the moment of a decision.

    drafters: by name; some may be down or silent. loads: running requests by drafter, those to be
    decided on included. beside: drafters with lanes of their own. room: of the step that is
    composed. is_fair: scarce resources are divided between tenants by weight."""

    drafters: Mapping[str, Drafter]
    learn: Estimators
    now: float = 0.0
    loads: Mapping[str, int] = MappingProxyType({})
    tenants: Mapping[str, Tenant] = MappingProxyType({})
    beside: frozenset[str] = frozenset()
    room: Room = NO_ROOM
    is_fair: bool = False

    def is_beside(self, drafter: Drafter) -> bool:
        """Return True if the drafter works in a lane beside the target."""
        return drafter.name in self.beside

    def budgets(
        self, candidates: Sequence[DraftCandidate], wanted: Sequence[int]
    ) -> list[tuple[list[int], int]]:
        """Return groups of candidates, by index, each with its part of the draft budget.

        One group gets all of it, unless it is short of `wanted` and tenants share it: then each
        tenant's group gets a weighted max-min fair part."""
        whole = [(list(range(len(candidates))), self.room.budget)]
        if not self.is_fair or sum(wanted) <= self.room.budget:
            return whole
        groups: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            groups.setdefault(candidate.state.request.tenant, []).append(i)
        if len(groups) == 1:
            return whole
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
        self._counts: dict[str, int] | None = None

    def _counted(self) -> dict[str, int]:
        if self._counts is None:
            counts = self._counts = {}
            for state in self._running.values():
                if state.drafter:
                    counts[state.drafter] = counts.get(state.drafter, 0) + 1
        return self._counts

    def __getitem__(self, name: str) -> int:
        return self._counted().get(name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted())

    def __len__(self) -> int:
        return len(self._counted())


Gauges = Mapping[str, Any]
"""Numbers behind a policy's last decisions, by name; what it does not know is left out."""


class Policy:
    """Base of the four kinds."""

    metrics: ClassVar[tuple[Gauge, ...]] = ()
    """Gauges of `gauges` that `/metrics` shows; the others, as by request, explain simulations."""
    limits: ClassVar[LimitOptions] = LimitOptions()
    """Options that a host or a plan may set or lower."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def gauges(self) -> Gauges:
        """Numbers behind the last decisions, worked out when they are read."""
        return {}


class AdmissionPolicy(Policy, ABC):
    """Composes the target's step: schedules, admits and preempts. Only `compose` is required."""

    name: ClassVar[str]
    may_idle: bool = False
    """True if it may leave requests waiting forever, as a paper's exact rule may.

    Fairness between tenants does not apply to such a policy."""
    order: OrderName = "arrival"
    """Order in which the requests of a queue are tried."""
    token_budget = 0
    """Positions of a step, drafts included; 0: no speculation."""
    thresholds: ClassVar[ThresholdOptions | None] = None
    """Options with thresholds that a plan works out; None: it has none."""

    @abstractmethod
    def compose(self, step: Step) -> None:
        """Schedule the step."""

    def is_steady(self, step: Step) -> bool:
        """Return True if `compose` would repeat itself unless a request arrives or ends.

        Several steps are then planned at once."""
        return False

    def draft_budget(self, num_tokens: int) -> int:
        """Return the draft positions that may join a step of `num_tokens` known tokens."""
        return max(0, self.token_budget - num_tokens)

    def queue_of(self, state: RequestState) -> Hashable:
        """Return the key of the queue in which a request waits."""
        return None

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        """Return what keeps a request waiting for longer than a step, as `Step.shortage`."""
        return step.shortage(state)

    def new_queue(self, estimators: Estimators) -> ArrivalQueue:
        """Return an empty queue of the policy's order."""
        return make_queue(self.order, estimators)


@dataclass(frozen=True, slots=True)
class ReplayProposal:
    """A proposal that a drafter with time to spare reads a request's verified text.

    evaluate: also count the tokens that it would have drafted."""

    state: RequestState
    drafter: str
    evaluate: bool = False


class SelectionPolicy(Policy, ABC):
    """Chooses a drafter for every request that leaves the choice open.

    weighs_time: it leaves out drafters that take longer than they save; those without requests are
    then measured by `Trials`."""

    name: ClassVar[str]
    weighs_time: ClassVar[bool] = False

    @property
    def proposes_replays(self) -> bool:
        """True if `replays` is worth a call now."""
        return type(self).replays is not SelectionPolicy.replays

    @abstractmethod
    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        """Return a drafter's name (None: no draft) by request id; called once a round for each."""

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        """Take in all verdicts of one target step."""

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        """Return proposals, the least important last."""
        return []

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        """Take in the result of a replay."""

    def release_request(self, request_id: str) -> None:
        """Drop the state of an ended request."""


def usable(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Return the drafters that can take a request now."""
    return {n: d for n, d in drafters.items() if d.is_up}


class AllocationPolicy(Policy, ABC):
    """Decides how many tokens each request may draft.

    weighs_time: it grants nothing where drafting takes longer than it saves; drafters without
    grants are then measured by `Trials`."""

    name: ClassVar[str]
    weighs_time: ClassVar[bool] = False

    @abstractmethod
    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        """Return a grant for each candidate, together within `view.room.budget`.

        With drafters in lanes the candidates are all requests that speculate, whether or not they
        may start a draft now: the same prices hold for all."""

    def reserve(self, state: RequestState) -> int:
        """Return the positions to keep free for a request's draft: by default the option `k_max`.

        A longer one of looked-up tokens takes what is free."""
        return int(self.options.k_max)

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        """Take in all verdicts of one target step."""

    def release_request(self, request_id: str) -> None:
        """Drop the state of an ended request."""


class Pipeline(Policy, ABC):
    """Decides when drafters draft, whether the target waits, and which drafts it verifies.

    Admission decides which requests join the step."""

    name: ClassVar[str]

    @dataclass(frozen=True, slots=True)
    class Options:
        """No options."""

    @property
    def drafts_beside(self) -> bool:
        """True if local drafters with lanes use them; else they draft inside the target's step.

        It may change when a step has ended."""
        return True

    def divide(self, states: Sequence[RequestState]) -> None:
        """Take in the decoding requests whose drafters work in lanes."""

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """Return the requests of a lane's next step, of those whose drafts are due."""
        return due

    @abstractmethod
    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        """Return the time until which the target waits for drafts; None: verify now.

        It ends early when a draft comes or is given up. ready: decoding requests that the target
        could verify, with or without a draft; pending: those whose drafts are on their way."""

    def joins(self, state: RequestState) -> bool:
        """Return True if a request may be verified in the step that `hold_until` let start."""
        return True

    def stepped(self, running: Iterable[RequestState], view: View, result: StepResult) -> None:
        """Take in the end of a target step."""
