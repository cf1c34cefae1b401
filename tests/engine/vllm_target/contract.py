"""What Penstock relies on inside vLLM, in a process of its own: prints what has moved.

python -m tests.engine.vllm_target.contract
"""

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import penstock.engine.vllm

Checks = dict[str, Callable[[], str]]
"""By name: how it differs, "" where it does not."""


def _find(path: str) -> Any:
    """An object by its path under `vllm.`; what stands behind a colon is an attribute."""
    module, _, names = path.partition(":")
    found = import_module(f"vllm.{module}")
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def _without(wanted: str, known: Iterable[str]) -> str:
    """Names have a space between them."""
    gone = [name for name in wanted.split() if name not in set(known)]
    return f"without {' '.join(gone)}" if gone else ""


def _fields(path: str, names: str) -> str:
    return _without(names, [f.name for f in dataclasses.fields(_find(path))])


def _parameters(path: str, names: str, *, all_of_them: bool = False) -> str:
    """The first ones after `self`, if it has that."""
    known = [n for n in inspect.signature(_find(path)).parameters if n != "self"]
    wanted = names.split()
    found = known if all_of_them else known[: len(wanted)]
    return "" if found == wanted else f"takes ({', '.join(known)}), not ({', '.join(wanted)})"


def _callables(path: str, names: str) -> str:
    found = _find(path)
    return _without(names, [n for n in names.split() if callable(getattr(found, n, None))])


def _says(path: str, *texts: str) -> str:
    source = inspect.getsource(_find(path))
    gone = [t for t in texts if t not in source]
    return f"{path} no longer says {' and '.join(map(repr, gone))}" if gone else ""


def _sets(path: str, names: str) -> str:
    return _says(f"{path}.__init__", *(f"self.{name}" for name in names.split()))


def _holds(fact: bool, otherwise: str) -> str:
    return "" if fact else otherwise


def _imports() -> dict[str, Callable[[], str]]:
    """Each name that the product imports from vLLM, as its source says."""
    found = {}
    for file in Path(penstock.engine.vllm.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for name in (alias.name for alias in node.names):
                    found[f"{node.module}.{name}"] = partial(_imported, node.module or "", name)
    return found


def _imported(module: str, name: str) -> str:
    return _holds(hasattr(import_module(module), name), "gone")


def _core_uses() -> str:
    """The engine lends the core's method an object with these attributes."""
    lent = {"model_executor", "collective_rpc", "available_gpu_memory_for_kv_cache"}
    source = inspect.getsource(_find(f"{_CORE}._initialize_kv_caches"))
    return _holds(set(re.findall(r"self\.(\w+)", source)) <= lent, f"uses more of self than {lent}")


_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_OUTPUT = "v1.core.sched.output"
_CORE = "v1.engine.core:EngineCore"

ENGINE: Checks = {
    "NewRequestData": lambda: _fields(
        f"{_OUTPUT}:NewRequestData",
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request",
    ),
    "CachedRequestData": lambda: _fields(
        f"{_OUTPUT}:CachedRequestData",
        "req_ids resumed_req_ids new_token_ids new_block_ids num_computed_tokens num_output_tokens",
    ),
    "SchedulerOutput": lambda: _fields(
        f"{_OUTPUT}:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
        "total_num_scheduled_tokens scheduled_spec_decode_tokens finished_req_ids "
        "num_spec_tokens_to_schedule",
    ),
    "EngineArgs": lambda: _fields(
        "engine.arg_utils:EngineArgs",
        "model dtype max_model_len max_num_seqs max_num_batched_tokens "
        "tensor_parallel_size quantization enable_prefix_caching async_scheduling "
        "skip_tokenizer_init worker_cls speculative_config block_size "
        "kv_cache_memory_bytes",
    ),
    "Executor": lambda: _callables(
        "v1.executor.abstract:Executor",
        "get_class get_kv_cache_specs collective_rpc execute_model sample_tokens shutdown",
    ),
    "Worker.execute_model": lambda: _parameters(
        "v1.worker.gpu_worker:Worker.execute_model", "scheduler_output"
    ),
    "Worker.sample_tokens": lambda: _parameters(
        "v1.worker.gpu_worker:Worker.sample_tokens", "grammar_output"
    ),
    "SamplerOutput": lambda: _fields(
        "v1.outputs:SamplerOutput", "sampled_token_ids logprobs_tensors"
    ),
    "GPUModelRunner._sample": lambda: _says(
        f"{_RUNNER}._sample", "self.rejection_sampler(", "self.sampler("
    ),
    "GPUModelRunner.speculative_config": lambda: (
        _says(f"{_RUNNER}._prepare_inputs", "use_spec_decode = self.speculative_config is not None")
        or _says(f"{_RUNNER}.sample_tokens", "spec_config = self.speculative_config")
    ),
    "EngineCore._initialize_kv_caches": lambda: (
        _parameters(f"{_CORE}._initialize_kv_caches", "vllm_config", all_of_them=True)
        or _core_uses()
    ),
    "EngineArgs of several workers": lambda: _fields(
        "engine.arg_utils:EngineArgs",
        "pipeline_parallel_size distributed_executor_backend nnodes node_rank "
        "master_addr master_port",
    ),
    "pipeline stages": lambda: (
        _sets(_RUNNER, "requests input_batch intermediate_tensors max_num_tokens")
        or _sets(
            "v1.worker.gpu_input_batch:InputBatch",
            "token_ids_cpu is_token_ids num_tokens_no_spec req_id_to_index",
        )
        or _fields("v1.worker.gpu_input_batch:CachedRequestState", "output_token_ids")
    ),
    "MultiprocExecutor": lambda: _parameters(
        "v1.executor.multiproc_executor:MultiprocExecutor", "vllm_config monitor_workers"
    ),
    "second model runner": lambda: _without(
        "VLLM_USE_V2_MODEL_RUNNER", _find("envs:environment_variables")
    ),
    "custom_class, a proposer of one's own": lambda: _says(
        f"{_RUNNER}.__init__", 'method == "custom_class"'
    ),
}


def moved(checks: Checks) -> list[str]:
    """Each name that is not as it was, and how it differs."""
    found = []
    for name, differs in checks.items():
        try:
            difference = differs()
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        if difference:
            found.append(f"{name}: {difference}")
    return found


if __name__ == "__main__":
    parts = {"imports": _imports(), "engine": ENGINE}
    print(json.dumps({part: moved(checks) for part, checks in parts.items()}))
