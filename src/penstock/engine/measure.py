"""Measured step times of an engine's models, alone and together, for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from penstock.config import DEFAULT_TENANT
from penstock.core.loop import Instrument, Loop
from penstock.core.types import (
    NO_DRAFTER,
    Arrive,
    Reconfigure,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    Tenant,
)
from penstock.engine.build import Engine
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.timing import (
    DRAFT_CONTEXT,
    DRAFT_STEPS,
    best_seconds,
    dummy_draft,
    dummy_prefill,
    dummy_verify,
    slowdowns,
)
from penstock.fluid.step_profile import DrafterProfile, ServedStep, StepWork

_NUM_READ = 128
_SERVED = ((24, 2), (6, 6), (2, 16))
"""Turns from one served request to the next, and how many there are: about 1, 4 and 12 at once."""
_SERVED_PROMPT, _SERVED_TOKENS = 48, 24


@dataclass(frozen=True, slots=True)
class ProfileGrid:
    """Grid of measurements. repeats: passes. together_s: seconds of two models at once.

    A pass has every batch with every draft length behind every context, every chunk of prefill
    behind none and the longest, drafters at every batch, and served requests."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    draft_lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    contexts: tuple[int, ...] = (64, 512)
    chunks: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512)
    repeats: int = 8
    together_s: float = 0.1

    @property
    def longest(self) -> int:
        """Tokens of the longest request that a step needs room for."""
        most = max(max(self.draft_lengths) + 1, *self.chunks)
        return max(max(self.contexts) + most, DRAFT_CONTEXT + _NUM_READ + DRAFT_STEPS)

    @property
    def kv_tokens(self) -> int:
        """KV memory that holds the whole grid, with blocks of up to 128 tokens."""
        each = max(self.contexts) + max(self.draft_lengths) + 1
        return max(max(self.batches) * (each + 128), self.longest + 128)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured profile data. steps: of the target, with their seconds.

    served: whole steps of served requests, by pass."""

    steps: tuple[tuple[StepWork, float], ...]
    drafters: tuple[DrafterProfile, ...]
    served: tuple[tuple[ServedStep, ...], ...] = ()


def num_measurements(engine: Engine, grid: ProfileGrid) -> int:
    """Return the number of calls of `on_progress` that `measure` makes."""
    return grid.repeats + 1 + len(engine.executor.drafters)


def measure(
    engine: Engine, grid: ProfileGrid, on_progress: Callable[[], None] = lambda: None
) -> Measured:
    """Time the models of an idle engine with memory for at least four requests.

    A step is the model's and the sampler's, without the scheduler. Its time is the median of all
    passes: on a shared machine the best is one that what is served seldom meets. Two models share
    threads as drafters beside the target do."""
    clock, target = engine.clock, engine.executor.target
    works = list(_target_steps(engine, grid))
    drafters = list(engine.executor.drafters.values())
    drafts = [list(_draft_steps(engine, drafter, grid)) for drafter in drafters]
    # Keeping a batch takes a first run, which does not count.
    runs = [(run, 1 + target.keeps_batches) for _, run in works]
    runs += [(run, 1) for steps in drafts for _, run in steps]
    passes, served = [], []
    for number in range(grid.repeats + 1):
        with torch.inference_mode():
            passes.append([best_seconds(clock, run, repeats) for run, repeats in runs])
        if number:  # the first pass warms up
            served.append(tuple(_served_steps(engine, number)))
        on_progress()
    usual = iter(np.median(passes[1:], axis=0).tolist())
    target_steps = tuple((work, next(usual)) for work, _ in works)
    profiles = []
    for drafter, steps in zip(drafters, drafts, strict=True):
        context = _context_of(engine, drafter)
        together = (1.0, 1.0)
        if not drafter.of_target:
            together = slowdowns(engine.executor, drafter, clock, context, grid.together_s)
        batches = [batch for batch, _ in steps[:-2]]
        num_read, seconds = _num_read(engine, drafter), [next(usual) for _ in steps]
        found = _drafter_profile(drafter.name, batches, num_read, seconds, together)
        profiles.append(replace(found, of_target=drafter.of_target))
        on_progress()
    return Measured(target_steps, tuple(profiles), tuple(served))


class _Results(Instrument):
    """Keeps the last step's result."""

    last: StepResult | None = None

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self.last = result


