"""What choosing costs to learn: the requests of `drafter_choice` again, on the virtual clock.

    python -m benchmarks.choice_sim [--quick] [--json] [--out DIR] [--policies adaptive,lbss]

Step times are measured on the engine first, with every drafter at work; then nothing is noise any
more: every request, one at a time, has accepted what it would have had accepted live, and host work
is in the steps. Requests are cut into parts that are served before and counted in turn (`--folds`).
Beside policies run two that know more than a policy can: `told` knows the share of every drafter's
tokens that the request will accept, `domains` its mean and covariance in the request's domain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from benchmarks.choice_traces import Trace, load, target_names
from benchmarks.drafter_choice import (
    FIRST_OVERHEAD,
    MIXED,
    NONE,
    Player,
    Times,
    best_single,
    cell_traces,
    clairvoyant,
    make_loop,
    traces_of,
)
from benchmarks.selection_sim import OwnRow, oracle
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.core.policies.selection.adaptive import Adaptive
from penstock.core.registry import policies, register
from penstock.core.state import RequestState
from penstock.core.types import Request
from penstock.engine.build import Engine
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.run import Setup, make_scheduler
from penstock.zoo.registry import DOMAINS

FloatArray = npt.NDArray[np.float64]

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64, 128, 256)
LENGTHS = (1, 3, 6)
"""Of the drafts that step times are measured with."""
BAR = 0.95
HINDSIGHT = ("none", "best single", "clairvoyant")
_JITTER = 0.02


def measured_profile(engine: Engine, traces: Sequence[Trace], temperature: float) -> StepProfile:
    """Step times of one request at a time: without drafts first, then with each drafter."""
    loop = make_loop(engine, "single", {}, "fixed")
    times = loop.scheduler.learn.times
    drafters = list(engine.executor.drafters)
    Player("", loop, [NONE] * len(traces)).play(traces, 1, temperature)
    plain = times.overhead or FIRST_OVERHEAD
    for option in ((d, k) for k in LENGTHS for d in drafters):
        Player("", loop, [option] * len(traces)).play(traces, 1, temperature)
    drafting = max(plain, times.overhead + times.draft_overhead)
    seconds = [times.target(n) + (drafting if n > 1 else plain) for n in ROWS]
    return StepProfile(
        "measured",
        engine.scheduler.pool.num_blocks * engine.scheduler.pool.block_size,
        ROWS,
        tuple(np.maximum.accumulate(seconds).tolist()),
        drafters=tuple(
            DrafterProfile(d, (1,), (times.curve_of(d)(1),), times.catch_up_of(d)) for d in drafters
        ),
    )


def acceptance(trace: Trace, drafter: str) -> float:
    """The share of positions at which a drafter's first token would be accepted."""
    runs = np.array(trace.runs[drafter])
    return float(((runs > 0).sum() + 0.5) / (len(runs) + 1))


@dataclass
class Rates:
    """Of the requests "0", "1", …"""

    traces: Sequence[Trace]

    def rates(self, request_id: str) -> dict[str, float]:
        trace = self.traces[int(request_id)]
        return {d: acceptance(trace, d) for d in trace.runs}


def knows_domains(traces: Sequence[Trace]) -> type[Adaptive]:
    """`adaptive` that need not learn from other requests."""
    names = list(traces[0].runs)
    rates = np.array([[acceptance(t, d) for d in names] for t in traces])
    logits = np.log(rates / (1 - rates))
    of = np.array([DOMAINS.index(t.domain) for t in traces])
    means = np.array([logits[of == i].mean(0) for i in range(len(DOMAINS))])
    off = logits - means[of]
    covariance = off.T @ off / len(off) + _JITTER * np.eye(len(names))

    class Domains(Adaptive):
        name: ClassVar[str] = "domains"

        def _know(self, state: RequestState, drafters: Any, view: Any) -> Any:
            known = super()._know(state, drafters, view)
            columns = [names.index(d) for d in self._models]
            known.mean = means[of[int(state.request.id)]][columns]
            known.doubt = np.zeros(len(columns))
            self._prior._covariance = covariance[np.ix_(columns, columns)]
            return known

    return Domains


def seconds_of(policy: str, profile: StepProfile, traces: Sequence[Trace]) -> FloatArray:
    """[requests] seconds, prefill aside, one request after the other."""
    register("selection", oracle(Rates(traces)), "told")
    register("selection", knows_domains(traces))
    setup = Setup(
        profile,
        admission_options={"max_num_seqs": 1},
        selection=policy,
        block_size=16,
        drafters=tuple(d.name for d in profile.drafters),
    )
    clock = VirtualClock()
    rows = {d: [[n + 1 for n in t.runs[d]] for t in traces] for d in setup.drafters}
    executor = SimulatedExecutor(
        clock,
        ProfiledStepTimes(profile),
        OwnRow(rows),
        drafters=setup.make_drafters(),
        profiles={d.name: d for d in profile.drafters},
    )
    requests = [
        Request(str(i), len(t.prompt), len(t.text), prompt_token_ids=t.prompt)
        for i, t in enumerate(traces)
    ]
    records = simulate(make_scheduler(setup), executor, clock, requests).records.values()
    ends = np.array([r.finish_time for r in records], dtype=np.float64)
    prefill = np.array([profile.linear(len(t.prompt)) for t in traces])
    return np.diff(ends, prepend=0.0) - prefill


