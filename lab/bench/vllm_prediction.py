"""How well does the simulator predict vLLM, and Penstock above vLLM's workers?

    python -m lab.bench.vllm_prediction azure2023_conv.csv.gz --out prediction.jsonl [--json]

Needs a Python that has vLLM. Model, requests and KV memory are those of `lab.bench.vllm_arrivals`.
Each program's steps at ONE load give a profile of its step times, the host's part included; other
loads are then simulated with it, with the same arrivals and lengths. Programs and loads take turns,
and each stretch is served twice: where live runs differ by more than the bar nothing can be told.
Every stretch is written down; the same command goes on.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.bench.vllm_arrivals import ARMS, BLOCK_SIZE, MOST_REQUESTS, Bench, Rows
from lab.common.cells import Figures
from lab.common.claims import ClaimVerdict, Control, Outcome, judge
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import rotated
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.types import NO_DRAFTER, Request
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import fit_steps

CALIBRATION = 0.6
LOADS = (0.3, 0.5, 0.7, 0.9)
TURNS = (1, 2)
NEAR, BAR = 0.1, 22
"""Largest deviation, and how many of the cells must be within it."""
VLLM = {"max_num_batched_tokens": 2048, "max_num_seqs": MOST_REQUESTS, "watermark": 0.0}
"""Its limits, and the share of KV blocks that admission leaves free (0.32's defaults)."""
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("vllm_v1", VLLM),
    "engine": ("fluid_guided", {}),
}
"""By arm: the admission policy that the simulator gives it."""
SCALES = {"ttft_s": ("TTFT ms", 1e3), "tpot_s": ("TPOT ms", 1e3), "tokens_per_s": ("tokens/s", 1.0)}
"""Figures, and how they are shown."""
BATCHES = ("all", *(f"from {2**bits >> 1}" for bits in range(MOST_REQUESTS.bit_length())))
"""Classes of steps by the number of decoding requests."""


