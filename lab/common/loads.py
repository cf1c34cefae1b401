"""Policies against load on the virtual clock: thresholds in hindsight, and the curves of WAIT's
figure 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Effort, Trial
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import SEEDS, FloatArray, ratio
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.sim.capacity import TooShort, capacity, judge_load
from penstock.sim.parallel import HERE, Workers
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload

SEED = 0
_CURVE_SHARE, _CURVE_S = 5, 5.0
"""A point of a curve has so many times fewer arrivals than a run that looks for a capacity, but
where it can arrivals for so many seconds: its second half must not be about how a server fills."""
_BOUND_REQUESTS = 20_000
_CLAIMED_GAIN = (1.2, 1.3)
_BUDGETS = (256, 384, 512, 768, 1024, 2048, 4096)
_CAPS = (128, 256, 320, 512, 1024, 2048)
_GRID_LOAD = 1.05
"""Over the bound: where Sarathi's budget and cap are tuned."""
PROFILES: Mapping[str, Callable[[], StepProfile]] = {
    "paper-linear": lambda: PAPER_LINEAR,
    "a100-llama2-7b": lambda: load_profile("a100-llama2-7b"),
}
BOUND, OFFERED = "fluid bound", "Throughput* (eq. 6)"
SHIPPED = ("vllm_v0", "vllm_v1", "sarathi")
"""The paper's rivals, as they come."""
TUNED = "sarathi, tuned"


@dataclass(frozen=True, eq=False)
class Scene:
    """A machine and what it serves: a workload's name, or recorded lengths."""

    profile: StepProfile
    lengths: str | Workload

    @property
    def name(self) -> str:
        lengths = self.lengths
        return f"{lengths if isinstance(lengths, str) else lengths.name}, {self.profile.name}"

    def requests(self, num: int, rate: float, seed: int = SEED) -> Workload:
        """So many requests with Poisson arrivals; the same ones at any rate."""
        drawn = make_workload(
            self.lengths, num_requests=num, rate=rate, arrivals="poisson", seed=seed
        )
        return drawn.shuffled(seed)

    @cached_property
    def bound(self) -> float:
        """The fluid capacity bound, requests/s."""
        drawn = self.requests(_BOUND_REQUESTS, 1.0)
        return load_bound(self.profile, drawn, self.profile.kv_tokens)

    def num_arrivals(self, effort: Effort) -> int:
        """Of a point of a curve."""
        wanted = max(effort.arrivals // _CURVE_SHARE, int(_CURVE_S * self.bound))
        return min(effort.arrivals, wanted)

    def at(self, num: int) -> Callable[[float], Workload]:
        """So many requests, by their rate."""
        return partial(self.requests, num)


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


@dataclass(frozen=True)
class Point:
    """A run that ends with its last arrival: requests/s offered; output tokens/s, offered and made,
    of the requests that came and that were finished in its second half; and the mean latency in
    seconds of those (None: none was)."""

    policy: str
    rate: float
    seed: int
    offered: float
    tokens_per_s: float
    latency_s: float | None


def setup_of(admission: str, profile: StepProfile = PAPER_LINEAR, **options: Any) -> Setup:
    """A server of the paper: its memory, blocks of one token."""
    return Setup(profile, policy_named(admission, **options))


def options_of(setup: Setup) -> str:
    """A policy's options in words, but for the lengths that the workload has anyhow."""
    return " ".join(
        f"{name}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in setup.admission.options.items()
        if name != "output_lens"
    )


# --- thresholds in hindsight ----------------------------------------------------------------------


def sustains(setup: Setup, at: Callable[[float], Workload], rate: float) -> bool:
    """Whether a server keeps up with a load, by the criterion of `capacity`."""
    return judge_load(setup, at(rate)).sustained


def capacity_of(
    choice: Candidate, scene: Scene, effort: Effort, least: float = 0.0, workers: Workers = HERE
) -> Sustained:
    """Bisection below 1.1 times the expected capacity and above `least`, which is known to be
    sustained, or a quarter of what is expected: less counts as none. A policy that serves in long
    waves may complete too unevenly for a precise answer: then the estimate counts."""
    at = scene.at(effort.arrivals)
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
    scene: Scene,
    effort: Effort,
    tell: Callable[[str], None] = lambda _: None,
    workers: Workers = HERE,
) -> Sustained | None:
    """The largest capacity over thresholds, in hindsight. First comes the choice of which the fluid
    expects most; up to `effort.tries` others follow, the neighbours of the best so far first, and
    only those that sustain more than it are measured. None without choices. `tell` hears which is
    tried."""
    at = scene.at(effort.arrivals)
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
        what = f"{choice.setup.admission.name} on {scene.name}"
        tell(f"{what}: {options_of(choice.setup)} ({so_far})")
        if least and not sustains(choice.setup, at, least):
            continue
        found = capacity_of(choice, scene, effort, least, workers)
        if best is None or found.requests_per_s > best.requests_per_s:
            best = found
            if best.requests_per_s:
                queue = [*_promising_first(neighbours(best.setup)), *queue]
    return best