def _served_steps(engine: Engine, number: int) -> Iterator[ServedStep]:
    """Serve requests, one more in so many turns, and yield their steps.

    In turn without drafts and with look-up, if there is one: slow minutes should meet both."""
    scheduler, look_up = engine.scheduler, engine.scheduler.look_up
    scheduler.apply(Reconfigure((Tenant(DEFAULT_TENANT),)), engine.clock.now())
    both = [NO_DRAFTER] if look_up is None else [NO_DRAFTER, look_up.name]
    for turn, (every, num) in enumerate(_SERVED):
        for drafter in both if (number + turn) % 2 == 0 else both[::-1]:
            watch = _Results()
            loop = Loop(scheduler, engine.executor, engine.clock, (watch,))
            name = 2 * number + (drafter != NO_DRAFTER), every
            waiting = list(_requests(engine, name, num, drafter))
            turns = 0
            while waiting or loop.scheduler.num_unfinished:
                arrives = [Arrive(waiting.pop())] if waiting and turns % every == 0 else []
                turns += 1
                watch.last, began = None, engine.clock.now()
                loop.turn(arrives)
                seconds = engine.clock.now() - began
                if watch.last is not None and watch.last.work is not None:
                    seconds -= watch.last.phases.draft
                    yield ServedStep(watch.last.work, seconds, drafter != NO_DRAFTER)
            loop.turn(())


def _requests(engine: Engine, name: tuple[int, int], num: int, drafter: str) -> Iterator[Request]:
    """Yield requests that begin each as no other does, so that all of their prompts is computed."""
    prompt_len = min(_SERVED_PROMPT, engine.max_model_len // 2)
    for i in range(num):
        yield Request(
            id=f"served-{drafter}-{name}-{i}",
            prompt_len=prompt_len,
            max_tokens=min(_SERVED_TOKENS, engine.max_model_len // 4),
            prompt_token_ids=(i, *name, *[k % 31 for k in range(prompt_len - 3)]),
            sampling=SamplingParams(temperature=0.0),
            drafter=drafter,
        )


def _target_steps(
    engine: Engine, grid: ProfileGrid
) -> Iterator[tuple[StepWork, Callable[[], None]]]:
    target = engine.executor.target
    for context in grid.contexts:
        for batch in grid.batches:
            for length in grid.draft_lengths:
                tokens = context + length + 1
                if tokens <= engine.max_model_len and batch <= target.num_that_fit(tokens):
                    work = StepWork(0, 0.0, batch, batch * context, batch * length)
                    counts = [length + 1] * batch
                    yield work, partial(dummy_verify, target, counts, context)
    for context in (0, max(grid.contexts)):
        for chunk in grid.chunks:
            tokens = context + chunk
            if tokens <= engine.max_model_len and target.num_that_fit(tokens):
                work = StepWork(chunk, chunk * (context + chunk / 2))
                yield work, partial(dummy_prefill, target, chunk, context)


def _draft_steps(
    engine: Engine, drafter: LocalDrafter, grid: ProfileGrid
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield drafts of every batch, then drafts of one request with little and much to read."""
    context = _context_of(engine, drafter)
    for batch in grid.batches:
        if batch <= drafter.num_that_fit(context + 1 + DRAFT_STEPS):
            yield batch, partial(dummy_draft, drafter, batch, DRAFT_STEPS, 1, context)
    for num_read in (1, 1 + _num_read(engine, drafter)):
        yield 1, partial(dummy_draft, drafter, 1, 1, num_read)


def _context_of(engine: Engine, drafter: LocalDrafter) -> int:
    """Return the tokens before a draft. A drafter without a model reads its context when asked."""
    if drafter.runner is None:
        return 0
    return max(0, min(DRAFT_CONTEXT, _longest(engine, drafter) - 1 - DRAFT_STEPS))


def _num_read(engine: Engine, drafter: LocalDrafter) -> int:
    """Return the difference in tokens between the two measured readings."""
    return max(1, min(_NUM_READ, _longest(engine, drafter) - 2))


def _longest(engine: Engine, drafter: LocalDrafter) -> int:
    room, runner = engine.max_model_len, drafter.runner
    return room if runner is None else min(room, runner.num_blocks * runner.block_size)


def _drafter_profile(
    name: str,
    batches: Sequence[int],
    num_read: int,
    seconds: Sequence[float],
    together: tuple[float, float],
) -> DrafterProfile:
    """Return the profile. seconds: of `_draft_steps`."""
    *drafts, little, much = seconds
    # A larger batch cannot be faster: then the smaller one was disturbed.
    rising = np.minimum.accumulate(drafts[::-1])[::-1] / DRAFT_STEPS
    reading = max(0.0, much - little) / num_read
    slowdown, target_slowdown = (_rounded(s) for s in together)
    return DrafterProfile(
        name,
        tuple(batches),
        tuple(_rounded(s) for s in rising),
        _rounded(reading),
        slowdown,
        target_slowdown,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
