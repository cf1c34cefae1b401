"""Is the default bundle behind any other, or any fixed choice of its parts, and where?

    python -m lab.bench.never_behind [--json] [--seeds N] [--only TEXT] [--data DIR] [--out FILE]

Cells on the virtual clock. A system is a bundle (`--policy`), or ADMISSION, LENGTHS with one
drafter for all: `vllm_v1, priced` was the default before `auto`. In each cell `auto` is set against
all other systems of the cell; `behind` is `auto` over the best of them in hindsight, paired by
seed.

- Poisson arrivals on the A100 profile at 0.5 to 1.2 of the fluid bound, without drafts and with
  those of recorded acceptance of a drafter that takes 0.05 of a step; KV memory for a quarter of
  what `vllm` would use: mean latency. 27 tenants, one of which sends 20 times as much as each of
  the others: geometric mean of tokens per second. Tight TPOT targets for a third: the share met.
- Closed loops of 1 to 64 clients, drafters of 0.05 and 0.33 of a step: tokens per second of the
  second half; prompts of 12,000; four tenants of unlike acceptance (geometric mean); KV memory for
  a quarter: against every admission with every draft length.
- 4 and 16 draft servers, a round trip of 5 to 300 ms away (geometric mean of tokens per second);
  the others have the better of two pipelines.

`auto without X`: the price or value X is zero, or values are given to the next request; each in a
cell where this must lose.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lab.bench.admission import FILES
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.families import closed_loop
from lab.common.report import draw_cells
from lab.common.results import DATA, Results, ResultTable, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.loop import Loop
from penstock.core.policies.admission.fluid_guided import FluidGuided
from penstock.core.policies.allocation import priced
from penstock.core.policies.allocation.parts.values import TokenValues
from penstock.core.policies.bundles import AUTO, BUNDLES
from penstock.core.types import Arrive
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import (
    AcceptanceModel,
    DomainAcceptance,
    GeometricAcceptance,
    RecordedAcceptance,
    read_records,
)
from penstock.sim.clock import VirtualClock
from penstock.sim.domains import AcceptanceFit, DomainFit
from penstock.sim.executor import SimulatedExecutor
from penstock.sim.links import DraftServer, Link
from penstock.sim.parallel import Workers, workers
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, make_executor, make_scheduler, requests_of, run
from penstock.sim.workloads import Workload, WorkloadError, make_workload

BEFORE = "vllm_v1, priced"
LENGTHS = ("none", *(f"fixed {k}" for k in (1, 2, 3, 4, 6, 8)), "goodspeed")
ADMISSIONS = ("vllm_v1", "sarathi", "fluid_guided")
HINDSIGHT, LOWEST = 0.98, 0.95
_PICTURE = "auto over the best other in hindsight (dots), over the default before (diamonds)"
OVER_BEFORE, OVER_BUNDLE, OVER_SEPARATE = 1.05, 1.02, 1.05
_FILES = FILES | {
    "code": "azure2023_code.csv.gz",
    "summaries": "vidur_arxiv_summarization.csv.gz",
}
_NUM = {"conversation": 240, "code": 400, "summaries": 200}
_SECONDS = 20.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_RATES = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
_WAITS = ("latency", "ttft", "ttft_p99", "refused")
_UNFINISHED = 1e-9  # of a system that leaves requests waiting for ever


@dataclass(frozen=True)
class Cell:
    """A load and a server without its policies.

    measure: figures of a system with a seed; `value`, where more is better, among them. without:
    prices and values that matter here. unit: of the value; seconds: of one over it."""

    name: str
    measure: Callable[[str, int], Figures]
    rivals: Sequence[str]
    without: Sequence[str] = ()
    unit: str = "tokens/s"


# --- systems --------------------------------------------------------------------------------------


def decisions(system: str, remote: bool = False) -> dict[str, Any]:
    """Fields of a `Setup` by a system's name. remote: drafts come from draft servers."""
    if system in BUNDLES:
        found = BUNDLES[system]
        return {
            "admission": PolicyConfig.from_bundle("admission", system),
            "selection": PolicyConfig.from_bundle("selection", system),
            "allocation": PolicyConfig.from_bundle("allocation", system),
            # Only draft servers are known to have devices of their own.
            "pipeline": found.pipeline if remote else "off",
        }
    admission, _, lengths = system.partition(", ")
    name, _, k = lengths.partition(" ")
    fixed = PolicyConfig.from_name("fixed", k=int(k or 1))
    return {
        "admission": PolicyConfig.from_name(admission),
        "selection": PolicyConfig.from_name("single"),
        "allocation": fixed if name in ("fixed", "none") else policy_named(name),
        "pipeline": "off",
    }


