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
from penstock.engine.vllm.steps import Asked, TargetStep

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as _VllmWorker

_PLACEHOLDER = -1
"""No token, in vLLM's matrix of sampled tokens."""


@dataclass
class StepInput(SchedulerOutput):
    """vLLM's scheduler output with sampling tasks. news: tokens decided since the last step."""

    news: dict[str, list[int]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None


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


class StepSampler:
    """Replaces a model runner's samplers. asked, decided: of the last step, by request."""

    def __init__(self, runner: Any) -> None:
        self.decided: dict[str, Decided] = {}
        self._runner = runner
        self.asked: dict[str, Asked] = {}
        self._draft_probs: torch.Tensor | None = None
        self._sampling: list[SamplingParams] = []
        self._rows = SamplingRows.from_params([])
        self._ratio = np.array([], dtype=np.bool_)

    def begin(self, step: StepInput) -> None:
        """Set the tasks of the next step's logits."""
        self.asked = {a.request_id: a for a in step.asked}
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
        request_ids = self._runner.input_batch.req_ids
        batch = [self.asked[i] for i in request_ids if i in self.asked]
        if len(batch) < len(request_ids):
            num_draft = [0] * len(request_ids) if metadata is None else metadata.num_draft_tokens
            ends = list(accumulate(num + 1 for num in num_draft))
            rows = [
                row
                for i, begin, end in zip(request_ids, [0, *ends], ends, strict=False)
                if i in self.asked
                for row in range(begin, end)
            ]
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        self.decided = self._decide(batch, logits.to(torch.float32)) if batch else {}
        return SamplerOutput(self._matrix(request_ids).to(logits.device), None)

    def _decide(self, batch: list[Asked], logits: torch.Tensor) -> dict[str, Decided]:
        sampling = [a.sampling for a in batch]
        if sampling != self._sampling:  # a batch is mostly the last one again
            self._sampling, self._rows = sampling, SamplingRows.from_params(sampling)
            self._ratio = np.array([s.is_ratio for s in sampling], dtype=np.bool_)
        probs = None if self._draft_probs is None else self._draft_probs.to(logits.device)
        decided = decide(logits, batch, self._rows, self._ratio, probs, sample_coupled)
        return {a.request_id: d for a, d in zip(batch, decided, strict=True)}

    def _matrix(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Return tokens [requests, most tokens] int32, for vLLM's bookkeeping."""
        tokens = [self.decided[i].token_ids if i in self.decided else [] for i in request_ids]
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

    def sample_tokens(self, grammar_output: Any) -> list[Decided]:
        """Return the decisions in the order of the asked requests."""
        super().sample_tokens(grammar_output)
        if self._sampler is None:
            return []
        return list(map(self._sampler.decided.__getitem__, self._sampler.asked))

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
