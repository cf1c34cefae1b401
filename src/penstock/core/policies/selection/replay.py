"""Full information: every drafter is judged on the verified text, whichever drafter drafted it.

The idea of HedgeSpec (Liu et al., arXiv 2510.20064): verified text shows what any drafter would
have had accepted, at no cost to the target, so that nothing need be explored. Here evidence comes
from replays, which also leave a drafter's KV ready for a switch. Reading takes a drafter's time
though, and where it cannot pay for itself nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from penstock.core.policies.options import (
    LONGEST_DRAFT,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
)
from penstock.core.policies.selection import ReplayProposal, usable
from penstock.core.policies.selection.parts.goodput import RoundTimes, model_of
from penstock.core.policies.selection.parts.staged import (
    StagedPolicy,
    kept,
    rounds_ahead,
    step_times,
)
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed
from penstock.core.view import View

_POPULATION_DECAY = 0.999


@dataclass(slots=True)
class _Share:
    """Accepted of decided tokens."""

    accepted: float = 0.0
    decided: float = 0.0

    def add(self, accepted: float, decided: float) -> None:
        self.accepted += accepted
        self.decided += decided

    def fade(self, keep: float) -> None:
        """Count for less."""
        self.accepted *= keep
        self.decided *= keep

    def mean(self, prior: float, strength: float) -> float:
        """With a prior that is worth `strength` tokens; below 1."""
        return min((self.accepted + strength * prior) / (self.decided + strength), 0.99)


@dataclass(slots=True)
class _Record:
    """What a request has shown of each model, and the length of its stage. `promising`: in the
    stage that ends with round `asked`, what others might be better by, and their names."""

    shares: dict[str, _Share] = field(default_factory=dict)
    gap: int = 0
    asked: int = -1
    promising: list[tuple[float, str]] = field(default_factory=list)


class Replay(StagedPolicy):
    """The drafter with the greatest estimated goodput. Stages double, and before each decision the
    others read what they have missed. Drafters of their own lane read whenever they are idle.

    A `ratio` request leaves no evidence but that of its own drafts: what else would be unbiased
    needs target probabilities that are not kept.
    """

    name: ClassVar[str] = "replay"

    @dataclass(frozen=True, slots=True)
    class Options:
        """first_gap, longest_gap: rounds between a request's decisions, at first and at most.
        memory: tokens of a request after which evidence has faded to 1/e. prior_tokens: of its own,
        what the share of all requests counts as. optimism: standard deviations by which a drafter
        might be better than it seems; one that even then would not pay for its reading is not
        asked. k_max: the longest draft that a worth is computed for."""

        first_gap: PositiveInt = 2
        longest_gap: PositiveInt = 16
        memory: Annotated[float, Range(at_least=1)] = 200.0
        prior_tokens: PositiveFloat = 8.0
        optimism: NonNegativeFloat = 1.0
        k_max: Annotated[int, Range(at_least=1, at_most=LONGEST_DRAFT)] = 8

        def __post_init__(self) -> None:
            if self.first_gap > self.longest_gap:
                raise ValueError(
                    "first_gap must be at most longest_gap, "
                    f"not {self.first_gap} against {self.longest_gap}"
                )

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self._keep = math.exp(-1 / options.memory)
        self._records: dict[str, _Record] = {}
        self._population: dict[str, _Share] = {}
        self._models: dict[str, str] = {}

    # --- choosing -------------------------------------------------------------------------------

    def worth(
        self, state: RequestState, drafters: Sequence[Drafter], times: RoundTimes
    ) -> list[float]:
        return [
            self._goodput(state, d, times) * kept(state, d, times, rounds_ahead(state))
            for d in drafters
        ]

    def rounds(self, state: RequestState, drafter: Drafter | None) -> int:
        record = self._records.setdefault(state.request.id, _Record())
        record.gap = min(max(self.options.first_gap, 2 * record.gap), self.options.longest_gap)
        return record.gap

    def _goodput(
        self, state: RequestState, drafter: Drafter, times: RoundTimes, optimism: float = 0.0
    ) -> float:
        rate = self._rate(state.request.id, model_of(drafter), optimism)
        return times.expected(state, drafter, rate, self.options.k_max)

    def _rate(self, request_id: str, model: str, optimism: float) -> float:
        """Estimated acceptance of a token."""
        record = self._records.get(request_id)
        own = record.shares.get(model, _NOTHING) if record is not None else _NOTHING
        strength = self.options.prior_tokens
        prior = self._population.get(model, _NOTHING).mean(_PRIOR_MEAN, 1.0)
        mean = own.mean(prior, strength)
        deviation = math.sqrt(mean * (1 - mean) / (own.decided + strength + 1))
        return min(mean + optimism * deviation, 0.99)

    # --- replays --------------------------------------------------------------------------------

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        drafters = usable(view.drafters)
        beside = view.beside & drafters.keys()
        proposals = []
        times = None
        for state in states:
            record = self._records.get(state.request.id)
            is_last = self._is_last_round(state)
            if record is None or not (beside or is_last):
                continue
            until = self._until[state.request.id]
            if record.asked != until:
                # Lanes ask again and again.
                times = times or step_times(states, view)
                record.asked = until
                record.promising = self._promising(state, drafters, view, times)
            proposals += [
                (gain, ReplayProposal(state, name, evaluate=True))
                for gain, name in record.promising
                if name in drafters and (is_last or name in beside)
            ]
        proposals.sort(key=lambda proposal: -proposal[0])
        return [proposal for _, proposal in proposals]

    def _promising(
        self,
        state: RequestState,
        drafters: Mapping[str, Drafter],
        view: View,
        times: RoundTimes,
    ) -> list[tuple[float, str]]:
        """Those that might be better by more than their reading costs."""
        drafter = view.drafters.get(state.drafter or "")
        own = 0.0 if drafter is None else self._goodput(state, drafter, times)
        best = max(own, times.alone)
        found = []
        for other in self._others(state, drafters):
            bound = self._goodput(state, other, times, self.options.optimism)
            gain = bound * kept(state, other, times, rounds_ahead(state)) - best
            if gain > 0:
                found.append((gain, other.name))
        return found

    def _is_last_round(self, state: RequestState) -> bool:
        return self._until.get(state.request.id, 0) - state.round <= 1

    def _others(self, state: RequestState, drafters: Mapping[str, Drafter]) -> list[Drafter]:
        """One drafter of every other model, the one that has read some of the text if any has."""
        found: dict[str, Drafter] = {}
        for name, drafter in drafters.items():
            if drafter.remote:
                continue
            known = found.setdefault(model_of(drafter), drafter)
            if name in state.kv and known.name not in state.kv:
                found[model_of(drafter)] = drafter
        own = drafters.get(state.drafter or "")
        if own is not None:
            found.pop(model_of(own), None)
        return list(found.values())

    # --- learning -------------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        for drafter in view.drafters.values():
            self._models[drafter.name] = model_of(drafter)
        self._age(outcomes)
        for state, verdict in outcomes:
            if verdict.drafter is not None and verdict.num_decided:
                self._note(state, verdict.drafter, verdict.evidence, verdict.num_decided)

    def _age(self, outcomes: Sequence[Outcome]) -> None:
        """Every verified token makes all that is known count for less, also of drafters that nobody
        uses or asks: what they showed long ago must not be held against them for ever."""
        num_tokens = sum(len(o.verdict.token_ids) for o in outcomes)
        for share in self._population.values():
            share.fade(_POPULATION_DECAY**num_tokens)
        for state, verdict in outcomes:
            record = self._records.get(state.request.id, _UNKNOWN)
            for share in record.shares.values():
                share.fade(self._keep ** len(verdict.token_ids))

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        if replayed.num_tokens:
            self._note(state, replayed.drafter, replayed.num_matched, replayed.num_tokens)

    def _note(self, state: RequestState, drafter: str, accepted: float, decided: int) -> None:
        model = self._models.get(drafter, drafter)
        self._population.setdefault(model, _Share()).add(accepted, decided)
        record = self._records.get(state.request.id)
        if record is not None:
            record.shares.setdefault(model, _Share()).add(accepted, decided)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._records.pop(request_id, None)


_NOTHING = _Share()
_UNKNOWN = _Record()
_PRIOR_MEAN = 0.7

POLICY = Replay
