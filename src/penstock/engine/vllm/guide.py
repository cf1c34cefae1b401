"""Penstock's scheduler, told of the requests of vLLM's and asked what it would do with them.

It is the scheduler of the engine and of the simulator, with their policies. What it knows of KV and
of progress is put right from vLLM's before every step: whatever vLLM does otherwise than planned
costs a step at most. Tokens stay with vLLM; here every request is one of which only lengths are
known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.config import (
    DEFAULT_TENANT,
    ConfigError,
    PluginConfig,
    PolicyConfig,
    RequestOptions,
    parse_request_options,
    read_profile,
)
from penstock.core.groups import CountedKV, CountedState
from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.times import step_work
from penstock.core.policies.registry import make_policy, option_types, policy_names
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, RequestState
from penstock.core.types import (
    TARGET,
    Arrive,
    Cancel,
    PhaseTimes,
    Request,
    Status,
    StepPlan,
    StepResult,
    Tenant,
    Verdict,
    latency_target,
)
from penstock.engine.vllm.pool import MirroredPool
from penstock.fluid.step_profile import StepProfile

OPTION_PREFIX = "penstock_"
"""Of Penstock's options in a request's `vllm_xargs`, which other extensions use, too."""

_TOKEN_LIMITS = ("max_num_batched_tokens", "token_budget", "max_num_tokens")
_REQUEST_LIMITS = ("max_num_seqs", "max_batch_size")
"""What the admission policies call a step's most positions, and most requests that run."""

_WHOLE_PROMPTS = ("vllm_v0", "wait", "nested_wait")
"""Policies that never go on with part of a prompt, which vLLM leaves where one is longer than its
step."""

_UNMEASURED_STEP_S = 0.01
"""Of every step while none was measured: the largest is then the most efficient."""

_log = logging.getLogger(__name__)


class SeenRequest(Protocol):
    """What is read of a request of vLLM's. num_output_placeholders: tokens that steps in flight
    will add; num_computed_tokens is what they will have computed."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    sampling_params: Any

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


class Limits(NamedTuple):
    """What vLLM has room for. proposer: what drafts, if anything does, up to `num_draft_tokens`
    tokens a step. overlaps: it schedules a step while the one before is computed."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    proposer: str | None = None
    num_draft_tokens: int = 0
    overlaps: bool = False


class Answer(NamedTuple):
    """What a step of vLLM's came to for a request: its tokens, and how many of a draft were
    verified. num_output_tokens: that it had before."""

    token_ids: Sequence[int]
    num_proposed: int
    num_output_tokens: int


