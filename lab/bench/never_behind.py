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
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lab.bench.admission import FILES
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.families import closed_loop
from lab.common.results import DATA, Results, ResultTable, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
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
from penstock.sim.links import DraftServer, Link
from penstock.sim.parallel import Workers, workers
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, make_executor, make_scheduler, requests_of, run
from penstock.sim.workloads import Workload, WorkloadError, make_workload

BEFORE, LITERAL = "vllm_v1, priced", "wait"
LENGTHS = ("none", *(f"fixed {k}" for k in (1, 2, 3, 4, 6, 8)), "goodspeed")
ADMISSIONS = ("vllm_v1", "sarathi", "fluid_guided")
HINDSIGHT, LOWEST = 0.98, 0.95
OVER_BEFORE, OVER_BUNDLE, OVER_SEPARATE = 1.05, 1.02, 1.05
_FILES = FILES | {
    "code": "azure2023_code.csv.gz",
    "summaries": "vidur_arxiv_summarization.csv.gz",
}
_NUM = {"conversation": 240, "code": 400, "summaries": 200}
_SECONDS = 20.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_RATES = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
_UNFINISHED = 1e-9  # of a system that leaves requests waiting for ever


@dataclass(frozen=True)
class Cell:
    """A load and a server without its policies.

    measure: figures of a system with a seed; `value`, where more is better, among them. without:
    prices and values that matter here."""

    name: str
    measure: Callable[[str, int], Figures]
    rivals: Sequence[str] = (*(b for b in BUNDLES if b != AUTO), BEFORE)
    without: Sequence[str] = ()


# --- systems --------------------------------------------------------------------------------------


