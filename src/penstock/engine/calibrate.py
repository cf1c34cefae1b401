"""Step times before the first request, measured or from a profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.curve import StepTimeCurve
from penstock.core.learn.times import Times, drafter_profiles
from penstock.core.loop import Clock
from penstock.core.policies.pipeline.parts.planner import (
    MIN_GAIN,
    MOST_MICRO_BATCHES,
    Lane,
    Round,
    best_num,
    cycle_seconds,
)
from penstock.core.state import Drafter
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.executor import LocalExecutor
from penstock.engine.runner import Model
from penstock.engine.timing import (
    DRAFT_CONTEXT,
    DRAFT_STEPS,
    best_seconds,
    dummy_draft,
    dummy_verify,
    slowdowns,
    slowdowns_seconds,
)
from penstock.fluid.step_profile import StepProfile

_ROWS = (1, 8, 32, 3, 128, 16, 64, 5, 2, 256, 24, 12, 48, 96, 160)
_BATCHES = (1, 8, 2, 32, 4, 16, 64)
"""Coarse first: of a large, slow model only the first ones are measured."""
# Small, so that start-up is quick; requests refine the times.
_REPEATS, _TOGETHER_S = 3, 0.02
_TOKENS_EACH = DRAFT_CONTEXT + 16
_MOST_TOGETHER_S = 1.0
"""Seconds of start-up for measuring drafters beside the target."""


def calibrate(
    executor: LocalExecutor,
    estimators: Estimators,
    clock: Clock,
    profile: StepProfile | None = None,
    *,
    together: Collection[str] = (),
    budget_s: float = 0.4,
) -> None:
    """Fill the step times from a profile, or from a few steps of each model without known times.

    A target that the profile lacks is measured on scratch blocks for about `budget_s` seconds, and
    so are its drafters together.
    together: drafters to measure beside the target, too, if lanes could gain; in a second at most.
    No request may be running."""
    known: set[str] = set()
    left_s = _MOST_TOGETHER_S
    if profile is not None:
        drafters = [Drafter(name) for name in executor.drafters]
        seed_estimators(estimators, profile, drafters)
        known = set(drafter_profiles(profile, drafters))
    else:
        _measure_target(executor.target, estimators, clock, budget_s)
    times = estimators.times
    for name, drafter in executor.drafters.items():
        if name in known:
            continue
        if times.curve_of(name).is_empty:
            share_s, longest = budget_s / len(executor.drafters), executor.max_model_len
            measure = partial(_measure_drafter, drafter, estimators, clock, share_s, longest)
            executor.in_lane(name, measure)
        is_measured = any(d.name == name for d in times.profile.drafters)
        expected_s = slowdowns_seconds(times, name, _TOGETHER_S)
        if name not in together or is_measured or expected_s > left_s:
            continue
        if lanes_may_gain(times, name):
            left_s -= expected_s
            _measure_together(executor, drafter, estimators, clock)
    times.doubt_all()


def lanes_may_gain(times: Times, drafter: str) -> bool:
    """Return whether lanes would gain if the drafter and the target did not slow each other."""
    curve = times.curve_of(drafter)
    for batch in _BATCHES:
        lane = Lane(batch, lambda n: DRAFT_STEPS * curve(n))
        work = Round((lane,), lambda group: times.target((1 + DRAFT_STEPS) * sum(group)))
        if best_num(partial(cycle_seconds, work), MOST_MICRO_BATCHES, MIN_GAIN):
            return True
    return False


def _measure_target(target: Model, estimators: Estimators, clock: Clock, budget_s: float) -> None:
    times = estimators.times
    if times.target.is_empty:
        best = _best_seconds_by_size(clock, budget_s, _ROWS, partial(_verify, target))
        for size, taken in best.items():
            times.target.add_measurement(size, taken)
    times.target.use_rows(target.num_blocks * target.block_size)


def _measure_drafter(
    drafter: LocalDrafter,
    estimators: Estimators,
    clock: Clock,
    budget_s: float,
    max_model_len: int,
) -> None:
    curve = estimators.times.curve_of(drafter.name)
    sizes = _fitting(drafter)
    best = _best_seconds_by_size(
        clock, budget_s, sizes, lambda n: dummy_draft(drafter, n, DRAFT_STEPS)
    )
    for size, seconds in best.items():
        curve.add_measurement(size, seconds / DRAFT_STEPS)
    num_read = min(DRAFT_CONTEXT, max_model_len - 2)
    if sizes and num_read > 0:
        read = _best_seconds_by_size(
            clock, budget_s / 4, (1, 1 + num_read), partial(dummy_draft, drafter, 1, 1)
        )
        reading = max(0.0, read[1 + num_read] - read[1]) / num_read
        estimators.times.note_catch_up(drafter.name, reading)


def _measure_together(
    executor: LocalExecutor, drafter: LocalDrafter, estimators: Estimators, clock: Clock
) -> None:
    """Add the drafter to the profile, with the slowdowns of working together."""
    context = 0 if drafter.runner is None else DRAFT_CONTEXT
    if min(m.num_that_fit(_TOKENS_EACH) for m in (drafter, executor.target)) < 4:
        return
    both = slowdowns(executor, drafter, clock, context, _TOGETHER_S)
    estimators.times.add_together(drafter.name, *both)


def _best_seconds_by_size(
    clock: Clock, budget_s: float, sizes: Sequence[int], run: Callable[[int], None]
) -> dict[int, float]:
    """Return the best of several passes over the sizes that fit into the budget, ascending."""
    best: dict[int, float] = {}
    expected = StepTimeCurve()
    began = clock.now()
    if sizes:
        run(sizes[0])
    for _ in range(_REPEATS):
        for size in sizes:
            spent = clock.now() - began
            # A cost per row needs two sizes.
            if len(best) >= 2 and spent + expected(size) > budget_s:
                continue
            seconds = best_seconds(clock, partial(run, size), 1)
            expected.add_measurement(size, seconds)
            best[size] = min(seconds, best.get(size, seconds))
    return dict(sorted(best.items()))


def _fitting(model: Model | LocalDrafter) -> list[int]:
    return [n for n in _BATCHES if n <= model.num_that_fit(_TOKENS_EACH)]


def _verify(target: Model, rows: int) -> None:
    """Run one step over `rows` positions, in sequences of up to 5, and its sampling."""
    counts = [5] * (rows // 5) + ([rows % 5] if rows % 5 else [])
    context = min(DRAFT_CONTEXT, target.num_blocks * target.block_size - max(counts))
    dummy_verify(target, counts[: max(1, target.num_that_fit(_TOKENS_EACH))], context)
