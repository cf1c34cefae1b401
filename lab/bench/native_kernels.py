"""What do more rows cost the CPU kernels in each format of weights, and with experts?

    python -m lab.bench.native_kernels [--model FILE | --experts LAYERS] [--threads N] [--seconds S]

Layers of a model of 1.5 B parameters: processor time of one thread, medians of interleaved rounds.
`--model` takes whole steps of a GGUF file, wall time. `--experts` takes so many layers in the shape
of Qwen3-30B-A3B with 8 of 64 experts, in Q4_K (17 layers: 3 GB). Minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lab.common.rehearsal import decoder_shape
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import GROUP_FORMATS, QuantizedMatrix, Stored, Weight
from penstock.engine.models.variant import Experts, Variant
from penstock.engine.models.weight_specs import weight_specs
from penstock.engine.native import loading
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import RaggedBatch

GGML = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
FORMATS = (*GGML, *GROUP_FORMATS, "BF16")
VERIFIED = (1, 2, 3, 5, 9)
STEPS = (1, 2, 4, 5, 8, 12, 16, 24, 32, 64)
ROUNDS = 15
CONTEXT = 64
BLOCK_SIZE = 16
MATRICES = ("qkv", "o", "gate_up", "down")
SHAPE = (1536, 8960, 4, 12, 2, 128)
"""Some layers of a model of 1.5 B weights."""


def decoder_config(*shape: int, vocab: int = 4096) -> DecoderConfig:
    """In bfloat16. shape: hidden, intermediate, layers, heads, KV heads, of a head."""
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
    made = decoder_shape(**dict(zip(names, shape, strict=True)))
    return replace(made, vocab_size=vocab, dtype=torch.bfloat16)


def one_sequence(rows: int) -> RaggedBatch:
    """`rows` rows after CONTEXT positions, with the logits of all."""
    end = CONTEXT + rows
    return RaggedBatch(
        token_ids=np.arange(rows, dtype=np.int32),
        positions=np.arange(CONTEXT, end, dtype=np.int32),
        query_start=np.array([0, rows], dtype=np.int32),
        seq_lens=np.array([end], dtype=np.int32),
        block_tables=np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)[None],
        logits_rows=np.arange(rows, dtype=np.int32),
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


def weights_in(kind: str, config: DecoderConfig) -> dict[str, Weight]:
    """The same matrices in each layer; embeddings so large that the layers change little."""
    matrices: dict[str, Stored] = {}
    weights: dict[str, Weight] = {}
    for spec in weight_specs(config):
        name = spec.name.rpartition(".")[2]
        if name in MATRICES:
            if name not in matrices:
                matrices[name] = random_matrix(kind, math.prod(spec.shape[:-1]), spec.shape[-1])
            weights[spec.name] = matrices[name]
        elif name.endswith("norm"):
            weights[spec.name] = torch.ones(spec.shape)
        else:
            weights[spec.name] = 1e4 * torch.randn(spec.shape)
    return weights


def num_bytes(weights: dict[str, Weight], *names: str) -> int:
    """Of these matrices in all layers."""
    return sum(
        weight.data.nbytes
        for name, weight in weights.items()
        if name.endswith(names) and not isinstance(weight, tuple)
    )


def layers_runner(kind: str, *shape: int, blocks: int = 64) -> tuple[NativeRunner, int]:
    """A model of one format, and the bytes that a row reads. shape: as of `decoder_config`."""
    config = decoder_config(*shape, vocab=64)
    weights = weights_in(kind, config)
    kv_dtype = torch.bfloat16 if kind == "BF16" else torch.float32
    runner = NativeRunner(config, weights, kv_dtype, blocks, BLOCK_SIZE, 1)
    return runner, num_bytes(weights, *MATRICES)


def experts_table(layers: int, threads: int, seconds: float) -> None:
    """Milliseconds of a step by rows, beside the bytes that its experts and all weights have."""
    torch.manual_seed(0)
    experts = Experts(count=64, per_token=8, norm_topk_prob=True)
    config = replace(
        decoder_config(2048, 768, layers, 32, 4, 128, vocab=64),
        architecture="Qwen3MoeForCausalLM",
        variant=Variant(qk_norm=True, experts=experts),
    )
    weights = weights_in("Q4_K", config)
    runner = NativeRunner(config, weights, torch.float32, 64, BLOCK_SIZE, threads)
    of_all = num_bytes(weights, "gate_up", "down")
    of_others = num_bytes(weights, "qkv", ".o", "router")
    embeddings = weights["embed_tokens"]
    memory = torch.ones(1 << 26)
    print(
        f"{(of_all + of_others) / 1e9:.2f} GB, {layers} layers, 8 of 64 experts, {threads} threads"
    )
    print("rows   ms, best   experts, MB   all read, MB   GB/s   of torch's sum")
    for rows in (1, 5, 8):
        batch = one_sequence(rows)
        took = best_times(
            {"step": lambda batch=batch: runner.forward(batch), "sum": lambda: memory.sum()},
            seconds,
        )
        chosen = [
            (embeddings[:rows] @ router.t()).topk(experts.per_token).indices.unique().numel()
            for name, router in weights.items()
            if name.endswith("router")
        ]
        of_chosen = of_all * sum(chosen) / (layers * experts.count)
        rate = (of_chosen + of_others) / took["step"]
        print(
            f"{rows:4d} {1e3 * took['step']:10.2f} {of_chosen / 1e6:13.1f} "
            f"{(of_chosen + of_others) / 1e6:14.1f} {rate / 1e9:6.1f} "
            f"{rate * took['sum'] / memory.nbytes:16.0%}",
            flush=True,
        )


def steps_table(path: Path, threads: int) -> None:
    """Milliseconds of a model's step by rows, with the logits of all rows and of the last alone."""
    blocks = -(-(CONTEXT + STEPS[-1]) // BLOCK_SIZE)
    runner = NativeRunner.load(path, torch.float32, blocks, BLOCK_SIZE, threads)
    print(f"{path.name}, {loading.loaded_instruction_set()}, {threads} threads")
    print("rows  " + "".join(f"{kind + ' logits, ms':>18s}  over one" for kind in ("all", "last")))
    passes: dict[str, Callable[[], object]] = {}
    for rows in STEPS:
        batch = one_sequence(rows)
        last = replace(batch, logits_rows=batch.logits_rows[-1:])
        passes[f"all {rows}"] = partial(runner.forward, batch)
        passes[f"last {rows}"] = partial(runner.forward, last)
    took = median_times(passes, time.perf_counter)
    for rows in STEPS:
        pairs = [(took[f"{kind} {rows}"], took[f"{kind} 1"]) for kind in ("all", "last")]
        print(f"{rows:4d}  " + "".join(f"{1e3 * t:18.1f} {t / one:9.2f}" for t, one in pairs))


def median_times(
    contenders: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds by this clock, over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def format_table() -> None:
    print("\nlayers of a 1.5 B model; GB/s of weights with one row, and n rows over one")
    print("format     GB/s " + "".join(f"{rows:8d}" for rows in VERIFIED[1:]))
    for kind in FORMATS:
        runner, read = layers_runner(kind, *SHAPE)
        batches = {str(rows): one_sequence(rows) for rows in VERIFIED}
        passes = {n: partial(runner.forward, b) for n, b in batches.items()}
        took = median_times(passes, time.thread_time)
        ratios = "".join(f"{took[str(rows)] / took['1']:8.2f}" for rows in VERIFIED[1:])
        print(f"{kind:9s} {read / took['1'] / 1e9:6.1f} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for experts")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each line of experts")
    parser.add_argument("--experts", type=int, metavar="LAYERS", help="the table of experts")
    parser.add_argument("--model", type=Path, metavar="FILE", help="steps of this model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.experts:
        return experts_table(arguments.experts, arguments.threads, arguments.seconds)
    if arguments.model:
        try:
            return steps_table(arguments.model, arguments.threads)
        except CheckpointError as error:
            parser.error(str(error))
    format_table()


if __name__ == "__main__":
    main()
