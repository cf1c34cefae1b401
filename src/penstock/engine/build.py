"""Engine from a configuration: load models, size memory, measure, compose."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.config import (
    DEFAULT_TENANT,
    SUFFIX,
    EngineConfig,
    as_tenants,
    key_variable,
    read_profile,
)
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp, TextLookUp
from penstock.core.loop import Loop
from penstock.core.policies.base import MOST_DRAFT_TOKENS
from penstock.core.policies.registry import make_pipeline
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, DrafterKind, DrafterStatus
from penstock.core.types import TARGET, Pooling
from penstock.engine.audit import Auditor
from penstock.engine.backends import (
    Models,
    Placement,
    load_vllm,
    resolve_context,
    resolve_num_blocks,
    resolve_num_slots,
    resolve_placements,
)
from penstock.engine.calibrate import calibrate
from penstock.engine.drafters.completions import CompletionsClient
from penstock.engine.drafters.server import ServerDrafter
from penstock.engine.ends import LazyTokenizer
from penstock.engine.executor import LocalExecutor
from penstock.engine.grammar import GrammarCompiler
from penstock.engine.kv_cache import state_bytes
from penstock.engine.models.config import DecoderConfig
from penstock.engine.native.loading import loaded_instruction_set
from penstock.engine.state import StateFile
from penstock.engine.tokenizer import Tokenizer, load_tokenizer, unlike_tokenizers

_log = logging.getLogger(__name__)


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    now = staticmethod(time.perf_counter)


@dataclass(frozen=True, slots=True)
class Engine:
    """All parts that a process needs to serve one target."""

    loop: Loop
    scheduler: Scheduler
    executor: LocalExecutor
    auditor: Auditor
    clock: MonotonicClock
    tokenizer_path: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    target: str
    backend: str
    dtype: str
    num_threads: int
    kv_bytes: int | None
    kv_dtype: str
    num_slots: int | None = None
    state_bytes: int = 0
    instruction_set: str | None = None
    scores_prompts: bool = True
    pooling: Pooling | None = None
    generates: bool = True
    state: StateFile | None = None

    def describe(self) -> dict[str, Any]:
        """Return facts for `/health`, logs and reports."""
        return {
            "target": self.target,
            "drafters": self._drafter_names,
            "dtype": self.dtype,
            "backend": self.backend,
            "instruction_set": self.instruction_set,
            "num_threads": self.num_threads,
            "kv_tokens": self.scheduler.pool.capacity_tokens,
            "kv_bytes": self.kv_bytes,
            "kv_dtype": self.kv_dtype,
            "state_slots": self.num_slots,
            "state_bytes": self.state_bytes,
            "max_model_len": self.max_model_len,
        }

    @property
    def _drafter_names(self) -> list[str]:
        """Names that a request may give, look-up's last."""
        look_up = self.scheduler.look_up
        names = [*self.executor.drafters, *self.executor.servers]
        return names if look_up is None else [*names, look_up.name]


