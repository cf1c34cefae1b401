"""Shared inputs of all phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.fairness import Fairness
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp
from penstock.core.policies.base import (
    NO_ROOM,
    AdmissionPolicy,
    AllocationPolicy,
    Loads,
    Pipeline,
    Room,
    SelectionPolicy,
    View,
)
from penstock.core.state import Drafter, DraftStage, RequestState
from penstock.core.table import Table
from penstock.core.trials import Trials


@dataclass(frozen=True, slots=True)
class Context:
    """The table, the policies and the estimators.

    trials: draft rounds with unused drafters; None where no policy weighs time. fairness: between
    tenants; None where it is off. groups_decodes: requests decode in groups, if they may.
    max_num_seqs, max_draft_tokens: requests, and tokens of one draft, that the executor has room
    for. look_up: in texts; None where there is none."""

    table: Table
    learn: Estimators
    admission: AdmissionPolicy
    selection: SelectionPolicy
    allocation: AllocationPolicy
    pipeline: Pipeline
    trials: Trials | None
    fairness: Fairness | None
    max_model_len: int
    groups_decodes: bool
    max_num_seqs: float
    max_draft_tokens: int
    look_up: LookUp | None

    @property
    def may_draft(self) -> bool:
        """True if requests may have drafts, those of predictions aside."""
        return bool(self.table.drafters) or self.look_up is not None

    @property
    def uses_lanes(self) -> bool:
        """True if a drafter drafts beside the target."""
        return bool(self.beside)

    @property
    def beside(self) -> frozenset[str]:
        """Drafters that work in lanes beside the target."""
        table, lanes = self.table, self.pipeline.drafts_beside
        known = table.beside.get(lanes)
        if known is None:
            own = [n for n, d in table.drafters.items() if d.is_remote or (lanes and d.has_lane)]
            known = table.beside[lanes] = frozenset(own)
        return known

    def is_beside(self, drafter: Drafter) -> bool:
        """Return True if the drafter works in a lane beside the target."""
        return drafter.is_remote or (drafter.has_lane and self.pipeline.drafts_beside)

    def divide(self) -> list[RequestState]:
        """Tell the pipeline which decoding requests draft in lanes, and return them."""
        beside = {n for n in self.beside if self.table.drafters[n].is_up}
        running = self.table.running.values()
        states = [s for s in running if s.drafter in beside and s.is_decoding]
        self.pipeline.divide(states)
        return states

    def is_ready(self, state: RequestState) -> bool:
        """Return True if the target may take a request now: no draft of it is due or on its way."""
        if state.in_flight:
            return False
        stage = state.draft.stage
        if stage is DraftStage.ORDERED:
            return False
        if not state.drafter:
            return True
        drafter = self.table.drafter_of(state)
        if drafter is None or not self.is_beside(drafter):
            return True
        return stage in (DraftStage.HELD, DraftStage.SKIPPED) or not state.is_decoding

    def may_run(self, state: RequestState) -> bool:
        """Return True if a running request may join the step that is composed."""
        paused = self.table.accounts.paused
        if paused and state.request.id in paused:
            return False
        return self.is_ready(state) and self.pipeline.joins(state)

    def view(self, drafters: Mapping[str, Drafter], now: float, room: Room = NO_ROOM) -> View:
        """Return a policy's view, with these drafters only."""
        table = self.table
        return View(
            drafters,
            self.learn,
            now,
            Loads(table.running),
            table.tenants,
            self.beside,
            room,
            self.fairness is not None,
        )
