"""Executor for a target in vLLM. Drafters are Penstock's own, as with any other target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from penstock.core.loop import Clock
from penstock.core.types import StepPlan
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.executor import LocalExecutor
from penstock.engine.steps import Computed, Done, DraftsAtHand, StepJob, sampled_of, verified
from penstock.engine.verifier import Decided
from penstock.engine.vllm.arguments import LONGEST_DRAFT
from penstock.engine.vllm.steps import StepWriter, TargetStep
from penstock.engine.vllm.target import VllmTarget


class VllmExecutor(LocalExecutor):
    """Turns plans into steps of vLLM's workers, and waits for them."""

    def __init__(
        self,
        target: VllmTarget,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        num_threads: int = 1,
        cores: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(target, drafters, clock, max_model_len, num_threads, cores)
        self._vllm = target
        self._writer = StepWriter(target.max_num_rows, target.max_num_seqs)

    def submit(self, plan: StepPlan) -> None:
        for order in plan.drafts:
            # Its drafter reads all of the text.
            self._writer.rows.leave(order.request_id)
        super().submit(plan)

    def _verify(self, job: StepJob) -> Done:
        if job.plan.items or job.plan.drafts:
            return super()._verify(job)
        # The decode group alone: what else a step may hold would take half of the host's time.
        with job.models():
            started_at = self._clock.now()
            (step,) = self._write(job, (), None)
            built_at = self._clock.now()
            _, tokens = self._vllm.run(step)
            verified_at = self._clock.now()
            decoded = self._writer.rows.take_in(tokens)
            computed = Computed((), (), step.num_rows, built_at, verified_at, decoded)
            times = (started_at, started_at, self._clock.now())
            return verified(job, DraftsAtHand(), computed, *times)

    def _write(
        self,
        job: StepJob,
        drafts: Sequence[tuple[list[int], list[int]]],
        draft_probs: torch.Tensor | None,
    ) -> list[TargetStep]:
        """Return the steps of a plan."""
        run, writer = job.plan.decodes, self._writer
        change = None if run is None else run.change
        steps = writer.write(job.plan.items, job.texts, drafts, draft_probs, change)
        if run is not None and run.num_requests != len(writer.rows):
            raise RuntimeError("the rows of the decode group are not the scheduler's")
        return steps

    def _compute(
        self,
        job: StepJob,
        drafts: Sequence[tuple[list[int], list[int]]],
        draft_probs: torch.Tensor | None,
    ) -> Computed:
        items = job.plan.items
        drafts = [
            self._cut(item.start + item.num_scheduled_tokens, *draft)
            for item, draft in zip(items, drafts, strict=True)
        ]
        sampled = sampled_of(job, drafts)
        steps = self._write(job, drafts, draft_probs)
        built_at = self._clock.now()
        decided: dict[str, Decided] = {}
        tokens: list[int] = []
        for step in steps:
            answers, made = self._vllm.run(step)
            decided.update(zip([a.request_id for a in step.asked], answers, strict=True))
            tokens += made
        verified_at = self._clock.now()
        wanted = [decided[item.request_id] for item in items if item.samples]
        num_rows = sum([s.num_rows for s in steps])
        decoded = None if job.plan.decodes is None else self._writer.rows.take_in(tokens)
        return Computed(sampled, wanted, num_rows, built_at, verified_at, decoded)

    def _cut(
        self, known: int, token_ids: list[int], prob_rows: list[int]
    ) -> tuple[list[int], list[int]]:
        """Cut a draft to the workers' room, where one more token must fit behind it."""
        if not token_ids:
            return token_ids, prob_rows
        most = max(0, min(LONGEST_DRAFT, self.max_model_len - known - 1))
        return token_ids[:most], prob_rows[:most]

    def close(self) -> None:
        super().close()
        self._vllm.close()

    def _drop_table(self, request_id: str) -> None:
        """Do nothing: the next step has a new epoch and all of its blocks."""

    def _forget_in_target(self, request_id: str) -> None:
        self._writer.release_request(request_id)
