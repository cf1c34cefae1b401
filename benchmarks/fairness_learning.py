"""How well acceptance is learnt, steady and drifting: parts of `benchmarks.fairness`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.figures import interval, line

from penstock.core.learn.streams import ESTIMATORS
from penstock.core.policies.allocation import AllocationPolicy
from penstock.core.registry import make_policy
from penstock.fluid.fair_path import expected_goodput, fair_optimum, fair_utility
from penstock.lab.oracles import BestFilter, KnowsRates
from penstock.lab.rounds import FloatArray, GeometricClients, jumping_rates, play
from penstock.lab.statistics import SEEDS

CLIENTS = 8
Figures = dict[str, Any]

# --- steady acceptance ----------------------------------------------------------------------------

PRIORS = (0.1, 0.3, 0.5, 0.7, 0.9)


def stationary(quick: bool, data: Path) -> Figures:
    """U* − U of the expected goodput, per client, from several priors."""
    replications = 1 if quick else 3
    figures: Figures = {"cells": []}
    worst: dict[str, dict[str, float]] = {}
    for name, budget, prior in itertools.product(
        ("goodspeed_adaptive", "goodspeed"), (16, 20), PRIORS
    ):
        option = "prior_mean" if name == "goodspeed_adaptive" else "initial_acceptance"
        make = functools.partial(make_policy, "allocation", name, {option: prior})
        cells = [_steady_gaps(make, budget, seed, replications) for seed in SEEDS]
        cell: Figures = {"policy": name, "C": budget, "prior": prior}
        cell["starved"] = sum(c["starved"] for c in cells)
        for key in ("30", "300", "mean 1-30", "mean 1-300"):
            cell[key], cell[f"{key} ±"] = interval([c[key] for c in cells])
        figures["cells"].append(cell)
        seen = worst.setdefault(name, {})
        for key in ("30", "300", "mean 1-30", "mean 1-300", "starved"):
            seen[key] = max(seen.get(key, 0.0), cell[key])
    figures["worst"] = worst
    figures["undrafted"] = {name: _undrafted(name, options) for name, options in EMPTY.items()}
    figures["lines"] = _steady_lines(worst) + [
        f"[info] stationary, {name}: {low:.0%} to {high:.0%} of the rounds without a draft, of the "
        f"client that has most of them"
        for name, (low, high) in figures["undrafted"].items()
    ]
    return figures


EMPTY: dict[str, dict[str, Any]] = {
    "goodspeed_adaptive": {},
    "goodspeed": {},
    "goodspeed hold": {"on_empty": "hold"},
    "goodspeed hold, floor 0.2": {"on_empty": "hold", "least_acceptance": 0.2},
    "goodspeed hold, decided": {"on_empty": "hold", "evidence": "decided"},
    "goodspeed zero": {"on_empty": "zero"},
}
"""What rounds without a draft are to `goodspeed`, and what it needs then."""


def _undrafted(name: str, options: dict[str, Any]) -> tuple[float, float]:
    """Over the seeds, least and most of: the share of rounds without a draft of the client that has
    most of them, among those that x* gives drafts to in every round. C = 16."""
    found = []
    for seed in SEEDS:
        rates = _steady_rates(seed)
        world = GeometricClients(np.tile(rates, (300, 1)), seed)
        policy = make_policy("allocation", name.partition(" ")[0], options)
        without = (play(policy, world.clients(), 16, 300).lengths == 0).mean(axis=0)
        found.append(float(without[fair_optimum(rates, 16).lengths >= 1].max()))
    return min(found), max(found)


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

    def gap(first: int, last: int) -> float:
        mean = expected[:, first:last].mean(axis=(0, 1))
        return (fair_utility(best.goodput) - fair_utility(mean)) / CLIENTS

    drafted = lengths[:, 30:].mean(axis=1)
    wanted = best.lengths >= 0.5
    starved = (drafted[:, wanted] < 0.25 * best.lengths[wanted]).sum()
    return {
        "30": gap(20, 30),
        "300": gap(200, 300),
        "mean 1-30": gap(0, 30),
        "mean 1-300": gap(0, 300),
        "starved": float(starved),
    }


def _steady_lines(worst: dict[str, dict[str, float]]) -> list[str]:
    ours, theirs = worst["goodspeed_adaptive"], worst["goodspeed"]
    lines = []
    for key, bar in (("30", 0.01), ("300", 0.001), ("mean 1-30", 0.01), ("mean 1-300", 0.001)):
        what = f"rounds up to {key}, last third" if key.isdigit() else f"{key} rounds, learning too"
        lines.append(
            line(
                ours[key] <= bar,
                f"stationary, {what}, worst prior and C: {ours[key]:.4f} nats a client "
                f"(bar {bar:g}; goodspeed β = 0.5: {theirs[key]:.4f})",
            )
        )
    lines.append(
        line(
            ours["starved"] == 0,
            f"stationary: {ours['starved']:g} starved clients (goodspeed {theirs['starved']:g})",
        )
    )
    return lines


# --- drift ----------------------------------------------------------------------------------------


def drift(quick: bool, data: Path) -> Figures:
    """Loss of utility against a scheduler that knows acceptance, C = 20."""
    rounds = 400 if quick else 1600
    bars = {30: 3.5, 100: 2.0, 400: 1.2}
    figures: Figures = {"cells": []}
    lines = []
    for dwell, bar in bars.items():
        losses: dict[str, list[float]] = {}
        goodputs: dict[str, list[float]] = {}
        for seed in SEEDS:
            rates = jumping_rates(rounds, CLIENTS, dwell, seed)
            world = GeometricClients(rates, seed)
            known = _mean_goodput(KnowsRates(rates), world)
            policies = {
                "goodspeed_adaptive": make_policy("allocation", "goodspeed_adaptive"),
                "goodspeed": make_policy("allocation", "goodspeed"),
                "filter": BestFilter(rates, dwell),
            }
            for name, policy in policies.items():
                gap = fair_utility(known) - fair_utility(_mean_goodput(policy, world))
                losses.setdefault(name, []).append(100 * gap / fair_utility(known))
                goodputs.setdefault(name, []).append(100 * (1 - np.exp(-gap / CLIENTS)))
        cell: Figures = {"dwell": dwell}
        for name in losses:
            cell[name], cell[f"{name} ±"] = interval(losses[name])
            cell[f"{name}, goodput"] = interval(goodputs[name])[0]
        figures["cells"].append(cell)
        lines.append(
            line(
                cell["goodspeed_adaptive"] <= bar,
                f"drift, dwell {dwell}: utility {cell['goodspeed_adaptive']:.2f} ± "
                f"{cell['goodspeed_adaptive ±']:.2f}% below one that knows (bar {bar:g}; goodspeed "
                f"{cell['goodspeed']:.2f}, best filter {cell['filter']:.2f}); geometric mean of "
                f"goodput {cell['goodspeed_adaptive, goodput']:.2f}% below (goodspeed "
                f"{cell['goodspeed, goodput']:.2f}, best filter {cell['filter, goodput']:.2f})",
            )
        )
    figures["lines"] = lines
    return figures


def _mean_goodput(
    policy: AllocationPolicy, world: GeometricClients, budget: int = 20
) -> FloatArray:
    played = play(policy, world.clients(), budget, len(world.rates))
    return expected_goodput(world.rates, played.lengths).mean(axis=0)


# --- estimators -----------------------------------------------------------------------------------


def estimators(quick: bool, data: Path) -> Figures:
    """`goodspeed_adaptive` with each way to learn acceptance: steady (C = 16, gap in rounds 201 to
    300) and jumping (C = 20, loss of utility)."""
    cells = []
    for name in ESTIMATORS:
        make = functools.partial(
            make_policy, "allocation", "goodspeed_adaptive", {"estimator": name}
        )
        cell: Figures = {"estimator": name}
        cell["steady"] = interval([_steady_gaps(make, 16, s, 1)["300"] for s in SEEDS])[0]
        for dwell, seed in itertools.product((30, 100, 400), SEEDS):
            rates = jumping_rates(200 if quick else 800, CLIENTS, dwell, seed)
            world = GeometricClients(rates, seed)
            known = fair_utility(_mean_goodput(KnowsRates(rates), world))
            loss = 100 * (1 - fair_utility(_mean_goodput(make(), world)) / known)
            cell[f"dwell {dwell}"] = cell.get(f"dwell {dwell}", 0.0) + loss / len(SEEDS)
        cells.append(cell)
    lines = [
        f"[info] estimator {c['estimator']}: steady gap {c['steady']:.4f} nats a client, dwell "
        f"30/100/400: {c['dwell 30']:.2f}/{c['dwell 100']:.2f}/{c['dwell 400']:.2f}% below"
        for c in cells
    ]
    return {"cells": cells, "lines": lines}
