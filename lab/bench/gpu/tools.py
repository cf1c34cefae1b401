"""Timing, ceilings and made-up batches for lab.bench.gpu."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.engine.backends import make_attention
from penstock.engine.eager import EagerRunner
from penstock.engine.gpu.graphs import GraphRunner
from penstock.engine.kv_cache import PagedKVCache, kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.random import random_weights
from penstock.engine.rehearsal import BLOCK_SIZE

_CYCLES_PER_SECOND = 2e9
_AHEAD_SECONDS = 4e-3
"""The device sleeps so long before what is timed, or three times as long as the host takes to
launch it if that is more, so that all launches are queued when it starts: what is measured is the
device's own time."""


@dataclass(frozen=True, slots=True)
class GpuLoops:
    """Whole loops. tokens: that each request makes in one run; so many in the sweep over batches,
    too."""

    drafter: str = "qwen3-0.6b"
    contexts: tuple[int, ...] = (200, 1000)
    batch: int = 16
    draft_lengths: tuple[int, ...] = (2, 3, 4, 5, 6)
    tokens: int = 48


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """Speculation by batch size, after SPIN."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    drafter: str = "llama-68m"


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """Where and what is measured. The defaults are the issue's; a test takes small ones."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    attention: str = "triton_paged"
    target: str = "llama-2-7b"
    drafters: tuple[tuple[str, float | None], ...] = (
        ("qwen3-0.6b", 1.3),
        ("llama-1.1b", 1.3),
        ("llama-68m", None),
    )
    decode_batches: tuple[int, ...] = (1, 16, 64)
    verify_batches: tuple[int, ...] = (16, 64)
    context: int = 1000
    mean: float = 800.0
    window: int = 5
    draft_batch: int = 16
    loops: GpuLoops = GpuLoops()
    sweep: BatchSweep = BatchSweep()
    repeats: int = 15
    small: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Seconds; `low` and `high` are the quartiles. floor: seconds, if there
    is one; bar: of `ratio` (or of `value`, where the line has a unit of its own)."""

    item: str
    case: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    ratio: float | None = None
    bar: str = ""
    passed: bool | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """Seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def row(
        self, item: str, case: str, floor: float, bar: float | None = None, note: str = ""
    ) -> Row:
        """Against a floor of so many seconds."""
        ratio = self.median / floor
        passed = None if bar is None else ratio <= bar
        return self.plain(item, case, note).with_(
            floor=floor, ratio=ratio, bar="" if bar is None else f"≤ {bar:g}×", passed=passed
        )

    def plain(self, item: str, case: str, note: str = "") -> _RowBuilder:
        return _RowBuilder(self, item, case, note)


@dataclass(frozen=True, slots=True)
class _RowBuilder:
    times: GpuTimes
    item: str
    case: str
    note: str

    def with_(self, **fields: Any) -> Row:
        low, high = self.times.quartiles
        return Row(self.item, self.case, self.times.median, low, high, note=self.note, **fields)


def timed(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int,
    *,
    queued: bool = True,
) -> GpuTimes:
    """Seconds of `repeats` rounds over the runs (input sets in rotation), after two to warm up.

    queued: the device's own time; otherwise launches count where it waits for them.
    """
    for run in [*runs, *runs]:
        run()
    if device.type != "cuda":
        return GpuTimes(tuple(_on_host(run) for _ in range(repeats) for run in runs))
    ahead = max(_AHEAD_SECONDS, *(3 * _launch_seconds(run, device) for run in runs))
    seconds = []
    for _ in range(repeats):
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if queued:
                torch.cuda._sleep(int(ahead * _CYCLES_PER_SECOND))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return GpuTimes(tuple(seconds))


def _launch_seconds(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    seconds = _on_host(run)
    torch.cuda.synchronize(device)
    return seconds


def _on_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy, read: bytes a second of device memory; flops: of a large bfloat16 product."""

    copy: float
    read: float
    flops: float

    def floor(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """Seconds below which nothing can be that moves and computes so much."""
        return max(num_bytes / self.copy, num_flops / self.flops)


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Ceilings:
    """By a copy, a sum and a matrix product, all on random data."""
    elements = 1 << (18 if small else 31)
    width = 128 if small else 8192
    source = torch.randn(elements // 4, device=device)
    into = torch.empty_like(source)
    copy = timed([lambda: into.copy_(source)], device, 9)
    read = timed([lambda: source.sum()], device, 9)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = timed([lambda: a @ b], device, 9)
    return Ceilings(
        copy=2 * source.nbytes / copy.median,
        read=source.nbytes / read.median,
        flops=2 * width**3 / product.median,
    )


def make_runner(
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_tokens: int,
    attention: str,
    kv_dtype: torch.dtype | None = None,
) -> GraphRunner:
    """Random weights, and a cache of random numbers with a scratch block at its end."""
    num_blocks = -(-kv_tokens // BLOCK_SIZE) + 1
    weights = random_weights(config, dtype, device)
    backend = partial(make_attention, attention)
    eager = EagerRunner.of(config, weights, device, num_blocks, BLOCK_SIZE, backend, kv_dtype)
    fill_randomly(eager.cache)
    return GraphRunner(eager)


def fill_randomly(cache: PagedKVCache) -> None:
    """A step's time must not come from zeros."""
    for layer in cache.layers:
        for part in layer.flatten(0, 1):
            part.copy_(torch.randn(part.shape, device=cache.device))


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it reads a few rows; a
    tied one is read as the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = hidden * (2 * config.q_size + 2 * config.kv_size) + 3 * hidden * inner
    return (config.num_layers * layer + config.vocab_size * hidden) * dtype.itemsize


def kv_bytes(config: DecoderConfig, dtype: torch.dtype, lengths: Sequence[int]) -> int:
    return sum(lengths) * kv_bytes_per_token(config, dtype)


def step_flops(config: DecoderConfig, rows: int) -> float:
    """Of the matrix products with weights; those of attention are few beside them."""
    return rows * weight_bytes(config, torch.bfloat16)


def log_normal_lengths(batch: int, mean: float, sigma: float, seed: int) -> list[int]:
    """Of that mean, at least 16 and at most 4000 tokens."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, batch)
    return [int(n) for n in drawn.clip(16, 4000)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN never passes a bound."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def poison(device: torch.device, num_bytes: int) -> None:
    """Leave NaN behind in the allocator's next block of that size: what is not written shows."""
    torch.full((max(1, num_bytes // 4),), float("nan"), device=device)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
