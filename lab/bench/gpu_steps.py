"""How near do a GPU's steps come to the time that reading the weights takes?

    python -m lab.bench.gpu_steps [--device cuda] [--out FILE] [--json]

Qwen3's shapes with random weights in bfloat16. A draft step is one token of each request behind a
context of 500, with the choice of the token and its way to the host, as a drafter without early
stopping waits for it. Ways: kernel by kernel; torch.compile; the whole step under torch.compile's
`reduce-overhead`; a recorded CUDA graph; and a graph of compiled kernels, which is the runner's.
The floor is weights and context at the rate of a large copy. Verification steps of a 14 B target
are for GoodSpeed's figure 3. Medians.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.common.results import Results, parser, table, tell
from penstock.engine.cuda_graphs import GraphRunner, Step, compute_layer
from penstock.engine.eager import EagerRunner
from penstock.engine.fingerprint import machine_name
from penstock.engine.kv_cache import kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.variant import Variant
from penstock.engine.models.weight_specs import weight_bytes, weight_specs
from penstock.engine.runner import RaggedBatch

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_kv_heads": 8,
    "max_position_embeddings": 4096,
    "variant": Variant(qk_norm=True),
    "dtype": torch.bfloat16,
}
# Hidden size, MLP, layers, heads, tied embeddings.
_SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "14B": (5120, 17408, 40, 40, False),
    "tiny": (128, 256, 2, 16, True),
}
CONTEXT, BLOCK = 500, 16
BATCHES = (1, 16)
ROWS = (4, 8, 16, 24, 28, 32)
_STEPS = 40


def config_of(size: str) -> DecoderConfig:
    hidden, inner, layers, heads, tied = _SIZES[size]
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        tie_word_embeddings=tied,
        **_QWEN3,
    )


def load(size: str, device: torch.device, kind: type[EagerRunner]) -> EagerRunner:
    """A runner with random weights, made on the device; the one before goes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    config = config_of(size)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for spec in weight_specs(config):
        made = torch.empty(spec.shape, dtype=config.dtype, device=device)
        weights[spec.name] = made.normal_(0, 0.02, generator=generator)
        if len(spec.shape) == 1:
            weights[spec.name] = weights[spec.name].float().add_(1)
    blocks = (max(*BATCHES, *ROWS) + 1) * (-(-CONTEXT // BLOCK) + 1)
    return kind(config, weights, device, blocks, BLOCK)


def one_row_each(batch: int) -> RaggedBatch:
    """A row of each request, behind its context."""
    rows = np.arange(batch + 1, dtype=np.int32)
    each = -(-CONTEXT // BLOCK) + 1
    return RaggedBatch(
        token_ids=np.ones(batch, dtype=np.int32),
        positions=np.full(batch, CONTEXT, dtype=np.int32),
        query_start=rows,
        seq_lens=np.full(batch, CONTEXT + 1, dtype=np.int32),
        block_tables=np.arange(batch * each, dtype=np.int32).reshape(batch, each),
        logits_rows=rows[:-1],
    )


def median_seconds(step: Callable[[], Any], steps: int = _STEPS) -> float:
    """Of a step that ends on the host."""
    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    size = 1 << (31 if device.type == "cuda" else 27)
    a = torch.ones(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)

    def copy() -> None:
        b.copy_(a)
        _synchronize(device)

    return 2 * size / median_seconds(copy, 10)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Compiled(GraphRunner):
    """Compiled layers, launched kernel by kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool = None


class _Recorded(GraphRunner):
    """A graph of layers that are not compiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_layer = compute_layer


class _ReduceOverhead(_Compiled):
    """The whole step in torch.compile's own graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_layer = compute_layer

    def new_step(self, num_rows: int, num_blocks: int) -> Step:
        step = super().new_step(num_rows, num_blocks)
        for tensor in _held([self._decoder, self.cache.by_slot, step._inputs]):
            torch._dynamo.mark_static_address(tensor)
        step.compute = torch.compile(  # type: ignore[method-assign]
            step.compute, mode="reduce-overhead", dynamic=False
        )
        return step


def _held(found: Any) -> Iterator[torch.Tensor]:
    """All tensors of an object, however deep."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _held(one)
    elif isinstance(found, Decoder):
        yield from _held(list(vars(found).values()))
    elif type(found).__module__.startswith("penstock.engine.models"):
        names = getattr(type(found), "__slots__", None) or vars(found)
        yield from _held([getattr(found, name) for name in names])


RUNNERS = "CUDA graph of compiled kernels"
WAYS: dict[str, type[EagerRunner]] = {
    "eager": EagerRunner,
    "torch.compile": _Compiled,
    "CUDA graph": _Recorded,
    RUNNERS: GraphRunner,
    "torch.compile, reduce-overhead": _ReduceOverhead,
}


def draft_steps(size: str, way: str, device: torch.device, rate: float) -> Iterator[dict[str, Any]]:
    """Milliseconds of a draft step; first_s: seconds of the first call, which compiles."""
    config, runner = config_of(size), load(size, device, WAYS[way])
    for number in BATCHES:
        batch = one_row_each(number)

        def step(batch: RaggedBatch = batch) -> list[int]:
            return runner.forward(batch).argmax(-1).tolist()  # type: ignore[no-any-return]

        row: dict[str, Any] = {"model": size, "way": way, "batch": number}
        began = time.perf_counter()
        try:
            step()
            row["first_s"] = time.perf_counter() - began
            row["ms"] = 1e3 * median_seconds(step)
        except Exception as error:  # a way that does not work is a result
            row |= {"failed": f"{type(error).__name__}: {error}"[:300], "first_s": math.nan}
            row["ms"] = math.nan
        context = number * (CONTEXT + 1) * kv_bytes_per_token(config, config.dtype)
        row["floor_ms"] = 1e3 * (weight_bytes(config, config.dtype) + context) / rate
        yield told(row)


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed while others are measured."""
    row["over"] = row["ms"] / row["floor_ms"]
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def verify_steps(size: str, device: torch.device, rate: float) -> Iterator[dict[str, Any]]:
    """Seconds of the target's step over so many rows."""
    config = config_of(size)
    runner = load(size, device, GraphRunner)
    floor = weight_bytes(config, config.dtype) / rate
    for number in ROWS:
        batch = one_row_each(number)
        seconds = median_seconds(lambda b=batch: runner.forward(b).argmax(-1).tolist())
        yield told({"model": size, "rows": number, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor})


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--device", default="cuda")
    made.add_argument("--sizes", default="0.6B,1.7B,14B", help="drafters, and the target last")
    made.add_argument("--out", type=Path, help="the figures as JSON, while they are measured")
    args = made.parse_args(arguments)
    device = torch.device(args.device)
    rate = bandwidth(device)
    first, *others, target = args.sizes.split(",")
    drafts: list[dict[str, Any]] = []
    verifies: list[dict[str, Any]] = []
    name = machine_name(device)
    found = {"machine": name, "bytes_per_s": rate, "drafts": drafts, "verifies": verifies}
    *quick, slow = WAYS
    for size, ways in (
        (first, quick),
        *((o, [RUNNERS]) for o in others),
        (target, ()),
        (first, [slow]),
    ):
        drafts += (row for way in ways for row in draft_steps(size, way, device, rate))
        if not ways:
            verifies += verify_steps(size, device, rate)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
    columns = {"floor, ms": "{floor_ms:.2f}", "ms": "{ms:.2f}", "over the floor": "{over:.1f}"}
    tables = [
        table(
            f"A draft step, {name}, {rate / 1e12:.2f} TB/s",
            drafts,
            {"model": "{model}", "way": "{way}", "batch": "{batch}"}
            | columns
            | {"first call, s": "{first_s:.1f}"},
        ),
        table("A verification step", verifies, {"model": "{model}", "rows": "{rows}"} | columns),
    ]
    return tell(args, Results(found, (), tables))


if __name__ == "__main__":
    sys.exit(main())
