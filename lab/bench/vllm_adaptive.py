"""Is the default behind vLLM's adaptive verification, on the virtual clock?

    python -m lab.bench.vllm_adaptive [--json] [--seeds N] [--only TEXT] [--data DIR] [--out FILE]

Closed loops of 1 to 256 clients on the A100 profile, recorded acceptance; tokens per second of the
second half. `auto` is the default bundle; it does not see confidences. `adaptive` is the rival
(`lab.common.vllm_adaptive`) with confidences that correlate with acceptance by 0.56 (made up: the
records have none), with the best in hindsight of 1, 2 and 4 draft tokens and of single drafters.
Tuned: its costs are measured at the load's context, too, instead of vLLM's default.

One drafter is a head of 0.05 of a step, the other look-up. Control: random lengths. Oracles:
`known` drafts right tokens only; `clairvoyant` has each request's drafter from its record.
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

from lab.bench.never_behind_scenes import one_drafter
from lab.bench.never_behind_systems import decisions
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.clients import log_normal, second_half
from lab.common.families import closed_loop
from lab.common.oracles import assigned
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from lab.common.vllm_adaptive import AdaptiveVerification, Cutter, CuttingExecutor, Known, Signal
from penstock.config import PolicyConfig
from penstock.core.policies.bundles import AUTO
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import RecordedAcceptance, read_records
from penstock.sim.parallel import Workers, workers
from penstock.sim.run import Setup
from penstock.sim.workloads import WorkloadError

BATCHES = {1: 20.0, 4: 12.0, 16: 6.0, 64: 6.0, 256: 8.0}
"""Clients, and seconds on the virtual clock."""
SEPARATION = 1.35  # of the confidences of right and wrong tokens: a correlation of 0.56
HEAD, LOOK_UP = "eagle", DrafterProfile("ngram", (1,), (20e-6,))
ONE_BAR, SEVERAL_BAR, WORTH_CHOOSING = 1.0, 1.1, 1.15
_LENGTHS = (1, 2, 4)
_CONTEXT, _OWN_CONTEXT = 4096, 200  # vLLM's 8192, cut to what Llama-2 can read; of this load
_BUNDLES = {"adaptive": "vllm_v1, fixed", "known": "vllm_v1, fixed 8", "fixed": "vllm_v1, fixed"}
_BUNDLES |= {"none": "vllm_v1, none", "random": "vllm_v1, random"}


@dataclass(frozen=True)
class Cell:
    """Clients and drafters. data: the folder of records.

    A system is `auto`, `clairvoyant`, or NAME/DRAFTER[/LENGTH[/CONTEXT]]."""

    drafters: tuple[str, ...]
    records: str
    batch: int
    data: Path

    @property
    def name(self) -> str:
        return f"{' and '.join(self.drafters)}, {self.records}, batch {self.batch}"

    def rivals(self, *contexts: int) -> list[str]:
        found = itertools.product(self.drafters, _LENGTHS, contexts)
        return [f"adaptive/{d}/{k}/{c}" for d, k, c in found]

    @property
    def fixed(self) -> list[str]:
        return ["none/", *(f"fixed/{HEAD}/{k}" for k in _LENGTHS)]

    @property
    def singles(self) -> list[str]:
        """The default with each drafter alone."""
        return [f"priced/{d}" for d in self.drafters] if len(self.drafters) > 1 else [AUTO]

    @property
    def oracles(self) -> list[str]:
        return ["clairvoyant", *self.singles] if len(self.drafters) > 1 else [f"known/{HEAD}"]

    @property
    def systems(self) -> list[str]:
        rivals = self.rivals(_CONTEXT, _OWN_CONTEXT)
        found = [AUTO, *rivals, *self.fixed, f"random/{HEAD}", *self.oracles, *self.singles]
        return list(dict.fromkeys(found))


@cache
def _rows(data: Path, records: str, drafters: tuple[str, ...]) -> dict[str, list[list[int]]]:
    return read_records(data / f"accept_{records}.jsonl.gz", drafters)


def measured(cell: Cell, system: str, seed: int) -> Figures:
    """Tokens per second of a system."""
    name, *told = system.split("/")
    acceptance = RecordedAcceptance(_rows(cell.data, cell.records, cell.drafters), seed)
    rng, num = np.random.default_rng(seed), 60 * cell.batch + 100
    prompts = log_normal(rng, num, 60, 0.8).clip(16, 240)
    load = closed_loop(prompts, log_normal(rng, num, 200, 0.5).clip(32, 600))
    bundle = " ".join([_BUNDLES.get(name, AUTO), *told[1:2]])
    base = one_drafter(0.05, AUTO, acceptance, seed=seed)
    profile = replace(base.profile, drafters=(*base.profile.drafters, LOOK_UP))
    used = tuple(filter(None, told[:1])) if told else cell.drafters
    setup = replace(base, profile=profile, drafters=used, **decisions(bundle))
    one = {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters}
    cutter = Cutter()
    if name == "adaptive":
        k, context = map(int, told[1:])
        cutter = AdaptiveVerification(profile, lambda n: k * one[told[0]](n), context)
    elif name == "known":
        cutter = Known(profile, one[HEAD])
    kind = partial(CuttingExecutor, cutter=cutter, signal=Signal(SEPARATION, seed))
    seconds = BATCHES[cell.batch]
    knows = name == "clairvoyant"
    best = _best_drafters(setup, acceptance, cell.batch, num) if knows else {}
    with assigned(best) if knows else nullcontext("") as selection:
        if selection:
            setup = replace(setup, selection=PolicyConfig.from_name(selection))
        made = second_half(setup, load, cell.batch, seconds, kind)
    return {"value": sum(made.values()) / (seconds / 2)}


def _best_drafters(
    setup: Setup, acceptance: RecordedAcceptance, batch: int, num: int
) -> dict[str, str]:
    """Each request's best drafter with its best length, in a batch of requests like it."""
    times = {d.name: d for d in setup.profile.drafters}
    found: dict[str, str] = {}
    known: dict[int, str] = {}
    for request in map(str, range(num)):
        rows = {d: acceptance._row(d, request) for d in setup.drafters}
        if id(rows[HEAD]) not in known:
            rates = {}
            for drafter, k in itertools.product(rows, range(1, 9)):
                step = setup.profile.linear(batch * (1 + k)) + times[drafter].seconds(batch, k)
                own = RecordedAcceptance({drafter: [rows[drafter]]})
                rates[drafter, k] = own.tokens_per_step(drafter, k) / step
            known[id(rows[HEAD])] = max(rates, key=lambda option: rates[option])[0]
        found[request] = known[id(rows[HEAD])]
    return found


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
        "over fixed lengths and none": "{fixed}",
        "oracle over `adaptive`": "{oracle:.2f}",
        "random over it": "{random:.2f}",
        "oracle over `auto` with one drafter": "{worth:.2f}",
    }
    title = "Tokens per second over the rival's best in hindsight"
    return Results(rows, verdicts(rows), [table(title, rows, columns)])


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    def best(*systems: str) -> FloatArray:
        """The best of some systems in their mean, [seeds]."""
        found = [np.array(done.values(f"{cell.name}/{s}", "value")) for s in systems]
        return max(found, key=lambda rates: float(rates.mean()))

    ours, rival, oracle = best(AUTO), best(*cell.rivals(_CONTEXT)), best(*cell.oracles)
    return {
        "cell": cell.name,
        "drafters": len(cell.drafters),
        "seeds": len(ours),
        "ours": float(ours.mean()),
        "shipped": _told(ratio(ours, rival)),
        "tuned": _told(ratio(ours, best(*cell.rivals(_CONTEXT, _OWN_CONTEXT)))),
        "fixed": _told(ratio(ours, best(*cell.fixed))),
        "auto": ratio(ours, rival).mean,
        "oracle": ratio(oracle, rival).mean,
        "random": ratio(best(f"random/{HEAD}"), rival).mean,
        "worth": ratio(oracle, best(*cell.singles)).mean,
    }


