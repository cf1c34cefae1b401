"""Arguments of vLLM's engine, and its failures as errors in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from penstock.config import ConfigError, EngineConfig, VllmConfig
from penstock.engine.memory import CPU_KV_SHARE
from penstock.engine.models.checkpoint import one_line
from penstock.engine.vllm import check_installed

LONGEST_DRAFT = 32
"""Most draft tokens of a request in a step; vLLM sizes its buffers by it."""
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_ENVIRONMENT = {
    # This process is the engine core: one worker needs no process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_OWN = (
    "async_scheduling",
    "enable_prefix_caching",
    "master_addr",
    "master_port",
    "model",
    "nnodes",
    "node_rank",
    "scheduler_cls",
    "skip_tokenizer_init",
    "speculative_config",
    "tokenizer",
    "worker_cls",
)
"""Engine arguments that Penstock sets itself."""
_MOST_OF_A_REASON = 400
"""Characters; some reasons go on with instructions."""


def vllm_config(config: EngineConfig) -> Any:
    """Return the configuration of vLLM's engine. Raises: ConfigError."""
    assert config.vllm is not None
    check_installed()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not config.target.is_dir():
        raise ConfigError(
            f"engine vllm takes a checkpoint folder in Hugging Face layout, not {config.target}"
        )
    settings = _engine_args(config, config.vllm)
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise ConfigError(
            "engine vllm needs vLLM's first model runner, as the second takes no drafts from "
            "outside: unset VLLM_USE_V2_MODEL_RUNNER"
        )

    return EngineArgs(**settings).create_engine_config()


@contextmanager
def failures_in_one_line(config: EngineConfig) -> Iterator[None]:
    """Turn vLLM's exceptions into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"vLLM cannot serve {config.target}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return one line, with the invalid setting if that is the reason."""
    if isinstance(error, ValidationError):
        found = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        reason = "; ".join(f"{where}: {what}" if where else what for where, what in found)
    else:
        reason = one_line(error)
    reason = " ".join(reason.split())
    if len(reason) > _MOST_OF_A_REASON:
        reason = reason[:_MOST_OF_A_REASON].rpartition(" ")[0] + " ..."
    return reason


def _engine_args(config: EngineConfig, own: VllmConfig) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    known = {f.name for f in fields(EngineArgs)}
    for name in own.args:
        if name in _OWN:
            raise ConfigError(f"vllm.args.{name}: Penstock sets it itself")
        if name not in known:
            near = [k for k in sorted(known) if name.replace("-", "_").lower() in k]
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ConfigError(f"vllm.args.{name}: vLLM has no such engine argument{hint}")
    if own.distributed_backend == "ray" and not current_platform.ray_device_key:
        raise ConfigError(
            "distributed_backend is ray, under which vLLM starts no workers on "
            f"{current_platform.device_type} devices; allowed: mp"
        )
    settings: dict[str, Any] = {
        "model": str(config.target),
        "dtype": config.dtype,
        # -1: as much as fits.
        "max_model_len": config.max_model_len or -1,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "tensor_parallel_size": own.tensor_parallel,
        "pipeline_parallel_size": own.pipeline_parallel,
        "distributed_executor_backend": own.distributed_backend,
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
    if own.master is not None:
        host, _, port = own.master.rpartition(":")
        settings |= {"nnodes": own.nodes, "node_rank": own.node_rank}
        settings |= {"master_addr": host.strip("[]"), "master_port": int(port)}
    if "block_size" in config.model_fields_set:
        settings["block_size"] = config.block_size
    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # vLLM's default is nearly all memory of the machine.
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        settings["kv_cache_memory_bytes"] = int(free * CPU_KV_SHARE / own.num_local_workers)
    return {**settings, **own.args}
