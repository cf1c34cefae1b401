"""Attention of ragged batches: packed, padded and decomposed in turn; their memory; the planner.

    python -m benchmarks.ragged_attention [--quick] [--json] [--batches 8,16,32] [PART...]

Parts: time, memory, exhaustion, cost; without one, all. Contexts are log-normal (mean 400 tokens,
σ 0.8), each request verifies 4 positions, float32, one thread, five seeds fixed beforehand. A time
is processor time of the layers measured, gathering from the paged cache included; contenders take
turns, and the best and the median of the turns are shown.

KV memory is what an engine holds for the keys and values of all layers, over what the tokens in it
need: for `packed` the blocks of the paged cache (a request's last block is not full) and the
largest copy that it makes of one layer; for `padded` and `decomposed` the tensor of rows that
gives them their names, in every layer. Both can also be run over the paged cache, as here, and
then hold its blocks and such a tensor for one layer: `over the paged cache`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.ragged_cost import cost
from benchmarks.ragged_scene import (
    KV_TOKENS,
    MEMORY_BAR,
    SEEDS,
    SHAPES,
    SPEED_BAR,
    WINDOW,
    Contest,
    Figures,
    contexts,
    kv_shape,
    line,
    measured,
    take_turns,
)

from penstock.engine.attention.decomposed import DecomposedAttention, as_many_rows
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.rehearsal import (
    BLOCK_SIZE,
    CPU,
    blocks_needed,
    decoder_shape,
    random_cache,
    verification_batch,
)
from penstock.fluid.packing import (
    LAYOUTS,
    KVShape,
    Layout,
    compare,
    largest_batch,
)
from penstock.lab.padded_attention import BY_LAYOUT
from penstock.lab.statistics import interval


def timing(batches: list[int], quick: bool) -> Figures:
    """Milliseconds of a layer, and the speed-up over `padded` against the tokens that it saves."""
    cells, lines = [], []
    cpu, wall = time.process_time(), time.perf_counter()
    for name in SHAPES:
        config = measured(name)
        seeds = SEEDS[:2] if quick else SEEDS
        most = max(blocks_needed(contexts(b, seed)) for b in batches for seed in seeds)
        cache = random_cache(config, most)
        for batch in batches:
            cell = _time_cell(cache, config, batch, list(seeds), 2 if quick else 3)
            cells.append({"shape": name, "batch": batch, **cell})
            lines += _time_lines(cells[-1])
            print("\n".join(_time_lines(cells[-1])), file=sys.stderr, flush=True)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    lines.append(f"[info] time: CPU time over wall time {share:.2f}")
    return {"cells": cells, "cpu_share": share, "lines": lines}


def _time_cell(
    cache: PagedKVCache, config: DecoderConfig, batch: int, seeds: list[int], turns: int
) -> Figures:
    ratios: list[float] = []
    prepare: dict[str, list[float]] = {}
    best: dict[str, list[float]] = {}
    median: dict[str, list[float]] = {}
    for seed in seeds:
        contest = Contest(cache, config, batch, seed)
        for name, milliseconds in contest.prepare_ms.items():
            prepare.setdefault(name, []).append(milliseconds)
        ratios.append(batch * max(contest.lengths) / sum(contest.lengths))
        for name, times in take_turns(contest.calls, turns).items():
            best.setdefault(name, []).append(1e3 * min(times) / config.num_layers)
            median.setdefault(name, []).append(1e3 * statistics.median(times) / config.num_layers)
        del contest  # gigabytes, which the next seed would stand beside
    cell: Figures = {"padded_to_real": statistics.fmean(ratios), "ms": {}, "median_ms": {}}
    for name in best:
        cell["ms"][name] = statistics.fmean(best[name])
        cell["median_ms"][name] = statistics.fmean(median[name])
    cell["prepare_ms"] = {name: statistics.fmean(ms) for name, ms in prepare.items()}
    for key, times, suffix in (
        ("of ratio", best, ""),
        ("of ratio, median", median, ""),
        ("of ratio, kept", best, ", kept"),
    ):
        over, under = times["padded" + suffix], times["packed" + suffix]
        shares = [p / q / r for p, q, r in zip(over, under, ratios, strict=True)]
        found = interval(shares)
        cell[key], cell[f"{key} ±"] = found.mean, found.half
    return cell


def _time_lines(cell: Figures) -> list[str]:
    ms = cell["ms"]
    what = f"time: {cell['shape']}, batch {cell['batch']}"
    shown = ", ".join(f"{name} {ms[name]:.2f}" for name in ms if "kept" not in name)
    return [
        line(
            cell["of ratio"] >= SPEED_BAR,
            f"{what}: padded/packed {ms['padded'] / ms['packed']:.2f}, padded-to-real "
            f"{cell['padded_to_real']:.2f}: {cell['of ratio']:.2f} ± {cell['of ratio ±']:.2f} of "
            f"it (medians {cell['of ratio, median']:.2f}; bar {SPEED_BAR})",
        ),
        line(
            cell["of ratio, kept"] >= SPEED_BAR,
            f"{what}: with no copying on either side {cell['of ratio, kept']:.2f} ± "
            f"{cell['of ratio, kept ±']:.2f} of it (packed {ms['packed, kept']:.2f} ms, padded "
            f"{ms['padded, kept']:.2f} ms)",
        ),
        f"[info] {what}: ms a layer: {shown}",
    ]


# --- memory ---------------------------------------------------------------------------------------


def memory(batches: list[int], quick: bool) -> Figures:
    """KV memory over what the tokens need, at the model's full depth."""
    cells, lines = [], []
    for name in SHAPES:
        shape = kv_shape(name)
        layers, _, sizes = SHAPES[name]
        config = decoder_shape(layers=1, **sizes)
        for batch in batches:
            found = [_memory_cell(config, shape, batch, seed) for seed in SEEDS]
            cell = {key: statistics.fmean(x[key] for x in found) for key in found[0]}
            worst = max(x["packed"] for x in found)
            cells.append({"shape": name, "batch": batch, **cell, "packed, worst seed": worst})
            lines.append(
                line(
                    worst <= MEMORY_BAR,
                    f"memory: {name}, {layers} layers, batch {batch}: packed {cell['packed']:.3f} "
                    f"× real (worst seed {worst:.3f}; bar {MEMORY_BAR}), padded "
                    f"{cell['padded']:.2f}, decomposed {cell['decomposed']:.3f}; over the paged "
                    f"cache padded {cell['padded, over the paged cache']:.2f}, decomposed "
                    f"{cell['decomposed, over the paged cache']:.2f}",
                )
            )
    return {"cells": cells, "lines": lines}


