"""Is the default behind vLLM's adaptive verification, on the virtual clock?

    python -m lab.bench.vllm_adaptive [--json] [--seeds N] [--only TEXT] [--data DIR] [--out FILE]

Closed loops of 1 to 256 clients on the A100 profile, recorded acceptance; tokens per second of the
second half. `auto` is the default bundle; it does not see confidences. `adaptive` is the rival
(`lab.common.vllm_adaptive`) with confidences that correlate with acceptance by 0.56 (as SpecKV,
2026, found), with the best in hindsight of 1, 2 and 4 draft tokens and of single drafters. Tuned: its
costs are measured at the load's context, too, instead of vLLM's default.

One drafter is a head of 0.05 of a step, the other look-up. Control: random lengths. Oracles: `known`
drafts right tokens only; `clairvoyant` has each request's drafter from its record.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.never_behind import closed, decisions, log_normal, one_drafter
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.families import closed_loop
from lab.common.oracles import assigned
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from lab.common.vllm_adaptive import (
    LONGEST,
    AdaptiveVerification,
    Cutter,
    CuttingExecutor,
    Known,
    Signal,
    Whole,
)
from penstock.config import PolicyConfig
from penstock.core.policies.bundles import AUTO
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import RecordedAcceptance, read_records
from penstock.sim.parallel import Workers, workers
from penstock.sim.run import Setup
from penstock.sim.workloads import WorkloadError

BATCHES = {1: 20.0, 4: 12.0, 16: 6.0, 64: 6.0, 256: 8.0}
"""Clients, and seconds on the virtual clock."""
SEPARATION = 1.35
HEAD, LOOK_UP = "eagle", "ngram"
ONE_BAR, SEVERAL_BAR, WORTH_CHOOSING = 1.0, 1.1, 1.15
_LENGTHS = (1, 2, 4)
_DEFAULT_CONTEXT = 4096  # 8192, cut to what Llama-2 can read
_OWN_CONTEXT = 200
_SHARE, _LOOK_UP_S = 0.05, 20e-6
_PROMPT, _OUTPUT = 60, 200
CLAIRVOYANT, KNOWN, RANDOM, PRICED = "clairvoyant", "known", "random", "priced"


@dataclass(frozen=True)
class Cell:
    """Clients, drafters and what confidences say. data: the folder of records."""

    drafters: tuple[str, ...]
    records: str
    batch: int
    data: Path

    @property
    def name(self) -> str:
        return f"{' and '.join(self.drafters)}, {self.records}, batch {self.batch}"

    @property
    def rivals(self) -> list[str]:
        """Every form of vLLM's, by drafter."""
        contexts = (_DEFAULT_CONTEXT, _OWN_CONTEXT)
        found = itertools.product(self.drafters, _LENGTHS, contexts)
        return [f"adaptive/{d}/{k}/{c}" for d, k, c in found]

    @property
    def shipped(self) -> list[str]:
        """Those with its default context."""
        return [name for name in self.rivals if name.endswith(f"/{_DEFAULT_CONTEXT}")]

    @property
    def fixed(self) -> list[str]:
        return ["none/", *(f"fixed/{HEAD}/{k}" for k in _LENGTHS)]

    @property
    def systems(self) -> list[str]:
        found = [AUTO, *self.rivals, *self.fixed, f"{RANDOM}/{HEAD}"]
        if len(self.drafters) > 1:
            return [*found, CLAIRVOYANT, *self.single]
        return [*found, f"{KNOWN}/{HEAD}"]

    @property
    def single(self) -> list[str]:
        """The default's lengths with each drafter alone."""
        return [f"{PRICED}/{d}" for d in self.drafters]


@cache
def _rows(data: Path, records: str, drafters: tuple[str, ...]) -> dict[str, list[list[int]]]:
    return read_records(data / f"accept_{records}.jsonl.gz", drafters)


def measured(cell: Cell, system: str, seed: int) -> Figures:
    """Tokens per second of a system."""
    name, *told = system.split("/")
    used = tuple(filter(None, told[:1])) if told else cell.drafters
    rows = _rows(cell.data, cell.records, cell.drafters)
    acceptance = RecordedAcceptance(rows, seed)
    rng, num = np.random.default_rng(seed), 60 * cell.batch + 100
    prompts = log_normal(rng, num, _PROMPT, 0.8).clip(16, 4 * _PROMPT)
    load = closed_loop(prompts, log_normal(rng, num, _OUTPUT, 0.5).clip(32, 600))
    base = one_drafter(_SHARE, AUTO, acceptance, seed=seed)
    profile = base.profile
    look_up = DrafterProfile(LOOK_UP, (1,), (_LOOK_UP_S,))
    profile = replace(profile, drafters=(*profile.drafters, look_up))
    setup = replace(base, profile=profile, drafters=used, **decisions(_policies(name, told)))
    cutter: Cutter = Whole()
    if used:
        seconds = {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters}
        one = seconds[used[0]]
        if name == "adaptive":
            k = int(told[1])
            cutter = AdaptiveVerification(profile, lambda n: k * one(n), int(told[2]))
        elif name == KNOWN:
            cutter = Known(profile, one)
    kind = partial(CuttingExecutor, cutter=cutter, signal=Signal(SEPARATION, seed))
    choice = nullcontext("")
    if name == CLAIRVOYANT:
        choice = assigned(_best_drafters(setup, acceptance, cell.batch, len(load)))
    with choice as selection:
        if selection:
            setup = replace(setup, selection=PolicyConfig.from_name(selection))
        seconds_ = BATCHES[cell.batch]
        made = closed(setup, load, cell.batch, seconds_, kind)
    return {"value": sum(made.values()) / (seconds_ / 2)}


