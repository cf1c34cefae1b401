"""Policies against load on the virtual clock: capacities and curves of WAIT's figure 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Effort
from penstock.lab.report import Plot, draw, write_table
from penstock.sim.capacity import TooShort, capacity, judge_load
from penstock.sim.parallel import HERE, Workers
from penstock.sim.planner import load_bound
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload

SEED = 0
_CLAIMED_GAIN = 1.2
UNCAPPED = {"token_budget": 4096, "max_num_seqs": 2048}
"""Sarathi with limits that do not bind where a step costs the same for any token."""


@dataclass(frozen=True)
class Candidate:
    """A policy with options, and a capacity (requests/s) that the fluid expects of it."""

    setup: Setup
    expected: float


@dataclass(frozen=True)
class Sustained:
    """The largest load in requests/s that a server sustains; 0 if none was found."""

    setup: Setup
    requests_per_s: float

    def over(self, rival: Sustained) -> float:
        """Its capacity over another's; NaN, which no claim agrees with, where that has none."""
        if not rival.requests_per_s:
            return math.nan
        return self.requests_per_s / rival.requests_per_s


@dataclass(frozen=True)
class Point:
    """A run that ends with its last arrival: requests/s offered, output tokens/s of the requests
    that were finished by then, and their mean latency in seconds (None: none was)."""

    policy: str
    rate: float
    tokens_per_s: float
    latency_s: float | None


def gain_verdict(claim: str, mine: Sustained, rivals: Mapping[str, Sustained]) -> ClaimVerdict:
    """Whether a policy carries a fifth more than each rival. The control is the best rival."""

    def ahead(policy: Sustained) -> Measurement:
        gains = {rival: policy.over(s) for rival, s in rivals.items()}
        parts = ", ".join(f"{gain - 1:+.0%} over {rival}" for rival, gain in gains.items())
        return Measurement(
            f"{policy.requests_per_s:.4g} requests/s, {parts}",
            tuple(gain >= _CLAIMED_GAIN for gain in gains.values()),
        )

    best = max(rivals, key=lambda rival: rivals[rival].requests_per_s)
    return check(claim, ahead, mine, f"{best} in its place", rivals[best])


def setup_of(admission: str, **options: Any) -> Setup:
    """A server of the paper: its profile and memory, blocks of one token."""
    return Setup(PAPER_LINEAR, PolicyConfig.of(admission, **options))


def options_of(setup: Setup) -> str:
    """A policy's options in words, but for the lengths that the workload has anyhow."""
    return " ".join(
        f"{name}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in setup.admission.options.items()
        if name != "output_lens"
    )


def requests_at(name: str, num_requests: int) -> Callable[[float], Workload]:
    """The same requests at any rate."""
    return partial(_requests, name, num_requests)


def _requests(name: str, num_requests: int, rate: float) -> Workload:
    return make_workload(name, num_requests=num_requests, rate=rate, seed=SEED)


def bound_of(name: str, num_requests: int) -> float:
    """The fluid capacity bound of a named workload, requests/s."""
    drawn = requests_at(name, num_requests)(1.0)
    return load_bound(PAPER_LINEAR, drawn, PAPER_LINEAR.kv_tokens)


def sustains(setup: Setup, at: Callable[[float], Workload], rate: float) -> bool:
    """Whether a server keeps up with a load, by the criterion of `capacity`."""
    return judge_load(setup, at(rate)).sustained


def capacity_of(
    choice: Candidate, name: str, effort: Effort, least: float = 0.0, workers: Workers = HERE
) -> Sustained:
    """Bisection below 1.1 times the expected capacity and above `least`, which is known to be
    sustained, or a quarter of what is expected: less counts as none. A policy that serves in long
    waves may complete too unevenly for a precise answer: then the estimate counts."""
    at = requests_at(name, effort.arrivals)
    low, high = max(0.25 * choice.expected, least), max(1.1 * choice.expected, 1.05 * least)
    if low > least and not sustains(choice.setup, at, low):
        return Sustained(choice.setup, 0.0)
    try:
        found = capacity(choice.setup, at, low, high, tolerance=effort.tolerance, workers=workers)
    except TooShort as error:
        if error.estimate is None:
            raise
        found = error.estimate
    return Sustained(choice.setup, found.requests_per_s)


