"""How long does a forward pass take by rows: compiled kernels, eager torch, and the machine's
floor; what do more rows cost in each format of weights, and what would more cores bring?

    python -m lab.bench.native_kernels [--threads N] [--seconds S] [--formats | --scale]

A random decoder of 12 M parameters in bfloat16, in turns, best of many. The floor is the weights at
the bandwidth of a torch sum, or the multiply-adds at the rate of a large matrix product, whichever
takes longer. The formats' table has layers of a model of 1.5 B parameters: processor time of one
thread, medians of interleaved rounds; `--formats` makes that table alone.

`--scale`: what a phase costs by the number of threads, and a step of such a model on more cores,
simulated from one thread's time of each part. Left out: the memory's bandwidth (GB/s are told).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lab.common.rehearsal import decoder_shape
from penstock.engine.eager import EagerRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import GROUP_FORMATS, QuantizedMatrix, Stored, Weight
from penstock.engine.models.weights import weight_specs
from penstock.engine.native.library import native_library
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_unfiltered
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling.noise import Salt

GGML = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
FORMATS = (*GGML, *GROUP_FORMATS, "BF16")
VERIFIED = (1, 2, 3, 5, 9)
ROUNDS = 15
ROWS = (1, 2, 5, 8, 16, 40, 64, 160, 512)
CONTEXT = 64
BLOCK_SIZE, NUM_BLOCKS = 16, 256
SHAPE = (1536, 8960, 4, 12, 2, 128)
LAYERS, VOCAB = 28, 151_936
"""A model of 1.5 B weights: some layers of it, their number, and its vocabulary."""


def decoder_config(*shape: int, vocab: int = 4096) -> DecoderConfig:
    """In bfloat16. shape: hidden, intermediate, layers, heads, KV heads, of a head."""
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
    made = decoder_shape(**dict(zip(names, shape, strict=True)))
    return replace(made, vocab_size=vocab, dtype=torch.bfloat16)


TARGET = decoder_config(384, 1024, 6, 6, 2, 64)
DRAFTER = decoder_config(96, 256, 1, 3, 1, 32)


def random_weights(config: DecoderConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: (0.05 * torch.randn(spec.shape)).bfloat16() for spec in weight_specs(config)}


def native_runner(config: DecoderConfig, threads: int) -> NativeRunner:
    weights = random_weights(config)
    return NativeRunner(config, weights, torch.float32, NUM_BLOCKS, BLOCK_SIZE, threads)


def eager_runner(config: DecoderConfig) -> EagerRunner:
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    return EagerRunner(config, weights, torch.device("cpu"), NUM_BLOCKS, BLOCK_SIZE)


def one_sequence(rows: int, room: int = 0) -> RaggedBatch:
    """`rows` rows after CONTEXT positions; logits of all, or of the last one in a prefill."""
    end = CONTEXT + rows
    blocks = -(-(end + room) // BLOCK_SIZE)
    wanted = range(rows) if rows <= 64 else [rows - 1]
    return RaggedBatch(
        token_ids=np.arange(rows, dtype=np.int32),
        positions=np.arange(CONTEXT, end, dtype=np.int32),
        query_start=np.array([0, rows], dtype=np.int32),
        seq_lens=np.array([end], dtype=np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logits_rows=np.array(wanted, dtype=np.int32),
    )


def best_times(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Best wall time of each in seconds, over several turns.

    A turn is many calls in a row: torch's threads go on spinning for some milliseconds after their
    last product, on the cores that the next contender wants.
    """
    best = dict.fromkeys(contenders, float("inf"))
    turns = 5
    for _ in range(turns):
        for name, run in contenders.items():
            end = time.perf_counter() + seconds / (turns * len(contenders))
            calls = 0
            while calls < 2 or time.perf_counter() < end:
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
                calls += 1
    return best