def parts(traces: Sequence[Trace], counted: int, folds: int) -> Iterator[dict[str, list[Trace]]]:
    """For each fold the requests by cell, and under "" those that are served before."""
    by_domain = {d: [t for t in traces if t.domain == d] for d in DOMAINS}
    for fold in range(folds):
        first = fold * counted
        turned = {d: ts[first:] + ts[:first] for d, ts in by_domain.items()}
        rest = [ts[counted:] for ts in turned.values()]
        warm = [t for turn in zip(*rest, strict=True) for t in turn]
        now = [t for ts in turned.values() for t in ts[:counted]]
        yield {"": warm} | {c: cell_traces(now, c, counted) for c in (MIXED, *DOMAINS)}


def measure_target(
    target: str, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    engine = load(target, 16, args.new_tokens)
    traces = traces_of(engine, target, args)
    profile = measured_profile(engine, traces[:: args.requests + args.warm], args.temperature)
    times = Times(
        profile.linear,
        {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters},
        {d.name: d.per_catch_up_token for d in profile.drafters},
    )
    rates: dict[str, dict[str, list[float]]] = {c: {} for c in (MIXED, *DOMAINS)}
    task = progress.add_task(target, total=args.folds * len(args.policies))
    for cells in parts(traces, args.requests, args.folds):
        warm = cells.pop("")
        served = [*warm, *(t for ts in cells.values() for t in ts)]
        seconds = {}
        for policy in args.policies:
            seconds[policy] = seconds_of(policy, profile, served)
            progress.advance(task)
        end = len(warm)
        for cell, mine in cells.items():
            begin, end = end, end + len(mine)
            spent = {p: float(s[begin:end].sum()) for p, s in seconds.items()}
            spent["none"] = sum(times.request(t, NONE, 1) for t in mine)
            single = best_single(times, mine, 1)
            spent["best single"] = sum(times.request(t, single, 1) for t in mine)
            choices = zip(mine, clairvoyant(times, mine, 1), strict=True)
            spent["clairvoyant"] = sum(times.request(t, o, 1) for t, o in choices)
            tokens = sum(len(t.text) for t in mine)
            for name, value in spent.items():
                rates[cell].setdefault(name, []).append(tokens / value)
    return [_row(target, cell, found) for cell, found in rates.items()]


def _row(target: str, cell: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the folds; shares are of the best that hindsight has in each."""
    best = np.max([rates[n] for n in HINDSIGHT], axis=0)
    return {
        "target": target,
        "cell": cell,
        "tokens_per_s": {n: float(np.mean(r)) for n, r in rates.items()},
        "share": {n: float(np.mean(r / best)) for n, r in rates.items()},
    }


def show(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for target in dict.fromkeys(r["target"] for r in rows):
        table = Table(title=f"{target}, one request at a time: tokens/s, and shares of hindsight")
        for column in ("cell", *HINDSIGHT, *names):
            table.add_column(column, justify="left" if column == "cell" else "right")
        mine = [r for r in rows if r["target"] == target]
        for row in mine:
            best = (f"{row['tokens_per_s'][n]:.0f}" for n in HINDSIGHT)
            table.add_row(row["cell"], *best, *(f"{row['share'][n]:.3f}" for n in names))
        means = (f"{np.mean([r['share'][n] for r in mine]):.3f}" for n in names)
        table.add_row("mean", *("" for _ in HINDSIGHT), *means)
        Console(width=160).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one fold, the first target")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", type=Path, default=Path("choice"), help="folder for traces")
    parser.add_argument("--targets", type=target_names, default="target-large,target-small")
    parser.add_argument("--policies", default="adaptive,domains,told,lbss,ucb,replay,single")
    parser.add_argument("--requests", type=int, default=8, help="of a domain, counted in a fold")
    parser.add_argument("--warm", type=int, default=32, help="of a domain, served before")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args(arguments)
    if args.quick:
        args.folds, args.targets = 1, args.targets[:1]
    if not 1 <= args.folds <= 1 + args.warm // args.requests:
        parser.error(f"--folds is from 1 to {1 + args.warm // args.requests}, not {args.folds}")
    args.policies = args.policies.split(",")
    known = (*policies("selection"), "domains", "told")
    if unknown := [name for name in args.policies if name not in known]:
        parser.error(f"--policies: {unknown[0]!r}; choose from {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        for target in args.targets:
            rows += measure_target(target, args, progress)
    reached = [r["share"]["adaptive"] >= BAR for r in rows if "adaptive" in r["share"]]
    text = f"adaptive at {BAR} of hindsight in {sum(reached)} of {len(reached)} cells"
    if args.json:
        print(json.dumps({"runs": rows, "verdict": {"met": all(reached), "lines": [text]}}))
    else:
        show(rows, args.policies)
        print(f"{'met   ' if all(reached) else 'MISSED'}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