def decisions(system: str, remote: bool = False) -> dict[str, Any]:
    """Fields of a `Setup` by a system's name. remote: drafts come from draft servers."""
    if system in BUNDLES:
        found = BUNDLES[system]
        kinds = ("admission", "selection", "allocation")
        pipeline = found.remote_pipeline if remote else found.pipeline
        return {k: PolicyConfig.from_bundle(k, system) for k in kinds} | {"pipeline": pipeline}
    admission, _, lengths = system.partition(", ")
    name, _, k = lengths.partition(" ")
    fixed = PolicyConfig.from_name("fixed", k=int(k or 1))
    return {
        "admission": PolicyConfig.from_name(admission),
        "selection": PolicyConfig.from_name("single"),
        "allocation": fixed if name in ("fixed", "none") else PolicyConfig.from_name(name),
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


def closed(setup: Setup, load: Workload, batch: int, seconds: float) -> dict[str, int]:
    """Tokens by tenant in the second half: so many clients, each sends when it has its answer."""
    # Counted requests tell of their tokens when they end.
    clock, scheduler = VirtualClock(), make_scheduler(replace(setup, counted=False))
    executor = make_executor(setup, load, clock)
    loop, coming = Loop(scheduler, executor, clock), requests_of(load, setup)
    due = [Arrive(request) for request in itertools.islice(coming, batch)]
    tenants = {} if load.tenants is None else dict(enumerate(load.tenants.tolist()))
    made: dict[str, int] = {}
    while (now := clock.now()) < seconds:
        executor.next_event = seconds / 2 if now < seconds / 2 else seconds
        turn = loop.turn(due)
        due = []
        for output in turn.outputs:
            tenant = tenants.get(int(output.request_id), "")
            made[tenant] = made.get(tenant, 0) + output.num_tokens * (now >= seconds / 2)
            if output.finish_reason is not None:
                due += [Arrive(replace(next(coming), arrival_time=now))]
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
    """Four tenants, of whose drafts more or fewer are accepted, 32 requests at a time."""
    names = np.array(list(_RATES))[np.arange(1200) % len(_RATES)]
    fits = {
        name: DomainFit(mean=(math.log(p / (1 - p)),), covariance=((0.0,),))
        for name, p in _RATES.items()
    }
    acceptance = DomainAcceptance(AcceptanceFit(drafters=("eagle",), domains=fits), seed)
    setup = one_drafter(0.1, system, acceptance, seed=seed)
    made = closed(setup, closed_loop(np.full(1200, 100), 300, names), 32, _SECONDS)
    return {"value": geometric(max(1, made.get(name, 0)) / (_SECONDS / 2) for name in _RATES)}


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
    name: str,
    share: float,
    has_drafts: bool,
    system: str,
    seed: int,
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
    setup = one_drafter(0.05, system, acceptance, seed=seed, fairness=bool(num_tenants))
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
    alone = [f"vllm_v1, {n}" for n in LENGTHS]
    separate = [f"{a}, {n}" for a in ADMISSIONS for n in LENGTHS]
    for has_drafts in (True, False):
        told = "drafts" if has_drafts else "no drafts"
        for name, share in itertools.product(_NUM, (0.5, 0.8, 0.95, 1.2)):
            scene = partial(arrivals, data, name, share, has_drafts)
            found.append(Cell(f"{name} at {share}, {told}", scene))
        scene = partial(arrivals, data, "conversation", 0.8, has_drafts, memory=0.25)
        prices = ("the price of memory", "the margin of memory") if has_drafts else ()
        found.append(Cell(f"conversation, KV for a quarter, {told}", scene, without=prices))
        scene = partial(arrivals, data, "conversation", 1.2, has_drafts, num_tenants=27)
        prices = ("values of tenants",) if has_drafts else ()
        found.append(Cell(f"27 tenants, {told}", scene, without=prices))
        tight = 0.012 if has_drafts else 0.02
        scene = partial(arrivals, data, "conversation", 0.8, has_drafts, tight=tight)
        prices = ("values of targets", "the right values") if has_drafts else ()
        found.append(Cell(f"tight TPOT for a third, {told}", scene, without=prices))
    for batch, records in itertools.product((32, 64), ("gsm8k", "sharegpt")):
        scene = partial(clients, data, batch, 0.05, records, 200, 0.25)
        found.append(Cell(f"KV for a quarter of {batch}, {records}", scene, (*separate, BEFORE)))
    found.append(Cell("four tenants", four_tenants, (*alone, BEFORE), ("values of tenants",)))
    for share in (0.33, 0.05):
        scene = partial(clients, data, 8, share, "sharegpt", 12_000, None)
        prices = ("a drafter's reading",) * (share > 0.05)
        name = f"batch 8, drafter {share}, prompts of 12,000"
        found.append(Cell(name, scene, (*alone, BEFORE), prices))
    for batch, share, records in itertools.product(
        (64, 32, 8, 1), (0.33, 0.05), ("sharegpt", "gsm8k")
    ):
        scene = partial(clients, data, batch, share, records, 200, None)
        name = f"batch {batch}, drafter {share}, {records}"
        prices = ("the price of a second",) * ((batch, share) == (64, 0.33))
        found.append(Cell(name, scene, (*alone, BEFORE), prices))
    for num, trip, verify in itertools.product((4, 16), (0.005, 0.03, 0.1, 0.3), (0.03, 0.1)):
        name = f"{num} draft servers, {1000 * trip:g} ms, step {1000 * verify:g} ms"
        found.append(Cell(name, partial(servers, num, trip, verify), (*alone, BEFORE)))
    return found


# --- the comparison -------------------------------------------------------------------------------


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """`auto` over the best of the others in every cell."""
    wanted: dict[str, Callable[[], Figures]] = {}
    for seed, cell in itertools.product(seeds, grid):
        for system in (AUTO, *cell.rivals, *(f"{AUTO} without {p}" for p in cell.without)):
            job = partial(measured, cell, system, seed)
            wanted[f"{cell.name}/{system}/{seed}"] = job
    done.measure_all(wanted, workers)
    rows = [_row(cell, done) for cell in grid]
    lost = [_loss(cell, price, done) for cell in grid for price in cell.without]
    verdicts = [_verdict(row) for row in rows] + _means(rows)
    columns = {
        "cell": "{cell}",
        "`auto`": "{ours:.4g}",
        "best other": "{best}",
        "over it": "{mean:.3f}",
        "low": "{low:.3f}",
        "over the default before": "{before:.3f}",
        "TTFT, p99 (best other's)": "{ttft}",
    }
    tables = [table("`auto` over the best of the others in hindsight", rows, columns)]
    if lost:
        columns = {"without": "{price}", "cell": "{cell}", "of `auto`": "{mean:.3f} ({low:.3f} to "}
        columns["of `auto`"] += "{high:.3f})"
        tables.append(table("Prices and values set to zero in turn", lost, columns))
        verdicts += [bar(f"without {x['price']}", "under 1 of `auto`", x["mean"] < 1) for x in lost]
    return Results({"cells": rows, "prices": lost}, verdicts, [*tables, *_bundles(rows)])


def _values(cell: Cell, system: str, done: Cells, figure: str = "value") -> FloatArray:
    return np.array(done.values(f"{cell.name}/{system}", figure))


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    ours = _values(cell, AUTO, done)
    over = {name: ratio(ours, _values(cell, name, done)) for name in cell.rivals}
    best = min(over, key=lambda name: over[name].mean)
    waits = {
        name: {
            figure: float(found.mean())
            for figure in ("latency", "ttft", "ttft_p99", "refused")
            if len(found := _values(cell, name, done, figure))
        }
        for name in (AUTO, *cell.rivals)
    }
    told = [f"{w['ttft']:.2f}, {w['ttft_p99']:.1f}" for w in (waits[AUTO], waits[best]) if w]
    is_latency = "latency" in waits[AUTO] and np.allclose(
        ours, 1 / _values(cell, AUTO, done, "latency")
    )
    return {
        "cell": cell.name,
        "ours": waits[AUTO]["latency"] if is_latency else float(ours.mean()),
        "best": best,
        "mean": over[best].mean,
        "low": over[best].low,
        "high": over[best].high,
        "before": over[BEFORE].mean,
        "ttft": f"{told[0]} ({told[1]})" if told else "",
        "over": {name: found.mean for name, found in over.items()},
        "waits": waits,
    }


def _loss(cell: Cell, price: str, done: Cells) -> dict[str, Any]:
    found: Interval = ratio(
        _values(cell, f"{AUTO} without {price}", done), _values(cell, AUTO, done)
    )
    interval = {"mean": found.mean, "low": found.low, "high": found.high}
    return {"price": price, "cell": cell.name, **interval}


def geometric(values: Iterable[float] | FloatArray) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def _bundles(rows: Sequence[dict[str, Any]]) -> list[ResultTable]:
    """`auto` over each system, over the cells in which it was."""
    over: dict[str, list[float]] = {}
    for row in rows:
        for name, mean in row["over"].items():
            over.setdefault(name, []).append(mean)
    found = [{"name": n, "cells": len(m), "mean": geometric(m)} for n, m in over.items()]
    columns = {"system": "{name}", "cells": "{cells}", "`auto` over it": "{mean:.3f}"}
    return [table("Geometric means over cells", found, columns)]


def _means(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """Verdicts on geometric means: over the default before, the best bundle, separate policies."""
    found = geometric(row["before"] for row in rows)
    claim = f"geometric mean of {len(rows)} cells over the default before"
    verdicts = [bar(claim, f"{found:.3f} (bar {OVER_BEFORE})", found >= OVER_BEFORE)]
    bundled = [row["over"] for row in rows if LITERAL in row["over"]]
    if bundled:
        means = {name: geometric(over[name] for over in bundled) for name in bundled[0]}
        name, mean = min(means.items(), key=lambda pair: pair[1])
        claim = f"the best one bundle for {len(bundled)} cells"
        verdicts.append(bar(claim, f"{mean:.3f} of {name}", mean >= OVER_BUNDLE))
    for row in rows:
        if f"{ADMISSIONS[-1]}, none" in row["over"]:
            told = f"{row['mean']:.3f} of {row['best']} (bar {OVER_SEPARATE})"
            claim = f"{row['cell']}: the best separate policies"
            verdicts.append(bar(claim, told, row["mean"] >= OVER_SEPARATE))
    return verdicts


def _verdict(row: dict[str, Any]) -> ClaimVerdict:
    told = f"{HINDSIGHT} of the best in hindsight, {LOWEST} at the lower end"
    return bar(row["cell"], told, row["mean"] >= HINDSIGHT and row["low"] >= LOWEST)


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
            return tell(args, compare(grid, SEEDS[: args.seeds], Cells(args.out), some))
    except (WorkloadError, OSError) as error:
        print(f"never_behind: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
