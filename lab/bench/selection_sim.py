"""How near does a selection policy come to the better of two drafters for each request, on recorded
acceptance?

    python -m lab.bench.selection_sim [--json] [--policies A,B] [--data DIR]

Recorded acceptance of look-up and of EAGLE on the same request, one request at a time; its time
under a policy is set against that with the better drafter for this request in hindsight, in five
orders of the requests (`--seeds`), since what is learned depends on who comes first. Records are
the accept_* files in DIR (default: PENSTOCK_DATA, else ../shared/data).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.common.claims import bar
from lab.common.families import SPIN, OwnRow, always_live
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import FloatArray, interval
from lab.rivals import policy_named
from penstock.core.policies.registry import PolicyError
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import read_records
from penstock.sim.profiles import load_profile
from penstock.sim.run import run
from penstock.sim.workloads import Workload, WorkloadError

RECORDS = ("gsm8k", "sharegpt")
PRICES = (DrafterProfile("ngram", (1,), (20e-6,)), DrafterProfile("eagle", (1,), (0.6e-3,), 20e-6))
"""Seconds of a draft token, and of one that is read: look-up, and a head on the target."""
PROMPT = 100
RECORDED_BAR = 0.97


def seconds_of(
    policy: str, options: dict[str, Any], rows: dict[str, list[list[int]]]
) -> FloatArray:
    """[requests] seconds from admission to the last token, one request after the other. policy: a
    name, or one of `SPIN`."""
    lengths = np.array([len(row) for row in rows["eagle"]], dtype=np.int64)
    profile = replace(load_profile("a100-llama2-7b"), drafters=PRICES)
    setup = always_live(
        profile,
        OwnRow(rows),
        tuple(rows),
        1,
        SPIN.get(policy) or policy_named(policy, **options),
        beside=False,
    )
    prompts = np.full(len(lengths), PROMPT, dtype=np.int64)
    load = Workload("one by one", prompts, lengths, np.zeros(len(lengths)))
    return np.diff(run(setup, load).finished_at, prepend=0.0)


def compare(names: Sequence[str], args: argparse.Namespace) -> Results:
    """By data set and policy: how near the better drafter of each request, over shuffles of the
    record. A learner that an unlucky beginning spoils shows in `worst_sums`."""
    found = []
    for dataset in RECORDS:
        rows = read_records(args.data / f"accept_{dataset}.jsonl.gz", ("ngram", "eagle"))
        by_policy: dict[str, list[tuple[FloatArray, float]]] = {}
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
    reached = all(r["reaching"] == 1 for r in found if r["policy"] == "auto")
    return Results(found, [bar("auto", f"{RECORDED_BAR} for each request", reached)], [shown])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument(
        "--policies", default=",".join(("auto", *SPIN, "epsilon_greedy", "greedy"))
    )
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--data", type=Path, default=DATA)
    args = options.parse_args(arguments)
    try:
        return tell(args, compare(args.policies.split(","), args))
    except (WorkloadError, PolicyError) as error:
        print(f"selection_sim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
