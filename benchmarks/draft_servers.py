"""Draft servers on the virtual clock: tokens a second and fairness by policy and pipeline.

    python -m benchmarks.draft_servers [--quick] [--json]

Draft 12 ms a token and round trip 30 ms, both log-normal over the servers (sd 0.5); verification
30, 100 or 300 ms and 0.2 ms a position; acceptance uniform in 0.3 to 0.9; C = 2.5 N; one endless
request a server. Five seeds, the same for every policy; intervals are of the paired differences of
logarithms, at 95% (Student's t).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from benchmarks.figures import interval
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.fluid.step_profile import StepProfile
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
    ("renewal", "async"),
)
OURS = ("renewal", "async")


@dataclass(frozen=True, slots=True)
class Scene:
    """num_servers servers; a verification takes `verify_s` beside its positions."""

    num_servers: int
    verify_s: float

    @property
    def seconds(self) -> float:
        """Simulated time: about ROUNDS rounds of a barrier."""
        return ROUNDS * (self.verify_s + ROUND_TRIP_S + 4 * DRAFT_S)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Rates are tokens a second."""

    allocation: str
    pipeline: str
    num_servers: int
    verify_ms: float
    seed: int
    tokens_per_s: float
    sum_log_rate: float
    smallest: float
    jain: float


def measure(scene: Scene, allocation: str, pipeline: str, seed: int) -> Figures:
    """One run of a policy."""
    rng = np.random.default_rng(seed)
    num = scene.num_servers
    names = [f"s{i}" for i in range(num)]
    drafting = DRAFT_S * np.exp(rng.normal(0, SPREAD, num))
    trips = ROUND_TRIP_S * np.exp(rng.normal(0, SPREAD, num))
    rates = rng.uniform(0.3, 0.9, num)
    setup = Setup(
        StepProfile(
            "verify", 10**9, (0, 1000), (scene.verify_s, scene.verify_s + 1000 * POSITION_S)
        ),
        allocation=allocation,
        allocation_options={"total": int(2.5 * num)},
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
    report = run(setup, load, until=scene.seconds)
    found = report.num_tokens / report.result.finished_at
    return Figures(
        allocation,
        pipeline,
        num,
        1e3 * scene.verify_s,
        seed,
        float(found.sum()),
        float(np.log(found).sum()),
        float(found.min()),
        float(found.sum() ** 2 / (num * (found**2).sum())),
    )


def pick(runs: Iterable[Figures], scene: Scene, policy: tuple[str, str]) -> list[Figures]:
    """A policy's runs in a scene, in order of their seeds."""
    return [
        r
        for r in runs
        if (r.allocation, r.pipeline) == policy
        and (r.num_servers, r.verify_ms) == (scene.num_servers, 1e3 * scene.verify_s)
    ]


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures]) -> tuple[float, float, float]:
    """Of tokens a second: geometric mean over the seeds, and its interval at 95%."""
    logs = np.log([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)])
    mean, half = interval(logs)
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def verdicts(runs: Sequence[Figures], scenes: Sequence[Scene]) -> list[tuple[bool, str]]:
    """A line for each bar, and whether it is met."""
    lines = []
    for scene in scenes:
        ours = pick(runs, scene, OURS)
        where = f"N = {scene.num_servers}, verification {1e3 * scene.verify_s:.0f} ms"
        if scene.verify_s < 0.1:
            bar = 1.5 if scene.num_servers <= 8 else 2.2
            rival = pick(runs, scene, ("goodspeed", "off"))
            found, low, high = ratio(ours, rival)
            gain = np.mean(
                [a.sum_log_rate - b.sum_log_rate for a, b in zip(ours, rival, strict=True)]
            )
            lines.append(
                (
                    bool(found >= bar and gain >= 0),
                    f"{where}: renewal, async over goodspeed with a barrier: {found:.3f}x "
                    f"({low:.2f} to {high:.2f}; bar {bar}x), sum of logs {gain:+.2f}",
                )
            )
            continue
        rivals = [pick(runs, scene, (name, "off")) for name in ("fixed", "deadline")]
        best = max(rivals, key=lambda r: float(np.mean([x.tokens_per_s for x in r])))
        found, low, high = ratio(ours, best)
        lines.append(
            (
                high >= 1,
                f"{where}: renewal, async over {best[0].allocation} with a barrier: {found:.3f}x "
                f"({low:.3f} to {high:.3f}; bar: not below 1 beyond the interval)",
            )
        )
    return lines


def show(runs: Sequence[Figures], scenes: Sequence[Scene]) -> None:
    """A table for each scene: means over the seeds."""
    console = Console()
    for scene in scenes:
        table = Table(title=f"N = {scene.num_servers}, verification {1e3 * scene.verify_s:.0f} ms")
        table.add_column("allocation, pipeline")
        for column in ("tokens/s", "sum of logs", "smallest", "Jain"):
            table.add_column(column, justify="right")
        for policy in POLICIES:
            own = pick(runs, scene, policy)
            means = [
                float(np.mean([getattr(r, key) for r in own]))
                for key in ("tokens_per_s", "sum_log_rate", "smallest", "jain")
            ]
            table.add_row(", ".join(policy), *(f"{m:.4g}" for m in means))
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one seed, N = 8")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    sizes = (8,) if options.quick else (8, 32)
    scenes = [Scene(n, v) for n in sizes for v in (0.03, 0.1, 0.3)]
    seeds = range(1 if options.quick else 5)
    jobs = [(s, *p, seed) for s in scenes for p in POLICIES for seed in seeds]
    console = Console(file=sys.stderr)
    runs = [measure(*job) for job in track(jobs, "simulating", console=console)]
    lines = verdicts(runs, scenes)
    if options.json:
        print(
            json.dumps(
                {
                    "runs": [asdict(r) for r in runs],
                    "verdict": {"met": all(m for m, _ in lines), "lines": [t for _, t in lines]},
                }
            )
        )
    else:
        show(runs, scenes)
        for met, text in lines:
            print(f"{'met   ' if met else 'MISSED'}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