def _promising_first(choices: Iterable[Candidate]) -> list[Candidate]:
    return sorted(choices, key=lambda choice: -choice.expected)


def tuned_sarathi(scene: Scene, effort: Effort, workers: Workers = HERE) -> Setup:
    """Sarathi with the budget and the cap of a grid that make most tokens in hindsight, at more
    than any server sustains."""
    grid = [
        setup_of("sarathi", scene.profile, token_budget=budget, max_num_seqs=cap)
        for budget, cap in itertools.product(_BUDGETS, _CAPS)
        if budget >= cap
    ]
    num = scene.num_arrivals(effort) // 2
    rate = _GRID_LOAD * scene.bound
    points = workers.map(_measured, [(TUNED, setup, scene, rate, num, SEED) for setup in grid])
    return grid[int(np.argmax([point.tokens_per_s for point in points]))]


# --- curves ---------------------------------------------------------------------------------------

Job = tuple[str, Setup, Scene, float, int, int]


def _measured(job: Job) -> Point:
    return measure(*job)


def measure(
    policy: str, setup: Setup, scene: Scene, rate: float, num_requests: int, seed: int
) -> Point:
    """One point of a curve."""
    workload = scene.requests(num_requests, rate, seed)
    assert workload.arrival_time is not None
    end = float(workload.arrival_time[-1])
    report = run(setup, workload, until=end)
    came = workload.arrival_time > end / 2
    finished = report.completed & (report.finished_at > end / 2)
    latency = (report.finished_at - report.arrived_at)[finished]
    return Point(
        policy,
        rate,
        seed,
        float(workload.output_len[came].sum()) / (end / 2),
        float(report.num_tokens[finished].sum()) / (end / 2),
        float(latency.mean()) if len(latency) else None,
    )


def curves(
    job: Trial, scene: Scene, setups: Callable[[float], Mapping[str, Setup]], name: str
) -> list[Point]:
    """Every policy at every load, which are shares of the bound, for five seeds. setups: by load,
    in requests/s."""
    num = scene.num_arrivals(job.effort)
    seeds = SEEDS if job.effort.seeds > 1 else SEEDS[:2]
    jobs: list[Job] = [
        (policy, setup, scene, share * scene.bound, num, seed)
        for share in job.effort.shares
        for policy, setup in setups(share * scene.bound).items()
        for seed in seeds
    ]
    return [*job.each(measure, jobs, lambda *_: f"{name}: curves of {scene.name}")]


def peaks(points: Iterable[Point]) -> dict[str, FloatArray]:
    """The most output tokens/s of any load, by policy, [seeds]."""
    best: dict[str, dict[int, float]] = {}
    for p in points:
        by_seed = best.setdefault(p.policy, {})
        by_seed[p.seed] = max(by_seed.get(p.seed, 0.0), p.tokens_per_s)
    return {policy: np.array([*by_seed.values()]) for policy, by_seed in best.items()}


def bounds(scenes: Iterable[Scene], points: Sequence[tuple[Scene, Point]]) -> dict[str, float]:
    """The fluid capacity bound in output tokens/s, by scene."""
    return {
        scene.name: scene.bound
        * float(np.mean([p.offered / p.rate for s, p in points if s is scene]))
        for scene in scenes
    }


def gain_verdict(
    where: str, policy: str, found: Mapping[str, FloatArray], bound: float
) -> ClaimVerdict:
    """Whether a policy's peak is 20-30% above the best of `SHIPPED`, by the peaks of all; other
    rivals are told. The oracle gains as much of that as the fluid bound allows, in tokens/s."""
    low, high = _CLAIMED_GAIN
    rival = max(SHIPPED, key=lambda name: float(found[name].mean()))

    def between(mine: FloatArray) -> Measurement:
        # A policy that makes nothing is far behind, not nowhere.
        made = np.maximum(mine, 1e-9)
        gains = {
            name: ratio(made, np.maximum(peak, 1e-9))
            for name, peak in found.items()
            if name != policy
        }
        gain = gains.pop(rival)
        side = "below" if gain.high < low else "above" if gain.low > high else "within"
        others = ", ".join(f"{g.mean - 1:+.0%} over {name}" for name, g in gains.items())
        return Measurement(
            f"{side}: {gain.mean - 1:+.0%} ({gain.low - 1:+.0%} to {gain.high - 1:+.0%}) over "
            f"{rival}; {others}",
            (side == "within",),
        )

    best = found[rival]
    allowed = np.minimum(bound, (low + high) / 2 * best)
    return check(
        f"{where} peaks 20-30% above the best of vLLM and Sarathi",
        between,
        found[policy],
        f"{rival} in its place",
        best,
        ("what the fluid bound allows", allowed),
    )


