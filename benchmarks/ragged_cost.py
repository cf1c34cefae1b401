"""What `decomposed` costs by its rows, fitted, and which rows the planner would choose by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.ragged_scene import (
    SHAPES,
    Figures,
    contexts,
    measured,
    take_turns,
)
from scipy.optimize import nnls

from penstock.engine.attention.decomposed import DecomposedAttention, as_many_rows
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.rehearsal import (
    BLOCK_SIZE,
    blocks_needed,
    random_cache,
    random_queries,
    verification_batch,
)
from penstock.fluid.packing import (
    LAYOUTS,
    AttentionCost,
    Decomposition,
    KVShape,
    Layout,
    best_decomposition,
    compare,
    cut,
    decompose,
)
from penstock.lab.padded_attention import BY_LAYOUT

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
    made: dict[str, Any] = {n: make(cache, config.num_heads) for n, make in BY_LAYOUT.items()}
    del made["decomposed"]
    for name, plan in TRIED.items():
        made[name] = DecomposedAttention(cache, config.num_heads, plan)
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
