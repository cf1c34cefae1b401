"""Carries out plans with real models in this process: draft, verify in one ragged batch, sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.core.ports import Clock
from penstock.core.types import (
    TARGET,
    DraftOrder,
    DraftReady,
    DraftSource,
    DraftTime,
    PhaseTimes,
    StepPlan,
    StepResult,
    TokenLogprob,
    Verdict,
    VerifyItem,
)
from penstock.core.work import step_work
from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.drafters.base import Draft, Drafts, LocalDrafter
from penstock.engine.remote import HeldDrafts, RemoteOrders, Weights
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, VerifyBatch, sample_coupled, token_logprobs, verify
from penstock.engine.sequences import BlockTables, TokenBuffer, sampling_rows, uses_ratio

_NO_DRAFT = Draft([], [])


@dataclass(slots=True)
class _Drafted:
    """Drafts at hand for a step: by request, with the distributions of each drafter's batch."""

    by_request: dict[str, tuple[Draft, int]] = field(default_factory=dict)
    probs: list[torch.Tensor] = field(default_factory=list)
    num_probs: int = 0
    times: list[DraftTime] = field(default_factory=list)

    def add(self, orders: Sequence[DraftOrder], drafts: Drafts) -> None:
        for order, draft in zip(orders, drafts.drafts, strict=True):
            self.by_request[order.request_id] = (draft, self.num_probs)
        if drafts.probs is not None:
            self.probs.append(drafts.probs)
            self.num_probs += drafts.probs.shape[0]

    def hold(self, request_id: str, draft: Draft, probs: torch.Tensor | None) -> None:
        """Bring in a draft that was made in an earlier step."""
        self.by_request[request_id] = (draft, self.num_probs)
        if probs is not None:
            self.probs.append(probs)
            self.num_probs += probs.shape[0]

    def draft_of(self, item: VerifyItem) -> tuple[list[int], list[int]]:
        """Token ids, and rows of the joined `probs`, of an item's draft."""
        draft, offset = self.by_request.get(item.request_id, (_NO_DRAFT, 0))
        rows = [r if r < 0 else r + offset for r in draft.prob_rows]
        return draft.token_ids[: item.num_draft_tokens], rows[: item.num_draft_tokens]

    def joined_probs(self) -> torch.Tensor | None:
        return torch.cat(self.probs) if self.probs else None


