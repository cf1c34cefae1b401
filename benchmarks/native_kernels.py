"""Time of one forward pass by rows: the compiled kernels, eager torch, and the machine's floor.

    python -m benchmarks.native_kernels [--threads N] [--seconds S]

The model is a random decoder of 12 M parameters in bfloat16. The floor is what this machine could
do at best: the weights at the bandwidth of a torch sum over as many bytes, or the multiply-adds at
the rate of a large torch matrix product, whichever takes longer. All are measured in turns, best of
many, so that other load on the machine meets each of them alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from penstock.engine.backends import make_attention
from penstock.engine.batch import RaggedBatch
from penstock.engine.eager import EagerRunner
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.weights import weight_specs
from penstock.engine.native.runner import NativeRunner
from penstock.engine.sampling.noise import Salt

ROWS = (1, 2, 5, 8, 16, 40, 64, 160, 512)
CONTEXT = 64
BLOCK_SIZE, NUM_BLOCKS = 16, 256


def decoder_config(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


TARGET = decoder_config(384, 1024, layers=6, heads=6, kv_heads=2, head_dim=64)
DRAFTER = decoder_config(96, 256, layers=1, heads=3, kv_heads=1, head_dim=32)


def random_weights(config: DecoderConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: (0.05 * torch.randn(spec.shape)).bfloat16() for spec in weight_specs(config)}


def native_runner(config: DecoderConfig, threads: int) -> NativeRunner:
    weights = random_weights(config)
    return NativeRunner(config, weights, torch.float32, NUM_BLOCKS, BLOCK_SIZE, threads)


def eager_runner(config: DecoderConfig) -> EagerRunner:
    cpu = torch.device("cpu")
    cache = PagedKVCache(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, cpu)
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    decoder = Decoder(config, weights, config.max_position_embeddings, cpu)
    return EagerRunner(config, decoder, cache, make_attention("packed", cache, config.num_heads))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="for each line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    forward_table(arguments.threads, arguments.seconds)
    draft_table(arguments.threads, min(arguments.seconds, 0.5))


if __name__ == "__main__":
    main()