def _all_tokens(offers: Any) -> Any:
    """Draft lengths where a second costs nothing: every token that adds value and has room."""
    most = min(len(offers.owners), offers._view.room.budget)
    caps = np.full(len(offers.groups), np.inf)
    return offers.lengths(caps, most - 1), offers.plain_value / offers.plain_s


def _valued(**changed: float) -> Any:
    right = TokenValues.__init__
    return lambda self, fairness, in_time: right(
        self, **{"fairness": fairness, "in_time": in_time, **changed}
    )


_right_values = TokenValues.of_tokens
WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the price of a second": lambda: patch.object(priced, "_best_plan", _all_tokens),
    "the price of memory": lambda: patch.object(
        FluidGuided, "_admissible", lambda _, step, waiting: list(itertools.islice(waiting, 256))
    ),
    "the margin of memory": lambda: patch.object(FluidGuided, "_confidence", lambda *_: 0.0),
    "a drafter's reading": lambda: patch.object(priced, "reading_seconds", lambda *_: 0.0),
    "values of tenants": lambda: patch.object(TokenValues, "__init__", _valued(fairness=0.0)),
    "values of targets": lambda: patch.object(TokenValues, "__init__", _valued(in_time=0.0)),
    "the right values": lambda: patch.object(
        TokenValues, "of_tokens", lambda *args: np.roll(_right_values(*args), 1)
    ),
}


_SECOND, _READING = ("the price of a second",), ("a drafter's reading",)
_MEMORY, _TENANTS = ("the price of memory", "the margin of memory"), ("values of tenants",)
_TARGETS = ("values of targets", "the right values")


def measured(cell: Cell, system: str, seed: int) -> Figures:
    """Figures of a system, or of `SYSTEM without PRICE`."""
    name, _, missing = system.partition(" without ")
    with WITHOUT[missing]() if missing else nullcontext():
        return cell.measure(name, seed)


# --- scenes ---------------------------------------------------------------------------------------


@cache
def recorded(data: Path, records: str, seed: int) -> RecordedAcceptance:
    return RecordedAcceptance(read_records(data / f"accept_{records}.jsonl.gz", ("eagle",)), seed)


def one_drafter(
    share: float, system: str, acceptance: AcceptanceModel | None, **more: Any
) -> Setup:
    """An A100, and a drafter whose steps and reading take `share` of the target's."""
    target = load_profile("a100-llama2-7b")
    seconds = tuple(share * target.linear(n) for n in _BATCHES)
    reading = share * (target.linear(1024) - target.linear(512)) / 512
    profile = replace(target, drafters=(DrafterProfile("eagle", _BATCHES, seconds, reading),))
    has_drafts = acceptance is not None and not system.endswith(", none")
    names = ("eagle",) if has_drafts else ()
    made = Setup(profile, block_size=16, acceptance=acceptance, drafters=names, **more)
    return replace(made, **decisions(system))


def closed(
    setup: Setup,
    load: Workload,
    batch: int,
    seconds: float,
    kind: Callable[..., SimulatedExecutor] = SimulatedExecutor,
) -> dict[str, int]:
    """Tokens by tenant in the second half: so many clients, each sends when it has its answer."""
    # Counted requests tell of their tokens when they end.
    clock, scheduler = VirtualClock(), make_scheduler(replace(setup, counted=False))
    executor = make_executor(setup, load, clock, kind)
    loop, requests = Loop(scheduler, executor, clock), list(requests_of(load, setup))
    owner = {request.id: request.tenant for request in requests}
    made = dict.fromkeys(owner.values(), 0)
    coming = {t: iter([r for r in requests[batch:] if r.tenant == t]) for t in made}
    due = [Arrive(request) for request in requests[:batch]]
    while (now := clock.now()) < seconds:
        executor.next_event = seconds / 2 if now < seconds / 2 else seconds
        turn = loop.turn(due)
        due = []
        for output in turn.outputs:
            tenant = owner[output.request_id]
            made[tenant] += output.num_tokens * (now >= seconds / 2)
            if output.finish_reason is not None:
                due.append(Arrive(replace(next(coming[tenant]), arrival_time=now)))
        if due or turn.collected or turn.submitted:
            continue
        times = [t for t in (executor.next_completion, turn.wake_at) if t is not None]
        if not times:
            raise RuntimeError(f"no request runs any more: {turn.stalled}")
        clock.advance_to(min(times))
    return made