def _policies(name: str, told: Sequence[str]) -> str:
    """A system's name for `decisions`."""
    if name in (AUTO, CLAIRVOYANT, PRICED):
        return AUTO
    lengths = {"adaptive": "fixed", KNOWN: f"fixed {LONGEST}", "none": "none", RANDOM: "random"}
    found = lengths.get(name, name)
    return f"vllm_v1, {found} {told[1]}" if found == "fixed" else f"vllm_v1, {found}"


def _best_drafters(
    setup: Setup, acceptance: RecordedAcceptance, batch: int, num: int
) -> dict[str, str]:
    """Each request's best drafter with its best length, in a batch of requests like it."""
    times = {d.name: d for d in setup.profile.drafters}

    def seconds(drafter: str, row: Sequence[int], k: int) -> float:
        step = setup.profile.linear(batch * (1 + k)) + times[drafter].seconds(batch, k)
        return step / RecordedAcceptance({drafter: [row]}).tokens_per_step(drafter, k)

    known: dict[int, str] = {}
    found = {}
    for request in map(str, range(num)):
        rows = {d: acceptance._row(d, request) for d in setup.drafters}
        key = id(rows[HEAD])
        if key not in known:
            options = itertools.product(rows, range(1, LONGEST + 1))
            known[key] = min(options, key=lambda o: seconds(o[0], rows[o[0]], o[1]))[0]
        found[request] = known[key]
    return found


def cells(data: Path) -> list[Cell]:
    """The grid."""
    found = itertools.product(((HEAD,), (HEAD, LOOK_UP)), ("gsm8k", "sharegpt"), BATCHES)
    return [Cell(*axes, data) for axes in found]


# --- the comparison -------------------------------------------------------------------------------


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """`auto` and others over the rival in every cell."""
    wanted: dict[str, Callable[[], Figures]] = {}
    for seed, cell in itertools.product(seeds, grid):
        for system in cell.systems:
            wanted[f"{cell.name}/{system}/{seed}"] = partial(measured, cell, system, seed)
    done.measure_all(wanted, workers)
    rows = [_row(cell, done) for cell in grid]
    columns = {
        "cell": "{cell}",
        "`auto`, tokens/s": "{ours:.0f}",
        "over `adaptive`": "{shipped}",
        "over it, tuned": "{tuned}",
        "over the best fixed length": "{fixed}",
        "oracle over `adaptive`": "{oracle:.2f}",
        "random lengths over it": "{random:.2f}",
        "drafters in hindsight": "{hindsight}",
    }
    title = "Tokens per second over the rival's best in hindsight"
    return Results(rows, verdicts(rows), [table(title, rows, columns)])


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    def values(*systems: str) -> FloatArray:
        """The best of some systems in their mean, [seeds]."""
        found = [np.array(done.values(f"{cell.name}/{s}", "value")) for s in systems]
        return max(found, key=lambda rates: float(rates.mean()))

    ours, rival = values(AUTO), values(*cell.shipped)
    several = len(cell.drafters) > 1
    oracle = values(CLAIRVOYANT, *cell.single) if several else values(f"{KNOWN}/{HEAD}")
    worth = ratio(oracle, values(*cell.single)).mean if several else None
    over = {"auto": ratio(ours, rival), "oracle": ratio(oracle, rival)}
    over["random"] = ratio(values(f"{RANDOM}/{HEAD}"), rival)
    return {
        "cell": cell.name,
        "drafters": len(cell.drafters),
        "seeds": len(ours),
        "ours": float(ours.mean()),
        "shipped": _told(over["auto"]),
        "tuned": _told(ratio(ours, values(*cell.rivals))),
        "fixed": _told(ratio(ours, values(*cell.fixed))),
        "over": {name: found.mean for name, found in over.items()},
        "oracle": over["oracle"].mean,
        "random": over["random"].mean,
        "worth": worth,
        "hindsight": "" if worth is None else f"{worth:.2f}",
    }


def _told(found: Interval) -> str:
    ends = f" ({found.low:.3f} to {found.high:.3f})" if found.half else ""
    return f"{found.mean:.3f}{ends}"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[ClaimVerdict]:
    """One drafter: never behind. Several: ahead where drafters are worth choosing."""
    one = [row for row in rows if row["drafters"] == 1]
    several = [r for r in rows if r["drafters"] > 1 and r["worth"] >= WORTH_CHOOSING]

    def reaching(found: Sequence[Mapping[str, Any]], least: float, system: str) -> Measurement:
        means = [row["over"][system] for row in found]
        num = sum(mean >= least for mean in means)
        told = f"{num} of {len(means)} cells at {least}, least {min(means):.3f}"
        return Measurement(told, tuple(mean >= least for mean in means))

    found = []
    cases = ((one, ONE_BAR, "one drafter: not behind"), (several, SEVERAL_BAR, "several: ahead"))
    for part, least, claim in cases:
        if part:
            test = partial(reaching, part, least)
            oracle = ("clairvoyant", "oracle")
            found.append(check(claim, test, AUTO, "random lengths", "random", oracle))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--seeds", type=int, default=len(SEEDS))
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("vllm_adaptive.jsonl"))
    options.add_argument("--workers", type=int, help="processes; default: one for each core")
    args = options.parse_args(arguments)
    grid = [cell for cell in cells(args.data) if args.only in cell.name]
    try:
        with workers(args.workers) as some:
            return tell(args, compare(grid, SEEDS[: args.seeds], Cells(args.out), some))
    except (WorkloadError, OSError) as error:
        print(f"vllm_adaptive: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
