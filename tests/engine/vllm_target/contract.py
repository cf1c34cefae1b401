"""What Penstock relies on inside vLLM, in a process of its own: prints what has moved.

python -m tests.engine.vllm_target.contract
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec


def _find(path: str) -> Any:
    """An object by its path under `vllm.`; what stands behind a colon is an attribute."""
    module, _, names = path.partition(":")
    found = import_module(f"vllm.{module}")
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def _fields(path: str, names: str) -> bool:
    """Names have a space between them."""
    return set(names.split()) <= {f.name for f in dataclasses.fields(_find(path))}


def _parameters(path: str, names: str) -> bool:
    """The first ones after `self`, if it has that."""
    known = [n for n in inspect.signature(_find(path)).parameters if n != "self"]
    wanted = names.split()
    return known[: len(wanted)] == wanted


def _callables(path: str, names: str) -> bool:
    return all(callable(getattr(_find(path), name)) for name in names.split())


def _says(path: str, *texts: str) -> bool:
    source = inspect.getsource(_find(path))
    return all(text in source for text in texts)


def _sets(path: str, names: str) -> bool:
    return _says(f"{path}.__init__", *(f"self.{name}" for name in names.split()))


_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_OUTPUT = "v1.core.sched.output"

BOTH: dict[str, Callable[[], bool]] = {
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

ENGINE: dict[str, Callable[[], bool]] = {
    "Executor": lambda: _callables(
        "v1.executor.abstract:Executor",
        "get_class get_kv_cache_specs get_supported_kv_cache_layouts "
        "set_kv_cache_layout determine_available_memory initialize_from_config "
        "compile_or_warm_up_model collective_rpc execute_model sample_tokens shutdown",
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
        and _says(f"{_RUNNER}.sample_tokens", "spec_config = self.speculative_config")
    ),
    "get_kv_cache_configs": lambda: _parameters(
        "v1.core.kv_cache_utils:get_kv_cache_configs", "vllm_config kv_cache_specs available_memory"
    ),
    "EngineArgs of several workers": lambda: _fields(
        "engine.arg_utils:EngineArgs",
        "pipeline_parallel_size distributed_executor_backend nnodes node_rank "
        "master_addr master_port",
    ),
    "pipeline stages": lambda: (
        _callables("distributed.parallel_state", "get_pp_group")
        and _sets(_RUNNER, "requests input_batch intermediate_tensors max_num_tokens")
        and _sets(
            "v1.worker.gpu_input_batch:InputBatch",
            "token_ids_cpu is_token_ids num_tokens_no_spec req_id_to_index",
        )
        and _fields("v1.worker.gpu_input_batch:CachedRequestState", "output_token_ids")
    ),
    "MultiprocExecutor": lambda: _parameters(
        "v1.executor.multiproc_executor:MultiprocExecutor", "vllm_config monitor_workers"
    ),
    "engine core": lambda: _callables(
        "v1.engine.core", "register_all_kvcache_specs resolve_kv_cache_layout"
    ),
}

PLUGIN: dict[str, Callable[[], bool]] = {
    "SchedulerConfig": lambda: _fields(
        "config:SchedulerConfig", "scheduler_cls async_scheduling policy enable_chunked_prefill"
    ),
    "VllmConfig.additional_config": lambda: _fields("config:VllmConfig", "additional_config"),
    "a function as scheduler_cls": lambda: _says(
        "config:SchedulerConfig.get_scheduler_cls", "resolve_obj_by_qualname(self.scheduler_cls)"
    ),
    "AsyncScheduler": lambda: issubclass(
        _find("v1.core.sched.async_scheduler:AsyncScheduler"), _find(_SCHEDULER)
    ),
    "Scheduler.schedule": lambda: _says(
        f"{_SCHEDULER}.schedule", "if num_running >= self.max_num_active_reqs:"
    ),
    "Scheduler.add_request": lambda: _parameters(f"{_SCHEDULER}.add_request", "request"),
    "Scheduler.finish_requests": lambda: (
        _parameters(f"{_SCHEDULER}.finish_requests", "request_ids finished_status")
        and _says(f"{_SCHEDULER}.finish_requests", "-> list[Request]:")
    ),
    "Scheduler.update_from_output": lambda: _parameters(
        f"{_SCHEDULER}.update_from_output", "scheduler_output model_runner_output"
    ),
    "Scheduler._reserve_prefill_lookahead": lambda: _parameters(
        f"{_SCHEDULER}._reserve_prefill_lookahead", "request num_computed_tokens num_new_tokens"
    ),
    "schedule asks it for running and for waiting requests": lambda: (
        inspect.getsource(_find(f"{_SCHEDULER}.schedule")).count("self._reserve_prefill_lookahead(")
        == 2
    ),
    "Scheduler._preempt_request": lambda: _parameters(
        f"{_SCHEDULER}._preempt_request", "request timestamp drop_stale_output"
    ),
    "Scheduler._handle_blocked_waiting_request": lambda: _parameters(
        f"{_SCHEDULER}._handle_blocked_waiting_request", "request"
    ),
    "Scheduler.pause_state": lambda: (
        hasattr(_find(_SCHEDULER), "pause_state")
        and hasattr(_find("v1.core.sched.interface:PauseState"), "UNPAUSED")
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
    "EngineCoreOutput": lambda: (
        [f.name for f in msgspec.structs.fields(_find("v1.engine:EngineCoreOutput"))][:2]
        == ["request_id", "new_token_ids"]
    ),
    "EngineCoreOutputs": lambda: hasattr(_find("v1.engine:EngineCoreOutputs"), "outputs"),
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
        and {
            *("num_tokens", "num_output_tokens", "has_encoder_inputs"),
            *("use_structured_output", "update_block_hashes"),
        }
        <= set(dir(_find("v1.request:Request")))
    ),
    "RequestStatus": lambda: (
        {"WAITING", "RUNNING"} <= {s.name for s in _find("v1.request:RequestStatus")}
    ),
    "KVCacheManager": lambda: (
        _sets("v1.core.kv_cache_manager:KVCacheManager", "coordinator block_pool")
        and _parameters("v1.core.kv_cache_manager:KVCacheManager.get_blocks", "request_id")
        and _parameters(
            "v1.core.kv_cache_manager:KVCacheManager.cache_blocks", "request num_computed_tokens"
        )
        and _parameters(
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
        and _callables("v1.core.block_pool:BlockPool", "get_num_free_blocks")
    ),
    "FullAttentionSpec": lambda: _callables("v1.kv_cache_interface", "FullAttentionSpec"),
    "ModelRunnerOutput": lambda: _fields(
        "v1.outputs:ModelRunnerOutput", "req_id_to_index sampled_token_ids num_nans_in_logits"
    ),
    "vllm_xargs": lambda: (
        "vllm_xargs"
        in _find("entrypoints.openai.completion.protocol:CompletionRequest").model_fields
    ),
}


def moved(checks: dict[str, Callable[[], bool]]) -> list[str]:
    """What is not as it was, and why where that is known."""
    found = []
    for name, holds in checks.items():
        try:
            if not holds():
                found.append(name)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    parts = {"both": BOTH, "engine": ENGINE, "plug-in": PLUGIN}
    print(json.dumps({part: moved(checks) for part, checks in parts.items()}))