def _told(found: Interval) -> str:
    ends = f" ({found.low:.3f} to {found.high:.3f})" if found.half else ""
    return f"{found.mean:.3f}{ends}"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[ClaimVerdict]:
    """One drafter: never behind. Several: ahead where drafters are worth choosing."""
    one = [row for row in rows if row["drafters"] == 1]
    several = [r for r in rows if r["drafters"] > 1 and r["worth"] >= WORTH_CHOOSING]

    def reaching(found: Sequence[Mapping[str, Any]], least: float, system: str) -> Measurement:
        reached = [row[system] >= least for row in found]
        told = f"{sum(reached)} of {len(found)} cells at {least}"
        return Measurement(f"{told}, least {min(r[system] for r in found):.3f}", tuple(reached))

    cases = ((one, ONE_BAR, "one drafter: not behind"), (several, SEVERAL_BAR, "several: ahead"))
    oracle = ("hindsight", "oracle")
    return [
        check(claim, partial(reaching, part, least), AUTO, "random lengths", "random", oracle)
        for part, least, claim in cases
        if part
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--seeds", type=int, default=len(SEEDS))
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("vllm_adaptive.jsonl"))
    options.add_argument("--workers", type=int, help="processes; default: one for each core")
    args = options.parse_args(arguments)
    axes = itertools.product(((HEAD,), (HEAD, LOOK_UP.name)), ("gsm8k", "sharegpt"), BATCHES)
    grid = [cell for cell in (Cell(*a, args.data) for a in axes) if args.only in cell.name]
    try:
        with workers(args.workers) as some:
            return tell(args, compare(grid, SEEDS[: args.seeds], Cells(args.out), some))
    except (WorkloadError, OSError) as error:
        print(f"vllm_adaptive: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