def load_engine(config: EngineConfig, *, calibrated: bool = True) -> Engine:
    """Load the models and compose the engine. Raises: CheckpointError, ConfigError.

    calibrated: measure step times, which some policies need."""
    torch.manual_seed(0)
    places = resolve_placements(config)
    if config.vllm is None:
        models = sized_models(config, places)
    else:
        models = _models_beside_vllm(config, places)
        config = models.config
    place = models.place
    clock = MonotonicClock()
    with models.need().explained():
        drafters = [models.drafter(n, path) for n, path in config.drafter_models.items()]
        executor = models.executor(drafters, clock)
    look_up = _look_up(config)
    state = None if config.state is None else StateFile(config, config.state, models, look_up)
    learn = Estimators() if state is None else state.restore()
    scheduler = _scheduler(config, models, learn, look_up)
    known = None if config.profile is None else read_profile(config.profile)
    profile = known and known.served(drafts=bool(drafters or look_up))  # as in simulations
    if calibrated:
        is_auto = config.pipeline == "auto"
        together = [n for n, d in scheduler.table.drafters.items() if is_auto and d.has_lane]
        calibrate(executor, scheduler.learn, clock, profile, together=together)
    # The few small steps that are measured are not typical of vLLM's.
    scheduler.learn.times.target.learns_profile = config.vllm is not None and profile is None
    target = models.target
    executor.tokenizer = LazyTokenizer(partial(load_tokenizer, config.target))
    executor.grammars = GrammarCompiler(
        partial(load_tokenizer, config.target), target.vocab_size, target.eos_token_ids
    )
    _start_servers(config, executor, clock, target.vocab_size)
    pooling, generates = models.uses()
    audited = {n: p for n, p in config.drafter_models.items() if n not in models.tokenizers}
    return Engine(
        loop=Loop(scheduler, executor, clock, own_events=executor.take_events),
        scheduler=scheduler,
        executor=executor,
        auditor=Auditor(audited),
        clock=clock,
        tokenizer_path=config.target,
        max_model_len=models.max_request_tokens,
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        target=config.target_name,
        backend=models.backend,
        dtype=_name(models.dtype),
        num_threads=place.num_threads,
        kv_bytes=models.kv_bytes,
        kv_dtype=_name(place.kv_dtype),
        num_slots=models.num_slots,
        state_bytes=models.state_bytes,
        instruction_set=loaded_instruction_set() if place.backend == "native" else None,
        scores_prompts=executor.scores_prompts,
        pooling=pooling,
        generates=generates,
        state=state,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sized_models(config: EngineConfig, places: Mapping[str, Placement]) -> Models:
    """Return an engine's models, not loaded yet. Raises: CheckpointError, ConfigError."""
    shapes = _shapes(config)
    tokenizers = _tokenizers(config)
    max_model_len = resolve_context(config, shapes[TARGET])
    target = shapes[TARGET]
    num_slots = resolve_num_slots(config, places[TARGET], target, _most_running(config))
    states = (num_slots or 0) * state_bytes(target) * (1 + config.prefix_caching)
    num_blocks = resolve_num_blocks(config, places, shapes, max_model_len, states)
    room = (num_blocks, max_model_len)
    return Models(config, places, shapes, *room, tokenizers, num_slots=num_slots)


def _most_running(config: EngineConfig) -> int | None:
    """Return the admission policy's own limit of requests at once, if it has one."""
    policy = config.admission.make("admission")
    name = policy.limits.max_num_seqs
    return None if name is None else int(getattr(policy.options, name))


def _models_beside_vllm(config: EngineConfig, places: Mapping[str, Placement]) -> Models:
    """Raises: CheckpointError, ConfigError."""
    tokenizers = _tokenizers(config)
    shapes = _drafter_shapes(config)
    # vLLM's kernels are PyTorch's, even with native drafters.
    torch.set_num_threads(places[TARGET].num_threads)
    vllm = load_vllm(config)
    config = config.model_copy(update={"block_size": vllm.block_size})
    num_blocks = vllm.num_blocks
    if shapes and config.kv_tokens is None:
        fitting = resolve_num_blocks(config, places, shapes, vllm.max_model_len)
        num_blocks = min(num_blocks, fitting)
    return Models(config, places, shapes, num_blocks, vllm.max_model_len, tokenizers, vllm)


def _look_up(config: EngineConfig) -> TextLookUp | None:
    if config.text_look_up is None:
        return None
    name, kind = config.text_look_up
    return TextLookUp(name, remembers=kind == SUFFIX)


def _start_servers(
    config: EngineConfig, executor: LocalExecutor, clock: MonotonicClock, vocab_size: int
) -> None:
    """Start the drafters on servers. Raises: ConfigError."""
    assert executor.tokenizer is not None
    is_shared = any(tenant.share_prompts for tenant in config.tenants.values())
    for name, server in config.servers.items():
        variable = key_variable(name)
        client = CompletionsClient(server, os.environ.get(variable), variable)
        loading = executor.tokenizer.loading
        # Of another machine: the prompts of no tenant, but for those that share theirs.
        tenant = None if server.is_here else ""
        drafter = ServerDrafter(name, client, loading, vocab_size, tenant, clock, executor.wake)
        executor.servers[name] = drafter
        drafter.start()
        if not (server.is_here or is_shared):
            _log.warning(
                "drafter %s is on another machine and gets no prompts, as no tenant allows it; to "
                "allow it: --set tenants.%s.share_prompts=true",
                name,
                DEFAULT_TENANT,
            )


def _scheduler(
    config: EngineConfig, models: Models, learn: Estimators, look_up: LookUp | None
) -> Scheduler:
    """Raises: PolicyError."""
    drafters = [] if config.head is None else [Drafter(config.head[0], kind=DrafterKind.HEAD)]
    drafters += [_drafter(config, models, name) for name in config.drafter_models]
    drafters += [
        Drafter(
            n,
            kind=DrafterKind.COMPLETIONS,
            status=DrafterStatus.DOWN,
            max_num_seqs=config.drafters[n].max_num_seqs,
        )
        for n in config.servers
    ]
    # Of a pipeline only the last stage knows the tokens of the step before.
    groups = config.vllm is not None and config.vllm.pipeline_parallel == 1
    most = models.vllm.max_num_seqs if groups and models.vllm else models.num_slots
    pool = _pool(config, models.num_target_blocks)
    pool.num_snapshots = models.num_slots if pool.prefix_caching else None
    return Scheduler(
        pool,
        drafters,
        admission=config.admission.make("admission"),
        selection=config.selection.make("selection"),
        allocation=config.allocation.make("allocation"),
        pipeline=make_pipeline(config.pipeline),
        max_model_len=models.max_model_len,
        tenants=as_tenants(config.tenants),
        learn=learn,
        groups_decodes=groups,
        fairness=config.fairness,
        max_num_seqs=most,
        max_draft_tokens=models.vllm.max_draft_tokens if models.vllm else MOST_DRAFT_TOKENS,
        look_up=look_up,
    )


def _drafter(config: EngineConfig, models: Models, name: str) -> Drafter:
    """Return the scheduler's drafter, with limits where the target's are wider."""
    shape = models.shapes.get(name)
    drafts_text = name in models.tokenizers
    drafter = Drafter(
        name,
        has_lane=_has_lane(config, models, name),
        max_num_seqs=config.drafters[name].max_num_seqs,
        kind=DrafterKind.LOCAL if drafts_text else DrafterKind.ENDING,
    )
    if shape is not None:
        # For another tokenizer it has its own blocks, and these are an estimate.
        drafter.pool = _pool(config, models.num_blocks, shared=not drafts_text)
        if shape.max_position_embeddings < models.max_model_len:
            drafter.max_len = shape.max_position_embeddings
        if shape.vocab_size < models.target.vocab_size and not drafts_text:
            drafter.vocab_size = shape.vocab_size
    return drafter


def _has_lane(config: EngineConfig, models: Models, name: str) -> bool:
    """Return whether a drafter may work beside the target.

    With `auto` it may not on the target's cores, where nothing can be gained."""
    if config.pipeline != "auto":
        return config.pipeline != "off"
    return name in models.places and models.is_apart(name)


def _shapes(config: EngineConfig) -> dict[str, DecoderConfig]:
    target = DecoderConfig.from_pretrained(config.target)
    if config.head is not None:
        target = target.within(None, config.head[1])
    return {TARGET: target, **_drafter_shapes(config)}


def _drafter_shapes(config: EngineConfig) -> dict[str, DecoderConfig]:
    return {
        name: DecoderConfig.from_pretrained(path) for name, path in config.drafter_models.items()
    }


def _tokenizers(config: EngineConfig) -> dict[str, Tokenizer]:
    """Return tokenizers of drafters that differ from the target's, and then the target's."""
    found: dict[str, Tokenizer] = {}
    for name, path in config.drafter_models.items():
        pair = unlike_tokenizers(config.target, path, found.get(TARGET))
        if pair is not None:
            found |= {TARGET: pair[0], name: pair[1]}
            _log.warning(
                "drafter %s (%s) has another tokenizer than the target: it drafts text, of which "
                "the target's tokens are verified",
                name,
                path,
            )
    return found


def _pool(config: EngineConfig, num_blocks: int, *, shared: bool = True) -> BlockPool:
    """Return a pool. shared: prefixes between requests, if the configuration enables it."""
    return BlockPool(num_blocks, config.block_size, prefix_caching=shared and config.prefix_caching)