def simulated(arm: str, rows: Rows, profile: StepProfile) -> Figures:
    """What a live run answers, of the same stretch on the virtual clock."""
    scheduler = Scheduler(
        BlockPool(profile.kv_tokens // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=False),
        [],
        admission=make_policy("admission", *PROGRAMS[arm]),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed"),
        max_model_len=2048,
        learn=Estimators(profile),
        groups_decodes=True,
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, ProfiledStepTimes(profile))
    requests = [Request(str(i), p, o, at, drafter=NO_DRAFTER) for i, (at, p, o) in enumerate(rows)]
    found = simulate(scheduler, executor, clock, requests)
    times = [(r.first_token_time, r.finish_time) for r in found.records.values()]
    ttft, latency = np.array(times, dtype=float).T - [arrival for arrival, _, _ in rows]
    return {"ttft": ttft, "latency": latency, "seconds": found.finished_at}


def figures(runs: Sequence[Figures], stretches: Sequence[Rows]) -> dict[str, float]:
    """Means over all requests, and tokens a second over all stretches."""
    ttft, latency = (np.concatenate([run[key] for run in runs]) for key in ("ttft", "latency"))
    tokens = np.array([output_len for rows in stretches for _, _, output_len in rows])
    several = tokens > 1
    tpot = (latency - ttft)[several] / (tokens[several] - 1)
    seconds = sum(run["seconds"] for run in runs)
    values = ttft.mean(), tpot.mean(), tokens.sum() / seconds
    return dict(zip(SCALES, map(float, values), strict=True))


def by_batch(profile: StepProfile, steps: Sequence[tuple[StepWork, float]]) -> dict[str, float]:
    """Predicted seconds of steps over measured ones, by `BATCHES`."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for work, seconds in steps:
        for name in ("all", BATCHES[1 + min(work.num_decodes, MOST_REQUESTS - 1).bit_length()]):
            sums[name][0] += profile.seconds(work)
            sums[name][1] += seconds
    return {name: sums[name][0] / sums[name][1] for name in BATCHES if name in sums}


def compare(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Every load under both programs: live, live again and simulated."""
    numbers, shares = range(1, 1 + args.stretches), (CALIBRATION, *LOADS)
    rates = {(s, i): round(s * bench.capacity(i), 3) for i in numbers for s in shares}
    runs = {
        (arm, share, turn, i): bench.serve(ARMS[arm], i, rates[share, i], turn=turn)
        for i in numbers
        for turn in TURNS
        for share in rotated(shares, i + turn)
        for arm in rotated(list(PROGRAMS), i + turn)
    }
    cells = []
    for arm in PROGRAMS:
        live = {s: [[runs[arm, s, turn, i] for i in numbers] for turn in TURNS] for s in shares}
        steps = {
            s: [(StepWork(*w), t) for turn in live[s] for run in turn for *w, t in run["steps"]]
            for s in shares
        }
        known = steps[CALIBRATION]
        profile = fit_steps(known, name=arm, kv_tokens=bench.kv_tokens, origin="").profile
        for share in shares:
            stretches = [bench.trace.stretch(i, args.requests, rates[share, i]) for i in numbers]
            first, again = (figures(turn, stretches) for turn in live[share])
            measured = figures([r for turn in live[share] for r in turn], stretches * len(TURNS))
            predicted = figures([simulated(arm, rows, profile) for rows in stretches], stretches)
            cells.append(
                {
                    "program": arm,
                    "load": share,
                    "rates": [rates[share, i] for i in numbers],
                    "live": measured,
                    "simulated": predicted,
                    "ratio": {key: predicted[key] / measured[key] for key in SCALES},
                    "again": {key: again[key] / first[key] for key in SCALES},
                    "steps": by_batch(profile, steps[share]),
                }
            )
    return {"kv_tokens": bench.kv_tokens, "cells": cells}


def verdict(cells: Sequence[dict[str, Any]]) -> ClaimVerdict:
    """Of the loads that were predicted. A figure that live runs do not repeat is near by luck."""
    others = [cell for cell in cells if cell["load"] != CALIBRATION]
    pairs = [(cell["ratio"][key], cell["again"][key]) for cell in others for key in SCALES]
    repeated = [ratio for ratio, again in pairs if abs(again - 1) <= NEAR]
    near, num = sum(abs(ratio - 1) <= NEAR for ratio in repeated), len(pairs)
    outcome: Outcome = "met" if near >= BAR else "missed"
    if near < BAR <= near + num - len(repeated):
        outcome = "inconclusive"
    measured = f"{near} of {num} (bar {BAR}); {num - len(repeated)} inconclusive"
    again = Control("live again", f"{len(repeated)} of {num}", judge(len(repeated) >= BAR))
    return ClaimVerdict(f"predicted within {NEAR:.0%}", measured, outcome, oracle=again)


def results(found: dict[str, Any]) -> Results:
    """Live → simulated (ratio; live again over live); the load of the profile is marked."""
    rows = []
    for cell in found["cells"]:
        load = f"{cell['load']}" + " (profile)" * (cell["load"] == CALIBRATION)
        row = {"program": cell["program"], "load": load}
        for key, (_, scale) in SCALES.items():
            live, told = (cell[who][key] * scale for who in ("live", "simulated"))
            of_live = f"({cell['ratio'][key]:.3f}; {cell['again'][key]:.3f})"
            row[key] = f"{live:.4g} → {told:.4g} {of_live}"
        row |= dict.fromkeys(BATCHES, "")
        row |= {batch: f"{ratio:.3f}" for batch, ratio in cell["steps"].items()}
        rows.append(row)
    columns = {"program": "{program}", "load": "{load}"}
    shown = columns | {header: f"{{{key}}}" for key, (header, _) in SCALES.items()}
    batches = columns | {name: f"{{{name}}}" for name in BATCHES}
    tables = [
        table("live → simulated (ratio; live again over live)", rows, shown),
        table("step seconds, predicted over measured, by decoding requests", rows, batches),
    ]
    return Results(found, [verdict(found["cells"])], tables)


def main() -> int:
    options = parser(__doc__)
    Bench.add_options(options, stretches=2, requests=1000)
    args = options.parse_args()
    with Bench.opened(args) as bench:
        found = compare(bench, args)
    return tell(args, results(found))


if __name__ == "__main__":
    raise SystemExit(main())
