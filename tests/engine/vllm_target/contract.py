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


def _says(path: str, *texts: str, times: int | None = None) -> str:
    source = inspect.getsource(_find(path))
    gone = [t for t in texts if t not in source or (times and source.count(t) != times)]
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


_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_OUTPUT = "v1.core.sched.output"
_CORE = "v1.engine.core:EngineCore"

BOTH: Checks = {
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
        "kv_cache_memory_bytes scheduler_cls additional_config",
    ),
}

ENGINE: Checks = {
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
    "custom_class, a proposer of one's own": lambda: _says(
        f"{_RUNNER}.__init__", 'method == "custom_class"'
    ),
}

PLUGIN: Checks = {
    "SchedulerConfig": lambda: _fields(
        "config:SchedulerConfig", "scheduler_cls async_scheduling policy enable_chunked_prefill"
    ),
    "VllmConfig.additional_config": lambda: _fields("config:VllmConfig", "additional_config"),
    "a function as scheduler_cls": lambda: _says(
        "config:SchedulerConfig.get_scheduler_cls", "resolve_obj_by_qualname(self.scheduler_cls)"
    ),
    "AsyncScheduler": lambda: _holds(
        issubclass(_find("v1.core.sched.async_scheduler:AsyncScheduler"), _find(_SCHEDULER)),
        "is no Scheduler",
    ),
    "Scheduler.schedule": lambda: _says(
        f"{_SCHEDULER}.schedule", "if num_running >= self.max_num_active_reqs:"
    ),
    "Scheduler.add_request": lambda: _parameters(f"{_SCHEDULER}.add_request", "request"),
    "Scheduler.finish_requests": lambda: (
        _parameters(f"{_SCHEDULER}.finish_requests", "request_ids finished_status")
        or _says(f"{_SCHEDULER}.finish_requests", "-> list[Request]:")
    ),
    "Scheduler.update_from_output": lambda: _parameters(
        f"{_SCHEDULER}.update_from_output", "scheduler_output model_runner_output"
    ),
    "Scheduler._reserve_prefill_lookahead": lambda: _parameters(
        f"{_SCHEDULER}._reserve_prefill_lookahead",
        "request num_computed_tokens num_new_tokens",
        all_of_them=True,
    ),
    "schedule asks it for running and for waiting requests": lambda: _says(
        f"{_SCHEDULER}.schedule", "self._reserve_prefill_lookahead(", times=2
    ),
    "Scheduler._preempt_request": lambda: _parameters(
        f"{_SCHEDULER}._preempt_request", "request timestamp drop_stale_output"
    ),
    "Scheduler._handle_blocked_waiting_request": lambda: _parameters(
        f"{_SCHEDULER}._handle_blocked_waiting_request", "request"
    ),
    "Scheduler.pause_state": lambda: (
        _without("pause_state", dir(_find(_SCHEDULER)))
        or _without("UNPAUSED", dir(_find("v1.core.sched.interface:PauseState")))
    ),
    "Scheduler's attributes": lambda: _sets(
        _SCHEDULER,
        "requests running waiting deferred_waiting kv_holding_waiting "
        "num_waiting_for_streaming_input kv_cache_manager block_size max_model_len "
        "finished_req_ids max_num_active_reqs max_num_scheduled_tokens "
        "num_spec_tokens requires_kv_delivery scheduler_reserve_full_isl "
        "scheduler_config vllm_config parallel_config prev_step_scheduled_req_ids "
        "reset_preempted_req_ids needs_kv_cache_zeroing use_pp lora_config ec_connector "
        "aux_output_connector perf_metrics return_sampling_mask",
    ),
    "schedule advances only these counters of a decoding request": lambda: _says(
        f"{_SCHEDULER}._update_after_schedule",
        "request.num_computed_tokens += num_scheduled_token",
        "request.num_in_flight_tokens += num_scheduled_token",
    ),
    "Scheduler.reset_prefix_cache": lambda: _callables(_SCHEDULER, "reset_prefix_cache"),
    # Made by position.
    "EngineCoreOutput": lambda: _without(
        "request_id new_token_ids",
        _find("v1.engine:EngineCoreOutput").__struct_fields__[:2],
    ),
    "EngineCoreOutputs": lambda: _without("outputs", dir(_find("v1.engine:EngineCoreOutputs"))),
    "a request's end": lambda: _says(
        "v1.core.sched.utils:check_stop",
        "last_token_id == sampling_params.eos_token_id",
        "last_token_id in (sampling_params.stop_token_ids or ())",
        "request.num_tokens >= max_model_len",
        "request.num_output_tokens >= request.max_tokens",
    ),
    "queue of waiting requests": lambda: _callables(
        "v1.core.sched.request_queue:FCFSRequestQueue", "remove_requests prepend_requests"
    ),
    "Request's attributes": lambda: (
        _sets(
            "v1.request:Request",
            "request_id num_prompt_tokens max_tokens num_computed_tokens "
            "num_output_placeholders block_hashes skip_reading_prefix_cache "
            "sampling_params spec_token_ids status resumable num_in_flight_tokens "
            "client_index trace_headers _all_token_ids _output_token_ids",
        )
        or _without(
            "num_tokens num_output_tokens has_encoder_inputs use_structured_output "
            "update_block_hashes",
            dir(_find("v1.request:Request")),
        )
    ),
    "RequestStatus": lambda: _without(
        "WAITING RUNNING PREEMPTED", [s.name for s in _find("v1.request:RequestStatus")]
    ),
    "KVCacheManager": lambda: (
        _sets("v1.core.kv_cache_manager:KVCacheManager", "coordinator block_pool")
        or _parameters("v1.core.kv_cache_manager:KVCacheManager.get_blocks", "request_id")
        or _parameters(
            "v1.core.kv_cache_manager:KVCacheManager.cache_blocks", "request num_computed_tokens"
        )
        or _parameters(
            "v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_blocks",
            "request_id num_tokens num_tokens_main_model",
        )
    ),
    "find_longest_cache_hit": lambda: _parameters(
        "v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit",
        "block_hashes max_cache_hit_length",
    ),
    "BlockPool": lambda: (
        _sets("v1.core.block_pool:BlockPool", "blocks num_gpu_blocks")
        or _callables("v1.core.block_pool:BlockPool", "get_num_free_blocks")
    ),
    "FullAttentionSpec": lambda: _callables("v1.kv_cache_interface", "FullAttentionSpec"),
    "ModelRunnerOutput": lambda: _fields(
        "v1.outputs:ModelRunnerOutput", "req_id_to_index sampled_token_ids num_nans_in_logits"
    ),
    "vllm_xargs": lambda: _without(
        "vllm_xargs",
        _find("entrypoints.openai.completion.protocol:CompletionRequest").model_fields,
    ),
    "settings that are refused": lambda: (
        _fields("config:SchedulerConfig", "prefill_schedule_interval")
        or _fields("config:SpeculativeConfig", "enable_adaptive_verification")
    ),
    "second model runner": lambda: (
        _without("use_v2_model_runner", dir(_find("config:VllmConfig")))
        or _without("VLLM_USE_V2_MODEL_RUNNER", _find("envs:environment_variables"))
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
    parts = {"imports": _imports(), "both": BOTH, "engine": ENGINE, "plug-in": PLUGIN}
    print(json.dumps({part: moved(checks) for part, checks in parts.items()}))
