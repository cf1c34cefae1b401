"""Which tile reads a matrix fastest: measured once for each shape, on the device itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from statistics import median

import torch

from penstock.engine.gpu.streams import spare_stream

_REPEATS = 5
_AHEAD_CYCLES = 2_000_000
"""The device sleeps so long (about 1 ms) before a replay that is timed, so that its launch, which
takes longer than a small product, is over when it starts."""
_COLD_BYTES = 160 << 20
"""More than any second-level cache: a small matrix is timed in several copies, as if it were one of
many layers."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's part of a product, how Triton compiles it, and over how many programs the sum
    over the depth is spread."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


Run = Callable[[Tile | None, torch.Tensor], object]
"""A product with one of the matrices; without a tile, by the library."""

_FEW = (Tile(16, 256, 4, 4), Tile(32, 128, 4, 5), Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))
_MANY = (Tile(32, 128, 4, 4), Tile(64, 64, 4, 4), Tile(128, 64, 8, 3))
"""Few, because every one is compiled for every kind of product before the first is timed; once more
where it is also tried split."""
_EXACT = (Tile(32, 32, 4, 2),)
"""In float32, which multiplies without tensor cores: the products of a larger tile, written out one
by one, take the compiler a quarter of a minute."""

_PROGRAMS = 2
"""For each multiprocessor, where a product is split: one computes while the other one waits."""
_LEAST_STEPS = 2
"""Blocks of the depth that a program has at least, so that reading the next covers computing."""


def tiles(dtype: torch.dtype, rows: int, depth: int, size: int, multiprocessors: int) -> list[Tile]:
    """What is tried for a product with [depth, size], and split over the depth where there would
    not be a program for each multiprocessor: nobody else could read the matrix meanwhile."""
    whole = _EXACT if dtype == torch.float32 else _FEW if rows <= 32 else _MANY
    tried = list(whole)
    for tile in whole:
        programs = -(-size // tile.block_n)
        most = depth // (_LEAST_STEPS * tile.block_k)
        splits = min(most, -(-_PROGRAMS * multiprocessors // programs))
        if programs < multiprocessors and splits > 1:
            tried.append(replace(tile, splits=splits))
    return tried


class Tuner:
    """Remembers the fastest tile for each kind of product."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._best: dict[Hashable, Tile | None] = {}

    def best(
        self, kind: Hashable, matrix: torch.Tensor, rows: int, size: int, run: Run
    ) -> Tile | None:
        """The tile for a kind of product with `size` results a row; None: leave it to the library.
        `run` is called only when the kind is new, which must not be while a graph is captured."""
        if kind not in self._best:
            if self._device.type == "cuda":
                count = torch.cuda.get_device_properties(self._device).multi_processor_count
                tried = tiles(matrix.dtype, rows, matrix.shape[0], size, count)
                self._best[kind] = self._measured(tried, matrix, run)
            else:
                self._best[kind] = tiles(matrix.dtype, rows, matrix.shape[0], size, 1)[0]
        return self._best[kind]

    def _measured(self, tried: list[Tile], matrix: torch.Tensor, run: Run) -> Tile | None:
        copies = max(1, min(128, -(-_COLD_BYTES // matrix.nbytes)))
        matrices = [matrix, *(_copy(matrix) for _ in range(copies - 1))]
        seconds: dict[Tile | None, float] = {}
        for tile in (None, *tried):
            try:
                seconds[tile] = self._seconds(tile, matrices, run)
            except Exception as error:
                # A tile may want more shared memory than this device has; the library never does.
                if tile is None or "out of resource" not in str(error):
                    raise
        return min(seconds, key=seconds.__getitem__)

    def _seconds(self, tile: Tile | None, matrices: list[torch.Tensor], run: Run) -> float:
        graph = torch.cuda.CUDAGraph()
        with spare_stream(self._device) as stream:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                run(tile, matrices[0])
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for matrix in matrices:
                    run(tile, matrix)
        times = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD_CYCLES)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return float(median(times[1:]))


def _copy(matrix: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    return matrix.clone(memory_format=torch.preserve_format)
