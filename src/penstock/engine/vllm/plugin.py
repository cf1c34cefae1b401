"""vLLM's scheduler, steered by Penstock's policies; imported inside vLLM's engine core.

vLLM's own code allocates, composes the batch and processes results. Before each step it gets the
requests that may run, the order of the waiting ones, and their numbers of known and draft
tokens. Requests that only decode on are kept from it (`DecodingRows`) and added to its output."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from penstock.config import ConfigError, PluginConfig, parse_plugin_config
from penstock.core.types import StepPlan
from penstock.engine.vllm.guide import Answer, Guide, Limits
from penstock.engine.vllm.pool import MirroredPool
from penstock.engine.vllm.rows import DecodingRows

SETTING = "penstock"
"""Key in vLLM's `--additional-config`."""
_BESIDE = (
    *("use_pp", "lora_config", "ec_connector", "aux_output_connector", "perf_metrics"),
    *("return_sampling_mask", "needs_kv_cache_zeroing"),
)
"""Attributes of vLLM's scheduler that give a decoding request more than its next token."""
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

_log = init_logger("vllm.penstock")


def make_guided_scheduler(*, vllm_config: Any, **rest: Any) -> GuidedScheduler:
    """Return an engine core's scheduler, asynchronous if vLLM's is. Raises: ConfigError."""
    kind = GuidedScheduler
    if vllm_config.scheduler_config.async_scheduling:
        kind = AsyncGuidedScheduler
    return kind(vllm_config=vllm_config, **rest)


class _Step(NamedTuple):
    """Step in flight: its plan as carried out, and the time of scheduling."""

    plan: StepPlan
    scheduled_at: float


@dataclass
class _Run:
    """Plan that holds for several steps, if nothing arrives or ends.

    num_steps: ended ones, from `started_at` to `finished_at`. is_over: no further step begins."""

    plan: StepPlan
    started_at: float = 0.0
    finished_at: float = 0.0
    num_steps: int = 0
    is_over: bool = False

    def holds(self, now: float) -> bool:
        run = self.plan.decodes
        assert run is not None
        if self.is_over or self.num_steps >= run.max_repeats:
            return False
        return run.until is None or now < run.until