def write_points(points: Iterable[tuple[Scene, Point]], path: Path) -> None:
    """Points of curves as CSV, with the scene that each belongs to. Raises: OSError."""
    header = ("workload", "profile", "policy", "offered_requests_per_s", "seed")
    write_table(
        path,
        (*header, "offered_tokens_per_s", "output_tokens_per_s", "mean_latency_s"),
        (
            (
                s.name.partition(",")[0],
                s.profile.name,
                *(p.policy, p.rate, p.seed, p.offered, p.tokens_per_s, p.latency_s),
            )
            for s, p in points
        ),
    )


def write_peaks(
    scenes: Iterable[Scene],
    found: Mapping[str, Mapping[str, Setup]],
    best: Mapping[str, Mapping[str, FloatArray]],
    path: Path,
) -> None:
    """Each seed's highest throughput as CSV. found: setups by scene and policy. best: their peaks.
    Raises: OSError."""
    write_table(
        path,
        ("scene", "policy", "options", "seed", "output_tokens_per_s", "bound_requests_per_s"),
        (
            (s.name, p, options_of(setup), seed, float(peak), s.bound)
            for s in scenes
            for p, setup in found[s.name].items()
            for seed, peak in enumerate(best[s.name][p])
        ),
    )


def draw_points(
    points: Sequence[tuple[Scene, Point]], drawn: Sequence[str], path: Path, title: str
) -> None:
    """Throughput above, latency below, a column for each workload: means, and the lowest and
    highest of all seeds. A picture for each profile; the first is `path`, the others have the
    profile in their name. Raises: LabError, OSError."""
    profiles = list(dict.fromkeys(scene.profile.name for scene, _ in points))
    for number, profile in enumerate(profiles):
        scenes = dict.fromkeys(scene for scene, _ in points if scene.profile.name == profile)
        rows = [_plots(s, [p for at, p in points if at is s], drawn) for s in scenes]
        own = path.with_stem(f"{path.stem}_{profile}") if number else path
        draw(own, f"{title}: {profile}", [[upper for upper, _ in rows], [low for _, low in rows]])


def _plots(scene: Scene, mine: Sequence[Point], drawn: Sequence[str]) -> tuple[Plot, Plot]:
    """Throughput and latency."""
    rates = sorted({p.rate for p in mine})
    bound = scene.bound * float(np.mean([p.offered / p.rate for p in mine]))
    offered = [float(np.mean([p.offered for p in mine if p.rate == r])) for r in rates]
    tokens = _lines(mine, drawn, lambda p: p.tokens_per_s)
    latencies = _lines(mine, drawn, lambda p: p.latency_s)
    lines = {OFFERED: (rates, offered), BOUND: (rates, [bound] * len(rates))}
    upper = {"title": scene.name.partition(",")[0], "ylabel": "output tokens/s", "ylim": (0, None)}
    lower = {"xlabel": "offered requests/s", "ylabel": "mean latency, s", "yscale": "log"}
    return (
        Plot(tokens[0] | lines, upper, "o-", {OFFERED: "k:", BOUND: "k--"}, tokens[1]),
        Plot(latencies[0], lower, "o-", {}, latencies[1]),
    )


Lines = dict[str, tuple[Sequence[float], Any]]


def _lines(
    points: Sequence[Point], drawn: Sequence[str], value: Callable[[Point], float | None]
) -> tuple[Lines, Lines]:
    """Means by policy, and bands from the lowest to the highest."""
    lines: Lines = {}
    bands: Lines = {}
    for policy in drawn:
        by_rate: dict[float, list[float]] = {}
        for p in points:
            seen = value(p)
            if p.policy == policy and seen is not None:
                by_rate.setdefault(p.rate, []).append(seen)
        rates = sorted(by_rate)
        if rates:
            lines[policy] = rates, [float(np.mean(by_rate[r])) for r in rates]
            bands[policy] = [min(by_rate[r]) for r in rates], [max(by_rate[r]) for r in rates]
    return lines, bands
