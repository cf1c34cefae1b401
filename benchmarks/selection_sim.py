"""How much of an oracle's rate a selection policy reaches, in the simulator.

    python -m benchmarks.selection_sim [--quick] [--json] [--policies A,B] [--lengths 100,250,500]

32 requests are always live; five drafters, of the Spin paper's sizes and each on a device of its
own, take eight each, and a switch costs the reading of the context. Requests draw their acceptances
from the mixed text of `penstock reproduce spin_fig11`, where times come from as well. The oracle is
`adaptive` that is told every request's true acceptances and has nothing to learn. A policy has
served 96 requests before the next 256 are counted. Five seeds, 95% intervals.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.core.registry import policies
from penstock.core.selection.adaptive import Adaptive
from penstock.core.state import RequestState
from penstock.core.types import Output, StepPlan, StepResult
from penstock.repro import spin_fig11 as scene
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.drafters import Capacity
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload

LIVE = 32
CAPACITY = 8
FIXED = 4
WARM = 96
COUNTED = 256
DRAFTERS = ("68M", "265M", "616M", "1.1B", "1.4B")
BARS = {100: 0.93, 250: 0.945, 500: 0.955}
MOST_SWITCHES = 4
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


def oracle(acceptance: DomainAcceptance) -> type[Adaptive]:
    """`adaptive` that knows every request's true acceptances."""

    class Oracle(Adaptive):
        name: ClassVar[str] = "oracle"

        def _rates(self, state: RequestState, known: Any) -> Any:
            rates = acceptance.rates(state.request.id)
            return np.array([rates[name] for name in self._models])

        def _tell(self, known: Any, request_id: str, drafter: str, estimators: Any) -> None:
            rate = acceptance.rates(request_id)[drafter]
            estimators.acceptance.expect(request_id, drafter, rate, 1e6)

    return Oracle


@dataclass
class Switches:
    """Counts changes of a request's drafter."""

    count: int = 0

    def __post_init__(self) -> None:
        self._last: dict[str, str] = {}

    def on_plan(self, plan: StepPlan) -> None:
        """Results say what was drafted."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Outputs name the drafter."""

    def on_output(self, output: Output) -> None:
        if output.drafter is not None:
            last = self._last.get(output.request_id, output.drafter)
            self.count += last != output.drafter
            self._last[output.request_id] = output.drafter


def measure(
    policy: str, options: dict[str, Any], length: int, target: str, allocation: str, seed: int
) -> tuple[float, float]:
    """Tokens per second, and switches a request."""
    fit = scene.acceptances(("hard", "between", "easy"))
    acceptance = DomainAcceptance(fit, seed)
    policies("selection")["oracle"] = oracle(acceptance)
    total = WARM + COUNTED + LIVE
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.normal(math.log(60), 0.8, total)).astype(np.int64).clip(8, 1024)
    workload = Workload(
        "closed loop", prompts, np.full(total, length, dtype=np.int64), np.zeros(total)
    )
    switches = Switches()
    report = run(
        Setup(
            scene.profile(target),
            admission_options={"max_num_seqs": LIVE},
            allocation=allocation,
            allocation_options={"k": FIXED} if allocation == "fixed" else {},
            selection=policy,
            selection_options=options,
            block_size=16,
            acceptance=acceptance,
            drafters=DRAFTERS,
            capacities=dict.fromkeys(DRAFTERS, Capacity(CAPACITY)),
            pipeline="async",
            seed=seed,
        ),
        workload,
        instruments=[switches],
    )
    ends = np.sort(report.finished_at)
    seconds = float(ends[WARM + COUNTED - 1] - ends[WARM - 1])
    return COUNTED * length / seconds, switches.count / total


def options_of(policy: str, allocation: str) -> dict[str, Any]:
    """A drafter is worth what drafts of the length that is allocated are worth."""
    if policy not in ("adaptive", "oracle"):
        return {}
    return {"k_max": FIXED if allocation == "fixed" else 8}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its interval."""
    array = np.array(values)
    if len(array) < 2:
        return float(array.mean()), math.nan
    half = STUDENT_T[len(array)] * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()), half


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 100 tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--policies", default="adaptive,lbss,ucb,replay,epsilon_greedy,single")
    parser.add_argument("--lengths", default="100,250,500")
    parser.add_argument("--target", default="13B", choices=("7B", "13B", "30B"))
    parser.add_argument("--allocation", default="fixed", help="fixed (4 tokens) or throughput")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(arguments)
    if args.quick:
        args.lengths, args.seeds = "100", 1
    names = args.policies.split(",")
    rows = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        lengths = [int(x) for x in args.lengths.split(",")]
        task = progress.add_task("simulating", total=len(lengths) * args.seeds * (1 + len(names)))
        for length in lengths:
            found: dict[str, list[tuple[float, float]]] = {}
            for name in ("oracle", *names):
                for seed in range(args.seeds):
                    found.setdefault(name, []).append(
                        measure(
                            name,
                            options_of(name, args.allocation),
                            length,
                            args.target,
                            args.allocation,
                            seed,
                        )
                    )
                    progress.advance(task)
            best = [rate for rate, _ in found["oracle"]]
            for name in names:
                shares = [rate / b for (rate, _), b in zip(found[name], best, strict=True)]
                mean, half = interval(shares)
                rows.append(
                    {
                        "length": length,
                        "policy": name,
                        "share": mean,
                        "half_width": half,
                        "switches": float(np.mean([s for _, s in found[name]])),
                        "oracle_tokens_per_s": float(np.mean(best)),
                    }
                )
    report(rows, args)
    return 0


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    lines = []
    for row in rows:
        if row["policy"] != "adaptive" or row["length"] not in BARS:
            continue
        bar = BARS[row["length"]]
        reached = row["share"] >= bar and row["switches"] <= MOST_SWITCHES
        lines.append(
            (
                reached,
                f"{row['length']} tokens: adaptive at {row['share']:.3f} of the oracle (bar {bar})"
                f", {row['switches']:.2f} switches a request (bar {MOST_SWITCHES})",
            )
        )
    if args.json:
        met = all(reached for reached, _ in lines)
        verdict = {"met": met, "lines": [text for _, text in lines]}
        print(json.dumps({"runs": rows, "verdict": verdict}))
        return
    table = Table(title=f"LLaMA-{args.target}, {args.allocation}: share of the oracle's rate")
    for column in ("tokens", "policy", "share", "±", "switches", "oracle tokens/s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(
            str(row["length"]),
            row["policy"],
            f"{row['share']:.3f}",
            f"{row['half_width']:.3f}",
            f"{row['switches']:.2f}",
            f"{row['oracle_tokens_per_s']:.0f}",
        )
    Console().print(table)
    for reached, text in lines:
        print(f"{'met   ' if reached else 'MISSED'}  {text}")


if __name__ == "__main__":
    sys.exit(main())
