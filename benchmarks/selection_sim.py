"""How much of an oracle's rate a selection policy reaches, in the simulator.

    python -m benchmarks.selection_sim [--quick] [--json] [--policies A,B] [--lengths 100,250,500]
    python -m benchmarks.selection_sim --recorded [--data DIR] [--json]

32 requests are always live; five drafters, of the Spin paper's sizes and each on a device of its
own, take eight each, and a switch costs the reading of the context. Requests draw their acceptances
from the mixed text of `penstock reproduce spin_fig11`, where times come from as well. The oracle is
`adaptive` that is told every request's true acceptances and has nothing to learn. A policy has
served 96 requests before the next 256 are counted. Five seeds, 95% intervals. For `adaptive+words`
the prompt's words say which of the three texts a request is of; `adaptive+prompt` has also seen,
for nothing, what every drafter makes of the prompt, as if it were as hard as the answer.

`--recorded`: recorded acceptance of look-up and of EAGLE on the same request, one at a time; its
time under a policy is set against that with the better drafter for this request in hindsight, in
five orders of the requests (`--seeds`), since what is learned depends on who comes first.
Records are the accept_* files in DIR (default: PENSTOCK_DATA, else ../shared/data).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from penstock.config import PolicyConfig
from penstock.core.policies.registry import PolicyError, register
from penstock.core.types import Output, StepPlan, StepResult
from penstock.fluid.step_profile import DrafterProfile
from penstock.lab.bench import DATA, Results, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.families import (
    SPIN_DRAFTERS,
    SPIN_TARGETS,
    SPIN_TEXTS,
    OwnRow,
    always_live,
    closed_loop,
    prompt_lengths,
    spin_acceptances,
    spin_profile,
)
from penstock.lab.oracles import reads_prompts, told
from penstock.lab.statistics import interval
from penstock.sim.acceptance import DomainAcceptance, read_records
from penstock.sim.profiles import load_profile
from penstock.sim.run import run
from penstock.sim.workloads import Workload, WorkloadError

LIVE = 32
CAPACITY = 8
FIXED = 4
WARM = 96
COUNTED = 256
BARS = {100: 0.93, 250: 0.945, 500: 0.955}
EVIDENCE_BAR = 0.96
MOST_SWITCHES = 4
RECORDS = ("gsm8k", "sharegpt")
PRICES = (DrafterProfile("ngram", (1,), (20e-6,)), DrafterProfile("eagle", (1,), (0.6e-3,), 20e-6))
"""Seconds of a draft token, and of one that is read: look-up, and a head on the target."""
PROMPT = 100
RECORDED_BAR = 0.97


@dataclass
class Switches:
    """Counts changes of a request's drafter."""

    count: int = 0
    last: dict[str, str] = field(default_factory=dict)

    def on_plan(self, plan: StepPlan) -> None:
        """Results say what was drafted."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Outputs name the drafter."""

    def on_output(self, output: Output) -> None:
        if output.drafter is not None:
            last = self.last.get(output.request_id, output.drafter)
            self.count += last != output.drafter
            self.last[output.request_id] = output.drafter


