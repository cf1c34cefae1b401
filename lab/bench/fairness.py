"""How near does an allocation of draft lengths come to the fair optimum, in steady, drifting and
recorded acceptance?

    python -m lab.bench.fairness [--quick] [--json] [--data DIR] [PART...]

Parts: solver, stationary, drift, recorded; without one, all. Eight clients, the real policy
objects; five seeds fixed beforehand, intervals of 95% by
Student's t. `recorded` replays the accept_* records in DIR (default: PENSTOCK_DATA, else
../shared/data).
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, bar
from lab.common.fair_path import expected_goodput, fair_optimum, fair_utility
from lab.common.oracles import BestFilter, Clairvoyant, KnowsRates
from lab.common.results import DATA, Results, parser, save
from lab.common.rounds import FloatArray, GeometricClients, RecordedClient, jumping_rates, play
from lab.common.statistics import SEEDS, interval, jain
from penstock.core.policies.base import AllocationPolicy
from penstock.core.policies.registry import make_policy
from penstock.fluid.fair import geometric_lengths
from penstock.sim.acceptance import read_records

CLIENTS = 8
Figures = dict[str, Any]
Part = tuple[Figures, list[ClaimVerdict]]


def spread(cell: Figures, key: str, values: Sequence[float]) -> None:
    """Note a mean, and half the width of its interval."""
    found = interval(values)
    cell[key], cell[f"{key} ±"] = found.mean, found.half


def named(name: str, options: dict[str, Any]) -> Callable[..., AllocationPolicy]:
    """A policy, whatever it is asked with."""
    return lambda *_: make_policy("allocation", name, options)


# --- solver ---------------------------------------------------------------------------------------


def solver(quick: bool, data: Path) -> Part:
    """Against the clock; tests compare it with every possible allocation."""
    times = {n: _solver_ms(n, 5 if quick else 40) for n in (8, 1000, 100_000)}
    verdicts = [
        bar("solver", f"{ms:.4f} ms at N = {n:,} (bar {most:g})", ms <= most)
        for most, (n, ms) in zip((0.02, 0.1, 10.0), times.items(), strict=True)
    ]
    return {"milliseconds": times}, verdicts


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


# --- steady acceptance ----------------------------------------------------------------------------

PRIORS = (0.1, 0.3, 0.5, 0.7, 0.9)
GAPS = {"30": 0.01, "300": 0.001, "mean 1-30": 0.01, "mean 1-300": 0.001}
"""Nats a client that may be missing, by what is looked at."""
POLICIES = ("goodspeed_adaptive", "goodspeed")


def stationary(quick: bool, data: Path) -> Part:
    """U* − U of the expected goodput, per client, from several priors."""
    figures: Figures = {"cells": []}
    worst: dict[str, dict[str, float]] = {}
    for name, budget, prior in itertools.product(POLICIES, (16, 20), PRIORS):
        option = "prior_mean" if name == "goodspeed_adaptive" else "initial_acceptance"
        make = named(name, {option: prior})
        gaps = [_steady_gaps(make, budget, seed, 1 if quick else 3) for seed in SEEDS]
        cell: Figures = {"policy": name, "C": budget, "prior": prior}
        cell["starved"] = sum(g["starved"] for g in gaps)
        for key in GAPS:
            spread(cell, key, [g[key] for g in gaps])
        figures["cells"].append(cell)
        seen = worst.setdefault(name, {})
        for key in (*GAPS, "starved"):
            seen[key] = max(seen.get(key, 0.0), cell[key])
    figures["worst"] = worst
    return figures, _steady_verdicts(worst["goodspeed_adaptive"], worst["goodspeed"])


def _steady_rates(seed: int) -> FloatArray:
    return np.random.default_rng((2, seed)).uniform(0.3, 0.9, CLIENTS)


def _steady_gaps(
    make: Callable[[], AllocationPolicy], budget: int, seed: int, replications: int
) -> dict[str, float]:
    """Gaps in one world: of the goodput expected of the last third of the first 30 and 300 rounds,
    over repeated runs, and of what is expected of all those rounds, learning included."""
    rates = _steady_rates(seed)
    best = fair_optimum(rates, budget)
    runs = []
    for replication in range(replications):
        clients = GeometricClients(np.tile(rates, (300, 1)), seed * 1000 + replication)
        runs.append(play(make(), clients.clients(), budget, 300).lengths)
    lengths = np.stack(runs)
    expected = expected_goodput(rates, lengths)
    drafted = lengths[:, 30:].mean(axis=1)
    wanted = best.lengths >= 0.5
    gaps = {"starved": float((drafted[:, wanted] < 0.25 * best.lengths[wanted]).sum())}
    for key, (first, last) in zip(GAPS, ((20, 30), (200, 300), (0, 30), (0, 300)), strict=True):
        mean = expected[:, first:last].mean(axis=(0, 1))
        gaps[key] = (fair_utility(best.goodput) - fair_utility(mean)) / CLIENTS
    return gaps


def _steady_verdicts(ours: dict[str, float], theirs: dict[str, float]) -> list[ClaimVerdict]:
    found = []
    for key, most in GAPS.items():
        what = f"rounds up to {key}, last third" if key.isdigit() else f"{key} rounds, learning too"
        found.append(
            bar(
                f"stationary, {what}, worst prior and C",
                f"{ours[key]:.4f} nats a client (bar {most:g}; goodspeed β = 0.5: "
                f"{theirs[key]:.4f})",
                ours[key] <= most,
            )
        )
    starved = f"{ours['starved']:g} starved clients (goodspeed {theirs['starved']:g})"
    return [*found, bar("stationary", starved, ours["starved"] == 0)]


# --- drift ----------------------------------------------------------------------------------------

DWELLS = {30: 3.5, 100: 2.0, 400: 1.2}
"""Rounds between two jumps, and the loss of utility that is allowed, in per cent."""


def _drifting_goodput(
    make: Callable[[FloatArray], AllocationPolicy], rounds: int, dwell: int, seed: int
) -> FloatArray:
    """Mean expected goodput of the clients, C = 20. make: of the rates [rounds, clients]."""
    rates = jumping_rates(rounds, CLIENTS, dwell, seed)
    world = GeometricClients(rates, seed)
    played = play(make(rates), world.clients(), 20, rounds)
    return expected_goodput(rates, played.lengths).mean(axis=0)


def drift(quick: bool, data: Path) -> Part:
    """Loss of utility against a scheduler that knows acceptance, C = 20."""
    rounds = 400 if quick else 1600
    cells, verdicts = [], []
    for dwell, most in DWELLS.items():
        makers = {
            "goodspeed_adaptive": named("goodspeed_adaptive", {}),
            "goodspeed": named("goodspeed", {}),
            "filter": functools.partial(BestFilter, dwell=dwell),
        }
        known = [fair_utility(_drifting_goodput(KnowsRates, rounds, dwell, s)) for s in SEEDS]
        cell: Figures = {"dwell": dwell}
        for name, make in makers.items():
            own = [fair_utility(_drifting_goodput(make, rounds, dwell, s)) for s in SEEDS]
            gaps = np.array(known) - own
            spread(cell, name, 100 * gaps / known)
            cell[f"{name}, goodput"] = interval(100 * (1 - np.exp(-gaps / CLIENTS))).mean
        cells.append(cell)
        text = (
            "utility {goodspeed_adaptive:.2f} ± {goodspeed_adaptive ±:.2f}% below one that knows "
            "(bar {bar:g}; goodspeed {goodspeed:.2f}, best filter {filter:.2f}); geometric mean of "
            "goodput {goodspeed_adaptive, goodput:.2f}% below (goodspeed {goodspeed, goodput:.2f}, "
            "best filter {filter, goodput:.2f})"
        ).format_map({**cell, "bar": most})
        verdicts.append(bar(f"drift, dwell {dwell}", text, cell["goodspeed_adaptive"] <= most))
    return {"cells": cells}, verdicts


# --- recorded acceptance --------------------------------------------------------------------------


def recorded(quick: bool, data: Path) -> Part:
    """Σ log of realised tokens a round; clients are each drafter on each data set, twice."""
    files = {name: data / f"accept_{name}.jsonl.gz" for name in ("gsm8k", "sharegpt")}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        why = f"skipped: {', '.join(missing)} missing (see PENSTOCK_DATA)"
        return {}, [bar("recorded", why, None)]
    rows = [
        read_records(path, [drafter])[drafter]
        for drafter in ("ngram", "eagle")
        for path in files.values()
    ]
    budget, rounds = 20, 1000 if quick else 2000
    policies: dict[str, Callable[[list[RecordedClient]], AllocationPolicy]] = {
        "fixed, rotating": lambda _: make_policy("allocation", "fixed", {"total": budget}),
        **{name: named(name, {}) for name in POLICIES},
        "clairvoyant": Clairvoyant,
    }
    rates: dict[str, list[FloatArray]] = {name: [] for name in policies}
    for (name, make), seed in itertools.product(policies.items(), SEEDS):
        clients = [RecordedClient(rows[i // 2], (seed, i)) for i in range(CLIENTS)]
        rates[name].append(play(make(clients), clients, budget, rounds).tokens.mean(axis=0))
    utility = {name: np.array(list(map(fair_utility, found))) for name, found in rates.items()}
    gains = {name: interval(found - utility["goodspeed"]) for name, found in utility.items()}
    cells = {
        name: {
            "sum_log": interval(utility[name]).mean,
            "against_goodspeed": (gains[name].mean, gains[name].half),
            "smallest": float(np.mean([r.min() for r in found])),
            "total": float(np.mean([r.sum() for r in found])),
            "jain": float(np.mean([jain(r) for r in found])),
        }
        for name, found in rates.items()
    }
    ours = gains["goodspeed_adaptive"]
    beside = ", ".join(
        f"{n} {gains[n].mean:+.3f} ± {gains[n].half:.3f}"
        for n in ("fixed, rotating", "clairvoyant")
    )
    text = f"Σ log {ours.mean:+.3f} ± {ours.half:.3f} against goodspeed (beside it: {beside})"
    return {"cells": cells}, [bar("recorded", text, ours.mean > ours.half)]


# --- command --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool, Path], Part]] = {
    f.__name__: f for f in (solver, stationary, drift, recorded)
}


def main() -> None:
    options = parser(__doc__, quick="fewer rounds and repetitions")
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    options.add_argument("--data", type=Path, default=DATA)
    given = options.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        options.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    found, told = {}, []
    for part in given.parts or PARTS:
        figures, verdicts = PARTS[part](given.quick, given.data)
        found[part] = {**figures, "lines": [v.line() for v in verdicts]}
        told += verdicts
        if not given.json:
            print("\n".join(found[part]["lines"]), flush=True)
    if given.result:
        save(given.result, Results(found, told))
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
