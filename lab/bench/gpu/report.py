"""Steps, drafts and the whole loop on an NVIDIA GPU, against what memory and arithmetic allow.

    python -m lab.bench.gpu [--quick] [--overlap] [--json] [--items numerics,decode,...]

Items: numerics (against float32; the others run only where it passes), decode, verify, draft, loop,
spin (cells of Spin's figures 4 and 12, arXiv 2503.15921). Weights, prompts and cached keys and
values are random; acceptance is SYNTHETIC, 0.7 at every position. Floors are bytes over the copy
bandwidth, or operations over the rate of a large product, whichever is longer, both measured in the
same run. Times are the device's own, medians with quartiles; `loop` and `spin` are wall time.

`loop` and the engine's part of `spin` need the configuration's package pydantic.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lab.bench.gpu.numerics import numerics
from lab.bench.gpu.tools import (
    BLOCK_SIZE,
    Ceilings,
    GpuSetting,
    Row,
    kv_bytes,
    log_normal_lengths,
    make_runner,
    measure_ceilings,
    release,
    step_flops,
    timed,
    weight_bytes,
)
from penstock.engine.backends import make_attention
from penstock.engine.gpu.graphs import Draws, GraphRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.random import shape
from penstock.engine.rehearsal import verification_batch

ITEMS = ("numerics", "decode", "verify", "draft", "loop", "spin")
SETS = 3
"""Input sets in rotation."""
ACCEPTANCE = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", default=",".join(ITEMS), help=f"of {', '.join(ITEMS)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and cells")
    parser.add_argument(
        "--overlap", action="store_true", help="place a kernel while the one before still ends"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    items = options.items.split(",")
    unknown = [item for item in items if item not in ITEMS]
    if unknown:
        print(f"gpu: no item {unknown[0]!r}; allowed: {', '.join(ITEMS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gpu: PyTorch sees no CUDA device; this needs an NVIDIA GPU", file=sys.stderr)
        return 2
    if options.overlap:
        from penstock.engine.gpu.kernels import launch

        launch.overlapped = True
    setting = GpuSetting(torch.device("cuda", torch.cuda.current_device()))
    if options.quick:
        setting = quickened(setting)
    return report(setting, items, as_json=options.json)


def quickened(setting: GpuSetting) -> GpuSetting:
    return dataclasses.replace(
        setting,
        repeats=5,
        loops=dataclasses.replace(setting.loops, draft_lengths=(3, 4), tokens=24),
        sweep=dataclasses.replace(setting.sweep, batches=(1, 8, 64)),
    )


def report(setting: GpuSetting, items: Sequence[str], *, as_json: bool) -> int:
    """Measure the items; 0 if numerics pass and every bar is met."""
    ceilings = measure_ceilings(setting.device, setting.dtype, small=setting.small)
    say(
        f"{describe(setting.device)}; copy {ceilings.copy / 1e12:.2f} TB/s, read "
        f"{ceilings.read / 1e12:.2f} TB/s, {setting.dtype} product {ceilings.flops / 1e12:.0f} "
        "TFLOP/s; weights and inputs are random, acceptance is SYNTHETIC"
    )
    rows: list[Row] = []
    measures: dict[str, Callable[[GpuSetting, Ceilings], Iterator[Row]]] = {
        "numerics": numerics,
        "decode": decode,
        "verify": verify,
        "draft": draft,
        "loop": loop,
        "spin": spin,
    }
    for item in dict.fromkeys(["numerics", *items]):
        began = time.perf_counter()
        try:
            for row in measures[item](setting, ceilings):
                rows.append(row)
                say(line(row))
        except Exception as error:  # what the other items say is worth having all the same
            traceback.print_exc()
            note = f"{type(error).__name__}: {error}"
            rows.append(Row(item, "failed", note=" ".join(note.split())[:200], passed=False))
            say(line(rows[-1]))
        with contextlib.suppress(RuntimeError):  # a device that has failed cannot release anything
            release(setting.device)
        say(f"  ({item}: {time.perf_counter() - began:.0f} s)")
        if item == "numerics" and any(row.passed is False for row in rows):
            say("gpu: numerics are wrong; times would mean nothing")
            break
    if as_json:
        facts = {"device": describe(setting.device), "ceilings": dataclasses.asdict(ceilings)}
        marks = {"random_weights": True, "synthetic_acceptance": ACCEPTANCE}
        print(json.dumps({**facts, **marks, "rows": [row.as_dict() for row in rows]}))
    else:
        print("\n".join(line(row) for row in rows))
    return 1 if any(row.passed is False for row in rows) else 0


def describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (a rehearsal)"
    return f"{name}, PyTorch {torch.__version__}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def line(row: Row) -> str:
    parts = [f"{row.item:9s} {row.case:52s}"]
    if row.median is not None and row.low is not None and row.high is not None:
        parts.append(f"{row.median * 1e3:9.3f} ms [{row.low * 1e3:.3f}, {row.high * 1e3:.3f}]")
    if row.floor is not None:
        parts.append(f"floor {row.floor * 1e3:.3f} ms")
    if row.ratio is not None:
        parts.append(f"{row.ratio:.3f}×")
    if row.bar:
        parts.append(f"bar {row.bar}" + {True: " met", False: " MISSED", None: ""}[row.passed])
    return "  ".join([*parts, row.note]).rstrip()


# --- steps --------------------------------------------------------------------------------------


def decode(setting: GpuSetting, ceilings: Ceilings) -> Iterator[Row]:
    """One position each behind the same context."""
    config = shape(setting.target)
    need = max(setting.decode_batches) * (setting.context + BLOCK_SIZE)
    runner = make_runner(config, setting.device, setting.dtype, need, setting.attention)
    for size in setting.decode_batches:
        lengths = [setting.context] * size
        times = step_times(setting, runner, [lengths] * SETS, 1)
        floor = step_floor(setting, ceilings, config, [lengths], 1)
        yield times.row("decode", f"{setting.target}, batch {size}", floor, 1.15)
    if setting.attention != "triton_paged":
        return
    del runner
    release(setting.device)
    e4m3 = torch.float8_e4m3fn
    runner = make_runner(config, setting.device, setting.dtype, need, setting.attention, e4m3)
    times = step_times(setting, runner, [lengths] * SETS, 1)
    floor = ceilings.floor(
        weight_bytes(config, setting.dtype) + kv_bytes(config, e4m3, lengths),
        step_flops(config, len(lengths)),
    )
    yield times.row("decode", f"{setting.target}, batch {size}, float8 keys and values", floor)


def verify(setting: GpuSetting, ceilings: Ceilings) -> Iterator[Row]:
    """Five positions each behind log-normal contexts, and the decode step of the same."""
    config = shape(setting.target)
    for size in setting.verify_batches:
        sets = [log_normal_lengths(size, setting.mean, 0.8, seed) for seed in range(SETS)]
        need = max(sum(lengths) for lengths in sets) + size * BLOCK_SIZE
        runner = make_runner(config, setting.device, setting.dtype, need, setting.attention)
        alone = step_times(setting, runner, sets, 1)
        floor = step_floor(setting, ceilings, config, sets, 1)
        yield alone.row("verify", f"decode of the same, batch {size}", floor)
        times = step_times(setting, runner, sets, setting.window)
        floor = step_floor(setting, ceilings, config, sets, setting.window)
        bar = 1.15 if size <= 16 else 1.4
        ratio = times.median / alone.median
        yield times.plain(
            "verify", f"{setting.window} positions, batch {size}", "against the decode step"
        ).with_(floor=floor, ratio=ratio, bar=f"≤ {bar:g}×", passed=ratio <= bar)
        yield from attention_rows(setting, ceilings, runner, sets)
        del runner
        release(setting.device)


def attention_rows(
    setting: GpuSetting, ceilings: Ceilings, runner: GraphRunner, sets: list[list[int]]
) -> Iterator[Row]:
    """Attention of all layers alone, and SDPA over tensors padded to the longest."""
    config, device, window = runner.config, setting.device, setting.window
    backend = make_attention(setting.attention, runner.cache, config.num_heads)
    runs = []
    for seed, lengths in enumerate(sets):
        batch = verification_batch(lengths, window, runner.num_blocks, seed, config.vocab_size)
        q = random_rows(setting, batch.num_tokens, config)
        runs.append(captured(all_layers(backend, backend.prepare(batch), q, config), device))
    times = timed(runs, device, setting.repeats)
    mean_bytes = sum(kv_bytes(config, runner.cache.dtype, lengths) for lengths in sets) / len(sets)
    case = f"attention of {config.num_layers} layers, batch {len(sets[0])}"
    yield times.row("verify", case, ceilings.floor(mean_bytes), 1.3)
    padded = timed(
        [
            captured(padded_layer(setting, config, lengths, seed), device)
            for seed, lengths in enumerate(sets)
        ],
        device,
        setting.repeats,
    )
    ratio = padded.median * config.num_layers / times.median
    yield Row(
        "verify",
        f"padded SDPA of {config.num_layers} layers over it",
        padded.median * config.num_layers,
        *(s * config.num_layers for s in padded.quartiles),
        ratio=ratio,
        bar="≥ 2×",
        passed=ratio >= 2,
        note="one layer timed, times their number",
    )


def random_rows(setting: GpuSetting, rows: int, config: DecoderConfig) -> torch.Tensor:
    q = torch.randn(rows, config.num_heads, config.head_dim, device=setting.device)
    return q.to(setting.dtype)


def all_layers(
    backend: Any, metadata: Any, q: torch.Tensor, config: DecoderConfig
) -> Callable[[], None]:
    def run() -> None:
        for layer in range(config.num_layers):
            backend.attend(q, layer, metadata)

    return run


def padded_layer(
    setting: GpuSetting, config: DecoderConfig, lengths: list[int], seed: int
) -> Callable[[], None]:
    """As an engine with rectangular caches attends: every sequence as long as the longest."""
    device, window = setting.device, setting.window
    longest = max(lengths)
    kv = (len(lengths), config.num_kv_heads, longest, config.head_dim)
    keys, values = (torch.randn(kv, device=device, dtype=setting.dtype) for _ in range(2))
    q = torch.randn(
        len(lengths), config.num_heads, window, config.head_dim, device=device, dtype=setting.dtype
    )
    ends = (
        torch.tensor(lengths, device=device)[:, None] - window + torch.arange(window, device=device)
    )
    mask = (torch.arange(longest, device=device) <= ends[:, :, None])[:, None]
    grouped = config.num_heads != config.num_kv_heads

    def run() -> None:
        F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)

    return run


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """As one graph, so that launches do not count."""
    if device.type != "cuda":
        return run
    with torch.inference_mode():
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph.replay


def step_times(setting: GpuSetting, runner: GraphRunner, sets: list[list[int]], window: int) -> Any:
    batches = [
        verification_batch(lengths, window, runner.num_blocks, seed, runner.config.vocab_size)
        for seed, lengths in enumerate(sets)
    ]
    runs = [partial(runner.step, batch) for batch in batches]
    return timed(runs, setting.device, setting.repeats)


def step_floor(
    setting: GpuSetting,
    ceilings: Ceilings,
    config: DecoderConfig,
    sets: list[list[int]],
    window: int,
) -> float:
    """Weights and the mean of the sets' keys and values, or the products' arithmetic."""
    mean = sum(kv_bytes(config, setting.dtype, lengths) for lengths in sets) / len(sets)
    rows = len(sets[0]) * window
    return ceilings.floor(weight_bytes(config, setting.dtype) + mean, step_flops(config, rows))


def draft(setting: GpuSetting, ceilings: Ceilings) -> Iterator[Row]:
    """Four tokens for a batch, as one graph, behind contexts of 200."""
    size, steps, context = setting.draft_batch, 4, 200
    for name, bar in setting.drafters:
        config = shape(name)
        need = size * (context + steps + 2 * BLOCK_SIZE)
        runner = make_runner(config, setting.device, setting.dtype, need, setting.attention)
        limits = np.full(size, steps, dtype=np.int32)
        draws = Draws(
            np.zeros(size * steps, dtype=np.float32),
            np.zeros((size * steps, 1, 2), dtype=np.uint32),
        )
        batches = [
            verification_batch(
                [context] * size, 1, runner.num_blocks, seed, config.vocab_size, steps
            )
            for seed in range(SETS)
        ]
        runs = [partial(runner.draft, batch, limits, draws, config.vocab_size) for batch in batches]
        times = timed(runs, setting.device, setting.repeats)
        moved = weight_bytes(config, setting.dtype)
        floor = sum(
            ceilings.floor(moved + kv_bytes(config, setting.dtype, [context + step] * size))
            for step in range(steps)
        )
        case = f"{name}, {steps} tokens, batch {size}"
        if bar is not None:
            yield times.row("draft", case, floor, bar)
        else:
            each = times.median / steps
            yield times.plain("draft", case, f"{each * 1e6:.0f} µs a token").with_(
                floor=floor,
                ratio=times.median / floor,
                bar="≤ 80 µs a token",
                passed=each <= 80e-6,
            )
        del runner
        release(setting.device)


# --- the whole loop -----------------------------------------------------------------------------


def loop(setting: GpuSetting, ceilings: Ceilings) -> Iterator[Row]:
    """The engine itself, all requests running: tokens a second, and the host between steps."""
    from lab.bench.gpu.loop import LoopSpec, steady_rate, transformers_rate

    for context, bar in zip(setting.loops.contexts, (1.65, 1.5), strict=False):
        base = LoopSpec(
            setting.target,
            setting.loops.drafter,
            setting.device,
            setting.dtype,
            setting.attention,
            setting.loops.batch,
            context,
            setting.loops.tokens,
            ACCEPTANCE,
        )
        alone, *drafted = steady_rate(base, (0, *setting.loops.draft_lengths), setting.repeats // 3)
        config = shape(setting.target)
        lengths = [context + setting.loops.tokens // 2] * setting.loops.batch
        floor = step_floor(setting, ceilings, config, [lengths], 1)
        yield alone.step.row(
            "loop",
            f"target only, context {context}",
            floor,
            1.15,
            f"{alone.tokens_per_s:.0f} tokens/s, host {alone.host_share:.1%} of a step",
        )
        best = max(drafted, key=lambda rate: rate.tokens_per_s)
        ratio = best.tokens_per_s / alone.tokens_per_s
        yield best.step.plain(
            "loop",
            f"{setting.loops.drafter}, {best.num_draft_tokens} drafted, context {context}",
            f"SYNTHETIC {ACCEPTANCE}; {best.tokens_per_s:.0f} tokens/s, "
            f"accepted + 1 = {best.mean_acceptance_length:.2f}",
        ).with_(ratio=ratio, bar=f"≥ {bar:g}×", passed=ratio >= bar)
        yield Row(
            "loop",
            f"host between steps, context {context}",
            ratio=best.host_share,
            bar="≤ 5%",
            passed=best.host_share <= 0.05,
            note=f"share of a step without work on the device; target-only {alone.host_share:.1%}",
        )
        yield Row(
            "loop",
            f"target idle, context {context}",
            ratio=best.host_share + best.draft_share,
            bar="≤ 10%",
            passed=best.host_share + best.draft_share <= 0.10,
            note=f"share of a step without work of the target; drafting {best.draft_share:.1%}",
        )
        for rate in drafted:
            yield rate.step.plain(
                "loop",
                f"  {rate.num_draft_tokens} drafted, context {context}",
                f"SYNTHETIC; {rate.tokens_per_s:.0f} tokens/s",
            ).with_(ratio=rate.tokens_per_s / alone.tokens_per_s)
        release(setting.device)
        theirs = transformers_rate(base)
        yield theirs.plain(
            "loop", f"transformers, context {context}", "a decode step of the same shapes"
        ).with_(ratio=theirs.median / alone.step.median)
        release(setting.device)


def spin(setting: GpuSetting, ceilings: Ceilings) -> Iterator[Row]:
    """Figure 12: a verification step by layout. Figure 4: throughput, target-only and drafted."""
    config = shape(setting.target)
    largest = max(setting.sweep.batches)
    lengths = {n: log_normal_lengths(n, 400, 0.8, n) for n in setting.sweep.batches}
    need = max(sum(ls) for ls in lengths.values()) + largest * BLOCK_SIZE
    runner = make_runner(config, setting.device, setting.dtype, need, setting.attention)
    for size in setting.sweep.batches:
        sets = [lengths[size]] * SETS
        times = step_times(setting, runner, sets, setting.window)
        floor = step_floor(setting, ceilings, config, sets, setting.window)
        yield times.row("spin", f"fig. 12, batch {size}, paged", floor)
        batch = verification_batch(
            lengths[size], setting.window, runner.num_blocks, 0, config.vocab_size
        )
        for layout in ("padded", "decomposed"):
            backend = make_attention(layout, runner.cache, config.num_heads)
            run = eager_step(runner, backend, batch)
            eager = timed([run], setting.device, max(3, setting.repeats // 3), queued=False)
            yield eager.plain("spin", f"fig. 12, batch {size}, {layout}", "against paged").with_(
                ratio=eager.median / times.median
            )
            del backend
            release(setting.device)
    del runner
    release(setting.device)
    yield from figure_4(setting)


def eager_step(runner: GraphRunner, backend: Any, batch: Any) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            runner.decoder.forward(batch, runner.cache, backend)

    return run


def figure_4(setting: GpuSetting) -> Iterator[Row]:
    from lab.bench.gpu.loop import LoopSpec, steady_rate

    for layout in (setting.attention, "padded", "decomposed"):
        for size in setting.sweep.batches:
            spec = LoopSpec(
                setting.target,
                setting.sweep.drafter,
                setting.device,
                setting.dtype,
                layout,
                size,
                400,
                setting.loops.tokens,
                ACCEPTANCE,
            )
            alone, drafted = steady_rate(spec, (0, 4), 1)
            yield drafted.step.plain(
                "spin",
                f"fig. 4, batch {size}, {layout}",
                f"SYNTHETIC; {alone.tokens_per_s:.0f} to {drafted.tokens_per_s:.0f} tokens/s",
            ).with_(ratio=drafted.tokens_per_s / alone.tokens_per_s)
            release(setting.device)
