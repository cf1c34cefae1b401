"""The engine in steady state on random weights, and transformers beside it, for lab.bench.gpu."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lab.bench.gpu.tools import BLOCK_SIZE, GpuTimes, fill_randomly, timed
from penstock.config import EngineConfig
from penstock.core.kv.blocks import BlockPool
from penstock.core.loop import Loop
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter
from penstock.core.types import NO_DRAFTER, TARGET, Arrive, Cancel, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.gpu import graphs
from penstock.engine.models.random import shape

DRAFTER = "drafter"
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """context: tokens of each request when measuring starts. num_tokens: that each of them makes
    while it is measured."""

    target: str
    drafter: str
    device: torch.device
    dtype: torch.dtype
    attention: str
    batch: int
    context: int
    num_tokens: int
    acceptance: float

    @property
    def uses_graphs(self) -> bool:
        return self.attention not in ("padded", "decomposed")

    @property
    def longest(self) -> int:
        return self.context + self.num_tokens + 64


@dataclass(frozen=True, slots=True)
class Rate:
    """step: seconds of a turn of the loop. host_share: of the wall time, without a graph at
    work on the device; draft_share: with one of the drafter."""

    num_draft_tokens: int
    tokens_per_s: float
    step: GpuTimes
    host_share: float
    draft_share: float
    mean_acceptance_length: float


@dataclass(slots=True)
class _Pass:
    tokens: int = 0
    wall: float = 0.0
    busy: float = 0.0
    drafting: float = 0.0
    drafts: int = 0
    accepted: int = 0


def steady_rate(spec: LoopSpec, draft_lengths: Sequence[int], repeats: int) -> list[Rate]:
    """For every number of draft tokens (0: target only), passes in turn after one to warm up."""
    engine = load(spec)
    passes: dict[int, list[_Pass]] = {k: [] for k in draft_lengths}
    steps: dict[int, list[float]] = {k: [] for k in draft_lengths}
    for number in range(max(1, repeats) + 1):
        for k in draft_lengths:
            done, seconds = run_pass(engine, spec, k)
            if number:
                passes[k].append(done)
                steps[k] += seconds
    return [_rate(k, passes[k], steps[k]) for k in draft_lengths]


def _rate(k: int, passes: list[_Pass], steps: list[float]) -> Rate:
    wall = sum(p.wall for p in passes)
    drafts = sum(p.drafts for p in passes)
    return Rate(
        k,
        statistics.median(p.tokens / p.wall for p in passes),
        GpuTimes(tuple(steps)),
        max(0.0, 1 - sum(p.busy for p in passes) / wall),
        sum(p.drafting for p in passes) / wall,
        1 + sum(p.accepted for p in passes) / drafts if drafts else 1.0,
    )


def load(spec: LoopSpec) -> Engine:
    blocks = spec.batch * (-(-spec.longest // BLOCK_SIZE) + 2)
    config = EngineConfig(
        target=Path(spec.target),
        drafters={DRAFTER: spec.drafter},
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(spec.device),
        backend="graphs" if spec.uses_graphs else "eager",
        attention=spec.attention,
        kv_tokens=blocks * BLOCK_SIZE,
        prefix_caching=False,
    )
    shapes = {TARGET: shape(spec.target), DRAFTER: shape(spec.drafter)}
    engine = load_engine(config, shapes, spec.acceptance, calibrated=False)
    for runner in (engine.executor.target, engine.executor.drafters[DRAFTER].runner):
        fill_randomly(runner.cache)
    return engine


def _loop(engine: Engine, k: int) -> Loop:
    """A fresh scheduler over the engine's executor."""
    target = engine.executor.target
    pools = [
        BlockPool(target.num_blocks, target.block_size, prefix_caching=False) for _ in range(2)
    ]
    scheduler = Scheduler(
        pools[0],
        [Drafter(DRAFTER, pools[1])],
        admission=make_policy("admission", "vllm_v1", {"max_num_batched_tokens": 8192}),
        selection=make_policy("selection", "single", {}),
        allocation=make_policy("allocation", "fixed", {"k": k}),
        pipeline=make_pipeline("off"),
        max_model_len=engine.max_model_len,
        runs_ahead=engine.executor.runs_ahead,
    )
    return Loop(scheduler, engine.executor, engine.clock)


