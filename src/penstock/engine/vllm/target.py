"""Target in vLLM: loads workers, sizes memory, runs steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.config import ConfigError, EngineConfig
from penstock.core.types import SamplingParams
from penstock.engine.models.fields import token_ids
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.runner import Model, RaggedBatch
from penstock.engine.verifier import Decided
from penstock.engine.vllm.arguments import LONGEST_DRAFT, failures_in_one_line, vllm_config
from penstock.engine.vllm.steps import Asked, GrownSequence, NewSequence, TargetStep


class VllmTarget(Model):
    """Weights and KV cache in vLLM's workers. max_num_rows, max_num_seqs: of one step."""

    keeps_batches = True

    def __init__(self, config: EngineConfig) -> None:
        """Raises: ConfigError."""
        with failures_in_one_line(config):
            self._load(vllm_config(config), config)
        described = open_checkpoint(config.target).description()
        own = token_ids(described.content.get("eos_token_id"))
        self.eos_token_ids = tuple(dict.fromkeys([*own, *described.eos_token_ids]))
        self._dummies: dict[str, tuple[int, list[int]]] = {}

    def _load(self, config: Any, asked: EngineConfig) -> None:
        """Do what vLLM's engine core does before its first step. config: vLLM's own."""
        import vllm
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self._config = config
        self._executor = executor = Executor.get_class(config)(config)
        if asked.kv_tokens is not None:
            layers = [
                layer for worker in executor.get_kv_cache_specs() for layer in worker.values()
            ]
            # One more, for vLLM's null block.
            num_blocks = -(-asked.kv_tokens // layers[0].block_size) + 1
            config.cache_config.num_gpu_blocks_override = num_blocks
        # The engine core's own way, as its parts move with every version.
        core = SimpleNamespace(model_executor=executor, collective_rpc=executor.collective_rpc)
        cache = EngineCore._initialize_kv_caches(core, config)
        groups = cache.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"{asked.target} has {len(groups)} kinds of KV cache; engine vllm serves "
                "models with one"
            )
        self.block_size = groups[0].kv_cache_spec.block_size
        self.num_blocks = cache.num_blocks - 1
        self.max_model_len = min(
            config.model_config.max_model_len, self.num_blocks * self.block_size
        )
        self.max_num_rows = config.scheduler_config.max_num_batched_tokens
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.max_draft_tokens = LONGEST_DRAFT
        self.dtype = config.model_config.dtype
        self.device = torch.device(config.device_config.device_type)
        self._sampling = vllm.SamplingParams(temperature=0.0)

    @property
    def vocab_size(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    def run(self, step: TargetStep) -> tuple[list[Decided], list[int]]:
        """Compute a step; return decisions by `step.asked`, and tokens by `step.rows`."""
        from penstock.engine.vllm.worker import scheduler_output

        # OpenMP's number of threads is per thread; this sets it here, before the step.
        torch.get_num_threads()
        self._executor.execute_model(scheduler_output(step, self._sampling, LONGEST_DRAFT))
        made: tuple[list[Decided], list[int]] = self._executor.sample_tokens(None)
        return made

    def close(self) -> None:
        self._executor.shutdown()

    def dummy_run(self, batch: RaggedBatch) -> None:
        self.run(self._dummy_step(batch))

    def _dummy_step(self, batch: RaggedBatch) -> TargetStep:
        """Return a step; requests equal to the last dummy step's are not sent again."""
        step = TargetStep()
        wanted = np.diff(np.searchsorted(batch.logits_rows, batch.query_start)).tolist()
        rows, ends = np.diff(batch.query_start).tolist(), batch.seq_lens.tolist()
        for i, (num_wanted, num_rows, end) in enumerate(zip(wanted, rows, ends, strict=True)):
            request_id, start, num_draft = f"dummy-{i}", end - num_rows, max(0, num_wanted - 1)
            blocks = (batch.block_tables[i] + 1).tolist()
            known = min(end - num_draft + 1, self.max_model_len - num_draft)
            if self._dummies.get(request_id) == (known, blocks):
                step.grown.append(GrownSequence(request_id, start, [], 0, [], anew=False))
            else:
                if request_id in self._dummies:
                    step.finished.add(request_id)
                self._dummies[request_id] = (known, list(blocks))
                step.new.append(NewSequence(request_id, [1] * known, blocks, start))
            draft = [1] * num_draft
            step.num_tokens[request_id] = num_rows
            if draft:
                step.drafts[request_id] = draft
            greedy = SamplingParams(temperature=0.0)
            step.asked.append(Asked(request_id, end - num_draft, greedy, draft, [-1] * num_draft))
        return step
