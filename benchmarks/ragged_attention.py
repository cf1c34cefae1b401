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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import nnls

from penstock.core.packing import (
    LAYOUTS,
    AttentionCost,
    Decomposition,
    KVShape,
    Layout,
    best_decomposition,
    compare,
    cut,
    decompose,
    largest_batch,
)
from penstock.engine.attention import make_backend
from penstock.engine.attention.decomposed import Backend as Decomposed
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.rehearsal import (
    BLOCK_SIZE,
    CPU,
    blocks_needed,
    decoder_shape,
    random_cache,
    random_queries,
    verification_batch,
)

SEEDS = range(5)
STUDENT_T = 2.776
WINDOW = 4
MEAN, SIGMA = 400, 0.8
SPEED_BAR, MEMORY_BAR = 0.9, 1.05
KV_TOKENS = 111_580
"""Of Llama-2-7B on an A100-80GB."""
SHAPES = {
    "SmolLM2-135M": (30, 8, dict(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64)),
    "Llama-2-7B": (
        32,
        1,
        dict(hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128),
    ),
}
"""Layers of the model, layers measured, and sizes."""
Figures = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval."""
    width = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), STUDENT_T * width


def line(passed: bool, what: str) -> str:
    return f"[{'pass' if passed else 'MISS'}] {what}"


def contexts(batch: int, seed: int) -> list[int]:
    """The first requests of a larger batch are those of a smaller one."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, batch)
    return np.maximum(WINDOW, drawn.round()).astype(int).tolist()


def measured(name: str) -> DecoderConfig:
    """The shape with as many layers as are measured."""
    _, layers, sizes = SHAPES[name]
    return decoder_shape(layers=layers, **sizes)


def kv_shape(name: str) -> KVShape:
    layers, _, sizes = SHAPES[name]
    return KVShape(layers, sizes["kv_heads"], sizes["head_dim"], 4, BLOCK_SIZE)


# --- time -----------------------------------------------------------------------------------------


def as_many_rows(lengths: list[int], window: int) -> Decomposition:
    """Spin's setting: B is the batch."""
    return decompose(lengths, len(lengths))


class Contest:
    """Contenders on one batch; `calls` run all measured layers, `prepare` is timed apart."""

    def __init__(self, cache: PagedKVCache, config: DecoderConfig, batch: int, seed: int) -> None:
        self.lengths = contexts(batch, seed)
        rows = verification_batch(self.lengths, WINDOW, cache.num_blocks, seed)
        q = random_queries(config, rows.num_tokens)
        backends = {name: make_backend(name, cache, config.num_heads) for name in LAYOUTS}
        backends["decomposed, B = n"] = Decomposed(cache, config.num_heads, as_many_rows)
        self.prepare_ms: dict[str, float] = {}
        self.calls: dict[str, Callable[[], object]] = {}
        for name, backend in backends.items():
            backend.prepare(rows)
            started = time.process_time()
            metadata = backend.prepare(rows)
            self.prepare_ms[name] = 1e3 * (time.process_time() - started)

            def call(backend: Any = backend, metadata: Any = metadata) -> None:
                for layer in range(config.num_layers):
                    backend.attend(q, layer, metadata)

            self.calls[name] = call
        self.calls |= kept_in_layout(config, self.lengths, q)
        reference = backends["packed"].attend(q, 0, backends["packed"].prepare(rows))
        for name, backend in backends.items():
            out = backend.attend(q, 0, backend.prepare(rows))
            assert (out - reference).abs().max() < 1e-5, name