def log_normal(rng: np.random.Generator, num: int, mean: float, spread: float) -> Any:
    return np.exp(rng.normal(math.log(mean), spread, num)).astype(np.int64)


def clients(
    data: Path,
    batch: int,
    share: float,
    records: str,
    prompt: int,
    memory: float | None,
    system: str,
    seed: int,
) -> Figures:
    """Tokens per second. memory: share of what the clients need at most."""
    seconds = _SECONDS * (8 if prompt > 1000 else 1)
    rng = np.random.default_rng(seed)
    prompts = log_normal(rng, 40 * batch, prompt, 0.8).clip(16, 4 * prompt)
    load = closed_loop(prompts, log_normal(rng, 40 * batch, 200, 0.5).clip(32, 600))
    needed = int(batch * (prompts.mean() + load.output_len.mean()))
    kv = None if memory is None else int(memory * needed)
    setup = one_drafter(share, system, recorded(data, records, seed), seed=seed, kv_tokens=kv)
    return {"value": sum(closed(setup, load, batch, seconds).values()) / (seconds / 2)}


def four_tenants(system: str, seed: int) -> Figures:
    """Four tenants with eight clients each, of whose drafts more or fewer are accepted."""
    names = np.array(list(_RATES))[np.arange(1200) % len(_RATES)]
    fits = {
        name: DomainFit(mean=(math.log(p / (1 - p)),), covariance=((0.0,),))
        for name, p in _RATES.items()
    }
    acceptance = DomainAcceptance(AcceptanceFit(drafters=("eagle",), domains=fits), seed)
    setup = one_drafter(0.1, system, acceptance, seed=seed)
    made = closed(setup, closed_loop(np.full(1200, 100), 300, names), 32, _SECONDS)
    return {"value": geometric(max(1, made[name]) / (_SECONDS / 2) for name in _RATES)}


def servers(num: int, round_trip: float, verify: float, system: str, seed: int) -> Figures:
    """A request without end at each draft server; devices and links are log-normal."""
    rng = np.random.default_rng(seed)
    rates = {f"s{i}": float(p) for i, p in enumerate(rng.uniform(0.3, 0.9, num))}
    apart = [
        DraftServer(
            name,
            float(0.012 * np.exp(rng.normal(0, 0.5))),
            Link(float(round_trip / 2 * np.exp(rng.normal(0, 0.5)))),
            tenant=name,
        )
        for name in rates
    ]
    setup = Setup(
        StepProfile("p", 10**9, (0, 1000), (verify, verify + 0.2)),
        draft_servers=() if system.endswith(", none") else tuple(apart),
        acceptance=GeometricAcceptance(rates, seed),
        kv_tokens=4096 * 300 * num,
        block_size=4096,
        counted=False,
    )
    chosen = decisions(system, remote=True)
    pipelines = (chosen["pipeline"],) if system in BUNDLES else ("off", "async")
    load = Workload("w", np.full(num, 8), np.full(num, 10**6), np.zeros(num), np.array(list(rates)))
    tried = [replace(setup, **chosen | {"pipeline": p}) for p in pipelines]
    made = [run(one, load, until=_SECONDS).num_tokens / _SECONDS for one in tried]
    return {"value": max(geometric(np.maximum(rates, 1e-3)) for rates in made)}


@cache
def lengths(data: Path, name: str) -> Workload:
    return replace(make_workload(data / _FILES[name], rate=1.0), arrival_time=None)


@cache
def bound(data: Path, name: str, has_drafts: bool) -> float:
    """Requests/s; with drafts, drafting takes no time in it."""
    profile, load = load_profile("a100-llama2-7b"), lengths(data, name)
    if not has_drafts:
        return load_bound(profile, load, profile.kv_tokens)
    acceptance = recorded(data, "sharegpt", 0)
    return load_bound(profile, load, profile.kv_tokens, acceptance, ("eagle",))


