"""Spin, figure 12 (and 5): verification time and KV memory against the batch, three layouts.

A random Llama-shaped decoder (512 wide, 8 heads, 4 layers) verifies on this machine's processor;
the paper's LLaMA-7B ran on a V100. The paper prints no lengths, only whose spread is wide and why:
requests whose drafts fare differently advance differently. A request here is a prompt and the
tokens of some rounds of four drafts at its own acceptance, in the middle of its generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.packing import LAYOUTS, KVShape, Layout, compare
from penstock.repro import Entry, ReproError, Run, Verdict, judge
from penstock.repro.output import pyplot, save_figure, write_table

NAME = "spin_fig12"

_BATCHES = (4, 8, 16, 32)
_DRAFTED = 4
_WINDOW = _DRAFTED + 1
_ROUNDS = 96
_TURNS = 3
_PAPER_REDUCTION = 0.3361
"""As printed; the times printed beside it, 529.21 and 335.46 ms, give 36.6%."""
_CLOSE = 0.75
_HEADS, _HEAD_DIM, _LAYERS = 8, 64, 4
_SHAPE = KVShape(_LAYERS, _HEADS, _HEAD_DIM, dtype_bytes=4)


@dataclass(frozen=True)
class Workload:
    """A data set's stand-in. prompt: median tokens, and σ of their logarithm; acceptance: least and
    most of a request's draft tokens, all in between alike."""

    prompt: tuple[float, float]
    acceptance: tuple[float, float]

    def lengths(self, count: int, rng: np.random.Generator) -> list[int]:
        """Tokens of context, this verification's positions included."""
        prompts = rng.lognormal(np.log(self.prompt[0]), self.prompt[1], count)
        rate = rng.uniform(*self.acceptance, count)[:, None]
        tokens = (rate ** np.arange(_WINDOW)).sum(axis=1) * rng.uniform(0, _ROUNDS, count)
        return [int(n) + _WINDOW for n in np.ceil(prompts + tokens)]


WORKLOADS = {
    "Alpaca": Workload((25, 0.7), (0.1, 0.95)),
    "CP": Workload((110, 0.3), (0.7, 0.9)),
    "CIP": Workload((60, 1.0), (0.4, 0.9)),
}


@dataclass(frozen=True)
class Cell:
    """Means over the seeds: seconds of a verification step and of its attention alone, KV tokens
    held, and KV tokens that the requests have."""

    step: dict[Layout, float]
    attention: dict[Layout, float]
    held: dict[Layout, float]
    real: float


Cells = dict[tuple[str, int], Cell]


