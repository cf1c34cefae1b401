"""The simulator's predictions against stock vLLM, and against Penstock above vLLM's workers.

    python -m lab.bench.vllm_prediction azure2023_conv.csv.gz --out prediction.jsonl [--json]

To be run by a Python that has vLLM. The model, lengths and arrivals are those of
`lab.bench.vllm_arrivals`, KV memory included. Each program's steps at ONE load give a profile of
its step times; all other loads are then simulated with it and the very same arrivals and lengths,
and compared. The programs and loads are served in turn, a stretch each, so that a drift of the
machine's speed meets all of them. Each stretch is written down: a run that was cut goes on.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.vllm_arrivals import ARMS, BLOCK_SIZE, MOST_REQUESTS, Bench, Rows
from lab.common.claims import bar
from lab.common.results import Results, parser, table, tell
from penstock.core.kv.blocks import BlockPool
from penstock.core.learn import Estimators
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.types import NO_DRAFTER, Request
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import fit_profile

CALIBRATION = 0.6
LOADS = (0.3, 0.5, 0.7, 0.9)
MAX_MODEL_LEN = 2048
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("vllm_v1", {"max_num_batched_tokens": 2048, "max_num_seqs": MOST_REQUESTS}),
    "engine": ("fluid_guided", {}),
}
"""By arm: the admission policy that the simulator gives it."""


def profile_of(runs: Sequence[Any], name: str, kv_tokens: int) -> StepProfile:
    """Fitted to the steps of some stretches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow((*StepWork._fields, "seconds"))
            writer.writerows(step for run in runs for step in run["steps"])
        return fit_profile(path, name=name, kv_tokens=kv_tokens).profile


def simulated(arm: str, rows: Rows, profile: StepProfile) -> dict[str, Any]:
    """What a live run answers, of the same stretch on the virtual clock."""
    admission, options = PROGRAMS[arm]
    scheduler = Scheduler(
        BlockPool(profile.kv_tokens // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=False),
        [],
        admission=make_policy("admission", admission, options),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed"),
        max_model_len=MAX_MODEL_LEN,
        learn=Estimators(profile),
        counted=True,
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, ProfiledStepTimes(profile))
    requests = [
        Request(str(i), prompt, output, arrival, drafter=NO_DRAFTER)
        for i, (arrival, prompt, output) in enumerate(rows)
    ]
    found = simulate(scheduler, executor, clock, requests)
    records = list(found.records.values())
    return {
        "ttft": [r.first_token_time - r.request.arrival_time for r in records],  # type: ignore[operator]
        "latency": [r.finish_time - r.request.arrival_time for r in records],  # type: ignore[operator]
        "seconds": found.finished_at,
    }


def figures(runs: Sequence[Any], stretches: Sequence[Rows]) -> dict[str, float]:
    """Means over all requests, and tokens a second over all stretches."""
    ttft, latency = (np.concatenate([run[key] for run in runs]) for key in ("ttft", "latency"))
    tokens = np.array([output for rows in stretches for _, _, output in rows])
    several = tokens > 1
    tpot = (latency - ttft)[several] / (tokens[several] - 1)
    return {
        "ttft_s": float(ttft.mean()),
        "tpot_s": float(tpot.mean()),
        "throughput_tokens_per_s": float(tokens.sum() / sum(run["seconds"] for run in runs)),
    }


def compare(bench: Bench, num_stretches: int, num_for_capacity: int) -> dict[str, Any]:
    """Every load under both programs, live and simulated."""
    measured = [bench.capacity(number) for number in range(1, 1 + num_for_capacity)]
    capacity = float(np.median(measured))
    rates = {load: round(load * capacity, 3) for load in (CALIBRATION, *LOADS)}
    numbers = range(1, 1 + num_stretches)
    live = {
        (arm, load, number): bench.serve(ARMS[arm], number, rate)
        for number in numbers
        for load, rate in rates.items()
        for arm in PROGRAMS
    }
    cells = []
    for arm in PROGRAMS:
        steps = [live[arm, CALIBRATION, number] for number in numbers]
        profile = profile_of(steps, arm, bench.kv_tokens)
        for load, rate in rates.items():
            stretches = [bench.stretch(number, rate) for number in numbers]
            real = figures([live[arm, load, number] for number in numbers], stretches)
            told = figures([simulated(arm, rows, profile) for rows in stretches], stretches)
            ratios = {key: told[key] / real[key] for key in real}
            cells.append(
                {"program": arm, "load": load, "live": real, "simulated": told, "ratio": ratios}
            )
    return {"capacity": capacity, "kv_tokens": bench.kv_tokens, "cells": cells}


def results(found: dict[str, Any]) -> Results:
    """Live → simulated (ratio); the load of the profile is marked."""
    shown = []
    for cell in found["cells"]:
        row = {"program": cell["program"], "load": f"{cell['load']}"}
        row["load"] += " (profile)" * (cell["load"] == CALIBRATION)
        for key, scale in (("ttft_s", 1e3), ("tpot_s", 1e3), ("throughput_tokens_per_s", 1.0)):
            live, told = (cell[who][key] * scale for who in ("live", "simulated"))
            row[key] = f"{live:.4g} → {told:.4g} ({cell['ratio'][key]:.3f})"
        shown.append(row)
    columns = {
        "program": "{program}",
        "load": "{load}",
        "TTFT ms": "{ttft_s}",
        "TPOT ms": "{tpot_s}",
        "tokens/s": "{throughput_tokens_per_s}",
    }
    others = [cell for cell in found["cells"] if cell["load"] != CALIBRATION]
    worst = max(abs(r - 1) for cell in others for r in cell["ratio"].values())
    told = [bar("largest deviation at the other loads", f"{worst:.1%} (bar 10%)", worst <= 0.1)]
    return Results(found, told, [table("live → simulated (ratio)", shown, columns)])


def main() -> int:
    options = parser(__doc__)
    Bench.add_arguments(options, stretches=4, requests=480)
    options.add_argument("--capacity", type=int, default=3, help="stretches to measure it by")
    args = options.parse_args()
    bench = Bench(args)
    try:
        found = compare(bench, args.stretches, args.capacity)
    finally:
        bench.close()
    return tell(args, results(found))


if __name__ == "__main__":
    raise SystemExit(main())
