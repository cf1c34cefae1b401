"""Penstock's scheduler, mirroring vLLM's requests and planning their steps.

It is the scheduler of the engine and of the simulator. Before every step its KV and progress are
synchronised with vLLM's, so a deviation of vLLM from a plan costs one step at most. It knows only
the lengths of requests, not their tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
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
from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.times import step_work
from penstock.core.policies.registry import make_policy, option_types, policies
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, RequestState
from penstock.core.sync import HostRequest
from penstock.core.types import (
    TARGET,
    Arrive,
    Cancel,
    LatencyTarget,
    PhaseTimes,
    Request,
    Status,
    StepPlan,
    StepResult,
    Tenant,
    Verdict,
)
from penstock.engine.vllm.pool import MirroredPool
from penstock.fluid.step_profile import StepProfile

OPTION_PREFIX = "penstock_"
"""Prefix of Penstock's options in a request's `vllm_xargs`."""
_TOKEN_LIMITS = ("max_num_batched_tokens", "token_budget", "max_num_tokens")
_REQUEST_LIMITS = ("max_num_seqs", "max_batch_size")
"""Names in the admission policies of a step's most positions, and of most running requests."""
_UNMEASURED_STEP_S = 0.01
"""Any constant time, before steps are measured, makes the largest step the most efficient."""

_log = logging.getLogger(__name__)