class LocalExecutor:
    """Target and drafters on one device, one plan after the other."""

    def __init__(
        self,
        target: ModelRunner,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        sample: Sampler = sample_coupled,
    ) -> None:
        self.target = target
        self.drafters = {d.name: d for d in drafters}
        self._clock = clock
        self._sample = sample
        self._tables = BlockTables(-(-max_model_len // target.block_size) + 1)
        self._texts: dict[str, TokenBuffer] = {}
        self._held = HeldDrafts()
        self.remote = RemoteOrders()
        self._queue: deque[StepPlan] = deque()
        self._sent: list[StepResult] = []
        self.busy_s = 0.0
        """Seconds spent inside models and samplers; the rest of a turn is the host's."""
        self.phases = PhaseTimes()
        """Seconds of all target steps so far, by phase."""
        self.num_target_steps = 0

    def ready(self, lane: str) -> bool:
        return not self._queue

    def submit(self, plan: StepPlan) -> None:
        for request_id, pool in plan.released:
            if pool == TARGET:
                self._tables.drop(request_id)
            else:
                self.drafters[pool].drop_table(request_id)
        for request_id in plan.forgotten:
            self._forget(request_id)
        # Last, because an id may come back in the very plan that forgets it.
        for request in plan.new_requests:
            self._texts[request.id] = TokenBuffer(request)
        if plan.lane != TARGET and plan.lane not in self.drafters:
            self._send(plan)
        elif not plan.is_empty:
            self._queue.append(plan)

    def text_of(self, request_id: str) -> TokenBuffer | None:
        """A request's verified text, if there is such a request."""
        return self._texts.get(request_id)

    def hold_remote(
        self,
        request_id: str,
        epoch: int,
        round_: int,
        token_ids: Sequence[int],
        weights: Sequence[Weights] | None,
    ) -> None:
        """Keep a draft server's draft until its verification; whatever is late is dropped in time.
        The token ids must lie in the vocabulary. weights: one for each token; None for a draft that
        is compared with the target's own sample."""
        if request_id in self._texts:
            draft = Draft(list(token_ids), [-1] * len(token_ids))
            self._held.hold(request_id, epoch, round_, draft, weights=weights)

    def collect(self) -> list[StepResult]:
        results, self._sent = self._sent, []
        while self._queue:
            plan = self._queue.popleft()
            with torch.inference_mode():
                result = self._run(plan)
            phases = result.phases
            self.busy_s += phases.draft + phases.verify + phases.sample
            if plan.items:
                self.num_target_steps += 1
                self.phases = PhaseTimes(*map(sum, zip(self.phases, phases, strict=True)))
            results.append(result)
        return results

    def _forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._tables.drop(request_id)
        for drafter in self.drafters.values():
            drafter.forget(request_id)
        self._held.forget(request_id)
        self.remote.forget(request_id)

    def _send(self, plan: StepPlan) -> None:
        """A draft server's lane: the orders go out, and their drafts come as events, or never."""
        now = self._clock.now()
        self.remote.send(plan.drafts, self._texts, now)
        if plan.drafts:
            self._sent.append(
                StepResult(plan_id=plan.id, lane=plan.lane, started_at=now, finished_at=now)
            )

    def _run(self, plan: StepPlan) -> StepResult:
        started_at = self._clock.now()
        orders = [*plan.drafts, *(i.draft for i in plan.items if i.draft is not None)]
        drafted = self._draft(orders)
        ready = tuple(self._hold(order, drafted) for order in plan.drafts)
        drafted_at = self._clock.now()
        if not plan.items:
            phases = PhaseTimes(draft=drafted_at - started_at)
            return StepResult(
                plan_id=plan.id,
                lane=plan.lane,
                started_at=started_at,
                finished_at=drafted_at,
                drafts=ready,
                phases=phases,
                draft_times=tuple(drafted.times),
            )
        receive = started_at - self.remote.oldest(plan.items, started_at)
        self._recall(plan.items, drafted)
        drafts = [drafted.draft_of(item) for item in plan.items]
        batch = self._batch(plan.items, [tokens for tokens, _ in drafts])
        built_at = self._clock.now()
        logits = self.target.forward(batch)
        verified_at = self._clock.now()
        verdicts = self._verdicts(plan.items, drafts, logits, drafted.joined_probs())
        finished_at = self._clock.now()
        return StepResult(
            plan_id=plan.id,
            lane=plan.lane,
            started_at=started_at,
            finished_at=finished_at,
            verdicts=verdicts,
            drafts=ready,
            phases=PhaseTimes(
                draft=drafted_at - started_at,
                receive=receive,
                verify=verified_at - built_at,
                sample=finished_at - verified_at,
                other=built_at - drafted_at,
            ),
            draft_times=tuple(drafted.times),
            num_rows=batch.num_tokens,
            work=step_work(plan),
            work_seconds=finished_at - drafted_at,
        )

    # --- drafting -------------------------------------------------------------------------------

    def _draft(self, orders: Sequence[DraftOrder]) -> _Drafted:
        """All orders of a step, one batch for each drafter."""
        drafted = _Drafted()
        for name, drafter in self.drafters.items():
            mine = [o for o in orders if o.drafter == name]
            if not mine:
                continue
            started_at = self._clock.now()
            drafts = drafter.draft(mine, [self._texts[o.request_id] for o in mine])
            seconds = self._clock.now() - started_at
            drafted.add(mine, drafts)
            drafted.times.append(
                DraftTime(
                    drafter=name,
                    batch=len(mine),
                    steps=max(o.max_draft_tokens for o in mine),
                    num_catch_up_tokens=sum(o.num_catch_up_tokens for o in mine),
                    seconds=seconds,
                )
            )
        return drafted

    def _hold(self, order: DraftOrder, drafted: _Drafted) -> DraftReady:
        """Keep a draft of a drafter's own lane until its verification."""
        draft, offset = drafted.by_request.pop(order.request_id)
        probs = drafted.joined_probs() if any(r >= 0 for r in draft.prob_rows) else None
        if probs is not None:
            probs = probs[[r + offset for r in draft.prob_rows]]
            draft = Draft(draft.token_ids, list(range(len(draft.token_ids))))
        self._held.hold(order.request_id, order.epoch, order.round, draft, probs)
        return DraftReady(
            order.request_id, order.epoch, order.round, order.drafter, len(draft.token_ids)
        )

    def _recall(self, items: Sequence[VerifyItem], drafted: _Drafted) -> None:
        for item in items:
            held = self._held.take(item, self.target)
            if held is not None and item.source is DraftSource.HELD:
                drafted.hold(item.request_id, *held)

    # --- verification ---------------------------------------------------------------------------

    def _batch(self, items: Sequence[VerifyItem], drafts: Sequence[list[int]]) -> RaggedBatch:
        token_ids: list[IntArray] = []
        positions: list[IntArray] = []
        logits_rows: list[IntArray] = []
        counts = np.empty(len(items), dtype=np.int32)
        ends = np.empty(len(items), dtype=np.int32)
        row = 0
        for i, (item, draft) in enumerate(zip(items, drafts, strict=True)):
            self._tables.extend(item.request_id, item.epoch, item.new_blocks)
            known = item.start + item.num_scheduled_tokens
            token_ids.append(self._texts[item.request_id].span(item.start, known))
            if draft:
                token_ids.append(np.asarray(draft, dtype=np.int32))
            ends[i] = known + len(draft)
            counts[i] = ends[i] - item.start
            positions.append(np.arange(item.start, ends[i], dtype=np.int32))
            if item.samples:
                first = row + item.num_scheduled_tokens - 1
                logits_rows.append(np.arange(first, first + len(draft) + 1, dtype=np.int32))
            row += int(counts[i])
        query_start = np.zeros(len(items) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_blocks = -(-int(ends.max()) // self.target.block_size)
        return RaggedBatch(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            query_start=query_start,
            seq_lens=ends,
            block_tables=self._tables.gather([i.request_id for i in items], num_blocks),
            logits_rows=(
                np.concatenate(logits_rows) if logits_rows else np.empty(0, dtype=np.int32)
            ),
        )

    def _verdicts(
        self,
        items: Sequence[VerifyItem],
        drafts: Sequence[tuple[list[int], list[int]]],
        logits: torch.Tensor,
        probs: torch.Tensor | None,
    ) -> tuple[Verdict, ...]:
        sampled = [(i, d) for i, d in zip(items, drafts, strict=True) if i.samples]
        chunks = [Verdict(i.request_id, i.epoch, i.round) for i in items if not i.samples]
        if not sampled:
            return tuple(chunks)
        texts = [self._texts[i.request_id] for i, _ in sampled]
        row_start = np.cumsum([0] + [len(tokens) + 1 for _, (tokens, _) in sampled])
        result = verify(
            VerifyBatch(
                logits=logits,
                row_start=row_start,
                positions=np.array([i.start + i.num_scheduled_tokens for i, _ in sampled]),
                params=sampling_rows(texts),
                ratio=uses_ratio(texts),
                draft_tokens=np.array([t for _, (ts, _) in sampled for t in ts], dtype=np.int64),
                draft_probs=probs,
                draft_prob_row=np.array([r for _, (_, rs) in sampled for r in rs], dtype=np.int64),
            ),
            self._sample,
        )
        verdicts = []
        for n, (item, (tokens, _)) in enumerate(sampled):
            emitted = result.tokens(n)
            texts[n].append(emitted)
            wanted = texts[n].request.sampling.num_logprobs
            rows = logits[row_start[n] : row_start[n] + len(emitted)]
            verdicts.append(
                Verdict(
                    request_id=item.request_id,
                    epoch=item.epoch,
                    round=item.round,
                    token_ids=tuple(emitted),
                    drafter=item.drafter if tokens else None,
                    num_proposed=len(tokens),
                    num_accepted=int(result.num_accepted[n]),
                    num_decided=int(result.num_decided[n]),
                    evidence=float(result.evidence[n]),
                    logprobs=() if wanted is None else _logprobs(rows, emitted, wanted),
                )
            )
        return (*chunks, *verdicts)


def _logprobs(rows: torch.Tensor, tokens: list[int], num: int) -> tuple[TokenLogprob, ...]:
    found = token_logprobs(rows, np.array(tokens, dtype=np.int64), num)
    tops = zip(found.top_token_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    return tuple(
        TokenLogprob(chosen, tuple(zip(*top, strict=True)))
        for chosen, top in zip(found.chosen.tolist(), tops, strict=True)
    )