def run_pass(engine: Engine, spec: LoopSpec, k: int) -> tuple[_Pass, list[float]]:
    """Bring all requests to their context, then measure until each has made its tokens."""
    loop, requests = _loop(engine, k), _requests(engine, spec, k)
    started: set[str] = set()
    events = [Arrive(r) for r in requests]
    while len(started) < len(requests):
        started |= {o.request_id for o in loop.turn(events).outputs if o.token_ids}
        events = []
    for _ in range(3):
        loop.turn([])
    done, seconds = _Pass(), []
    with _busy_seconds(spec.device) as spans:
        while done.tokens < spec.num_tokens * spec.batch:
            began = time.perf_counter()
            outputs = loop.turn([]).outputs
            seconds.append(time.perf_counter() - began)
            done.tokens += sum(len(o.token_ids) for o in outputs)
            done.drafts += sum(o.num_proposed > 0 for o in outputs)
            done.accepted += sum(o.num_accepted for o in outputs)
        done.wall = sum(seconds)
    done.busy = sum(spans.values())
    drafter = engine.executor.drafters[DRAFTER].runner
    if isinstance(drafter, graphs.GraphRunner):
        done.drafting = sum(spans.get(graph, 0.0) for graph in drafter.graphs)
    loop.turn([Cancel(r.id) for r in requests])
    while loop.scheduler.num_unfinished or loop.num_plans_in_flight:
        loop.turn([])
    return done, seconds


def _requests(engine: Engine, spec: LoopSpec, k: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.vocab_size, (spec.batch, spec.context))
    return [
        Request(
            id=f"r{next(_ids)}",
            prompt_len=spec.context,
            prompt_token_ids=tuple(prompt),
            max_tokens=spec.num_tokens + 60,
            sampling=SamplingParams(temperature=0.0, seed=seed),
            drafter=DRAFTER if k else NO_DRAFTER,
        )
        for seed, prompt in enumerate(prompts.tolist())
    ]


@contextmanager
def _busy_seconds(device: torch.device) -> Iterator[dict[graphs.CudaGraph, float]]:
    """Seconds of every graph in all its replays meanwhile. On a GPU the device's own: each is
    replayed again at the end, because between events around it the device would mostly be waiting
    for the host to launch it."""
    spans: dict[graphs.CudaGraph, float] = {}
    counts: Counter[graphs.CudaGraph] = Counter()
    replay = graphs.CudaGraph.replay

    def watched(self: graphs.CudaGraph) -> None:
        began = time.perf_counter()
        replay(self)
        counts[self] += 1
        spans[self] = spans.get(self, 0.0) + time.perf_counter() - began

    graphs.CudaGraph.replay = watched  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        graphs.CudaGraph.replay = replay  # type: ignore[method-assign]
    if device.type == "cuda":
        spans |= {g: timed([g.replay], device, 3).median * n for g, n in counts.items()}


@torch.inference_mode()
def transformers_rate(spec: LoopSpec) -> GpuTimes:
    """Seconds of its decode steps at that context and batch, greedy, launches included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = shape(spec.target)
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        attn_implementation="sdpa",
    )
    with torch.device(spec.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(spec.dtype)
        try:
            model = LlamaForCausalLM(theirs).eval()
        finally:
            torch.set_default_dtype(before)
        tokens = torch.randint(config.vocab_size, (spec.batch, spec.context))
    out = model(tokens, use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(spec.num_tokens):
        began = time.perf_counter()
        tokens = out.logits[:, -1:].argmax(-1)
        out = model(tokens, past_key_values=out.past_key_values, use_cache=True)
        tokens.tolist()
        seconds.append(time.perf_counter() - began)
    return GpuTimes(tuple(seconds[4:]))
