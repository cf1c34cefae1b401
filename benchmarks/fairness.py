"""Fair draft allocation: the solver, steady and drifting acceptance, recorded acceptance.

    python -m benchmarks.fairness [--quick] [--json] [--data DIR] [PART...]

Parts: solver, stationary, drift, recorded, seconds, shares; without one, all. Eight
clients unless said, the real policy objects; five seeds fixed beforehand, intervals of 95% by
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

from penstock.core.policies.allocation import AllocationPolicy
from penstock.core.policies.registry import make_policy
from penstock.fluid.fair import geometric_lengths
from penstock.fluid.fair_path import expected_goodput, fair_optimum, fair_utility
from penstock.lab.bench import DATA, Results, parser, save
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.oracles import BestFilter, Clairvoyant, KnowsRates
from penstock.lab.rounds import (
    BarrierTimes,
    FloatArray,
    GeometricClients,
    RecordedClient,
    jumping_rates,
    play,
)
from penstock.lab.statistics import SEEDS, interval, jain
from penstock.sim.acceptance import read_records

CLIENTS = 8
Figures = dict[str, Any]
Part = tuple[Figures, list[ClaimVerdict]]


def spread(cell: Figures, key: str, values: Sequence[float]) -> None:
    """Note a mean, and half the width of its interval."""
    found = interval(values)
    cell[key], cell[f"{key} ±"] = found.mean, found.half


def how_fair(rates: Sequence[FloatArray]) -> Figures:
    """Means over runs of what the smallest client and all have, and of Jain's index."""
    return {
        "smallest": float(np.mean([r.min() for r in rates])),
        "total": float(np.mean([r.sum() for r in rates])),
        "jain": float(np.mean([jain(r) for r in rates])),
    }


def named(name: str, options: dict[str, Any]) -> Callable[..., AllocationPolicy]:
    """A policy, whatever it is asked with; words behind its name do not count."""
    return lambda *_: make_policy("allocation", name.partition(" ")[0], options)


# --- solver ---------------------------------------------------------------------------------------


def solver(quick: bool, data: Path) -> Part:
    """Against every possible allocation, and the clock."""
    mismatches = sum(_mismatch(case) for case in range(1000))
    times = {n: _solver_ms(n, 5 if quick else 40) for n in (8, 1000, 100_000)}
    verdicts = [bar("solver", f"{mismatches} mismatches in 1,000 random cases", not mismatches)]
    for most, (n, ms) in zip((0.02, 0.1, 10.0), times.items(), strict=True):
        verdicts.append(bar("solver", f"{ms:.4f} ms at N = {n:,} (bar {most:g})", ms <= most))
    return {"mismatches": mismatches, "milliseconds": times}, verdicts


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


# --- steady acceptance ----------------------------------------------------------------------------

PRIORS = (0.1, 0.3, 0.5, 0.7, 0.9)
GAPS = {"30": 0.01, "300": 0.001, "mean 1-30": 0.01, "mean 1-300": 0.001}
"""Nats a client that may be missing, by what is looked at."""
EMPTY: dict[str, dict[str, Any]] = {
    "goodspeed_adaptive": {},
    "goodspeed": {},
    "goodspeed hold": {"on_empty": "hold"},
    "goodspeed hold, floor 0.2": {"on_empty": "hold", "least_acceptance": 0.2},
    "goodspeed hold, decided": {"on_empty": "hold", "evidence": "decided"},
    "goodspeed zero": {"on_empty": "zero"},
}
"""What rounds without a draft are to `goodspeed`, and what it needs then."""


def stationary(quick: bool, data: Path) -> Part:
    """U* − U of the expected goodput, per client, from several priors."""
    figures: Figures = {"cells": []}
    worst: dict[str, dict[str, float]] = {}
    for name, budget, prior in itertools.product(
        ("goodspeed_adaptive", "goodspeed"), (16, 20), PRIORS
    ):
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
    figures["undrafted"] = {name: _undrafted(name, options) for name, options in EMPTY.items()}
    return figures, [
        *_steady_verdicts(worst["goodspeed_adaptive"], worst["goodspeed"]),
        *(
            bar(
                f"stationary, {name}",
                f"{low:.0%} to {high:.0%} of the rounds without a draft, of the client that has "
                "most of them",
                None,
            )
            for name, (low, high) in figures["undrafted"].items()
        ),
    ]