def run(job: Run) -> list[Verdict]:
    seeds = range(max(1, job.effort.seeds // 4))
    cells: Cells = {}
    for name in (*WORKLOADS, "Mix"):
        for batch in _BATCHES:
            job.tell(f"{NAME}: {name}, batch {batch}")
            turns = max(1, min(_TURNS, job.effort.curve_arrivals // (200 * batch)))
            cells[name, batch] = measure([contexts(name, batch, seed) for seed in seeds], turns)
    write_table(
        job.out / f"{NAME}.csv",
        ("workload", "batch", "layout", "step_ms", "attention_ms", "kv_tokens_held", "padding"),
        _rows(cells),
    )
    _draw(job, cells)
    return [latency(cells), order(cells), exhaustion(cells)]


def contexts(name: str, batch: int, seed: int) -> list[int]:
    """`Mix` takes its requests from the three in turn."""
    rng = np.random.default_rng((12, seed))
    if name != "Mix":
        return WORKLOADS[name].lengths(batch, rng)
    each = [workload.lengths(batch, rng) for workload in WORKLOADS.values()]
    return [each[i % len(each)][i] for i in range(batch)]


def measure(batches: Sequence[list[int]], turns: int) -> Cell:
    """Means over the batches. Raises: ReproError without torch."""
    try:
        import torch

        from penstock.engine.rehearsal import Rehearsal, blocks_needed, decoder_shape
    except ModuleNotFoundError as error:
        raise ReproError(f"{NAME} needs torch: pip install 'penstock[serve]'") from error
    config = decoder_shape(
        hidden=_HEADS * _HEAD_DIM,
        intermediate=1376,
        layers=_LAYERS,
        heads=_HEADS,
        kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rehearsal = Rehearsal(config, max(map(blocks_needed, batches)))
    times = [rehearsal.times(lengths, _WINDOW, turns) for lengths in batches]
    torch.set_num_threads(threads)
    costs = [
        compare(x, [_WINDOW] * len(x), _SHAPE, None, rehearsal.decomposed.plan(x, _WINDOW))
        for x in batches
    ]
    return Cell(
        step={x: float(np.mean([t[x].step for t in times])) for x in LAYOUTS},
        attention={x: float(np.mean([t[x].attention for t in times])) for x in LAYOUTS},
        held={x: float(np.mean([c[x].kv_tokens for c in costs])) for x in LAYOUTS},
        real=float(np.mean([sum(lengths) for lengths in batches])),
    )


def saved(cell: Cell, layout: Layout) -> tuple[float, float]:
    """Share of a padded step's time, and of its attention's."""
    return (
        1 - cell.step[layout] / cell.step["padded"],
        1 - cell.attention[layout] / cell.attention["padded"],
    )


def latency(cells: Cells) -> Verdict:
    step, attention = saved(cells["Alpaca", 16], "decomposed")
    packed, packed_attention = saved(cells["Alpaca", 16], "packed")
    return Verdict(
        f"decomposition cuts verification latency by {_PAPER_REDUCTION:.1%} (Alpaca, batch 16)",
        f"the whole step by {step:.1%}, its attention by {attention:.1%}; packed by {packed:.1%} "
        f"and {packed_attention:.1%}",
        judge(step >= _CLOSE * _PAPER_REDUCTION, attention >= _CLOSE * _PAPER_REDUCTION),
    )


def order(cells: Cells) -> Verdict:
    """Attention of the largest batch, as the linear layers are the same for all."""
    found = {name: saved(cells[name, 32], "decomposed")[1] for name in WORKLOADS}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in found.items())
    most, least = (choose(found, key=found.__getitem__) for choose in (max, min))
    return Verdict(
        "most is gained on Alpaca, least on CP (batch 32)",
        f"of attention's time {shown}",
        judge(most == "Alpaca", least == "CP"),
    )


def exhaustion(cells: Cells) -> Verdict:
    """Whether a size of KV memory shows what the paper saw; it says neither size nor lengths."""
    parts, shown = [], []
    for name in ("Alpaca", "CIP"):
        half, whole = cells[name, 16].held, cells[name, 32].held
        enough = max(half["padded"], whole["decomposed"])
        parts.append(enough < whole["padded"])
        shown.append(
            f"{name} with memory for {enough:.0f} to {whole['padded']:.0f} tokens (decomposed "
            f"{whole['decomposed']:.0f}, packed {whole['packed']:.0f}, own "
            f"{cells[name, 32].real:.0f})"
        )
    return Verdict(
        "at batch 32 padding runs out of memory on Alpaca and CIP, decomposition does not",
        "; ".join(shown),
        judge(*parts),
    )


def _rows(cells: Cells) -> Iterator[tuple[object, ...]]:
    for (name, batch), cell in cells.items():
        for layout in LAYOUTS:
            yield (
                name,
                batch,
                layout,
                1e3 * cell.step[layout],
                1e3 * cell.attention[layout],
                cell.held[layout],
                cell.held[layout] - cell.real,
            )


def _draw(job: Run, cells: Cells) -> None:
    names = (*WORKLOADS, "Mix")
    figure, axes = pyplot().subplots(2, len(names), figsize=(13, 6), layout="constrained")
    for name, above, below in zip(names, *axes, strict=True):
        for layout in LAYOUTS:
            column = [cells[name, batch] for batch in _BATCHES]
            above.plot(_BATCHES, [1e3 * c.step[layout] for c in column], "o-", label=layout)
            below.plot(_BATCHES, [c.held[layout] for c in column], "o-", label=layout)
        below.plot(_BATCHES, [c.real for c in column], "k:", label="the requests' own")
        above.set(title=name, ylabel="ms of a verification step", ylim=(0, None))
        below.set(xlabel="batch", ylabel="KV tokens held", ylim=(0, None))
        below.legend()
    figure.suptitle("Batch verification: padded, decomposed and packed (Spin, figure 12)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Figure 12: verification latency and memory by batch, three layouts", run)