class Guide:
    """What Penstock's policies would do."""

    def __init__(self, config: PluginConfig, limits: Limits, pool: MirroredPool) -> None:
        """Raises: ConfigError; PolicyError."""
        self._limits = limits
        self._pool = pool
        self._tenants = frozenset(config.tenants) | {DEFAULT_TENANT}
        self._learn = Estimators()
        drafters = []
        if limits.proposer is not None:
            drafters.append(Drafter(limits.proposer, max_draft_tokens=limits.num_draft_tokens))
        if config.profile is None:
            unmeasured = (_UNMEASURED_STEP_S,)
            capacity = pool.capacity_tokens
            self._learn.times.profile = StepProfile("unmeasured", capacity, (0,), unmeasured)
            self._learn.times.learns_profile = True
        else:
            seed_estimators(self._learn, read_profile(config.profile), drafters)
        allocation = config.allocation or PolicyConfig.of("fixed", k=limits.num_draft_tokens)
        self._scheduler = Scheduler(
            pool,
            drafters,
            admission=_within(config.admission, limits).make("admission"),
            selection=make_policy("selection", "single"),
            allocation=allocation.make("allocation"),
            max_model_len=limits.max_model_len,
            tenants=[
                Tenant(name, share.weight, max_running_requests=share.max_running_requests)
                for name, share in config.tenants.items()
            ],
            learn=self._learn,
            fairness=config.fairness,
            max_num_seqs=limits.max_num_seqs,
            # Else a group's next token would be asked for while one is being computed.
            counted=not limits.overlaps,
        )
        self._requests = self._scheduler.table.requests
        self._groups = self._scheduler.table.groups

    def knows(self, request_id: str) -> bool:
        """Whether a request is one that the policies decide on; vLLM alone does on the others."""
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """That the policies decide on."""
        return len(self._requests)

    def is_preempted(self, request_id: str) -> bool:
        """Whether it has given up its memory."""
        state = self._requests.get(request_id)
        return state is not None and state.status is Status.PREEMPTED

    # --- requests -------------------------------------------------------------------------------

    def arrive(self, request: SeenRequest, now: float) -> None:
        """A request waits. To say so again changes nothing."""
        if request.request_id in self._requests:
            return
        options = self._options(request)
        room = self._limits.max_model_len - request.num_prompt_tokens
        hashes = () if request.skip_reading_prefix_cache else tuple(request.block_hashes)
        arrival = Request(
            request.request_id,
            request.num_prompt_tokens,
            max(1, min(request.max_tokens, room)),
            now,
            options.tenant,
            block_hashes=hashes,
            max_draft_tokens=options.max_draft_tokens,
            expected_output_tokens=options.expected_output_tokens,
            latency=latency_target(options.tpot_ms, options.deadline_ms),
        )
        # Refused is what is too large by a block: such a request is left to vLLM.
        self._scheduler.apply(Arrive(arrival), now)

    def _options(self, request: SeenRequest) -> RequestOptions:
        given = getattr(request.sampling_params, "extra_args", None) or {}
        own = {
            name.removeprefix(OPTION_PREFIX): value
            for name, value in given.items()
            if name.startswith(OPTION_PREFIX)
        }
        try:
            options = parse_request_options(own)
            if options.tenant not in self._tenants:
                known = ", ".join(sorted(self._tenants))
                raise ConfigError(f"tenant: {options.tenant!r} is unknown; tenants: {known}")
        except ConfigError as error:
            # vLLM has accepted the request, and gives its scheduler no way to refuse it.
            _log.warning("request %s: vllm_xargs %s%s", request.request_id, OPTION_PREFIX, error)
            return RequestOptions()
        return options

    def end(self, request_id: str, num_output_tokens: int | None, now: float) -> None:
        """A request is over, with so many tokens, or given up (None)."""
        if request_id not in self._requests:
            return
        if num_output_tokens:
            self._learn.lengths.ended(num_output_tokens)
        self._scheduler.apply(Cancel(request_id), now)

    # --- steps ----------------------------------------------------------------------------------

    def plan(
        self,
        running: Iterable[SeenRequest],
        alive: Container[str],
        num_blocks_of: Callable[[str], int],
        now: float,
    ) -> StepPlan:
        """The next step. running: by vLLM; alive: ids of all its requests; num_blocks_of: blocks
        that a running one holds."""
        table = self._scheduler.table
        seen = set()
        for request in running:
            state = self._requests.get(request.request_id)
            if state is None:
                continue
            seen.add(request.request_id)
            if state.status is not Status.RUNNING:
                table.admit(state)
            self._put_right(state, request, num_blocks_of)
        for request_id, state in list(table.running.items()):
            if request_id not in seen:
                if request_id in alive:
                    table.preempt(state)
                else:
                    self.end(request_id, None, now)
        self._pool.refresh()
        return self._scheduler.schedule(now)

    def _put_right(
        self,
        state: RequestState,
        request: SeenRequest,
        num_blocks_of: Callable[[str], int],
    ) -> None:
        """Let a request be as far as vLLM says."""
        num_known = request.num_tokens + request.num_output_placeholders
        if isinstance(state, CountedState) and state.decode_group is not None:
            if state.num_known_tokens == num_known == request.num_computed_tokens + 1:
                return
            self._scheduler.table.leave_group(state)
        state.num_output_tokens = num_known - request.num_prompt_tokens
        num_blocks = num_blocks_of(request.request_id)
        if state.kv_of(TARGET).num_blocks != num_blocks:
            state.kv[TARGET] = CountedKV(0, num_blocks)
        state.kv[TARGET].num_computed_tokens = request.num_computed_tokens
        # vLLM gives blocks away while a step in flight reads them: what comes after is later.
        state.plans.clear()
        # Nothing to do before the step in flight has ended, or ever: vLLM skips it, too.
        has_all = num_known <= request.num_computed_tokens
        left = request.num_prompt_tokens + request.max_tokens - request.num_computed_tokens
        num_coming = request.num_output_placeholders
        state.in_flight = has_all or (num_coming > 0 and left <= 2 - num_coming)

    def decoding(self, plan: StepPlan) -> list[str]:
        """Ids of the requests that only decode in a plan, and are in none of its items."""
        run = plan.decodes
        return [] if run is None else [i for key in run.groups for i in self._groups[key].members]

    def carried_out(self, plan: StepPlan, scheduled: Container[str]) -> StepPlan:
        """The plan without requests that vLLM has not scheduled."""
        for request_id in self.decoding(plan):
            if request_id not in scheduled:
                plan = self._without(plan, self._requests[request_id])
        left_out = [i for i in plan.items if i.request_id not in scheduled]
        for item in left_out:
            state = self._requests.get(item.request_id)
            if state is not None:
                state.plans.pop(plan.id, None)
        if not left_out:
            return plan
        return plan._replace(items=tuple(i for i in plan.items if i.request_id in scheduled))

    def _without(self, plan: StepPlan, state: RequestState) -> StepPlan:
        """Where `state` would only have decoded."""
        self._scheduler.table.leave_group(state)
        state.plans.pop(plan.id, None)
        run = plan.decodes
        assert run is not None
        kv_tokens = run.num_kv_tokens - state.num_known_tokens
        run = run._replace(num_requests=run.num_requests - 1, num_kv_tokens=kv_tokens)
        return plan._replace(decodes=run)

    def observe(
        self,
        plan: StepPlan,
        answers: Mapping[str, Answer],
        started_at: float,
        finished_at: float,
        repeats: int = 1,
    ) -> None:
        """What a plan, as it was carried out so often, came to. Requests that are gone have no
        answer."""
        plan = plan._replace(items=tuple(i for i in plan.items if i.request_id in answers))
        verdicts = []
        for item in plan.items:
            answer = answers[item.request_id]
            state = self._requests.get(item.request_id)
            if state is not None and state.epoch == item.epoch:
                state.num_output_tokens = answer.num_output_tokens
            accepted = max(0, len(answer.token_ids) - 1) if answer.num_proposed else 0
            verdicts.append(
                Verdict(
                    item.request_id,
                    item.epoch,
                    item.round,
                    tuple(answer.token_ids),
                    self._limits.proposer if answer.num_proposed else None,
                    answer.num_proposed,
                    accepted,
                    min(accepted + 1, answer.num_proposed),
                    accepted,
                    accepted,
                )
            )
        work = None if plan.is_empty else step_work(plan, verdicts)
        if work is not None and repeats > 1:
            # As long as they took in the mean, with the context that they had then.
            context = work.num_kv_tokens + (repeats - 1) * work.num_decodes // 2
            work = work._replace(num_kv_tokens=context)
        seconds = (finished_at - started_at) / repeats
        result = StepResult(
            plan.id,
            TARGET,
            started_at,
            finished_at,
            tuple(verdicts),
            phases=PhaseTimes(verify=seconds),
            num_rows=work.num_positions if work else 0,
            repeats=repeats,
            work=work,
            work_seconds=seconds,
        )
        self._scheduler.update(plan, result)


