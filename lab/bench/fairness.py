"""How near does an allocation of draft lengths come to the fair optimum, in steady and drifting
acceptance?

    python -m lab.bench.fairness [--quick] [--json] [PART...]

Parts: stationary, drift; without one, both. Eight clients, the real policy objects; five seeds,
intervals of 95% by Student's t.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, bar
from lab.common.fair_path import expected_goodput, fair_optimum, fair_utility
from lab.common.oracles import BestFilter, KnowsRates
from lab.common.results import Results, parser, tell
from lab.common.rounds import FloatArray, GeometricClients, jumping_rates, play
from lab.common.statistics import SEEDS, interval
from penstock.core.policies.base import AllocationPolicy
from penstock.core.policies.registry import make_policy

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


# --- steady acceptance ----------------------------------------------------------------------------

PRIORS = (0.1, 0.3, 0.5, 0.7, 0.9)
OWN_PRIOR = 0.5
"""Acceptance that `goodspeed_adaptive` expects before anything is known."""
GAPS = {"30": 0.01, "300": 0.001, "mean 1-30": 0.01, "mean 1-300": 0.001}
"""Nats a client that may be missing, by what is looked at."""
POLICIES = ("goodspeed_adaptive", "goodspeed")


def stationary(quick: bool) -> Part:
    """U* − U of the expected goodput, per client, from several priors."""
    figures: Figures = {"cells": []}
    worst: dict[str, dict[str, float]] = {}
    for name, budget, prior in itertools.product(POLICIES, (16, 20), PRIORS):
        if name == "goodspeed_adaptive" and prior != OWN_PRIOR:
            continue
        make = named(name, {} if name == "goodspeed_adaptive" else {"initial_acceptance": prior})
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


def drift(quick: bool) -> Part:
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


# --- command --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool], Part]] = {f.__name__: f for f in (stationary, drift)}


def main() -> int:
    options = parser(__doc__, quick="fewer rounds and repetitions")
    options.add_argument("parts", nargs="*", choices=[*PARTS, []])
    given = options.parse_args()
    found = {part: PARTS[part](given.quick) for part in given.parts or PARTS}
    runs = {part: figures for part, (figures, _) in found.items()}
    return tell(given, Results(runs, [v for _, verdicts in found.values() for v in verdicts]))


if __name__ == "__main__":
    sys.exit(main())