def arrivals(
    data: Path,
    has_drafts: bool,
    name: str,
    share: float,
    system: str,
    seed: int,
    drafter: float = 0.05,
    memory: float | None = None,
    tight: float | None = None,
    num_tenants: int = 0,
) -> Figures:
    """One over mean latency; with `tight` the share of these TPOT targets met, with tenants the
    geometric mean of their tokens/s until the last arrival."""
    num, rng = _NUM[name], np.random.default_rng(seed)
    load = lengths(data, name).shuffled(seed).select(slice(num))
    if tight is not None:
        load = replace(load, tpot=np.where(np.arange(num) % 3, np.nan, tight))
    if num_tenants:
        shares = np.array([20.0] + [1.0] * (num_tenants - 1))
        owners = rng.choice(num_tenants, 2 * num, p=shares / shares.sum())
        load = lengths(data, name).shuffled(seed).select(slice(2 * num))
        load = replace(load, tenants=owners.astype(str))
    load = make_workload(load, rate=share * bound(data, name, has_drafts), seed=seed)
    acceptance = recorded(data, "sharegpt", seed) if has_drafts else None
    setup = one_drafter(drafter, system, acceptance, seed=seed, fairness=bool(num_tenants))
    if memory is not None:
        demand = run(one_drafter(0.05, "vllm", None), load).result.kv_peak_tokens
        setup = replace(setup, kv_tokens=int(memory * demand))
    report = run(setup, load)
    is_done = bool((report.completed | report.refused).all())
    latency, ttft = float(report.latency.mean()), report.ttft
    figures = {
        "value": 1 / latency if is_done else _UNFINISHED,
        "latency": latency,
        "ttft": float(ttft.mean()),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "refused": int(report.refused.sum()),
    }
    if tight is not None:
        figures["value"] = max(1e-2, float(report.met_target.sum() / report.has_target.sum()))
    if num_tenants:
        until = float(report.arrived_at[-1])
        made = np.where(report.finished_at <= until, report.num_tokens, 0)
        rates = np.bincount(owners, made, num_tenants)[np.unique(owners)] / until
        figures["value"] = geometric(np.maximum(rates, 1 / until))
    return figures


def cells(data: Path) -> list[Cell]:
    """The grid."""
    found = []
    bundles = (*(name for name in BUNDLES if name != AUTO), BEFORE)
    alone = (*(f"vllm_v1, {n}" for n in LENGTHS), BEFORE)
    separate = (*(f"{a}, {n}" for a in ADMISSIONS for n in LENGTHS), BEFORE)
    for has_drafts in (True, False):
        told, scene = "drafts" if has_drafts else "no drafts", partial(arrivals, data, has_drafts)
        for name, share in itertools.product(_NUM, (0.5, 0.8, 0.95, 1.2)):
            at = partial(scene, name, share)
            found.append(Cell(f"{name} at {share}, {told}", at, bundles, unit="s"))
        tight = 0.012 if has_drafts else 0.02
        others: dict[str, tuple[float, dict[str, Any], Sequence[str], str]] = {
            "conversation, KV for a quarter": (0.8, {"memory": 0.25}, _MEMORY, "s"),
            "27 tenants": (1.2, {"num_tenants": 27}, _TENANTS, "tokens/s"),
            "tight TPOT for a third": (0.8, {"tight": tight}, _TARGETS, "of targets"),
        }
        for name, (share, options, prices, unit) in others.items():
            at = partial(scene, "conversation", share, **options)
            prices = prices if has_drafts else ()
            found.append(Cell(f"{name}, {told}", at, bundles, prices, unit))
    at = partial(arrivals, data, True, "code", 0.8, drafter=0.33)
    found.append(Cell("code at 0.8, drafter 0.33", at, bundles, _READING, "s"))
    closed = partial(clients, data)
    for batch, records in itertools.product((32, 64), ("gsm8k", "sharegpt")):
        at = partial(closed, batch, 0.05, records, 200, 0.25)
        found.append(Cell(f"KV for a quarter of {batch}, {records}", at, separate))
    found.append(Cell("four tenants of 8 clients", four_tenants, alone, _TENANTS))
    for share in (0.33, 0.05):
        at = partial(closed, 8, share, "sharegpt", 12_000, None)
        prices = _READING if share > 0.05 else ()
        found.append(Cell(f"batch 8, drafter {share}, prompts of 12,000", at, alone, prices))
    shares, records_of = (0.33, 0.05), ("sharegpt", "gsm8k")
    for batch, share, records in itertools.product((64, 32, 8, 1), shares, records_of):
        at = partial(closed, batch, share, records, 200, None)
        prices = _SECOND if (batch, share) == (64, 0.33) else ()
        found.append(Cell(f"batch {batch}, drafter {share}, {records}", at, alone, prices))
    for num, trip, verify in itertools.product((4, 16), (0.005, 0.03, 0.1, 0.3), (0.03, 0.1)):
        name = f"{num} draft servers, {1000 * trip:g} ms, step {1000 * verify:g} ms"
        found.append(Cell(name, partial(servers, num, trip, verify), alone))
    return found


