"""What every phase of the loop works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.learn import Estimators
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.allocation import AllocationPolicy
from penstock.core.policies.pipeline import Pipeline
from penstock.core.policies.selection import SelectionPolicy
from penstock.core.state import Drafter, DraftStage, RequestState
from penstock.core.table import Table
from penstock.core.tenants.fairness import Fairness
from penstock.core.trials import Trials
from penstock.core.view import NO_ROOM, Loads, Room, View


@dataclass(frozen=True, slots=True)
class Context:
    """The table, the policies and what was learned. fairness: None where it is off. counted:
    requests of which only lengths are known decode in groups. runs_ahead: the executor begins the
    next round before it is planned, for which blocks are kept where there are. max_num_seqs: the
    executor's room."""

    table: Table
    learn: Estimators
    admission: AdmissionPolicy
    selection: SelectionPolicy
    allocation: AllocationPolicy
    pipeline: Pipeline
    trials: Trials
    fairness: Fairness | None
    max_model_len: int
    counted: bool
    runs_ahead: bool
    max_num_seqs: float

    @property
    def uses_lanes(self) -> bool:
        """Whether anybody may draft beside the target."""
        drafters = self.table.drafters
        return bool(drafters) and any(d.has_lane or d.remote for d in drafters.values())

    def is_beside(self, drafter: Drafter) -> bool:
        """Whether it works beside the target, in a lane, and not inside the target's step."""
        return drafter.remote or (drafter.has_lane and self.pipeline.drafts_beside)

    def has_draft(self, state: RequestState) -> bool:
        """Whether a request waits for nothing but its verification, or its prefill."""
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
        """Whether a running request may join the step that is composed."""
        paused = self.table.accounts.paused
        if paused and state.request.id in paused:
            return False
        return self.has_draft(state) and self.pipeline.joins(state)

    def view(self, drafters: Mapping[str, Drafter], now: float, room: Room = NO_ROOM) -> View:
        """What a policy may see, with these drafters only."""
        table = self.table
        return View(
            drafters,
            self.learn,
            now,
            Loads(table.running),
            table.tenants,
            frozenset([n for n, d in table.drafters.items() if self.is_beside(d)]),
            room,
            self.fairness is not None,
        )