def parameters(config: DecoderConfig) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the LM head."""
    per_layer = config.hidden_size * (
        2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    )
    return config.num_layers * per_layer, config.vocab_size * config.hidden_size


def forward_table(threads: int, seconds: float) -> None:
    layers, head = parameters(TARGET)
    num_bytes = 2 * (layers + head)
    memory = torch.ones(num_bytes // 4)
    square = torch.randn(768, 768)
    native = {f"native x{n}": native_runner(TARGET, n) for n in sorted({1, threads})}
    eager = eager_runner(TARGET)
    names = [*native, "eager", "floor"]
    print(f"{(layers + head) / 1e6:.1f} M weights, {CONTEXT} positions of context; ms, best")
    print("rows " + "".join(f"{name:>12}" for name in names) + "   of floor   GFLOP/s")
    for rows in ROWS:
        batch = one_sequence(rows)
        contenders: dict[str, Callable[[], object]] = {
            "memory": lambda: memory.sum(),
            "product": lambda: square @ square,
            "eager": lambda batch=batch: eager.forward(batch),
        }
        for name, runner in native.items():
            contenders[name] = lambda runner=runner, batch=batch: runner.forward(batch)
        took = best_times(contenders, seconds)
        flops = 2 * (layers * rows + head * len(batch.logits_rows))
        took["floor"] = max(took["memory"], flops * took["product"] / (2 * 768**3))
        fastest = min(took[name] for name in native)
        line = f"{rows:4d} " + "".join(f"{1e3 * took[name]:12.3f}" for name in names)
        print(f"{line} {took['floor'] / fastest:10.0%} {flops / fastest / 1e9:9.0f}", flush=True)


def draft_table(threads: int, seconds: float) -> None:
    runner = native_runner(DRAFTER, threads)
    print(f"\ndrafter of {sum(parameters(DRAFTER)) / 1e6:.2f} M weights, two rows of catch-up; us")
    batch = one_sequence(2, room=8)
    for steps in (1, 4, 8):
        for temperature in (0.0, 1.0):
            order = (
                np.array([steps], dtype=np.int32),
                np.array([temperature]),
                np.array([7], dtype=np.uint64),
                np.array([Salt.TARGET], dtype=np.int32),
            )
            took = best_times({"draft": lambda order=order: runner.draft(batch, *order)}, seconds)
            print(f"{steps} tokens at temperature {temperature}: {1e6 * took['draft']:.0f}")


def random_matrix(kind: str, rows: int, columns: int) -> Stored:
    """Random bits: the time does not depend on the values, as long as they are finite."""
    if kind == "BF16":
        return (0.02 * torch.randn(rows, columns)).bfloat16()
    if kind in GROUP_FORMATS:
        form = GROUP_FORMATS[kind]
        codes = torch.randint(256, (rows, columns * form.bits // 8), dtype=torch.uint8)
        heads = [torch.full((rows, columns // form.size), 1e-4)] * (form.head_bytes // 4)
        return QuantizedMatrix(kind, rows, columns, form.encode(codes, *heads))
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(
        256, size=(rows, columns // block, size), dtype=np.uint8
    )
    scale = np.array([1e-4, 1e-4], dtype=np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = 112
    elif kind == "Q6_K":
        data[..., 208:] = scale[:2]
    else:
        num_scales = 2 if kind.endswith(("_1", "K")) else 1
        data[..., : 2 * num_scales] = scale[: 2 * num_scales]
    return QuantizedMatrix(kind, rows, columns, torch.from_numpy(data.reshape(rows, -1)))


def layers_runner(kind: str, *shape: int, blocks: int = 64) -> tuple[NativeRunner, int]:
    """A model of one format, and the bytes of its matrices. shape: as of `decoder_config`."""
    config = decoder_config(*shape, vocab=64)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "o": (hidden, config.q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    matrices = {name: random_matrix(kind, *shape) for name, shape in shapes.items()}
    ones = torch.ones(hidden)
    weights: dict[str, Weight] = {"embed_tokens": torch.randn(64, hidden), "norm": ones}
    num_bytes = 0
    for layer in range(config.num_layers):
        for name, matrix in matrices.items():
            weights[f"layers.{layer}.{name}"] = matrix
            data = matrix.data if isinstance(matrix, QuantizedMatrix) else matrix
            num_bytes += data.nbytes
        weights |= {f"layers.{layer}.{name}": ones for name in ("input_norm", "post_norm")}
    kv_dtype = torch.bfloat16 if kind == "BF16" else torch.float32
    return NativeRunner(config, weights, kv_dtype, blocks, BLOCK_SIZE, 1), num_bytes


def thread_times(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median processor time of this thread in seconds, over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.thread_time()
            run()
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def format_table() -> None:
    print("\nlayers of a 1.5 B model; GB/s of weights with one row, and n rows over one")
    print("format     GB/s " + "".join(f"{rows:8d}" for rows in VERIFIED[1:]))
    for kind in FORMATS:
        runner, num_bytes = layers_runner(kind, *SHAPE)
        batches = {str(rows): one_sequence(rows) for rows in VERIFIED}
        took = thread_times({n: partial(runner.forward, b) for n, b in batches.items()})
        ratios = "".join(f"{took[str(rows)] / took['1']:8.2f}" for rows in VERIFIED[1:])
        print(f"{kind:9s} {num_bytes / took['1'] / 1e9:6.1f} {ratios}", flush=True)


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


def scale_table() -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="for each line")
    parser.add_argument("--formats", action="store_true", help="only the table of formats")
    parser.add_argument("--scale", action="store_true", help="only phases and more cores")
    arguments = parser.parse_args()
    if arguments.scale:
        scale_table()
        return
    torch.set_num_threads(arguments.threads)
    if not arguments.formats:
        forward_table(arguments.threads, arguments.seconds)
        draft_table(arguments.threads, min(arguments.seconds, 0.5))
    format_table()


if __name__ == "__main__":
    main()
