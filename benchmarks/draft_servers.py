"""Draft servers on the virtual clock: tokens a second and fairness by policy and pipeline.

    python -m benchmarks.draft_servers [--quick] [--json]

Draft 12 ms a token and round trip 30 ms, both log-normal over the servers (sd 0.5); verification
30, 100 or 300 ms and 0.2 ms a position; acceptance uniform in 0.3 to 0.9; C = 2.5 N; one endless
request a server. Five seeds, the same for every policy; intervals are of the paired differences of
logarithms, at 95% (Student's t).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import StepProfile
from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.statistics import SEEDS, jain, ratio
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.links import DraftServer, Link
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload

DRAFT_S, ROUND_TRIP_S, POSITION_S, SPREAD = 0.012, 0.030, 2e-4, 0.5
ROUNDS = 400
BLOCK = 4096

POLICIES = (
    ("fixed", "off"),
    ("random", "off"),
    ("goodspeed", "off"),
    ("goodspeed_adaptive", "off"),
    ("deadline", "off"),
    ("fixed", "async"),
    ("deadline", "async"),
)
OURS = ("deadline", "async")
Runs = Sequence[dict[str, Any]]


class Network(NamedTuple):
    """num_servers servers; a verification takes `verify_s` beside its positions."""

    num_servers: int
    verify_s: float

    @property
    def seconds(self) -> float:
        """Simulated time: about ROUNDS rounds of a barrier."""
        return ROUNDS * (self.verify_s + ROUND_TRIP_S + 4 * DRAFT_S)

    @property
    def title(self) -> str:
        return f"N = {self.num_servers}, verification {1e3 * self.verify_s:.0f} ms"


def measure(network: Network, policy: tuple[str, str], seed: int) -> dict[str, Any]:
    """One run of an allocation with a pipeline. Rates are tokens a second."""
    rng = np.random.default_rng(seed)
    num, verify_s = network
    names = [f"s{i}" for i in range(num)]
    drafting = DRAFT_S * np.exp(rng.normal(0, SPREAD, num))
    trips = ROUND_TRIP_S * np.exp(rng.normal(0, SPREAD, num))
    rates = rng.uniform(0.3, 0.9, num)
    allocation, pipeline = policy
    setup = Setup(
        StepProfile("verify", 10**9, (0, 1000), (verify_s, verify_s + 1000 * POSITION_S)),
        allocation=PolicyConfig.of(allocation, total=int(2.5 * num)),
        acceptance=GeometricAcceptance(dict(zip(names, rates, strict=True)), seed),
        draft_servers=tuple(
            DraftServer(name, float(draft), Link(float(trip) / 2), tenant=name)
            for name, draft, trip in zip(names, drafting, trips, strict=True)
        ),
        pipeline=pipeline,
        block_size=BLOCK,
        kv_tokens=BLOCK * 300 * num,
        seed=seed,
    )
    endless = np.full(num, 10**6)
    load = Workload("endless", np.full(num, 8), endless, np.zeros(num), np.array(names))
    report = run(setup, load, until=network.seconds)
    found = report.num_tokens / report.result.finished_at
    return {
        "allocation": allocation,
        "pipeline": pipeline,
        "num_servers": num,
        "verify_ms": 1e3 * verify_s,
        "seed": seed,
        "tokens_per_s": float(found.sum()),
        "sum_log_rate": float(np.log(found).sum()),
        "smallest": float(found.min()),
        "jain": jain(found),
    }


def pick(runs: Runs, network: Network, policy: tuple[str, str], figure: str) -> list[float]:
    """A figure of a policy's runs, in order of their seeds."""
    wanted = (*policy, network.num_servers, 1e3 * network.verify_s)
    keys = ("allocation", "pipeline", "num_servers", "verify_ms")
    return [r[figure] for r in runs if tuple(r[k] for k in keys) == wanted]


def verdicts(runs: Runs, networks: Sequence[Network]) -> list[ClaimVerdict]:
    """Where a verification is short: well ahead of a barrier. Elsewhere: not behind the best
    one."""
    told = []
    for network in networks:
        rates = {p: pick(runs, network, p, "tokens_per_s") for p in POLICIES}
        if network.verify_s < 0.1:
            rival = ("goodspeed", "off")
            wanted = 1.5 if network.num_servers <= 8 else 2.2
            logs = (pick(runs, network, p, "sum_log_rate") for p in (OURS, rival))
            gain = float(np.subtract(*logs).mean())
            found = ratio(rates[OURS], rates[rival])
            reached = found.mean >= wanted and gain >= 0
            digits, what = 2, f"bar {wanted}x), sum of logs {gain:+.2f}"
        else:
            barriers = (("fixed", "off"), ("deadline", "off"))
            rival = max(barriers, key=lambda p: float(np.mean(rates[p])))
            found = ratio(rates[OURS], rates[rival])
            # Of a single seed nothing can be said.
            reached = found.high >= 1 if len(rates[OURS]) > 1 else None
            digits, what = 3, "bar: not below 1 beyond the interval)"
        span = f"{found.low:.{digits}f} to {found.high:.{digits}f}"
        text = f"deadline, async over {rival[0]} with a barrier: {found.mean:.3f}x ({span}; {what}"
        told.append(bar(network.title, text, reached))
    return told


def means(runs: Runs, network: Network) -> ResultTable:
    """A table of a network: means over the seeds."""
    figures = ("tokens_per_s", "sum_log_rate", "smallest", "jain")
    rows = [
        {"policy": ", ".join(p)} | {f: np.mean(pick(runs, network, p, f)) for f in figures}
        for p in POLICIES
    ]
    heads = ("tokens/s", "sum of logs", "smallest", "Jain")
    columns = {h: f"{{{f}:.4g}}" for h, f in zip(heads, figures, strict=True)}
    return table(network.title, rows, {"allocation, pipeline": "{policy}", **columns})


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser(__doc__, quick="one seed, N = 8").parse_args(arguments)
    sizes, seeds = ((8,), SEEDS[:1]) if args.quick else ((8, 32), SEEDS)
    networks = list(itertools.starmap(Network, itertools.product(sizes, (0.03, 0.1, 0.3))))
    jobs = list(itertools.product(networks, POLICIES, seeds))
    runs = [measure(*job) for job in track(jobs, "simulating", console=Console(file=sys.stderr))]
    tables = [means(runs, network) for network in networks]
    return tell(args, Results(runs, verdicts(runs, networks), tables))


if __name__ == "__main__":
    sys.exit(main())