def _undrafted(name: str, options: dict[str, Any]) -> tuple[float, float]:
    """Over the seeds, least and most of: the share of rounds without a draft of the client that has
    most of them, among those that x* gives drafts to in every round. C = 16."""
    found = []
    for seed in SEEDS:
        rates = _steady_rates(seed)
        world = GeometricClients(np.tile(rates, (300, 1)), seed)
        played = play(named(name, options)(), world.clients(), 16, 300)
        without = (played.lengths == 0).mean(axis=0)
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
        **{name: named(name, options) for name, options in EMPTY.items()},
        "clairvoyant": Clairvoyant,
    }
    cells: list[Figures] = []
    utility: dict[str, list[float]] = {}
    for name, make in policies.items():
        rates, undrafted = [], []
        for seed in SEEDS:
            clients = [RecordedClient(rows[i // 2], (seed, i)) for i in range(CLIENTS)]
            played = play(make(clients), clients, budget, rounds)
            rates.append(played.tokens.mean(axis=0))
            # The first half of the clients look up.
            undrafted.append((played.lengths[:, : CLIENTS // 2] == 0).mean(axis=0))
        utility[name] = [fair_utility(r) for r in rates]
        shares = [float(f(undrafted)) for f in (np.min, np.mean, np.max)]
        cells.append(
            {"policy": name, "sum_log": interval(utility[name]).mean, **how_fair(rates)}
            | {"clients": np.mean(rates, axis=0).round(3).tolist(), "look_up_without_draft": shares}
        )
    for cell in cells:
        gain = interval(np.subtract(utility[cell["policy"]], utility["goodspeed"]))
        cell["against_goodspeed"] = gain.mean, gain.half
    return {"cells": cells}, _recorded_verdicts({c["policy"]: c for c in cells})


def _recorded_verdicts(cells: dict[str, Figures]) -> list[ClaimVerdict]:
    gains = {name: c["against_goodspeed"] for name, c in cells.items()}
    mean, half = gains["goodspeed_adaptive"]
    beside = ", ".join(
        "{} {:+.3f} ± {:.3f}".format(n, *gains[n]) for n in ("fixed, rotating", "clairvoyant")
    )
    text = f"Σ log {mean:+.3f} ± {half:.3f} against goodspeed (beside it: {beside})"
    form = (
        "Σ log {sum_log:.3f}; look-up clients have no draft in {look_up_without_draft[0]:.0%} to "
        "{look_up_without_draft[2]:.0%} of the rounds, {look_up_without_draft[1]:.0%} in the mean"
    )
    return [
        bar("recorded", text, mean > half),
        *(bar(f"recorded, {name}", form.format_map(c), None) for name, c in cells.items()),
    ]


# --- tokens per second ----------------------------------------------------------------------------

TIMED = ("fixed", "random", "goodspeed", "goodspeed_adaptive", "deadline")
TIMES = (
    (8, 0.03, 0.012),
    (8, 0.1, 0.012),
    (8, 0.3, 0.012),
    (8, 0.03, 0.05),
    (32, 0.03, 0.012),
    (32, 0.03, 0.05),
)
"""Clients, seconds of a verification, and of a draft token."""


def seconds(quick: bool, data: Path) -> Part:
    """Rounds that wait for the slowest draft: 12 ms a draft token, 30 ms round trips, verification
    in 30 + 0.2 n ms; devices and links log-normal (sd 0.5), acceptance U(0.3, 0.9), C = 2.5 N.
    And slower ones: verification in 100 and 300 ms, drafting in 50 ms a token."""
    rounds = 200 if quick else 1000
    cells = []
    for clients, verify, each in TIMES:
        fixed: list[FloatArray] = []
        for name in TIMED:
            played = [_play_timed(name, clients, verify, each, seed, rounds) for seed in SEEDS]
            # Σ log a second and a round, [seeds, 2].
            utility = np.array([[fair_utility(r) for r in pair] for pair in played])
            fixed = fixed or list(utility)
            per_second, per_round = (utility - fixed).T
            cell: Figures = {"N": clients, "verify": verify, "draft": each, "policy": name}
            spread(cell, "sum_log", per_second)
            cell |= {"per_round": interval(per_round).mean, "behind": int((per_second < 0).sum())}
            cells.append(cell | how_fair([second for second, _ in played]))
    form = (
        "{total:.0f} tokens/s, Σ log {sum_log:+.2f} ± {sum_log ±:.2f} against fixed "
        "({per_round:+.2f} a round; behind in {behind} of 5 seeds), smallest {smallest:.1f}, Jain "
        "{jain:.3f}"
    )
    return {"cells": cells}, [
        bar(
            f"N = {c['N']}, verification {1000 * c['verify']:.0f} ms, drafting "
            f"{1000 * c['draft']:.0f} ms a token: {c['policy']}",
            form.format_map(c),
            None,
        )
        for c in cells
    ]


def _play_timed(
    name: str, clients: int, verify: float, each: float, seed: int, rounds: int
) -> tuple[FloatArray, FloatArray]:
    """Tokens of each client a second, and a round."""
    rng = np.random.default_rng((3, seed))
    world = GeometricClients(np.tile(rng.uniform(0.3, 0.9, clients), (rounds, 1)), seed)
    spread_out = np.exp(0.5 * rng.standard_normal((2, clients)))
    times = BarrierTimes(0.03 * spread_out[0], each * spread_out[1], verify, 0.0002)
    budget = round(2.5 * clients)
    policy = make_policy("allocation", name, {"total": budget})
    played = play(policy, world.clients(), budget, rounds, times=times)
    return played.per_second(), played.tokens.mean(axis=0)


# --- proportional fairness ------------------------------------------------------------------------


def shares(quick: bool, data: Path) -> Part:
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
            **how_fair(found),
            "sum_log": float(np.mean(list(map(fair_utility, found)))),
        }
        for name, found in optima.items()
    ]
    form = (
        "smallest client {smallest:.2f} tokens a round, total {total:.2f}, Jain {jain:.3f}, "
        "Σ log {sum_log:.2f}"
    )
    return {"cells": cells}, [bar(c["utility"], form.format_map(c), None) for c in cells]


# --- command --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool, Path], Part]] = {
    f.__name__: f for f in (solver, stationary, drift, recorded, seconds, shares)
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