def measure(policy: str, length: int, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second, and switches a request."""
    acceptance = DomainAcceptance(spin_acceptances(tuple(SPIN_TEXTS)), seed)
    register("selection", told(acceptance), "oracle")
    register("selection", reads_prompts(acceptance, seed))
    learner, _, evidence = policy.partition("+")
    is_fixed = args.allocation == "fixed"
    # A drafter is worth what drafts of the length that is allocated are worth.
    options = {"k_max": FIXED if is_fixed else 8} if learner in ("adaptive", "oracle") else {}
    setup = always_live(
        spin_profile(args.target),
        acceptance,
        tuple(SPIN_DRAFTERS),
        LIVE,
        PolicyConfig.of(policy if evidence == "prompt" else learner, **options),
        draft_tokens=FIXED if is_fixed else None,
        capacity=CAPACITY,
        seed=seed,
    )
    total = WARM + COUNTED + LIVE
    texts = np.array([acceptance.domain_of(str(i)) for i in range(total)])
    prompts = prompt_lengths(np.random.default_rng(seed), total)
    # A tenant counts as a word of the prompt.
    load = closed_loop(prompts, length, texts if evidence else None)
    switches = Switches()
    ends = np.sort(run(setup, load, instruments=[switches]).finished_at)
    seconds = float(ends[WARM + COUNTED - 1] - ends[WARM - 1])
    return COUNTED * length / seconds, switches.count / total


def drawn(names: Sequence[str], args: argparse.Namespace) -> Results:
    """Shares of the oracle's rate, by length and policy."""
    lengths, seeds = [int(x) for x in args.lengths.split(",")], range(args.seeds)
    jobs = list(itertools.product(lengths, ("oracle", *names), seeds))
    console = Console(file=sys.stderr)
    found = {
        (length, name, seed): measure(name, length, seed, args)
        for length, name, seed in track(jobs, "simulating", console=console)
    }
    rows = []
    for length, name in itertools.product(lengths, names):
        mine = np.array([found[length, name, s] for s in seeds])
        best = np.array([found[length, "oracle", s][0] for s in seeds])
        share = interval(mine[:, 0] / best)
        rows.append(
            {
                "length": length,
                "policy": name,
                "share": share.mean,
                "half_width": share.half,
                "switches": float(mine[:, 1].mean()),
                "oracle_tokens_per_s": float(best.mean()),
            }
        )
    shown = table(
        f"LLaMA-{args.target}, {args.allocation}: share of the oracle's rate",
        rows,
        {
            "tokens": "{length}",
            "policy": "{policy}",
            "share": "{share:.3f}",
            "±": "{half_width:.3f}",
            "switches": "{switches:.2f}",
            "oracle tokens/s": "{oracle_tokens_per_s:.0f}",
        },
    )
    return Results(rows, [v for row in rows for v in verdicts(row)], [shown])


def verdicts(row: dict[str, Any]) -> list[ClaimVerdict]:
    """Of `adaptive`, at the lengths that have a bar."""
    learner, _, evidence = row["policy"].partition("+")
    if learner != "adaptive" or row["length"] not in BARS:
        return []
    wanted = EVIDENCE_BAR if evidence else BARS[row["length"]]
    text = (
        f"{row['policy']} at {row['share']:.3f} of the oracle ± {row['half_width']:.3f} (bar "
        f"{wanted}), {row['switches']:.2f} switches a request (bar {MOST_SWITCHES})"
    )
    reached = row["share"] >= wanted and row["switches"] <= MOST_SWITCHES
    return [bar(f"{row['length']} tokens", text, reached)]


# --- recorded acceptance --------------------------------------------------------------------------


def seconds_of(
    policy: str, options: dict[str, Any], rows: dict[str, list[list[int]]]
) -> npt.NDArray[np.float64]:
    """[requests] seconds from admission to the last token, one request after the other."""
    lengths = np.array([len(row) for row in rows["eagle"]], dtype=np.int64)
    profile = replace(load_profile("a100-llama2-7b"), drafters=PRICES)
    setup = always_live(
        profile, OwnRow(rows), tuple(rows), 1, PolicyConfig.of(policy, **options), beside=False
    )
    prompts = np.full(len(lengths), PROMPT, dtype=np.int64)
    load = Workload("one by one", prompts, lengths, np.zeros(len(lengths)))
    return np.diff(run(setup, load).finished_at, prepend=0.0)


def recorded(names: Sequence[str], args: argparse.Namespace) -> Results:
    """By data set and policy: how near the better drafter of each request, over shuffles of the
    record. A learner that an unlucky beginning spoils shows in `worst_sums`."""
    found = []
    for dataset in RECORDS:
        rows = read_records(args.data / f"accept_{dataset}.jsonl.gz", ("ngram", "eagle"))
        by_policy: dict[str, list[tuple[npt.NDArray[np.float64], float]]] = {}
        for seed in range(args.seeds):
            order = np.random.default_rng((9, seed)).permutation(len(rows["eagle"]))
            shuffled = {d: [own[i] for i in order] for d, own in rows.items()}
            times = {d: seconds_of("single", {"drafter": d}, shuffled) for d in rows}
            best = np.minimum(*times.values())
            times |= {n: seconds_of(n, {}, shuffled) for n in names}
            for policy, seconds in times.items():
                sums = float(best.sum() / seconds.sum())
                by_policy.setdefault(policy, []).append((best / seconds, sums))
        for policy, orders in by_policy.items():
            shares, sums = np.stack([s for s, _ in orders]), [s for _, s in orders]
            together = interval(sums)
            found.append(
                {
                    "dataset": dataset,
                    "policy": policy,
                    "orders": len(sums),
                    "requests": shares.shape[1],
                    "mean": float(shares.mean()),
                    "reaching": float((shares >= RECORDED_BAR).mean()),
                    "worst": float(shares.min()),
                    "sums": together.mean,
                    "half_width": together.half,
                    "worst_sums": min(sums),
                }
            )
    heads = {
        "mean": "mean",
        f">= {RECORDED_BAR}": "reaching",
        "worst": "worst",
        "sums": "sums",
        "±": "half_width",
        "sums, worst order": "worst_sums",
    }
    columns = {head: f"{{{figure}:.3f}}" for head, figure in heads.items()}
    shown = table(
        "Share of the better drafter's speed, of every request in hindsight",
        found,
        {"data": "{dataset}", "policy": "{policy}", "requests": "{requests}", **columns},
    )
    reached = all(r["reaching"] == 1 for r in found if r["policy"] == "adaptive")
    return Results(found, [bar("adaptive", f"{RECORDED_BAR} for each request", reached)], [shown])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="one seed, 100 tokens")
    options.add_argument("--policies", default="adaptive,lbss,epsilon_greedy,greedy,single")
    options.add_argument("--lengths", default="100,250,500")
    options.add_argument("--target", default="13B", choices=tuple(SPIN_TARGETS))
    options.add_argument("--allocation", default="fixed", help="fixed (4 tokens) or throughput")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--recorded", action="store_true", help="look-up and EAGLE, recorded")
    options.add_argument("--data", type=Path, default=DATA)
    args = options.parse_args(arguments)
    if args.quick:
        args.lengths, args.seeds = "100", 1
    names = args.policies.split(",")
    try:
        if args.recorded:
            return tell(args, recorded([n for n in names if n != "single"], args))
        return tell(args, drawn(names, args))
    except (WorkloadError, PolicyError) as error:
        print(f"selection_sim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
