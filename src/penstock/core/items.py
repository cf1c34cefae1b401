"""The verify items of a step: what was scheduled, with the drafts that join it."""

from __future__ import annotations

from penstock.core.blocks import BlockPool
from penstock.core.drafting import Drafting
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.allocation import Grant
from penstock.core.state import CHOSEN, DraftStage
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import TARGET, DraftOrder, DraftSource, VerifyItem

_NOTHING = Grant(0)


class ItemWriter:
    """Gives every scheduled request its draft, and room in the target's KV for it."""

    def __init__(
        self,
        pool: BlockPool,
        drafting: Drafting,
        admission: AdmissionPolicy,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._pool = pool
        self._drafting = drafting
        self._admission = admission
        self._runs_ahead = runs_ahead

    def items(self, step: Step) -> tuple[VerifyItem, ...]:
        """In the order of scheduling."""
        scheduled = list(step.scheduled.values())
        grants = self._grants(step, scheduled) if self._drafting.drafters else {}
        items = [self._item(s, grants.get(s.state.request.id, _NOTHING)) for s in scheduled]
        if self._runs_ahead:
            items = [
                self._with_room_ahead(s, item, len(step.running))
                for s, item in zip(scheduled, items, strict=True)
            ]
        return tuple(items)

    def _grants(self, step: Step, scheduled: list[ScheduledTokens]) -> dict[str, Grant]:
        """Draft lengths by request: held drafts as far as the step's budget goes, then what drafts
        inside this step."""
        num_rows = step.num_tokens
        budget = self._admission.draft_budget(num_rows)
        grants: dict[str, Grant] = {}
        inline = []
        for s in scheduled:
            drafter = self._drafting.drafter_of(s.state)
            if s.state.draft.stage is DraftStage.HELD:
                length = min(s.state.draft.num_draft_tokens, budget)
                grants[s.state.request.id] = Grant(length)
                budget -= length
                num_rows += length
            elif drafter is not None and not self._drafting.is_beside(drafter):
                inline.append(s.state)
        num_sampled = sum(s.samples for s in scheduled)
        return grants | self._drafting.allocate(inline, budget, num_rows, num_sampled, step.now)

    def _item(self, scheduled: ScheduledTokens, grant: Grant) -> VerifyItem:
        length = 0
        state = scheduled.state
        source, order, drafter = DraftSource.NONE, None, None
        is_held = state.draft.stage is DraftStage.HELD
        if is_held and scheduled.samples:
            length = self._grow_for_draft(scheduled, grant.num_draft_tokens)
            if length:
                source, drafter = DraftSource.HELD, state.drafter
        elif state.drafter:
            inline = self._drafting.drafter_of(state)
            if inline is not None and not self._drafting.is_beside(inline):
                order = self._inline_order(scheduled, grant)
            length = order.max_draft_tokens if order is not None else 0
            if length:
                source, drafter = DraftSource.INLINE, state.drafter
        if is_held:
            state.draft = CHOSEN
        return VerifyItem(
            state.request.id,
            state.epoch,
            state.round,
            scheduled.start,
            scheduled.num_tokens,
            scheduled.samples,
            source,
            drafter,
            length,
            order,
            tuple(scheduled.new_blocks),
        )

    def _inline_order(self, scheduled: ScheduledTokens, grant: Grant) -> DraftOrder | None:
        """A draft. What the drafter has not read of the prompt it reads then: many requests never
        draft, or with another one."""
        state = scheduled.state
        if not grant.num_draft_tokens:
            return None
        length = self._grow_for_draft(scheduled, grant.num_draft_tokens)
        known = scheduled.start + scheduled.num_tokens
        return self._drafting.order(state, known, grant._replace(num_draft_tokens=length))

    def _grow_for_draft(self, scheduled: ScheduledTokens, length: int) -> int:
        """Room in the target's KV for as much of a draft as fits into free blocks."""
        blocks = scheduled.state.kv_of(TARGET).blocks
        end = scheduled.start + scheduled.num_tokens
        block_size = self._pool.block_size
        if end + length <= len(blocks) * block_size:
            return length
        length = min(length, (len(blocks) + self._pool.num_free_blocks) * block_size - end)
        self._grow(scheduled, end + length)
        return length

    def _with_room_ahead(
        self, scheduled: ScheduledTokens, item: VerifyItem, num_kept_free: int
    ) -> VerifyItem:
        """With room for the next round too, in which the draft may be as long, if more blocks than
        `num_kept_free` are free."""
        most = item.start + item.num_scheduled_tokens + 2 * item.num_draft_tokens + 1
        missing = self._pool.blocks_for(most) - scheduled.state.kv_of(TARGET).num_blocks
        if missing <= 0 or not item.samples or not self._pool.can_allocate(missing + num_kept_free):
            return item
        self._grow(scheduled, most)
        return item._replace(new_blocks=tuple(scheduled.new_blocks))

    def _grow(self, scheduled: ScheduledTokens, num_tokens: int) -> None:
        kv = scheduled.state.kv_of(TARGET)
        missing = self._pool.blocks_for(num_tokens) - kv.num_blocks
        scheduled.new_blocks += kv.grow(self._pool, missing)
