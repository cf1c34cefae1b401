"""Is the default bundle behind any other, or any fixed choice of its parts, and where?

    python -m lab.bench.never_behind [--json] [--quick] [--held-out] [--seeds N] [--only TEXT]
                                     [--data DIR] [--out FILE]

Cells on the virtual clock. A system is a bundle (`--policy`), or ADMISSION, LENGTHS[, SELECTION],
put together from separate policies; one drafter for all, where no SELECTION is named: `vllm_v1,
priced` was the default before `auto`. In each cell `auto` is set against all other systems of the
cell; `behind` is `auto` over the best of them in hindsight, paired by seed. A system that is at
under 0.85 of the best other, after a seed, is out of the race in that cell.

- Poisson arrivals on the A100 profile at 0.5 to 1.2 of the fluid bound, without drafts and with
  those of recorded acceptance of a drafter that takes 0.05 of a step; KV memory for a quarter of
  what `vllm` would use: mean latency. 27 tenants, one of which sends 20 times as much as each of
  the others: geometric mean of tokens per second. Tight TPOT targets for a third: the share met.
  On the H100, A40 and CPU profiles at 0.8; with lengths and acceptance of GSM8K.
- Closed loops of 1 to 64 clients, drafters of 0.05 and 0.33 of a step: tokens per second of the
  second half; prompts of 12,000; four tenants of unlike acceptance (geometric mean), or three
  beside one of whose drafts nothing is accepted, which asks for none in one of the others; KV
  memory for a quarter: against every admission with every draft length. Three of the profiles
  besides.
- Five drafters (`lab.bench.several_drafters`): against each one with priced and with fixed
  lengths, and `lbss` with priced ones.
- Look-up that finds rarely or often, beside two drafters: against each of them, look-up alone and
  neither.
- 1 to 16 draft servers, a round trip of 5 to 300 ms away (geometric mean of tokens per second);
  the others have the better of two pipelines.

`--held-out` runs the cells of `held_out.toml`, too: no constant may be tuned on them, and they are
told apart. `auto without X`: the price or value X is zero, or values are given to the next request;
each in a cell where this must lose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.never_behind_cells import BEFORE, CARELESS, SARATHI, STRANGER, cells
from lab.bench.never_behind_scenes import KNOWING, geometric
from lab.bench.never_behind_systems import Cell, measured
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.report import draw_cells
from lab.common.results import DATA, Results, ResultTable, count, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from penstock.core.policies.bundles import AUTO, BUNDLES
from penstock.sim.parallel import Workers, workers
from penstock.sim.workloads import WorkloadError

HINDSIGHT, LOWEST = 0.98, 0.95
OPEN, HELD_OUT = "open loads", "held-out loads"
FAR = "far servers"
SHARES = {OPEN: 0.9, HELD_OUT: 0.8}
"""Of the cells that must be at `HINDSIGHT`; all must be at `LOWEST`."""
OVER_BEFORE, OVER_BUNDLE, OVER_SEPARATE = 1.05, 1.02, 1.05
KEPT = 0.97
"""Share of their tokens per second that tenants keep beside one that accepts no draft."""
OUT_OF_THE_RACE = 0.85
"""Share of the best other, so far, under which a system is measured with no more seeds."""
_PICTURE = "auto over the best other (dots), over the default before (diamonds)"
_WAITS = ("latency", "ttft", "ttft_p99", "refused")


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """`auto` over the best of the others in every cell."""
    for seed in seeds:
        wanted: dict[str, Callable[[], Figures]] = {}
        for cell in grid:
            without = (f"{AUTO} without {price}" for price in cell.without)
            for system in (AUTO, *_near_the_best(cell, done), *without):
                wanted[f"{cell.name}/{system}/{seed}"] = partial(measured, cell, system, seed)
        done.measure_all(wanted, workers)
    rows = [_row(cell, done) for cell in grid]
    lost = [_loss(cell, price, done) for cell in grid for price in cell.without]
    columns = {
        "cell": "{cell}",
        "`auto`": "{ours}",
        "best other": "{best}",
        "over it": "{interval}",
        "over the default before": "{before:.3f}",
        f"over `{SARATHI}`": "{sarathi}",
        "TTFT and its p99, s": "{ttft}",
        "best other's": "{best_ttft}",
    }
    title = "`auto` over the best of the others"
    groups = {name: [row for row in rows if row["group"] == name] for name in SHARES}
    tables = [table(f"{title}, {name}", some, columns) for name, some in groups.items() if some]
    if lost:
        columns = {"without": "{price}", "cell": "{cell}", "of `auto`": "{interval}"}
        tables.append(table("One price or value set to zero, or exchanged", lost, columns))
    runs = {"cells": rows, "prices": lost}
    return Results(runs, _verdicts(rows, lost), [*tables, _means(rows)])


def _values(cell: Cell, system: str, done: Cells, figure: str = "value") -> FloatArray:
    return np.array(done.values(f"{cell.name}/{system}", figure))


def _over(cell: Cell, system: str, done: Cells) -> Interval:
    """`auto` over a system, with the seeds that both have."""
    ours, theirs = (_values(cell, name, done) for name in (AUTO, system))
    num = min(len(ours), len(theirs))
    return ratio(ours[:num], theirs[:num])


def _near_the_best(cell: Cell, done: Cells) -> Sequence[str]:
    """The rivals that may still turn out to be the best one: all before the first seed."""
    known = [done.values(f"{cell.name}/{name}", "value") for name in (AUTO, *cell.rivals)]
    if not all(known):
        return cell.rivals
    over = {name: _over(cell, name, done).mean for name in cell.rivals}
    kept = {name for name in over if min(over.values()) >= OUT_OF_THE_RACE * over[name]}
    return [name for name in cell.rivals if name in {*kept, BEFORE, SARATHI}]


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    ours = _values(cell, AUTO, done)
    over = {name: _over(cell, name, done) for name in cell.rivals}
    best = min(over, key=lambda name: over[name].mean)
    waits = {
        name: {figure: float(values.mean()) for figure in _WAITS if len(values := of(figure))}
        for name in (AUTO, *cell.rivals)
        for of in [partial(_values, cell, name, done)]
    }
    ttft, best_ttft = (
        f"{w['ttft']:.2f}, {w['ttft_p99']:.2f}" if w else "" for w in (waits[AUTO], waits[best])
    )
    shown = float((1 / ours if cell.unit == "s" else ours).mean())
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "group": HELD_OUT if cell.held_out else OPEN,
        "seeds": len(ours),
        "ours": f"{shown:.4g} {cell.unit}",
        "best": best,
        **_told(over[best]),
        "before": over[BEFORE].mean,
        "sarathi": f"{over[SARATHI].mean:.3f}" if SARATHI in over else "",
        "ttft": ttft,
        "best_ttft": best_ttft,
        "over": {name: found.mean for name, found in over.items()},
        "waits": waits,
    }


def _loss(cell: Cell, price: str, done: Cells) -> dict[str, Any]:
    without = _values(cell, f"{AUTO} without {price}", done)
    found = ratio(without, _values(cell, AUTO, done))
    return {"price": price, "cell": cell.name, **_told(found)}


def _drawn(results: Results) -> dict[str, tuple[Interval, float]]:
    rows = results.runs["cells"]
    return {r["cell"]: (Interval(r["mean"], r["low"], r["high"]), r["before"]) for r in rows}


def _told(found: Interval) -> dict[str, Any]:
    ends = f" ({found.low:.3f} to {found.high:.3f})" if found.half else ""
    return {**asdict(found), "interval": f"{found.mean:.3f}{ends}"}


def _means(rows: Sequence[dict[str, Any]]) -> ResultTable:
    """`auto` over bundles and what stands for one, over the cells of a kind in which they were."""
    over: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name in row["over"].keys() & {*BUNDLES, BEFORE, SARATHI}:
            over.setdefault((name, row["kind"]), []).append(row["over"][name])
    found = [
        {"name": name, "kind": kind, "cells": len(means), "mean": geometric(means)}
        for (name, kind), means in sorted(over.items())
    ]
    columns = {"system": "{name}", "kind": "{kind}", "loads": "{cells}", "over it": "{mean:.3f}"}
    return table("Geometric means of `auto` over others", found, columns)


def _verdicts(rows: Sequence[dict[str, Any]], lost: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """On every cell, on geometric means, on memory and speculation together, and on prices."""
    verdicts = []
    for name, share in SHARES.items():
        if some := [row for row in rows if row["group"] == name]:
            verdicts.append(_near(name, some, share))
    if far := [row["mean"] for row in rows if row["kind"] == FAR]:
        told = f"least {min(far):.3f} of {len(far)} (bar {LOWEST})"
        verdicts.append(bar("draft servers at 300 ms", told, min(far) >= LOWEST))
    found = geometric(row["before"] for row in rows)
    told = f"{found:.3f} (bar {OVER_BEFORE})"
    verdicts.append(bar("over the default before", told, found >= OVER_BEFORE))
    bundled = [row["over"] for row in rows if "wait" in row["over"]]
    if bundled:
        known = set.intersection(*({*over} for over in bundled))
        means = {name: geometric(over[name] for over in bundled) for name in sorted(known)}
        name, mean = min(means.items(), key=lambda pair: pair[1])
        told = f"{mean:.3f} over {name} (bar {OVER_BUNDLE})"
        verdicts.append(bar("over the best one system for all arrivals", told, mean >= OVER_BUNDLE))
    for row in rows:
        if row["kind"] == "memory":
            told = f"{row['mean']:.3f} over {row['best']} (bar {OVER_SEPARATE})"
            claim = f"{row['cell']}: over the best separate policies"
            verdicts.append(bar(claim, told, row["mean"] >= OVER_SEPARATE))
        if row["kind"] == STRANGER:
            verdicts.append(_beside_a_stranger(row))
    losing = [f"{x['price']} {x['mean']:.3f}" for x in lost]
    if lost:
        is_lost = all(x["mean"] < 1 for x in lost)
        verdicts.append(bar("without each price", ", ".join(losing), is_lost))
    return verdicts


def _beside_a_stranger(row: dict[str, Any]) -> ClaimVerdict:
    """Compare what the others keep with what they keep where drafts have fixed lengths."""
    over = row["over"]
    kept, control = over[AUTO + KNOWING], over[CARELESS + KNOWING] / over[CARELESS]
    told = f"{kept:.3f} (bar {KEPT}); with {CARELESS} {control:.3f}"
    return bar(f"{row['cell']}: what the others keep", told, kept >= KEPT > control)


def _near(name: str, rows: Sequence[dict[str, Any]], share: float) -> ClaimVerdict:
    """How many cells of a group are near the best in hindsight, and how far the last one is."""
    means = [row["mean"] for row in rows]
    num, least = sum(mean >= HINDSIGHT for mean in means), min(means)
    sure = sum(row["low"] >= LOWEST for row in rows)
    told = f"{num} of {len(rows)} ({num / len(rows):.2f}) at {HINDSIGHT} (bar {share}), least "
    told += f"{least:.3f} (bar {LOWEST}); the interval's lower end at {LOWEST} in {sure}"
    reached = num >= share * len(rows) and least >= LOWEST
    return bar(f"{name} against the best fixed choice", told, reached)


def _chosen(args: Any) -> list[Cell]:
    grid = [cell for cell in cells(args.data) if args.only in cell.name]
    grid = [cell for cell in grid if args.held_out or not cell.held_out]
    if not grid:
        raise WorkloadError(f"no cell that runs has {args.only!r} in its name")
    return list(_one_of_each(grid)) if args.quick else grid


def _one_of_each(grid: Iterable[Cell]) -> Iterable[Cell]:
    """The last cell of each kind."""
    return {cell.kind: cell for cell in grid}.values()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="one seed, a cell of each kind")
    options.add_argument("--held-out", action="store_true", help="the cells held out, too")
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--seeds", type=count, default=len(SEEDS))
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("never_behind.jsonl"))
    options.add_argument("--workers", type=int, help="processes; default: one for each core")
    args = options.parse_args(arguments)
    seeds = SEEDS[: 1 if args.quick else args.seeds]
    try:
        grid = _chosen(args)
        with workers(args.workers) as some:
            results = compare(grid, seeds, Cells(args.out), some)
            if args.result:
                draw_cells(args.result.with_suffix(".png"), _PICTURE, _drawn(results))
            return tell(args, results)
    except (WorkloadError, OSError) as error:
        print(f"never_behind: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
