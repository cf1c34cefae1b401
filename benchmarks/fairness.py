"""Fair draft allocation: the solver, steady and drifting acceptance, recorded acceptance.

    python -m benchmarks.fairness [--quick] [--json] [--data DIR] [PART...]

Parts: solver, stationary, drift, estimators, recorded, seconds, shares; without one, all. Eight
clients unless said, the real policy objects; five seeds fixed beforehand, intervals of 95% by
Student's t. `recorded` replays the accept_* records in DIR (default: PENSTOCK_DATA, else
../shared/data).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.fairness_learning import CLIENTS, EMPTY, Figures, drift, estimators, stationary
from benchmarks.figures import interval, line

from penstock.core.policies.allocation import AllocationPolicy
from penstock.core.registry import make_policy
from penstock.fluid.fair import geometric_lengths
from penstock.fluid.fair_path import expected_goodput, fair_optimum, fair_utility
from penstock.lab.oracles import Clairvoyant
from penstock.lab.rounds import (
    BarrierTimes,
    FloatArray,
    GeometricClients,
    RecordedClient,
    play,
)
from penstock.lab.statistics import SEEDS, jain
from penstock.sim.acceptance import read_records

# --- solver ---------------------------------------------------------------------------------------


def solver(quick: bool, data: Path) -> Figures:
    """Against every possible allocation, and the clock."""
    mismatches = sum(_mismatch(case) for case in range(1000))
    times = {n: _solver_ms(n, 5 if quick else 40) for n in (8, 1000, 100_000)}
    bars = {8: 0.02, 1000: 0.1, 100_000: 10.0}
    lines = [line(mismatches == 0, f"solver: {mismatches} mismatches in 1,000 random cases")]
    for n, milliseconds in times.items():
        lines.append(
            line(
                milliseconds <= bars[n],
                f"solver: {milliseconds:.4f} ms at N = {n:,} (bar {bars[n]:g})",
            )
        )
    return {"mismatches": mismatches, "milliseconds": times, "lines": lines}


def _mismatch(case: int) -> bool:
    """Whether one random case is solved worse than by trying everything."""
    rng = np.random.default_rng((1, case))
    clients, budget = int(rng.integers(1, 5)), int(rng.integers(0, 10))
    rates = rng.choice([0.0, 1.0, 0.5, *rng.uniform(0, 1, 3)], clients)
    weights = rng.choice([1.0, 2.0, *rng.uniform(0.1, 3, 3)], clients)
    limits = rng.integers(0, 6, clients)

    def value(lengths: Sequence[int]) -> float:
        return float((weights * (expected_goodput(rates, np.array(lengths)) - 1)).sum())

    every = itertools.product(*(range(n + 1) for n in limits))
    best = max(value(s) for s in every if sum(s) <= budget)
    lengths, _ = geometric_lengths(weights, rates, budget, limits)
    return (
        lengths.sum() > budget or (lengths > limits).any() or value(lengths.tolist()) < best - 1e-9
    )


def _solver_ms(clients: int, repeats: int) -> float:
    """Best of several batches, so that other programs on the machine do not count."""
    rng = np.random.default_rng(clients)
    rates: Any = rng.uniform(0.3, 0.95, clients)
    weights: Any = 1 / rng.uniform(1, 6, clients)
    if clients == CLIENTS:
        rates, weights = rates.tolist(), weights.tolist()
    inner = max(1, 2000 // clients)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(inner):
            geometric_lengths(weights, rates, int(2.5 * clients))
        best = min(best, (time.perf_counter() - started) / inner)
    return 1000 * best


# --- recorded acceptance --------------------------------------------------------------------------


def recorded(quick: bool, data: Path) -> Figures:
    """Σ log of realised tokens a round; clients are each drafter on each data set, twice."""
    files = {name: data / f"accept_{name}.jsonl.gz" for name in ("gsm8k", "sharegpt")}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        return {"lines": [f"[skip] recorded: {', '.join(missing)} missing (see PENSTOCK_DATA)"]}
    rows = [
        read_records(path, [drafter])[drafter]
        for drafter in ("ngram", "eagle")
        for path in files.values()
    ]
    rounds = 1000 if quick else 2000
    budget = 20
    policies: dict[str, Callable[[list[RecordedClient]], AllocationPolicy]] = {
        "fixed, rotating": lambda _: make_policy("allocation", "fixed", {"total": budget}),
        **{name: _named(name, options) for name, options in EMPTY.items()},
        "clairvoyant": Clairvoyant,
    }
    utility: dict[str, list[float]] = {name: [] for name in policies}
    rates: dict[str, list[FloatArray]] = {name: [] for name in policies}
    undrafted: dict[str, list[FloatArray]] = {name: [] for name in policies}
    for (name, make), seed in itertools.product(policies.items(), SEEDS):
        clients = [RecordedClient(rows[i // 2], (seed, i)) for i in range(CLIENTS)]
        played = play(make(clients), clients, budget, rounds)
        rates[name].append(played.tokens.mean(axis=0))
        utility[name].append(fair_utility(rates[name][-1]))
        # The first half of the clients look up.
        undrafted[name].append((played.lengths[:, : CLIENTS // 2] == 0).mean(axis=0))
    return _recorded_figures(utility, rates, undrafted)


def _named(
    name: str, options: dict[str, Any]
) -> Callable[[list[RecordedClient]], AllocationPolicy]:
    return lambda _: make_policy("allocation", name.partition(" ")[0], options)


def _recorded_figures(
    utility: dict[str, list[float]],
    rates: dict[str, list[FloatArray]],
    undrafted: dict[str, list[FloatArray]],
) -> Figures:
    gains = {
        name: interval([a - b for a, b in zip(values, utility["goodspeed"], strict=True)])
        for name, values in utility.items()
    }
    cells = [
        {
            "policy": name,
            "sum_log": interval(values)[0],
            "against_goodspeed": gains[name],
            "smallest": float(np.mean([r.min() for r in rates[name]])),
            "total": float(np.mean([r.sum() for r in rates[name]])),
            "jain": float(np.mean([jain(r) for r in rates[name]])),
            "clients": np.mean(rates[name], axis=0).round(3).tolist(),
            "look_up_without_draft": [
                float(np.min(undrafted[name])),
                float(np.mean(undrafted[name])),
                float(np.max(undrafted[name])),
            ],
        }
        for name, values in utility.items()
    ]
    mean, half = gains["goodspeed_adaptive"]
    text = ", ".join(
        f"{name} {gains[name][0]:+.3f} ± {gains[name][1]:.3f}"
        for name in ("fixed, rotating", "clairvoyant")
    )
    return {
        "cells": cells,
        "lines": [
            line(
                mean > half,
                f"recorded: Σ log {mean:+.3f} ± {half:.3f} against goodspeed (beside it: {text})",
            ),
            *(
                f"[info] recorded, {c['policy']}: Σ log {c['sum_log']:.3f}; look-up clients have "
                "no draft in {:.0%} to {:.0%} of the rounds, {:.0%} in the mean".format(
                    *(c["look_up_without_draft"][i] for i in (0, 2, 1))
                )
                for c in cells
            ),
        ],
    }


# --- tokens per second ----------------------------------------------------------------------------


def seconds(quick: bool, data: Path) -> Figures:
    """Rounds that wait for the slowest draft: 12 ms a draft token, 30 ms round trips, verification
    in 30 + 0.2 n ms; devices and links log-normal (sd 0.5), acceptance U(0.3, 0.9), C = 2.5 N.
    And slower ones: verification in 100 and 300 ms, drafting in 50 ms a token."""
    rounds = 200 if quick else 1000
    cells = []
    for clients, verify, each in TIMES:
        budget = round(2.5 * clients)
        rates: dict[str, list[tuple[FloatArray, FloatArray]]] = {}
        for seed, name in itertools.product(SEEDS, TIMED):
            rng = np.random.default_rng((3, seed))
            world = GeometricClients(np.tile(rng.uniform(0.3, 0.9, clients), (rounds, 1)), seed)
            spread = np.exp(0.5 * rng.standard_normal((2, clients)))
            times = BarrierTimes(0.03 * spread[0], each * spread[1], verify, 0.0002)
            policy = make_policy("allocation", name, {"total": budget})
            played = play(policy, world.clients(), budget, rounds, times=times)
            rates.setdefault(name, []).append((played.per_second(), played.tokens.mean(axis=0)))
        cells += [_timed_cell(name, (clients, verify, each), rates) for name in TIMED]
    lines = [
        f"[info] N = {c['N']}, verification {1000 * c['verify']:.0f} ms, drafting "
        f"{1000 * c['draft']:.0f} ms a token: {c['policy']}: {c['total']:.0f} tokens/s, Σ log "
        f"{c['sum_log']:+.2f} ± {c['sum_log ±']:.2f} against fixed ({c['per_round']:+.2f} a round; "
        f"behind in {c['behind']} of 5 seeds), smallest {c['smallest']:.1f}, Jain {c['jain']:.3f}"
        for c in cells
    ]
    return {"cells": cells, "lines": lines}


TIMED = ("fixed", "random", "goodspeed", "goodspeed_adaptive", "deadline")
TIMES = (
    (8, 0.03, 0.012),
    (8, 0.1, 0.012),
    (8, 0.3, 0.012),
    (8, 0.03, 0.05),
    (32, 0.03, 0.012),
    (32, 0.03, 0.05),
)


def _timed_cell(
    name: str,
    setting: tuple[int, float, float],
    rates: dict[str, list[tuple[FloatArray, FloatArray]]],
) -> Figures:
    per_second, per_round = (
        [
            fair_utility(a[k]) - fair_utility(b[k])
            for a, b in zip(rates[name], rates["fixed"], strict=True)
        ]
        for k in (0, 1)
    )
    mean, half = interval(per_second)
    clients, verify, each = setting
    found = [second for second, _ in rates[name]]
    return {
        "N": clients,
        "verify": verify,
        "draft": each,
        "policy": name,
        "total": float(np.mean([r.sum() for r in found])),
        "sum_log": mean,
        "sum_log ±": half,
        "per_round": interval(per_round)[0],
        "behind": sum(g < 0 for g in per_second),
        "smallest": float(np.mean([r.min() for r in found])),
        "jain": float(np.mean([jain(r) for r in found])),
    }


# --- proportional fairness ------------------------------------------------------------------------


def shares(quick: bool, data: Path) -> Figures:
    """What x* does to the smallest client, the total and Jain's index, by exponent of the utility,
    beside equal lengths: acceptance U(0.3, 0.9), N = 8, C = 20."""
    optima: dict[str, list[FloatArray]] = {}
    for seed in range(50):
        rates = np.random.default_rng((4, seed)).uniform(0.3, 0.9, CLIENTS)
        two, three = (expected_goodput(rates, [n] * CLIENTS) for n in (2, 3))
        optima.setdefault("equal lengths", []).append((two + three) / 2)
        for fairness in (0.0, 0.5, 1.0, 2.0, 4.0):
            best = fair_optimum(rates, 20, fairness=fairness)
            optima.setdefault(f"a = {fairness:g}", []).append(best.goodput)
    cells = [
        {
            "utility": name,
            "smallest": float(np.mean([x.min() for x in found])),
            "total": float(np.mean([x.sum() for x in found])),
            "jain": float(np.mean([jain(x) for x in found])),
            "sum_log": float(np.mean([fair_utility(x) for x in found])),
        }
        for name, found in optima.items()
    ]
    lines = [
        f"[info] {c['utility']}: smallest client {c['smallest']:.2f} tokens a round, total "
        f"{c['total']:.2f}, Jain {c['jain']:.3f}, Σ log {c['sum_log']:.2f}"
        for c in cells
    ]
    return {"cells": cells, "lines": lines}


# --- command --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool, Path], Figures]] = {
    "solver": solver,
    "stationary": stationary,
    "drift": drift,
    "estimators": estimators,
    "recorded": recorded,
    "seconds": seconds,
    "shares": shares,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("PENSTOCK_DATA", "../shared/data"))
    )
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    found = {}
    for part in given.parts or PARTS:
        found[part] = PARTS[part](given.quick, given.data)
        if not given.json:
            print("\n".join(found[part]["lines"]), flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