def _within(admission: PolicyConfig, limits: Limits) -> PolicyConfig:
    """The policy with limits that vLLM has room for: its own defaults where they are lower.
    Raises: ConfigError for higher ones that were asked for, and for a policy that cannot serve."""
    if admission.name in _WHOLE_PROMPTS and not admission.options.get("gated"):
        choices = ", ".join(n for n in policy_names("admission") if n not in _WHOLE_PROMPTS)
        raise ConfigError(
            f"admission policy {admission.name!r} computes whole prompts only, and vLLM cuts those "
            f"that are longer than a step; choose from {choices}"
        )
    policy = admission.make("admission")
    known = option_types("admission", admission.name)
    given: dict[str, int] = {}
    for names, flag, most in (
        (_TOKEN_LIMITS, "--max-num-batched-tokens", limits.max_num_batched_tokens),
        (_REQUEST_LIMITS, "--max-num-seqs", limits.max_num_seqs),
    ):
        for name in (n for n in names if n in known):
            if getattr(policy.options, name) <= most:
                continue
            if name in admission.options:
                raise ConfigError(
                    f"admission policy {admission.name!r}: {name} may be at most {most}, which is "
                    f"vLLM's {flag}, not {admission.options[name]}"
                )
            given[name] = most
    return admission.with_defaults(given)
