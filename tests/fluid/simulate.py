"""The paper's algorithms, prompt by prompt, to hold the formulas against: no formula of the
package is used here."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Prompt:
    arrived: float
    decode_len: int


@dataclass
class Line:
    """Prompts that share thresholds: a type (WAIT) or everybody (Nested WAIT). stages[k] holds
    those whose next step is k."""

    prompt_len: int
    ends: Sequence[int]
    thresholds: Sequence[int]
    stages: list[deque[Prompt]] = field(init=False)
    queue_samples: list[list[int]] = field(init=False)
    waiting_time: float = 0.0
    latencies: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = [deque() for _ in range(self.ends[-1] + 1)]
        self.queue_samples = [[] for _ in self.ends]

    def firsts(self) -> list[int]:
        return [0, *(end + 1 for end in self.ends[:-1])]

    def num_ready(self) -> int:
        """Segments 1 to i that all meet their thresholds."""
        ready = 0
        for first, n in zip(self.firsts(), self.thresholds, strict=True):
            if len(self.stages[first]) < n:
                break
            ready += 1
        return ready

    def take(self) -> list[tuple[int, Prompt]]:
        batch = []
        ready = self.num_ready()
        for i in range(ready):
            for k in range(self.firsts()[i], self.ends[i] + 1):
                stage = self.stages[k]
                batch += [(k, stage.popleft()) for _ in range(min(self.thresholds[i], len(stage)))]
        # A segment's queue changes only when the segment before it has run.
        for i in range(min(ready + 1, len(self.ends))):
            self.queue_samples[i].append(len(self.stages[self.firsts()[i]]))
        return batch

    def paused_kv(self) -> int:
        """A prompt whose next step is k ≥ 1 holds prompt + k − 1 tokens; before step 0, none."""
        return sum(len(s) * (self.prompt_len + k - 1) for k, s in enumerate(self.stages) if k > 0)

    def finish(self, batch: list[tuple[int, Prompt]], now: float) -> None:
        for k, prompt in batch:
            if k == 0:
                self.ttfts.append(now - prompt.arrived)
            if k == prompt.decode_len:
                self.latencies.append(now - prompt.arrived)
            else:
                self.stages[k + 1].append(prompt)


def run(
    lines: Sequence[Line],
    arrivals: Sequence[tuple[float, int, int]],
    seconds: Callable[[int], float],
) -> tuple[int, int]:
    """Serve `arrivals` (time, line, decode_len) until they end; a batch takes seconds(KV tokens).
    Returns the peak KV tokens of all prompts in memory, and of those in a batch."""
    coming = deque(sorted(arrivals))
    now, peak, peak_batch = 0.0, 0, 0
    while coming:
        batches = [line.take() if line.num_ready() else [] for line in lines]
        if not any(batches):
            now = coming[0][0]
        else:
            running = sum(
                line.prompt_len + k
                for line, batch in zip(lines, batches, strict=True)
                for k, _ in batch
            )
            peak_batch = max(peak_batch, running)
            peak = max(peak, running + sum(line.paused_kv() for line in lines))
            now += seconds(running)
        while coming and coming[0][0] <= now:
            at, which, decode_len = coming.popleft()
            lines[which].stages[0].append(Prompt(at, decode_len))
        for line, batch in zip(lines, batches, strict=True):
            line.finish(batch, now)
    return peak, peak_batch


def poisson(rng: np.random.Generator, rate: float, horizon: float) -> list[float]:
    return sorted(rng.uniform(0.0, horizon, rng.poisson(rate * horizon)).tolist())


def lindley(steps: np.ndarray, base: float) -> np.ndarray:
    """W ← max(base, W + step) from base; steps: (runs, S); returns (runs, S)."""
    w = np.full(len(steps), base)
    path = []
    for column in steps.T:
        w = np.maximum(base, w + column)
        path.append(w)
    return np.stack(path, axis=1)