class SeenRequest(Protocol):
    """Fields of vLLM's requests that are read; num_computed_tokens includes steps in flight.

    num_output_placeholders: tokens that they will add."""

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
    """Limits of vLLM. overlaps: it schedules a step while the one before is computed.

    proposer: its draft method, if any, of up to `num_draft_tokens` a step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    proposer: str | None = None
    num_draft_tokens: int = 0
    overlaps: bool = False


class Answer(NamedTuple):
    """Result of a step for one request. num_output_tokens: before the step."""

    token_ids: Sequence[int]
    num_proposed: int
    num_output_tokens: int


class Guide:
    """Runs Penstock's policies on vLLM's requests."""

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
            self._learn.times.target.learns_profile = True
        else:
            seed_estimators(self._learn, read_profile(config.profile), drafters)
        allocation = config.allocation or PolicyConfig.from_name("fixed", k=limits.num_draft_tokens)
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
            # Otherwise a group's next token would be planned while one is being computed.
            counted=not limits.overlaps,
        )
        self._requests = self._scheduler.table.requests
        self._groups = self._scheduler.table.groups

    def knows(self, request_id: str) -> bool:
        """Return whether the policies decide on a request; on the others vLLM alone does."""
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """Number of requests that the policies decide on."""
        return len(self._requests)

    def is_preempted(self, request_id: str) -> bool:
        state = self._requests.get(request_id)
        return state is not None and state.status is Status.PREEMPTED

    def arrive(self, request: SeenRequest, now: float) -> None:
        """Add a waiting request, once."""
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
            latency=LatencyTarget.from_ms(options.tpot_ms, options.deadline_ms),
        )
        # A request that is refused, as it exceeds the memory, is left to vLLM.
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
            # vLLM's scheduler cannot refuse a request.
            _log.warning("request %s: vllm_xargs %s%s", request.request_id, OPTION_PREFIX, error)
            return RequestOptions()
        return options

    def end(self, request_id: str, num_output_tokens: int | None, now: float) -> None:
        """Remove a request that ended with so many output tokens, or was cancelled (None)."""
        if request_id not in self._requests:
            return
        if num_output_tokens:
            self._learn.lengths.ended(num_output_tokens)
        self._scheduler.apply(Cancel(request_id), now)

    def plan(
        self,
        running: Iterable[SeenRequest],
        as_planned: Set[str],
        alive: Container[str],
        num_blocks_of: Callable[[str], int],
        now: float,
    ) -> StepPlan:
        """Return the next step's plan. num_blocks_of: blocks of a running request.

        running: vLLM's running requests, without those `as_planned`; alive: ids of all its
        requests."""
        seen = self.tell(running, num_blocks_of)
        states = self._scheduler.table.running
        gone = states.keys() - seen - as_planned
        if gone:
            self._scheduler.sync((), [i for i in states if i in gone and i in alive])
            for request_id in [i for i in states if i in gone and i not in alive]:
                self.end(request_id, None, now)
        self._pool.refresh()
        return self._scheduler.schedule(now)

    def tell(self, running: Iterable[SeenRequest], num_blocks_of: Callable[[str], int]) -> set[str]:
        """Take over the state of running requests that are known; return their ids."""
        told = [
            _told(request, num_blocks_of(request.request_id))
            for request in running
            if self.knows(request.request_id)
        ]
        self._scheduler.sync(told)
        return {request.request_id for request in told}

    def decoding(self, plan: StepPlan) -> list[str]:
        """Return ids of the requests that only decode in a plan."""
        run = plan.decodes
        return [] if run is None else [i for key in run.groups for i in self._groups[key].members]

    def carried_out(self, plan: StepPlan, scheduled: Container[str]) -> StepPlan:
        """Return the plan without requests that vLLM has not scheduled."""
        idle = [self._requests[i] for i in self.decoding(plan) if i not in scheduled]
        left_out = [i.request_id for i in plan.items if i.request_id not in scheduled]
        if not idle and not left_out:
            return plan
        run = plan.decodes
        if run is not None:
            num_kv_tokens = run.num_kv_tokens - sum(s.num_known_tokens for s in idle)
            num_requests = run.num_requests - len(idle)
            run = run._replace(num_requests=num_requests, num_kv_tokens=num_kv_tokens)
        states = idle + [self._requests[i] for i in left_out if self.knows(i)]
        self._scheduler.sync([self._as_counted(state) for state in states])
        items = tuple(i for i in plan.items if i.request_id in scheduled)
        return plan._replace(items=items, decodes=run)

    def _as_counted(self, state: RequestState) -> HostRequest:
        kv, num_computed = state.kv.get(TARGET), state.num_computed_tokens
        num_blocks = self._pool.blocks_for(num_computed) if kv is None else kv.num_blocks
        return HostRequest(state.request.id, state.num_output_tokens, num_computed, num_blocks)

    def on_step(
        self,
        plan: StepPlan,
        answers: Mapping[str, Answer],
        started_at: float,
        finished_at: float,
        repeats: int = 1,
    ) -> None:
        """Report a plan's results after `repeats` steps. Requests that are gone have no answer."""
        plan = plan._replace(items=tuple(i for i in plan.items if i.request_id in answers))
        verdicts, told = [], []
        for item in plan.items:
            answer = answers[item.request_id]
            state = self._requests.get(item.request_id)
            if state is not None and state.epoch == item.epoch:
                before = self._as_counted(state)
                told.append(before._replace(num_output_tokens=answer.num_output_tokens))
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
            # The mean context of the repeats, for their mean time.
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
        self._scheduler.sync(told)
        self._scheduler.update(plan, result)


def _told(request: SeenRequest, num_blocks: int) -> HostRequest:
    num_known = request.num_tokens + request.num_output_placeholders
    # Nothing to do before the step in flight ends, or at all: vLLM skips it, too.
    has_all = num_known <= request.num_computed_tokens
    left = request.num_prompt_tokens + request.max_tokens - request.num_computed_tokens
    num_coming = request.num_output_placeholders
    return HostRequest(
        request.request_id,
        num_known - request.num_prompt_tokens,
        request.num_computed_tokens,
        num_blocks,
        has_all or (num_coming > 0 and left <= 2 - num_coming),
    )


def _within(admission: PolicyConfig, limits: Limits) -> PolicyConfig:
    """Return the policy with defaults lowered to vLLM's limits. Raises: ConfigError."""
    policy = admission.make("admission")
    if not policy.cuts_prompts:
        choices = ", ".join(n for n, p in policies("admission").items() if p.cuts_prompts)
        raise ConfigError(
            f"admission policy {admission.name!r} computes whole prompts only, and vLLM cuts those "
            f"that are longer than a step; choose from {choices}"
        )
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
