"""Target and drafter at work at the same time: how much slower each is than alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from penstock.core.loop import Clock
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.gpu.streams import own_stream
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import ModelRunner
from penstock.engine.scratch import draft_scratch, verify_scratch

_BATCH = 4
_NUM_DRAFT_TOKENS = 4
_ROUNDS = 5


def slowdowns(
    target: ModelRunner,
    drafter: LocalDrafter,
    clock: Clock,
    num_threads: int,
    context: int,
    seconds: float,
) -> tuple[float, float]:
    """How many times as long a drafter's step takes beside a working target, and the target's
    beside it; each at least 1, the median of several tries of `seconds` each.

    num_threads: of the kernels, which two at once share as they do in the executor. context: tokens
    before the step; both must fit into memory.
    """
    runner: ModelRunner | None = getattr(drafter, "runner", None)
    verifying = partial(verify_scratch, target, [_NUM_DRAFT_TOKENS + 1] * _BATCH, context)
    drafting = partial(draft_scratch, drafter, _BATCH, _NUM_DRAFT_TOKENS, 1, context)
    slower: list[float] = []
    target_slower: list[float] = []
    for _ in range(_ROUNDS):
        _limit(target, num_threads)
        _limit(runner, num_threads)
        alone = _Pace(clock, target.device).run(drafting, seconds)
        target_alone = _Pace(clock, target.device).run(verifying, seconds)
        _limit(target, max(1, num_threads - 1))
        _limit(runner, max(1, num_threads // 2))
        beside = _Pace(clock, target.device)
        thread = threading.Thread(target=beside.run, args=(drafting, 2 * seconds))
        thread.start()
        target_beside = _Pace(clock, target.device).run(verifying, seconds)
        thread.join()
        slower.append(beside.during(seconds) / alone.mean)
        target_slower.append(target_beside.mean / target_alone.mean)
    _limit(target, num_threads)
    _limit(runner, num_threads)
    return max(1.0, median(slower)), max(1.0, median(target_slower))


class _Pace:
    """Runs something over and over, and knows when each time ended."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._device = device
        self._times: list[float] = []

    def run(self, step: Callable[[], None], seconds: float) -> _Pace:
        """For at least so long, and at least once."""
        with torch.inference_mode(), own_stream(self._device):
            self._times.append(self._clock.now())
            while len(self._times) < 2 or self._times[-1] - self._times[0] < seconds:
                step()
                self._times.append(self._clock.now())
        return self

    @property
    def mean(self) -> float:
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def during(self, seconds: float) -> float:
        """The mean of those that ended in the first so many seconds, or of the first alone."""
        inside = [t for t in self._times if t - self._times[0] <= seconds]
        ended = inside if len(inside) > 1 else self._times[:2]
        return (ended[-1] - ended[0]) / (len(ended) - 1)


def _limit(runner: ModelRunner | None, num_threads: int) -> None:
    if isinstance(runner, NativeRunner):
        runner.limit_threads(num_threads)
