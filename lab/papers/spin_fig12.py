"""Spin, figure 12 (and 5): verification time and KV memory against the batch, three layouts.

A random Llama-shaped decoder (512 wide, 8 heads, 4 layers, or with `--family` the shape of that
family's target) verifies on this machine's processor; the paper's LLaMA-7B ran on a V100. The paper
prints no lengths, only whose spread is wide and why: drafts fare differently. A request here is a
prompt and the tokens of some rounds of four drafts at its own acceptance.

Decomposition searches its rows; beside it stands the paper's number of them (B = n). Layouts take
turns. In the picture one memory is the same for all data sets: it holds what decomposition needs,
and padding up to a batch of 16. Controls: padding against itself, data sets under each other's
names, requests of one length or of one acceptance, pieces merged without eq. 13. Oracles: packing
in decomposition's place, time in proportion to the tokens held, no padding at all or none on CP and
Mix, a request whose drafts are all accepted, and plain attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, LabError, Trial
from lab.common.layouts import LAYOUTS, KVShape, compare
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import FloatArray, Interval, interval, ratio
from penstock.fluid.packing import cut
from penstock.zoo.registry import DEFAULT_TARGET, model_path

if TYPE_CHECKING:
    from lab.common.rehearsal import Rehearsal
    from penstock.engine.attention import AttentionFactory
    from penstock.engine.attention.decomposed import DecomposedAttention
    from penstock.engine.models.config import DecoderConfig

NAME = "spin_fig12"

_BATCHES = (4, 8, 16, 32)
_DRAFTED = 4
_WINDOW = _DRAFTED + 1
_ROUNDS = 96
_TURNS, _LEAST_TURNS = 9, 2
_PAPER_REDUCTION = 0.3361
"""As printed; the times printed beside it, 529.21 and 335.46 ms, give 36.6%."""
_CLOSE = 0.75
_ROUNDING = 1e-5
_MORE = 1.1
_SPIN_ROWS = "decomposed, B = n"
_SHOWN = (*LAYOUTS, _SPIN_ROWS)
_OUT = "padded, out of memory"
_HEADS, _HEAD_DIM, _LAYERS = 8, 64, 4


@dataclass(frozen=True)
class DataSet:
    """A data set's stand-in. prompt: median tokens, and σ of their logarithm; acceptance: least and
    most of a request's draft tokens, all in between alike."""

    prompt: tuple[float, float]
    acceptance: tuple[float, float]

    def drawn(self, count: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """Tokens of prompts, and of a round: [count] each."""
        prompts = rng.lognormal(np.log(self.prompt[0]), self.prompt[1], count)
        rate = rng.uniform(*self.acceptance, count)[:, None]
        return prompts, (rate ** np.arange(_WINDOW)).sum(axis=1)

    def lengths(self, count: int, rng: np.random.Generator) -> list[int]:
        """Tokens of context, this verification's positions included."""
        prompts, tokens = self.drawn(count, rng)
        tokens = tokens * rng.uniform(0, _ROUNDS, count)
        return [int(n) + _WINDOW for n in np.ceil(prompts + tokens)]


DATA_SETS = {
    "Alpaca": DataSet((25, 0.7), (0.1, 0.95)),
    "CP": DataSet((110, 0.3), (0.7, 0.9)),
    "CIP": DataSet((60, 1.0), (0.4, 0.9)),
}


@dataclass(frozen=True)
class LayoutTimes:
    """Means over the seeds: seconds of a verification step and of its attention alone, in every
    turn; KV tokens held, and KV tokens that the requests have. errors: largest differences from
    plain attention, of decomposition, and of its pieces merged without eq. 13."""

    step: dict[str, list[float]]
    attention: dict[str, list[float]]
    held: dict[str, float]
    real: float
    errors: tuple[float, float] = (0.0, 1.0)


Cells = dict[tuple[str, int], LayoutTimes]


def run(job: Trial) -> list[ClaimVerdict]:
    config = shape_of(job.family)
    seeds = range(max(1, job.effort.seeds // 4))
    cells: Cells = {}
    for name in (*DATA_SETS, "Mix"):
        for batch in _BATCHES:
            job.tell(f"{NAME}: {name}, batch {batch}")
            turns = max(_LEAST_TURNS, min(_TURNS, job.effort.curve_arrivals // (60 * batch)))
            drawn = [contexts(name, batch, seed) for seed in seeds]
            cells[name, batch] = measure(drawn, turns, config)
    write_table(
        job.out / f"{NAME}.csv",
        ("workload", "batch", "layout", "step_ms", "attention_ms", "kv_tokens_held", "padding"),
        _rows(cells),
    )
    _draw(job, cells)
    batches = [grown(seed) for seed in range(job.effort.repetitions)]
    return [
        latency(cells),
        latency(cells, _SPIN_ROWS),
        order(cells),
        exhaustion(cells),
        one_memory(cells),
        without_drafts(batches),
        accuracy(cells["Alpaca", 16]),
    ]


def contexts(name: str, batch: int, seed: int) -> list[int]:
    """`Mix` takes its requests from the three in turn."""
    rng = np.random.default_rng((12, seed))
    if name != "Mix":
        return DATA_SETS[name].lengths(batch, rng)
    each = [workload.lengths(batch, rng) for workload in DATA_SETS.values()]
    return [each[i % len(each)][i] for i in range(batch)]


def shape_of(family: Path | None) -> DecoderConfig:
    """Raises: LabError without torch, or where there is no such family."""
    try:
        from lab.common.rehearsal import decoder_shape
        from penstock.engine.models.config import DecoderConfig
    except ModuleNotFoundError as error:
        raise LabError(f"{NAME} needs torch: make serve installs it") from error
    if family is None:
        return decoder_shape(
            hidden=_HEADS * _HEAD_DIM,
            intermediate=1376,
            layers=_LAYERS,
            heads=_HEADS,
            kv_heads=_HEADS,
            head_dim=_HEAD_DIM,
        )
    try:
        target = DecoderConfig.from_pretrained(model_path(DEFAULT_TARGET, family))
    except (FileNotFoundError, KeyError) as error:
        raise LabError(str(error.args[0])) from error
    return decoder_shape(
        hidden=target.hidden_size,
        intermediate=target.intermediate_size,
        layers=target.num_layers,
        heads=target.num_heads,
        kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
    )


def measure(batches: Sequence[list[int]], turns: int, config: DecoderConfig) -> LayoutTimes:
    """Means over the batches."""
    import torch

    from lab.common.padded_attention import BY_LAYOUT
    from lab.common.rehearsal import Rehearsal, blocks_needed
    from penstock.engine.attention.decomposed import DecomposedAttention
    from penstock.fluid.packing import decompose

    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype_bytes=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # As many rows as requests: Spin's setting (section V-A).
    spin = partial(DecomposedAttention, plan=lambda lengths, _: decompose(lengths, len(lengths)))
    shown: dict[str, AttentionFactory] = {**BY_LAYOUT, _SPIN_ROWS: spin}
    rehearsal = Rehearsal(config, max(map(blocks_needed, batches)), shown)
    decomposed = DecomposedAttention(rehearsal.cache, config.num_heads)
    times = [rehearsal.times(lengths, _WINDOW, turns) for lengths in batches]
    errors = [
        rehearsal.error(batches[0], _WINDOW, backend)
        for backend in (decomposed, _unmerged(rehearsal, config.num_heads))
    ]
    torch.set_num_threads(threads)
    windows = [[_WINDOW] * len(x) for x in batches]
    costs = [
        compare(x, w, shape, None, decomposed.plan(x, _WINDOW))
        for x, w in zip(batches, windows, strict=True)
    ]
    fixed = [compare(x, w, shape)["decomposed"] for x, w in zip(batches, windows, strict=True)]
    return LayoutTimes(
        step={x: _by_turn([[t.step for t in found[x]] for found in times]) for x in _SHOWN},
        attention={
            x: _by_turn([[t.attention for t in found[x]] for found in times]) for x in _SHOWN
        },
        held={x: float(np.mean([c[x].kv_tokens for c in costs])) for x in LAYOUTS}
        | {_SPIN_ROWS: float(np.mean([c.kv_tokens for c in fixed]))},
        real=float(np.mean([sum(lengths) for lengths in batches])),
        errors=(errors[0], errors[1]),
    )


def _unmerged(rehearsal: Rehearsal, num_heads: int) -> DecomposedAttention:
    """Decomposition that takes the pieces of a request for equally important."""
    import torch

    from penstock.engine.attention import decomposed

    class Unmerged(decomposed.DecomposedAttention):
        def _partials(self, *args: Any) -> decomposed.Partials:
            found = super()._partials(*args)
            return replace(found, log_total=torch.zeros_like(found.log_total))

    # In pieces of 16 tokens, so that every request has several.
    return Unmerged(rehearsal.cache, num_heads, lambda lengths, _: cut(lengths, 16))


def _by_turn(batches: Sequence[Sequence[float]]) -> list[float]:
    """batches: [batches, turns]. Their mean: [turns]."""
    means: list[float] = np.mean(batches, axis=0).tolist()
    return means


def saved(cell: LayoutTimes, layout: str) -> tuple[Interval, Interval]:
    """Share of a padded step's time in the same turn, and of its attention's."""
    step, attention = (
        interval([1 - a / b for a, b in zip(found[layout], found["padded"], strict=True)])
        for found in (cell.step, cell.attention)
    )
    return step, attention


def latency(cells: Cells, layout: str = "decomposed") -> ClaimVerdict:
    cell = cells["Alpaca", 16]
    itself = replace(
        cell,
        step={**cell.step, layout: _turned(cell.step["padded"])},
        attention={**cell.attention, layout: _turned(cell.attention["padded"])},
    )

    def packed(times: dict[str, list[float]]) -> dict[str, list[float]]:
        return {**times, layout: times["packed"]}

    rows = "as many rows as requests, B = n" if layout == _SPIN_ROWS else "rows searched"
    return check(
        f"decomposition cuts verification latency by {_PAPER_REDUCTION:.1%} (Alpaca, batch 16; "
        f"{rows})",
        partial(reduction, layout=layout),
        cell,
        "padding against its own next turn",
        itself,
        ("packing", replace(cell, step=packed(cell.step), attention=packed(cell.attention))),
    )


def _turned(times: list[float]) -> list[float]:
    return times[1:] + times[:1]


def reduction(cell: LayoutTimes, layout: str) -> Measurement:
    """At least three quarters of the paper's, with certainty."""
    step, attention = saved(cell, layout)
    packed, packed_attention = saved(cell, "packed")
    enough = _CLOSE * _PAPER_REDUCTION
    return Measurement(
        f"the whole step by {_percent(step)}, its attention by {_percent(attention)}; packed by "
        f"{_percent(packed)} and {_percent(packed_attention)}",
        (step.low >= enough, attention.low >= enough),
    )


def _percent(share: Interval) -> str:
    return f"{share.mean:.1%} ({share.low:.1%} to {share.high:.1%})"


def order(cells: Cells) -> ClaimVerdict:
    """Attention of the largest batch, as the linear layers are the same for all."""
    found = {name: saved(cells[name, 32], "decomposed")[1] for name in DATA_SETS}
    names = list(found)
    turned = dict(zip(names, [found[n] for n in names[1:] + names[:1]], strict=True))
    return check(
        "most is gained on Alpaca, least on CP (batch 32)",
        extremes,
        found,
        "each data set under the name of another",
        turned,
        ("time in proportion to tokens held", {n: _held(cells[n, 32]) for n in DATA_SETS}),
    )


def _held(cell: LayoutTimes) -> Interval:
    share = 1 - cell.held["decomposed"] / cell.held["padded"]
    return Interval(share, share, share)


def extremes(found: dict[str, Interval]) -> Measurement:
    """With certainty: the intervals do not overlap."""
    rest = [share for name, share in found.items() if name not in ("Alpaca", "CP")]
    most, least = found["Alpaca"], found["CP"]
    return Measurement(
        "of attention's time " + ", ".join(f"{n} {_percent(share)}" for n, share in found.items()),
        (
            all(most.low > share.high for share in (*rest, least)),
            all(least.high < share.low for share in (*rest, most)),
        ),
    )


def exhaustion(cells: Cells) -> ClaimVerdict:
    return check(
        "at batch 32 padding runs out of memory on Alpaca and CIP, decomposition does not",
        runs_out,
        cells,
        "all requests of a batch equally long",
        _alike(cells),
        ("no padding at all", _without_padding(cells, "decomposed")),
    )


def _without_padding(cells: Cells, layout: str, *names: str) -> Cells:
    """Of these data sets, or all."""
    return {
        key: replace(cell, held={**cell.held, layout: cell.real})
        if not names or key[0] in names
        else cell
        for key, cell in cells.items()
    }


def _alike(cells: Cells) -> Cells:
    return {
        key: replace(cell, held=dict.fromkeys(cell.held, cell.real)) for key, cell in cells.items()
    }


def memory_of(cells: Cells) -> float:
    """KV tokens: the least memory in which decomposition does every batch and padding the ones
    before the largest."""
    most = max(batch for _, batch in cells)
    return max(
        cell.held["decomposed" if batch == most else "padded"] for (_, batch), cell in cells.items()
    )


def one_memory(cells: Cells) -> ClaimVerdict:
    return check(
        "in one memory padding runs out at batch 32 on Alpaca and CIP, and not on CP and Mix",
        one_memory_tells,
        cells,
        "all requests of a batch equally long",
        _alike(cells),
        ("no padding on CP and Mix", _without_padding(cells, "padded", "CP", "Mix")),
    )


def one_memory_tells(cells: Cells) -> Measurement:
    memory = memory_of(cells)
    held = {name: cell.held["padded"] for (name, batch), cell in cells.items() if batch == 32}
    told = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in held.items())
    return Measurement(
        f"memory for {memory:,.0f} tokens is needed otherwise; padded batches of 32 hold {told}",
        tuple((held[n] > memory) == (n in ("Alpaca", "CIP")) for n in held),
    )


def grown(seed: int) -> tuple[float, float, float, float]:
    """KV tokens of a padded batch of 32 that has begun together, after some rounds: with drafts,
    after as many tokens in the mean without, with drafts that all fare alike, and with a request
    whose drafts are all accepted."""
    prompts, tokens = DATA_SETS["Alpaca"].drawn(32, np.random.default_rng((4, seed)))
    mean = tokens.mean()

    def padded(made: FloatArray, positions: int) -> float:
        return 32 * (float((prompts + _ROUNDS * made).max()) + positions)

    alike = np.full_like(tokens, mean)
    right = np.where(prompts == prompts.max(), float(_WINDOW), alike)
    return padded(tokens, _WINDOW), padded(alike, 1), padded(alike, _WINDOW), padded(right, _WINDOW)


def without_drafts(batches: Sequence[tuple[float, float, float, float]]) -> ClaimVerdict:
    drafted, plain, alike, right = zip(*batches, strict=True)
    return check(
        "at batch 32 drafts run out of memory that is enough without them (figure 4)",
        needs_more,
        (drafted, plain),
        "drafts that are accepted alike",
        (alike, plain),
        ("all accepted of the longest request", (right, plain)),
    )


def needs_more(held: tuple[Sequence[float], Sequence[float]]) -> Measurement:
    """A tenth at least."""
    found = ratio(*held)
    return Measurement(f"{found} times the memory, after {_ROUNDS} rounds", (found.low > _MORE,))


def accuracy(cell: LayoutTimes) -> ClaimVerdict:
    return check(
        "decomposition keeps the accuracy of attention (eq. 13)",
        lambda error: Measurement(f"at most {error:.1g} off plain attention", (error < _ROUNDING,)),
        cell.errors[0],
        "pieces of a request that all weigh alike",
        cell.errors[1],
        ("plain attention", 0.0),
    )


def runs_out(cells: Cells) -> Measurement:
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
    return Measurement("; ".join(shown), tuple(parts))


def _rows(cells: Cells) -> Iterator[tuple[object, ...]]:
    for (name, batch), cell in cells.items():
        for layout in _SHOWN:
            yield (
                name,
                batch,
                layout,
                1e3 * float(np.median(cell.step[layout])),
                1e3 * float(np.median(cell.attention[layout])),
                cell.held[layout],
                cell.held[layout] - cell.real,
            )


def _draw(job: Trial, cells: Cells) -> None:
    steps, memory = [], []
    room = memory_of(cells)
    for name in (*DATA_SETS, "Mix"):
        column = {batch: cells[name, batch] for batch in _BATCHES}
        out = [batch for batch, c in column.items() if c.held["padded"] > room]
        times: dict[str, Any] = {}
        held: dict[str, Any] = {}
        for x in _SHOWN:
            shown = [batch for batch in column if x != "padded" or batch not in out]
            times[x] = shown, [1e3 * float(np.median(column[batch].step[x])) for batch in shown]
            held[x] = list(column), [c.held[x] for c in column.values()]
        times[_OUT] = out, [1e3 * float(np.median(column[batch].step["padded"])) for batch in out]
        held[_OUT] = out, [column[batch].held["padded"] for batch in out]
        held["the requests' own"] = list(column), [c.real for c in column.values()]
        held["memory"] = list(column), [room] * len(column)
        upper = {"title": name, "ylabel": "ms of a verification step", "ylim": (0, None)}
        lower = {"xlabel": "batch", "ylabel": "KV tokens held", "ylim": (0, None)}
        steps.append(Plot(times, upper, "o-", {_OUT: "o"}))
        styles = {_OUT: "o", "memory": "k--", "the requests' own": "k:"}
        memory.append(Plot(held, lower, "o-", styles))
    title = "Batch verification: padded, decomposed and packed (Spin, figure 12)"
    draw(job.out / f"{NAME}.png", title, [steps, memory])


EXPERIMENT = Experiment(
    NAME, "Figure 12: verification latency and memory by batch, three layouts", run, is_live=True
)