def _memory_cell(config: DecoderConfig, shape: KVShape, batch: int, seed: int) -> dict[str, float]:
    """Buffers as the backends really make them, for one layer; the rest is arithmetic."""
    lengths = contexts(batch, seed)
    cache = PagedKVCache(config, blocks_needed(lengths), BLOCK_SIZE, torch.float32, CPU)
    rows = verification_batch(lengths, WINDOW, cache.num_blocks, seed)
    real = sum(lengths) * shape.token_bytes
    blocks = shape.num_layers * sum(layer.nbytes for layer in cache.layers)
    costs = compare(lengths, [WINDOW] * batch, shape)
    assert blocks == costs["packed"].kv_bytes
    cell = {}
    for layout in LAYOUTS:
        backend = BY_LAYOUT[layout](cache, config.num_heads)
        if layout == "decomposed":
            backend = DecomposedAttention(cache, config.num_heads, as_many_rows)
        backend.prepare(rows)
        cell[f"{layout}, over the paged cache"] = (blocks + backend.gather.scratch_bytes) / real
        cell[layout] = costs[layout].kv_bytes / real
    cell["packed"] = cell.pop("packed, over the paged cache")
    return cell


# --- running out of memory ------------------------------------------------------------------------


def exhaustion(batches: list[int], quick: bool) -> Figures:
    """The largest batch that fits: by the planner, and by allocating until it is refused."""
    shape = kv_shape("Llama-2-7B")
    lines = []
    planned = {}
    for layout in LAYOUTS:
        found = [largest_batch(contexts(2000, s), KV_TOKENS, layout, shape) for s in SEEDS]
        planned[layout] = statistics.fmean(found)
        lines.append(
            f"[info] exhaustion: {layout} holds {planned[layout]:.0f} requests in {KV_TOKENS:,} KV "
            f"tokens (seeds {min(found)} to {max(found)})"
        )
    lines.append(
        f"[info] exhaustion: padded runs out of memory at batch {planned['padded'] + 1:.0f}, "
        f"{planned['packed'] / planned['padded']:.1f} times earlier than packed"
    )
    limit = 256 << 20
    config = measured("Llama-2-7B")
    token_bytes = kv_shape("Llama-2-7B").token_bytes // shape.num_layers
    refused = {layout: _first_refused(config, layout, limit) for layout in LAYOUTS}
    for layout, batch in refused.items():
        expected = 1 + largest_batch(contexts(300, 0), limit // token_bytes, layout, shape)
        lines.append(
            line(
                batch == expected,
                f"exhaustion: {layout}, one layer in {limit >> 20} MiB of address space: the "
                f"allocation is refused at batch {batch}, planned {expected}",
            )
        )
    return {"planned": planned, "refused": refused, "lines": lines}


def _first_refused(config: DecoderConfig, layout: Layout, limit: int) -> int:
    """The first batch whose tensor of keys and values this process may not have any more."""
    shape = KVShape(1, config.num_kv_heads, config.head_dim, 4, BLOCK_SIZE)
    for batch in range(1, 300):
        lengths = contexts(batch, 0)
        tokens = compare(lengths, [WINDOW] * batch, shape)[layout].kv_tokens
        if not _allocates(tokens * shape.token_bytes, limit):
            return batch
    return 300


def _allocates(num_bytes: int, limit: int) -> bool:
    """Whether torch gets that memory when the address space may grow by `limit` bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + limit + (1 << 16), hard))
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return True


# --- command --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[list[int], bool], Figures]] = {
    "time": timing,
    "memory": memory,
    "exhaustion": exhaustion,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and turns")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--batches", default="8,16,32", help="default: 8,16,32")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    try:
        batches = [int(x) for x in given.batches.split(",")]
    except ValueError:
        parser.error(f"--batches is {given.batches!r}; allowed: numbers with commas between them")
    torch.set_num_threads(1)
    found = {}
    for part in given.parts or PARTS:
        with torch.inference_mode():
            found[part] = PARTS[part](batches, given.quick)
        if not given.json:
            print("\n".join(found[part]["lines"]), flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