class GuidedScheduler(Scheduler):
    """vLLM's scheduler with a `Guide`."""

    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    running: list[Any]

    def __init__(self, **settings: Any) -> None:
        """Raises: ConfigError."""
        super().__init__(**settings)
        config = _checked(self, settings["kv_cache_config"])
        spec = self.vllm_config.speculative_config
        limits = Limits(
            self.max_model_len,
            self.max_num_active_reqs,
            self.max_num_scheduled_tokens,
            None if spec is None else spec.method,
            self.num_spec_tokens,
            isinstance(self, AsyncScheduler) or self.vllm_config.max_concurrent_batches > 1,
        )
        pool = MirroredPool(self.kv_cache_manager, self.block_size)
        try:
            self._guide = Guide(config, limits, pool)
        except ValueError as error:
            raise _bad(str(error)) from error
        # The policy decides whether memory must hold a whole prompt.
        self.scheduler_reserve_full_isl = False
        self._allowed: dict[str, int] | None = None
        self._decoding: frozenset[str] = frozenset()
        self._rows = DecodingRows(self.kv_cache_manager, self.block_size, self.max_model_len)
        self._keeps_rows = not (
            limits.overlaps
            or limits.proposer
            or self.scheduler_config.long_prefill_token_threshold
            or self.parallel_config.data_parallel_size > 1
            or any(getattr(self, name) for name in _BESIDE)
        )
        self._steps: dict[int, _Step] = {}
        self._run: _Run | None = None
        self._finished_at = 0.0
        _log.info("Penstock's policies schedule: admission %s", config.admission.name)

    def add_request(self, request: Any) -> None:
        self._end_run()
        super().add_request(request)
        # Otherwise it continues or ends a streamed request.
        is_new = self.requests.get(request.request_id) is request
        if is_new and request.status == RequestStatus.WAITING:
            self._tell_of(request)

    def _tell_of(self, request: Any) -> None:
        """Add a request that could run; one with a streamed prompt is left to vLLM."""
        if not request.resumable:
            self._guide.arrive(request, time.monotonic())

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        self._end_run()
        if request_ids is None:
            request_ids = self.requests
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            self._rows.remove(request_id)
        finished = super().finish_requests(ids, finished_status)
        for request in finished:
            self._guide.end(request.request_id, None, time.monotonic())
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._end_run()
        self._rows.clear()
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        run = self._run
        is_paused = self.pause_state != PauseState.UNPAUSED
        if is_paused or run is None or not run.holds(now):
            self._end_run()
        if is_paused:
            self._rows.clear()
            return super().schedule(*args, **kwargs)
        if self._run is not None:
            return self._schedule_again(self._run, now, *args, **kwargs)
        for request in list(self.deferred_waiting):
            # Those whose grammars are ready now.
            if self._handle_blocked_waiting_request(request):
                self._tell_of(request)
        knows_all = len(self.requests) == self._guide.num_requests and not self.deferred_waiting
        if not knows_all:
            self._rows.clear()
        as_planned = self._rows.ids.keys()
        plan = self._guide.plan(self._others(), as_planned, self.requests, self._num_blocks_of, now)
        try:
            output = self._carry_out(self._prepare(plan), *args, **kwargs)
        finally:
            self._allowed = None
        carried_out = self._guide.carried_out(plan, output.num_scheduled_tokens)
        self._steps[id(output)] = _Step(carried_out, now)
        decodes = plan.decodes
        if decodes is None or plan.items or carried_out is not plan or not knows_all:
            return output
        if decodes.max_repeats > 1 and len(self.running) == decodes.num_requests:
            # vLLM alone would follow the plan: all requests decode.
            self._run = _Run(plan)
        return output

    def _schedule_again(self, run: _Run, now: float, *args: Any, **kwargs: Any) -> Any:
        output = self._carry_out(0, *args, **kwargs)
        assert run.plan.decodes is not None
        if len(output.num_scheduled_tokens) == run.plan.decodes.num_requests:
            self._steps[id(output)] = _Step(run.plan, now)
        else:
            # The next plan synchronises this deviation.
            self._end_run()
            self._rows.clear()
        return output

    def _others(self) -> list[Any]:
        """Return the running requests outside the rows."""
        ids, running = self._rows.ids, self.running
        return [] if len(ids) == len(running) else [r for r in running if r.request_id not in ids]

    def _carry_out(self, num_coming: int, *args: Any, **kwargs: Any) -> Any:
        """Let vLLM schedule `num_coming` waiting requests and those outside the rows; add these."""
        rows, everyone = self._rows, self.running
        blocks = rows.begin()
        others = self._others()
        told = self.finished_req_ids or self.reset_preempted_req_ids
        if others or num_coming or told or not rows.ids:
            num_others, num_rows = len(others), len(rows.ids)
            limits = self.max_num_active_reqs, self.max_num_scheduled_tokens
            self.running = others
            self.max_num_active_reqs = min(limits[0] - num_rows, num_others + num_coming)
            self.max_num_scheduled_tokens -= num_rows
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self.max_num_active_reqs, self.max_num_scheduled_tokens = limits
                self.running = everyone + others[num_others:]
            if len(others) < num_others:
                self.running = [r for r in everyone if r.status == RequestStatus.RUNNING]
        else:
            output = SchedulerOutput.make_empty()
        rows.write(output, blocks)
        self.prev_step_scheduled_req_ids.update(rows.ids)
        return output

    def _end_run(self) -> None:
        """End the run, after its step in flight if there is one."""
        run = self._run
        if run is None:
            return
        run.is_over = True
        if any(step.plan is run.plan for step in self._steps.values()):
            return
        self._run = None
        if run.num_steps:
            self._guide.on_step(run.plan, {}, run.started_at, run.finished_at, run.num_steps)

    def _num_blocks_of(self, request_id: str) -> int:
        return len(self.kv_cache_manager.get_blocks(request_id).blocks[0])

    def _prepare(self, plan: StepPlan) -> int:
        """Prepare a plan's step; return how many waiting requests vLLM may try."""
        self._decoding = frozenset(self._guide.decoding(plan))
        self._allowed = {i.request_id: i.num_scheduled_tokens for i in plan.items}
        for request_id in self._rows.ids.keys() - self._decoding:
            self._rows.remove(request_id)
        others = self._others()
        for request in [r for r in others if self._guide.is_preempted(r.request_id)]:
            self.running.remove(request)
            self._preempt_request(
                request, time.monotonic(), drop_stale_output=self.requires_kv_delivery
            )
        drafts = {i.request_id: i.num_draft_tokens for i in plan.items}
        for request in others:
            # vLLM keeps draft probabilities for one step only, so a later draft is stale.
            if request.spec_token_ids and self._guide.knows(request.request_id):
                most = drafts.get(request.request_id, 0)
                request.spec_token_ids = request.spec_token_ids[:most]
        first = self._first_in_queue(plan)
        if first != list(itertools.islice(self.waiting, len(first))):
            self.waiting.remove_requests(first)
            self.waiting.prepend_requests(reversed(first))
        # Otherwise vLLM would try all other waiting requests.
        held: int = len(self.kv_holding_waiting) + self.num_waiting_for_streaming_input
        return len(first) + held

    def _first_in_queue(self, plan: StepPlan) -> list[Any]:
        """Return the admitted requests, then those that only vLLM decides on."""
        planned = [self.requests[i.request_id] for i in plan.items]
        admitted = [r for r in planned if r.status != RequestStatus.RUNNING]
        if len(self.requests) == self._guide.num_requests:
            return admitted
        others = [r for r in self.waiting if not self._guide.knows(r.request_id)]
        return admitted + [r for r in others if r.status in _READY]

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Limit a request's chunk to the plan (vLLM's hook for every request); 0 skips it."""
        request_id = request.request_id
        planned = None if request_id in self._decoding else self._allowed
        if planned is not None and self._guide.knows(request_id):
            allowed = planned.get(request_id, 0)
            due = request.num_tokens + request.num_output_placeholders - num_computed_tokens
            if allowed < due:
                num_new_tokens = min(num_new_tokens, allowed)
        chunk: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return chunk

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step = self._steps.pop(id(scheduler_output), None)
        if step is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        started_at, self._finished_at = max(step.scheduled_at, self._finished_at), now
        run = self._run
        if run is not None and step.plan is run.plan:
            run.started_at = run.started_at if run.num_steps else started_at
            run.finished_at = now
            run.num_steps += 1
        else:
            answers = self._answers(step.plan, scheduler_output, model_runner_output)
            self._guide.on_step(step.plan, answers, started_at, now)
        outputs, others = self._take_in(scheduler_output, model_runner_output)
        ended = [request for request in others if request.is_finished()]
        if ended or (run is not None and run.is_over):
            self._end_run()
        for request in ended:
            self._guide.end(request.request_id, request.num_output_tokens, now)
        if self._keeps_rows:
            added = [r for r in others if r.status == RequestStatus.RUNNING and self._rows.add(r)]
            if self._run is None:
                self._guide.tell(added, self._num_blocks_of)
        return outputs

    def _take_in(self, scheduled: Any, made: Any) -> tuple[Any, list[Any]]:
        """Return vLLM's outputs of a step, and the requests that it processed itself."""
        rows = self._rows
        if made.num_nans_in_logits:
            rows.clear()
        own, whole = rows.take_in(made), scheduled.num_scheduled_tokens
        rest: dict[str, int] = {}
        scheduled.num_scheduled_tokens = rest
        if len(rows.ids) < len(whole):
            rest |= {i: whole[i] for i in whole if i not in rows.ids}
        others = [self.requests[i] for i in rest if i in self.requests]
        outputs = super().update_from_output(scheduled, made)
        scheduled.num_scheduled_tokens = whole
        for client, added in own.items():
            outputs.setdefault(client, EngineCoreOutputs()).outputs += added
        return outputs, others

    def _answers(self, plan: StepPlan, scheduled: Any, made: Any) -> dict[str, Answer]:
        answers = {}
        for item in plan.items:
            request = self.requests.get(item.request_id)
            if request is None:
                continue
            row = made.req_id_to_index[item.request_id]
            token_ids = made.sampled_token_ids[row] if made.sampled_token_ids else []
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(item.request_id, ()))
            num_proposed = min(drafted, item.num_draft_tokens)
            answers[item.request_id] = Answer(token_ids, num_proposed, request.num_output_tokens)
        return answers


