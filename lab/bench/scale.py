"""What would more cores bring? The cost of a phase by the number of threads, and simulated steps.

    python -m lab.bench.scale

A step of a model of 1.5 B weights on more cores, from one thread's time of each part. Left out: the
memory's bandwidth (GB/s are told). A phase's cost beyond two threads is extrapolated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from lab.bench.native_kernels import (
    BLOCK_SIZE,
    CONTEXT,
    SHAPE,
    best_times,
    decoder_config,
    layers_runner,
    native_runner,
    one_sequence,
    parameters,
    thread_times,
)
from penstock.engine.native.library import native_library
from penstock.engine.native.sampler import sample_unfiltered
from penstock.engine.runner import RaggedBatch

LAYERS, VOCAB = 28, 151_936


class Part(NamedTuple):
    """Phases of a step that are alike. alone: seconds of each that every thread spends by itself;
    shared: seconds of each that its tasks share out, equal ones."""

    number: int
    alone: float
    shared: float
    tasks: int


def on_threads(parts: Sequence[Part], threads: int, phase_s: float) -> dict[str, float]:
    """Seconds of a step by what they go to; uneven: waiting for those who have a task more.

    phase_s: what a phase costs for each thread."""
    rounds = [math.ceil(p.tasks / threads) / p.tasks - 1 / threads for p in parts]
    return {
        "work": sum(p.number * p.shared for p in parts) / threads,
        "alone": sum(p.number * p.alone for p in parts),
        "uneven": sum(p.number * p.shared * more for p, more in zip(parts, rounds, strict=True)),
        "phases": sum(p.number for p in parts) * phase_s * threads if threads > 1 else 0.0,
    }


def phase_table() -> float:
    """What a phase costs by the number of threads; returns its seconds for each of two."""
    config = decoder_config(64, 64, 100, 4, 4, 32)
    phases, cores = 3 + 5 * config.num_layers, len(os.sched_getaffinity(0))
    batch = one_sequence(1)
    runners = {n: native_runner(config, n) for n in (1, 2, 4)}
    took = best_times({str(n): partial(r.forward, batch) for n, r in runners.items()}, 3.0)
    costs = {n: (took[str(n)] - took["1"] / min(n, cores)) / phases for n in (2, 4)}
    told = ", ".join(f"{n} threads {1e6 * cost:.2f} us" for n, cost in costs.items())
    print(f"a phase on {cores} cores beyond its work: {told}", flush=True)
    return costs[2] / 2


def step_parts(rows: int, context: int) -> Callable[[int], list[Part]]:
    """By the number of threads, the phases of a step of `rows` requests, measured on one."""
    config = decoder_config(*SHAPE)
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    runner, _ = layers_runner("Q4_K", *SHAPE, blocks=rows * -(-context // BLOCK_SIZE))
    slim = {
        name: layers_runner("Q8_0", hidden, width, num, 1, 1, 32, blocks=rows)[0]
        for name, width, num in (("slim", 32, 4), ("deep", 32, 36), ("wide", 256, 36))
    }
    short, logits = requests(rows, CONTEXT), torch.randn(rows, VOCAB)
    zeros = np.zeros(rows, np.int64)
    greedy = (zeros.astype(np.float64), zeros.astype(np.uint64), zeros, zeros.astype(np.int32))
    took = thread_times(
        {
            "short": partial(runner.forward, short),
            "long": partial(runner.forward, requests(rows, context)),
            **{name: partial(made.forward, requests(rows, 1)) for name, made in slim.items()},
            "sample": partial(sample_unfiltered, logits, *greedy),
        }
    )
    # Of a slim layer without its weights nothing is left but norms and rounding of two activations
    # as wide as the stream; a wide one has three times as many weights more.
    bare = (took["deep"] - took["slim"]) / 32 - (took["wide"] - took["deep"]) / 36 / 3
    element = max(0.0, bare) / (2 * hidden)
    attention = (took["long"] - took["short"]) / layers * context / (context - CONTEXT)
    panels = 4 * native_library().penstock_lanes()  # two panels at once
    of_heads, groups = config.num_heads + 2 * config.num_kv_heads, hidden // panels
    products = (  # input's width, columns, tasks
        (hidden, of_heads * config.head_dim, of_heads),
        (config.q_size, hidden, groups),
        (hidden, 2 * inner, inner // panels),
        (inner, hidden, groups),
    )
    alone = element * sum(width for width, _, _ in products)
    weights = sum(width * columns for width, columns, _ in products)
    weight = (took["short"] / layers - attention * CONTEXT / context - alone) / weights

    def parts(threads: int) -> list[Part]:
        pairs = rows * config.num_kv_heads
        return [
            *(Part(LAYERS, element * w, weight * w * n, tasks) for w, n, tasks in products),
            Part(LAYERS, 0, attention, rows * config.num_heads if pairs < threads else pairs),
            Part(1, element * hidden, weight * hidden * VOCAB, VOCAB // panels),
            Part(1, 0, took["sample"], rows),
        ]

    return parts


def requests(rows: int, context: int) -> RaggedBatch:
    """A row of each of so many requests, the last of `context` positions."""
    blocks = -(-context // BLOCK_SIZE)
    return RaggedBatch(
        token_ids=np.arange(rows, dtype=np.int32),
        positions=np.full(rows, context - 1, dtype=np.int32),
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.full(rows, context, dtype=np.int32),
        block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        logits_rows=np.arange(rows, dtype=np.int32),
    )


def main() -> None:
    phase_s = phase_table()
    print("simulated steps of a model of 1.5 B weights in Q4_K; ms: whole, and what it goes to")
    num_bytes = 0.5625 * (
        LAYERS * parameters(decoder_config(*SHAPE))[0] / SHAPE[2] + VOCAB * SHAPE[0]
    )
    for rows, context in ((1, 1024), (8, 1024), (32, 1024), (1, 8192)):
        parts = step_parts(rows, context)
        for threads in (1, 2, 4, 8, 16):
            found = on_threads(parts(threads), threads, phase_s)
            whole = sum(found.values())
            told = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in found.items())
            print(
                f"{rows:3d} rows behind {context}, {threads:2d} threads: {1e3 * whole:7.2f} "
                f"({told}; {num_bytes / whole / 1e9:.0f} GB/s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