# --- the comparison -------------------------------------------------------------------------------


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """`auto` over the best of the others in every cell."""
    wanted: dict[str, Callable[[], Figures]] = {}
    for seed, cell in itertools.product(seeds, grid):
        for system in (AUTO, *cell.rivals, *(f"{AUTO} without {p}" for p in cell.without)):
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
        "TTFT and its p99, s": "{ttft}",
        "best other's": "{best_ttft}",
    }
    tables = [table("`auto` over the best of the others in hindsight", rows, columns)]
    if lost:
        columns = {"without": "{price}", "cell": "{cell}", "of `auto`": "{interval}"}
        tables.append(table("One price or value set to zero, or exchanged", lost, columns))
    runs = {"cells": rows, "prices": lost}
    return Results(runs, _verdicts(rows, lost), [*tables, _means(rows)])


def _values(cell: Cell, system: str, done: Cells, figure: str = "value") -> FloatArray:
    return np.array(done.values(f"{cell.name}/{system}", figure))


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    ours = _values(cell, AUTO, done)
    over = {name: ratio(ours, _values(cell, name, done)) for name in cell.rivals}
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
        "seeds": len(ours),
        "ours": f"{shown:.4g} {cell.unit}",
        "best": best,
        **_told(over[best]),
        "before": over[BEFORE].mean,
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


def geometric(values: Iterable[float] | FloatArray) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def _means(rows: Sequence[dict[str, Any]]) -> ResultTable:
    """`auto` over each bundle and the default before, over the cells in which they were."""
    over: dict[str, list[float]] = {}
    for row in rows:
        for name in row["over"].keys() & {*BUNDLES, BEFORE}:
            over.setdefault(name, []).append(row["over"][name])
    found = [{"name": n, "cells": len(m), "mean": geometric(m)} for n, m in sorted(over.items())]
    columns = {"system": "{name}", "cells": "{cells}", "`auto` over it": "{mean:.3f}"}
    return table("Geometric means over cells", found, columns)


def _verdicts(rows: Sequence[dict[str, Any]], lost: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """On every cell, on geometric means, on memory and speculation together, and on prices."""
    verdicts = []
    for figure, least in (("mean", HINDSIGHT), ("low", LOWEST)):
        known = [row[figure] for row in rows if figure == "mean" or row["seeds"] > 1]
        num = sum(value >= least for value in known)
        claim = "every cell against the best in hindsight, "
        claim += "mean" if figure == "mean" else "lower end of the interval"
        told = f"{num} of {len(known)} at {least}, least {min(known, default=1):.3f}"
        verdicts.append(bar(claim, told, num == len(rows)))
    found = geometric(row["before"] for row in rows)
    told = f"{found:.3f} (bar {OVER_BEFORE})"
    verdicts.append(bar("over the default before", told, found >= OVER_BEFORE))
    bundled = [row["over"] for row in rows if "wait" in row["over"]]
    if bundled:
        means = {name: geometric(over[name] for over in bundled) for name in bundled[0]}
        name, mean = min(means.items(), key=lambda pair: pair[1])
        told = f"{mean:.3f} over {name} (bar {OVER_BUNDLE})"
        verdicts.append(bar("over the best one bundle for all", told, mean >= OVER_BUNDLE))
    for row in rows:
        if f"{ADMISSIONS[-1]}, none" in row["over"]:
            told = f"{row['mean']:.3f} over {row['best']} (bar {OVER_SEPARATE})"
            claim = f"{row['cell']}: over the best separate policies"
            verdicts.append(bar(claim, told, row["mean"] >= OVER_SEPARATE))
    losing = [f"{x['price']} {x['mean']:.3f}" for x in lost]
    if lost:
        is_lost = all(x["mean"] < 1 for x in lost)
        verdicts.append(bar("without each price", ", ".join(losing), is_lost))
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--seeds", type=int, default=len(SEEDS))
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("never_behind.jsonl"))
    options.add_argument("--workers", type=int, help="processes; default: one for each core")
    args = options.parse_args(arguments)
    grid = [cell for cell in cells(args.data) if args.only in cell.name]
    try:
        with workers(args.workers) as some:
            results = compare(grid, SEEDS[: args.seeds], Cells(args.out), some)
            if args.result:
                draw_cells(args.result.with_suffix(".png"), _PICTURE, _drawn(results))
            return tell(args, results)
    except (WorkloadError, OSError) as error:
        print(f"never_behind: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