class AsyncGuidedScheduler(GuidedScheduler, AsyncScheduler):
    """`GuidedScheduler` for vLLM's asynchronous scheduling."""


def _checked(scheduler: Scheduler, kv_cache_config: Any) -> PluginConfig:
    """Return the settings. Raises: ConfigError, also for settings of vLLM that do not fit."""
    additional = scheduler.vllm_config.additional_config
    given = additional.get(SETTING, {}) if isinstance(additional, dict) else {}
    try:
        config = parse_plugin_config(given)
    except ConfigError as error:
        raise _bad(str(error)) from error
    if scheduler.scheduler_config.policy != "fcfs":
        raise ConfigError(
            "Penstock's plug-in needs --scheduling-policy fcfs, not "
            f"{scheduler.scheduler_config.policy}: its admission policy says who comes first"
        )
    if scheduler.vllm_config.kv_transfer_config is not None:
        raise ConfigError("Penstock's plug-in does not go with --kv-transfer-config")
    if not scheduler.scheduler_config.enable_chunked_prefill:
        raise ConfigError("Penstock's plug-in needs --enable-chunked-prefill")
    if scheduler.scheduler_config.prefill_schedule_interval > 1:
        raise ConfigError(
            "Penstock's plug-in does not go with --prefill-schedule-interval: its admission policy "
            "says when prompts are computed"
        )
    speculation = scheduler.vllm_config.speculative_config
    if speculation is not None and speculation.enable_adaptive_verification:
        raise ConfigError(
            "Penstock's plug-in does not go with enable_adaptive_verification: its allocation "
            "policy says how long drafts are, and learns from what was verified of them"
        )
    kinds = [type(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups]
    model = scheduler.vllm_config.model_config
    if len(kinds) != 1 or not issubclass(kinds[0], FullAttentionSpec):
        named = ", ".join(k.__name__ for k in kinds) or "none"
        raise ConfigError(
            f"Penstock's plug-in serves models with one kind of KV cache, full attention; "
            f"{model.model} has {named}"
        )
    if model.runner_type != "generate" or model.is_diffusion:
        raise ConfigError(f"Penstock's plug-in serves models that generate, unlike {model.model}")
    return config


def _bad(reason: str) -> ConfigError:
    return ConfigError(f"--additional-config {SETTING}: {reason}")
