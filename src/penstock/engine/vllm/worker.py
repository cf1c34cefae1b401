"""vLLM's worker with Penstock's sampler instead of its rejection sampler.

So every verification mode equals the other backends', bit for bit from the same logits. vLLM's
configuration names it by path, and the worker's process imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import SamplerOutput

from penstock.core.types import SamplingParams
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.verifier import Decided, decide
from penstock.engine.vllm.group_rows import StepRows
from penstock.engine.vllm.steps import Asked, TargetStep

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as _VllmWorker

_PLACEHOLDER = -1
"""No token, in vLLM's matrix of sampled tokens."""


@dataclass
class StepInput(SchedulerOutput):
    """vLLM's scheduler output with sampling tasks.

    news: tokens decided since the last step, of all but `rows`."""

    news: dict[str, list[int]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    rows: StepRows | None = None


def scheduler_output(step: TargetStep, sampling: Any, longest_draft: int) -> StepInput:
    """Return vLLM's scheduler output of a step. sampling: for vLLM's unused sampler."""
    made: StepInput = StepInput.make_empty()
    made.finished_req_ids = step.finished
    for s in step.new:
        made.scheduled_new_reqs.append(
            NewRequestData(
                req_id=s.request_id,
                prompt_token_ids=s.token_ids,
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=(s.blocks,),
                num_computed_tokens=s.start,
                lora_request=None,
            )
        )
    cached = made.scheduled_cached_reqs
    for g in step.grown:
        cached.req_ids.append(g.request_id)
        if g.anew:
            cached.resumed_req_ids.add(g.request_id)
        cached.new_token_ids.append([])
        made.news[g.request_id] = g.new_token_ids
        cached.new_block_ids.append((g.blocks,) if g.blocks or g.anew else None)
        cached.num_computed_tokens.append(g.start)
        cached.num_output_tokens.append(g.num_output_tokens)
    made.num_scheduled_tokens = step.num_tokens
    if rows := step.rows:
        cached.req_ids += rows.ids
        cached.new_block_ids += rows.new_blocks
        cached.new_token_ids += [[]] * len(rows.ids)
        cached.num_computed_tokens += rows.computed
        cached.num_output_tokens += rows.num_outputs
        made.num_scheduled_tokens = dict.fromkeys(rows.ids, 1) | step.num_tokens
        made.rows = rows
    made.total_num_scheduled_tokens = step.num_rows
    made.scheduled_spec_decode_tokens = step.drafts
    made.num_spec_tokens_to_schedule = longest_draft
    made.asked = step.asked
    made.draft_probs = step.draft_probs
    return made


class NoProposer:
    """Drafter without drafts: vLLM computes logits of draft positions only with a drafter."""

    def __init__(self, vllm_config: Any) -> None:
        """Take vLLM's arguments."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it has no model."""

    def propose(self, sampled: Sequence[Any], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class RowSampler:
    """Samples steps of nothing but the decode group's rows, whose parameters it keeps."""

    def __init__(self) -> None:
        self._sampling: dict[str, SamplingParams] = {}
        self._rows: StepRows | None = None
        self._batch: list[str] = []
        self._params = SamplingRows.from_params([])
        # Columns by the batch's order, and the batch's order by column.
        self._columns = self._places = np.zeros(0, np.int64)

    def begin(self, rows: StepRows) -> None:
        """Set the rows of the next step."""
        self._rows = rows
        if rows.sampling is not None:
            self._sampling = dict(zip(rows.ids, rows.sampling, strict=True))
            self._batch = []

    def asked(self) -> dict[str, Asked]:
        """Return the rows as requests that are asked for like others."""
        assert self._rows is not None
        ends = zip(self._rows.ids, self._rows.computed, strict=True)
        return {i: Asked(i, n + 1, self._sampling[i], [], []) for i, n in ends}

    def sample(self, batch: list[str], logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return tokens in the batch's order, [requests] int64, and by column."""
        assert self._rows is not None
        if batch != self._batch:
            self._batch = list(batch)
            column = {i: n for n, i in enumerate(self._rows.ids)}
            self._columns = np.array([column[i] for i in batch])
            self._places = np.argsort(self._columns)
            self._params = SamplingRows.from_params([self._sampling[i] for i in batch])
        positions = np.array(self._rows.computed)[self._columns] + 1
        tokens = sample_coupled(logits.to(torch.float32), self._params, positions)
        return tokens, tokens.cpu().numpy()[self._places].tolist()


class StepSampler:
    """Replaces a model runner's samplers. answer: of the last step, as `VllmTarget.run` has it."""

    def __init__(self, runner: Any) -> None:
        self.answer: tuple[list[Decided], list[int]] = ([], [])
        self._runner = runner
        self._step: StepInput = StepInput.make_empty()
        self._row_sampler = RowSampler()
        self._asked: dict[str, Asked] = {}
        self._draft_probs: torch.Tensor | None = None
        self._sampling: list[SamplingParams] = []
        self._rows = SamplingRows.from_params([])
        self._ratio = np.array([], dtype=np.bool_)

    def begin(self, step: StepInput) -> None:
        """Set the tasks of the next step's logits."""
        self._step, self.answer = step, ([], [])
        self._asked = {a.request_id: a for a in step.asked}
        if step.rows is not None:
            self._row_sampler.begin(step.rows)
            if len(step.num_scheduled_tokens) > len(step.rows.ids):
                self._asked |= self._row_sampler.asked()
        self._draft_probs = step.draft_probs

    def __call__(
        self,
        metadata: Any = None,
        draft_probs: Any = None,
        logits: torch.Tensor | None = None,
        sampling_metadata: Any = None,
    ) -> SamplerOutput:
        """Sample, called by vLLM. metadata: None in a step without drafts.

        Every request of the batch has one row of logits more than draft tokens; rows of requests
        that are not asked for, chunks of prefill, are dropped."""
        assert logits is not None
        request_ids, rows_only = self._runner.input_batch.req_ids, self._step.rows
        if rows_only is not None and len(rows_only.ids) == len(request_ids):
            tokens, by_column = self._row_sampler.sample(request_ids, logits)
            self.answer = ([], by_column)
            return SamplerOutput(tokens[:, None].to(torch.int32), None)
        batch = [self._asked[i] for i in request_ids if i in self._asked]
        if len(batch) < len(request_ids):
            num_draft = [0] * len(request_ids) if metadata is None else metadata.num_draft_tokens
            ends = list(accumulate(num + 1 for num in num_draft))
            rows = [
                row
                for i, begin, end in zip(request_ids, [0, *ends], ends, strict=False)
                if i in self._asked
                for row in range(begin, end)
            ]
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        decided = self._decide(batch, logits.to(torch.float32)) if batch else {}
        members = () if self._step.rows is None else self._step.rows.ids
        asked = [decided[a.request_id] for a in self._step.asked]
        self.answer = (asked, [decided[i].token_ids[0] for i in members])
        return SamplerOutput(_matrix(request_ids, decided).to(logits.device), None)

    def _decide(self, batch: list[Asked], logits: torch.Tensor) -> dict[str, Decided]:
        sampling = [a.sampling for a in batch]
        if sampling != self._sampling:  # a batch is mostly the last one again
            self._sampling, self._rows = sampling, SamplingRows.from_params(sampling)
            self._ratio = np.array([s.is_ratio for s in sampling], dtype=np.bool_)
        probs = None if self._draft_probs is None else self._draft_probs.to(logits.device)
        decided = decide(logits, batch, self._rows, self._ratio, probs, sample_coupled)
        return {a.request_id: d for a, d in zip(batch, decided, strict=True)}


def _matrix(request_ids: Sequence[str], decided: Mapping[str, Decided]) -> torch.Tensor:
    """Return tokens [requests, most tokens] int32, for vLLM's bookkeeping."""
    tokens = [decided[i].token_ids if i in decided else [] for i in request_ids]
    width = max(1, *map(len, tokens))
    padded = [t + [_PLACEHOLDER] * (width - len(t)) for t in tokens]
    return torch.tensor(padded, dtype=torch.int32)


class Worker(_VllmWorker):
    """vLLM's worker, which answers a step with the decided tokens.

    In a pipeline only the last stage samples. The others get the tokens with the next step, here:
    vLLM itself sends one token, not several."""

    _sampler: StepSampler | None = None
    _speculation: Any = None

    def init_device(self) -> None:
        super().init_device()
        if not get_pp_group().is_last_rank:
            # vLLM makes one in the last stage only, but uses it in all.
            self.model_runner.drafter = NoProposer(self.vllm_config)

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # The input from the stage before, which vLLM makes in a first dummy run; on a CPU with
            # a given KV cache size there is no such run.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )

    def execute_model(self, scheduler_output: StepInput) -> Any:
        if not get_pp_group().is_last_rank:
            self._append(scheduler_output.news)
            return super().execute_model(scheduler_output)
        runner = self.model_runner
        if self._sampler is None:
            # Not earlier: vLLM measures its memory with its own samplers.
            self._sampler = runner.rejection_sampler = runner.sampler = StepSampler(runner)
            self._speculation = runner.speculative_config
        self._sampler.begin(scheduler_output)
        # Then a step without drafts costs no more than without speculation.
        has_drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        runner.speculative_config = self._speculation if has_drafts else None
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> tuple[list[Decided], list[int]]:
        """Return the decisions of the asked requests, and the tokens of the rows."""
        super().sample_tokens(grammar_output)
        return ([], []) if self._sampler is None else self._sampler.answer

    def _append(self, news: Mapping[str, list[int]]) -> None:
        batch = self.model_runner.input_batch
        for request_id, token_ids in news.items():
            self.model_runner.requests[request_id].output_token_ids += token_ids
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                continue
            begin = batch.num_tokens_no_spec[row]
            end = begin + len(token_ids)
            batch.token_ids_cpu[row, begin:end] = token_ids
            batch.is_token_ids[row, begin:end] = True
            batch.num_tokens_no_spec[row] = end
