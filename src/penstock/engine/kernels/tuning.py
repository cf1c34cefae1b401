"""Which tile reads a matrix fastest: measured once for each shape, on the device itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median

import torch

from penstock.engine.streams import spare_stream

_REPEATS = 5
_AHEAD_CYCLES = 2_000_000
"""The device sleeps so long (about 1 ms) before a replay that is timed, so that its launch, which
takes longer than a small product, is over when it starts."""
_COLD_BYTES = 160 << 20
"""More than any second-level cache: a small matrix is timed in several copies, as if it were one of
many layers."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's part of a product, and how Triton compiles it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


Run = Callable[[Tile | None, torch.Tensor], object]
"""A product with one of the matrices; without a tile, by the library."""

_FEW = (Tile(16, 256, 4, 4), Tile(32, 128, 4, 5), Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))
_MANY = (Tile(32, 128, 4, 4), Tile(64, 64, 4, 4), Tile(128, 64, 8, 3))
"""Few, because every one is compiled for every kind of product before the first is timed."""
_EXACT = (Tile(32, 32, 4, 2),)
"""In float32, which multiplies without tensor cores: the products of a larger tile, written out one
by one, take the compiler a quarter of a minute."""


def _tiles(dtype: torch.dtype, rows: int) -> tuple[Tile, ...]:
    if dtype == torch.float32:
        return _EXACT
    return _FEW if rows <= 32 else _MANY


class Tuner:
    """Remembers the fastest tile for each kind of product."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._best: dict[Hashable, Tile | None] = {}

    def best(self, kind: Hashable, matrix: torch.Tensor, rows: int, run: Run) -> Tile | None:
        """The tile for a kind of product; None: leave it to the library. `run` is called only when
        the kind is new, which must not be while a graph is recorded."""
        if kind not in self._best:
            tiles = _tiles(matrix.dtype, rows)
            if self._device.type == "cuda":
                self._best[kind] = self._measured(tiles, matrix, run)
            else:
                self._best[kind] = tiles[0]
        return self._best[kind]

    def _measured(self, tiles: tuple[Tile, ...], matrix: torch.Tensor, run: Run) -> Tile | None:
        copies = max(1, min(128, -(-_COLD_BYTES // matrix.nbytes)))
        matrices = [matrix, *(_copy(matrix) for _ in range(copies - 1))]
        seconds: dict[Tile | None, float] = {}
        for tile in (None, *tiles):
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