def best_of(
    choices: Iterable[Candidate],
    neighbours: Callable[[Setup], Iterable[Candidate]],
    name: str,
    effort: Effort,
    tell: Callable[[str], None] = lambda _: None,
    workers: Workers = HERE,
) -> Sustained | None:
    """The largest capacity over thresholds, in hindsight. First comes the choice of which the fluid
    expects most; up to `effort.tries` others follow, the neighbours of the best so far first, and
    only those that sustain more than it are measured. None without choices. `tell` hears which is
    tried."""
    at = requests_at(name, effort.arrivals)
    best: Sustained | None = None
    tried: list[PolicyConfig] = []
    queue = _promising_first(choices)
    while queue and len(tried) <= effort.tries:
        choice = queue.pop(0)
        least = best.requests_per_s * (1 + effort.tolerance) if best else 0.0
        if choice.setup.admission in tried or choice.expected < least:
            continue
        tried.append(choice.setup.admission)
        so_far = f"best so far {best.requests_per_s:.4g} requests/s" if best else "the first"
        tell(f"{choice.setup.admission.name} on {name}: {options_of(choice.setup)} ({so_far})")
        if least and not sustains(choice.setup, at, least):
            continue
        found = capacity_of(choice, name, effort, least, workers)
        if best is None or found.requests_per_s > best.requests_per_s:
            best = found
            if best.requests_per_s:
                queue = [*_promising_first(neighbours(best.setup)), *queue]
    return best


def _promising_first(choices: Iterable[Candidate]) -> list[Candidate]:
    return sorted(choices, key=lambda choice: -choice.expected)


def measure(policy: str, setup: Setup, name: str, rate: float, num_requests: int) -> Point:
    """One point of a curve."""
    workload = requests_at(name, num_requests)(rate)
    assert workload.arrival_time is not None
    end = float(workload.arrival_time[-1])
    report = run(setup, workload, until=end)
    latency = report.latency
    mean = float(latency.mean()) if len(latency) else None
    return Point(policy, rate, float(report.num_tokens[report.completed].sum()) / end, mean)


def write_points(points: Sequence[tuple[str, Point]], path: Path) -> None:
    """Points of curves as CSV, with the workload that each belongs to. Raises: OSError."""
    write_table(
        path,
        ("workload", "policy", "offered_requests_per_s", "output_tokens_per_s", "mean_latency_s"),
        ((w, p.policy, p.rate, p.tokens_per_s, p.latency_s) for w, p in points),
    )


def draw_points(points: Sequence[tuple[str, Point]], path: Path, title: str) -> None:
    """Throughput above, latency below, a column for each workload. Raises: LabError, OSError."""
    upper, lower = [], []
    for workload in dict.fromkeys(w for w, _ in points):
        tokens, latencies = {}, {}
        for policy in dict.fromkeys(p.policy for w, p in points if w == workload):
            curve = [p for w, p in points if (w, p.policy) == (workload, policy)]
            tokens[policy] = [p.rate for p in curve], [p.tokens_per_s for p in curve]
            seen = [p for p in curve if p.latency_s is not None]
            latencies[policy] = [p.rate for p in seen], [p.latency_s for p in seen]
        upper.append(Plot(tokens, {"title": workload, "ylabel": "output tokens a second"}, "o-"))
        axes = {"xlabel": "offered requests a second", "ylabel": "mean latency, s"}
        lower.append(Plot(latencies, {**axes, "yscale": "log"}, "o-"))
    draw(path, title, [upper, lower])