def kept_in_layout(
    config: DecoderConfig, lengths: list[int], q: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Attention alone: keys and values already lie as the layout wants them, nothing is copied."""
    num, longest, dim = len(lengths), max(lengths), config.head_dim
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    grouped = q.view(num, WINDOW, kv_heads, group, dim).permute(2, 0, 1, 3, 4).flatten(2, 3)
    sizes = torch.tensor(lengths)[:, None, None]
    seen = torch.arange(longest) <= sizes - WINDOW + torch.arange(WINDOW)[:, None]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    mask = mask.repeat_interleave(group, dim=1)[None]
    layers = range(config.num_layers)
    wide = [torch.rand(2, kv_heads, num, longest, dim) for _ in layers]
    narrow = [[torch.rand(2, kv_heads, 1, n, dim) for n in lengths] for _ in layers]
    masks = [mask[:, i : i + 1, :, :n].contiguous() for i, n in enumerate(lengths)]
    queries = [grouped[:, i : i + 1].contiguous() for i in range(num)]

    def padded() -> None:
        for keys, values in wide:
            F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

    def packed() -> None:
        for layer in narrow:
            for query, (keys, values), added in zip(queries, layer, masks, strict=True):
                F.scaled_dot_product_attention(query, keys, values, attn_mask=added)

    return {"packed, kept": packed, "padded, kept": padded}


def take_turns(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each call, in every turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(turns):
        for name, call in calls.items():
            started = time.process_time()
            call()
            times[name].append(time.process_time() - started)
    return times


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
        cell[key], cell[f"{key} ±"] = interval(shares)
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
        backend = make_backend(layout, cache, config.num_heads)
        if layout == "decomposed":
            backend = Decomposed(cache, config.num_heads, as_many_rows)
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


# --- cost model -----------------------------------------------------------------------------------

TRIED: dict[str, Callable[[list[int], int], Decomposition]] = {
    "cut 16": lambda lengths, window: cut(lengths, 16),
    "cut 32": lambda lengths, window: cut(lengths, 32),
    "cut 64": lambda lengths, window: cut(lengths, 64),
    "cut 128": lambda lengths, window: cut(lengths, 128),
    "cut 256": lambda lengths, window: cut(lengths, 256),
    "cut 512": lambda lengths, window: cut(lengths, 512),
    "B = n": as_many_rows,
    "B = 2n": lambda lengths, window: decompose(lengths, 2 * len(lengths)),
}


def cost(batches: list[int], quick: bool) -> Figures:
    """Fit the planner's four figures, predict, and compare its choice with the best one tried."""
    lines: list[str] = []
    figures: Figures = {"costs": {}, "lines": lines}
    for name in SHAPES:
        config = measured(name)
        group = config.num_heads // config.num_kv_heads
        sizes = batches[:2] if quick else [b for b in batches if b <= 32]
        cache = random_cache(config, max(blocks_needed(contexts(b, 0)) for b in sizes))
        samples = [
            x for b in sizes for w in (1, 4, 8) for x in _cost_samples(cache, config, b, w, quick)
        ]
        costs: dict[Layout, AttentionCost] = {}
        for layout in LAYOUTS:
            used = [x for x in samples if x["layout"] == layout]
            costs[layout], error = _fit(used)
            found = costs[layout]
            figures["costs"][f"{name}, {layout}"] = {
                "per_call_us": 1e6 * found.per_call,
                "per_kv_token_us": 1e6 * found.per_kv_token,
                "per_score_us": 1e6 * found.per_score,
                "per_partial_us": 1e6 * found.per_partial,
                "error": error,
            }
            lines.append(
                f"[info] cost: {name}, {layout}: {1e6 * found.per_call:.1f} µs a call, "
                f"{1e9 * found.per_kv_token:.0f} ns a token, {1e9 * found.per_score:.1f} a score, "
                f"{1e9 * found.per_partial:.0f} a partial result; mean error {error:.0%} of "
                f"{len(used)} times"
            )
        chosen = costs["decomposed"]
        unit = chosen.per_kv_token * group
        if unit:
            lines.append(
                f"[info] cost: {name}: in units of a token's copy, for each query head of a group: "
                f"score {chosen.per_score / unit:.3f}, partial {chosen.per_partial / unit:.2f}"
            )
        lines += _choice_lines(name, samples, chosen)
    return figures


def _cost_samples(
    cache: PagedKVCache, config: DecoderConfig, batch: int, window: int, quick: bool
) -> list[Figures]:
    """One layer's seconds for each layout and for each way of decomposing, with what it counts."""
    lengths = [max(window, n) for n in contexts(batch, 0)]
    rows = verification_batch(lengths, window, cache.num_blocks, 0)
    q = random_queries(config, rows.num_tokens)
    calls: dict[str, Callable[[], object]] = {}
    plans: dict[str, Decomposition] = {}
    made: dict[str, Any] = {name: make_backend(name, cache, config.num_heads) for name in LAYOUTS}
    del made["decomposed"]
    for name, plan in TRIED.items():
        made[name] = Decomposed(cache, config.num_heads, plan)
        plans[name] = plan(lengths, window)
    for name, backend in made.items():
        metadata = backend.prepare(rows)

        def call(backend: Any = backend, metadata: Any = metadata) -> None:
            for layer in range(config.num_layers):
                backend.attend(q, layer, metadata)

        calls[name] = call
    shape = KVShape(1, config.num_kv_heads, config.head_dim, 4, BLOCK_SIZE)
    samples = []
    for name, times in take_turns(calls, 2 if quick else 3).items():
        layout: Layout = "decomposed" if name in TRIED else name
        counted = compare(lengths, [window] * batch, shape, None, plans.get(name))[layout]
        samples.append(
            {
                "layout": layout,
                "plan": name,
                "batch": batch,
                "window": window,
                "lengths": lengths,
                "seconds": min(times) / config.num_layers,
                "counts": (
                    batch if layout == "packed" else 1,
                    counted.kv_read,
                    counted.scores,
                    counted.partials,
                ),
            }
        )
    return samples


def _fit(samples: list[Figures]) -> tuple[AttentionCost, float]:
    """Least squares of relative errors with no figure below zero, and the mean of those errors."""
    counts = np.array([x["counts"] for x in samples], dtype=float)
    seconds = np.array([x["seconds"] for x in samples])
    scale = counts.max(axis=0).clip(min=1)
    found = nnls(counts / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    error = float(np.abs(counts @ found / seconds - 1).mean())
    return AttentionCost(*map(float, found)), error


def _choice_lines(name: str, samples: list[Figures], chosen: AttentionCost) -> list[str]:
    """The planner's rows against those measured: time predicted, over the best time tried."""
    lines = []
    cells = {(x["batch"], x["window"]): x["lengths"] for x in samples}
    for (batch, window), lengths in cells.items():
        tried = {
            x["plan"]: x["seconds"]
            for x in samples
            if (x["batch"], x["window"]) == (batch, window) and x["layout"] == "decomposed"
        }
        plan = best_decomposition(lengths, window, chosen)
        best = min(tried, key=tried.__getitem__)
        lines.append(
            f"[info] cost: {name}, batch {batch}, {window} positions: planned {plan.num_rows} rows "
            f"of {plan.row_length}, {plan.num_slots} piece(s) in a row; fastest tried {best} "
            f"({1e3 * tried[best]:.2f} ms; B = n {1e3 * tried['B = n']:.2f} ms)"
        )
    return lines


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
