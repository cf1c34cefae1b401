"""Benchmark of target-only and speculative decoding in the engine itself."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import Engine
from penstock.serving.offline import Completion, complete
from penstock.serving.usage import Usage

MIN_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Token ids of one prompt, and its domain."""

    token_ids: tuple[int, ...]
    domain: str


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Results of a batch size and a drafter (None: target-only) over all repetitions."""

    batch: int
    drafter: str | None
    tokens_per_s: float
    best_tokens_per_s: float
    mean_acceptance_length: float | None
    cpu_share: float
    host_share: float

    @property
    def mode(self) -> str:
        return "target" if self.drafter is None else "speculative"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `bench_engine`. new_tokens: of every request, end-of-text ignored.

    repeats: passes over all cells in turn, so that disturbances affect all of them."""

    batches: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 64
    temperature: float = 0.0
    repeats: int = 5


def bench_engine(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    drafters: Sequence[str | None],
    options: BenchOptions,
    on_progress: Callable[[int, str | None], None] | None = None,
) -> list[BenchRun]:
    """Measure every batch size with every drafter; None stands for target-only decoding."""
    runs = []
    counter = itertools.count()
    for batch in options.batches:
        samples: dict[str | None, list[_Sample]] = {d: [] for d in drafters}
        for repeat in range(options.repeats + 1):
            for drafter in drafters:
                requests = list(_requests(prompts, batch, drafter, options, counter))
                sample = _measure(engine, requests, batch)
                if repeat:  # the first pass warms up
                    samples[drafter].append(sample)
                if on_progress is not None:
                    on_progress(batch, drafter)
        runs += [_summary(batch, drafter, samples[drafter]) for drafter in drafters]
    return runs


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens_per_s: float
    cpu_s: float
    wall_s: float
    host_s: float
    completions: list[Completion]


def _requests(
    prompts: Sequence[BenchPrompt],
    batch: int,
    drafter: str | None,
    options: BenchOptions,
    counter: Iterator[int],
) -> Iterator[Request]:
    for i in range(max(batch, MIN_REQUESTS)):
        prompt = prompts[i % len(prompts)]
        yield Request(
            id=f"bench-{next(counter)}",
            prompt_len=len(prompt.token_ids),
            prompt_token_ids=prompt.token_ids,
            max_tokens=options.new_tokens,
            sampling=SamplingParams(temperature=options.temperature, seed=i),
            drafter=NO_DRAFTER if drafter is None else drafter,
            expected_output_tokens=options.new_tokens,
        )


def _measure(engine: Engine, requests: list[Request], batch: int) -> _Sample:
    busy_before = engine.executor.totals.busy_s
    cpu, wall = time.process_time(), time.perf_counter()
    completions = complete(engine.loop, requests, batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    bad = next((c for c in completions if c.error), None)
    if bad is not None:
        raise RuntimeError(f"request {bad.request.id} failed: {bad.error}")
    tokens = sum(len(c.token_ids) for c in completions)
    return _Sample(
        tokens / wall, cpu, wall, wall - (engine.executor.totals.busy_s - busy_before), completions
    )


def _summary(batch: int, drafter: str | None, samples: list[_Sample]) -> BenchRun:
    rates = [s.tokens_per_s for s in samples]
    wall = sum(s.wall_s for s in samples)
    usage = Usage()
    for completion in (c for s in samples for c in s.completions):
        usage.add(completion.usage)
    return BenchRun(
        batch=batch,
        drafter=drafter,
        tokens_per_s=statistics.median(rates),
        best_tokens_per_s=max(rates),
        mean_acceptance_length=usage.mean_acceptance_length if usage.drafts else None,
        cpu_share=sum(s.cpu_s for s in samples) / wall,
        host_share=sum(s.host_s for s in samples) / wall,
    )


def cut_prompts(prompts: Sequence[BenchPrompt], num_tokens: int) -> list[BenchPrompt]:
    """Return prompts of `num_tokens` tokens: long ones keep their end, short ones repeat."""
    cut = []
    for prompt in prompts:
        repeated = prompt.token_ids * -(-num_tokens // len(prompt.token_ids))
        cut.append(replace(prompt, token_ids=repeated[-num_tokens:]))
    return cut
