"""How near does the simulator come to the live engine at loads that it was not calibrated on?

    python -m lab.bench.simulator_vs_engine [--quick] [--json] [--out DIR]

Poisson arrivals at the bundled target, in this process, without speculation. The steps of ONE load
under ONE admission policy give a step-time profile; three other loads under every policy are then
simulated with it, with the same arrivals and lengths. The loads take turns, a stretch each.

The clock is this process's CPU time, for arrivals as for steps: while another program holds the
core it stands still. "CPU" in the table is CPU time over wall time. `--out` keeps the recorded
steps (steps.csv, for `penstock profile fit`) and the profile.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.common.claims import bar
from lab.common.live import play_arrivals
from lab.common.results import Results, parser, table, tell
from lab.common.step_recorder import StepRecorder
from penstock.config import EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.loop import Loop
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.calibrate import calibrate
from penstock.engine.executor import RunnerExecutor
from penstock.engine.tokenizer import load_tokenizer
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.serving.bench import BenchPrompt, cut_prompts
from penstock.serving.offline import complete
from penstock.sim.arrivals import ArrivalProcess
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import Fit, fit_profile, save_profile
from penstock.sim.workloads import Workload
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

FloatArray = npt.NDArray[np.float64]
StepList = list[tuple[StepWork, float]]

CALIBRATION = ("vllm_v1", 0.6)
ADMISSIONS = ("vllm_v1", "fluid_guided")
LOADS = (0.3, 0.5, 0.8)
KV_TOKENS = 65_536
BLOCK_SIZE = 16
MIN_CPU_SHARE = 0.97


# --- what is asked --------------------------------------------------------------------------------


def draw_workload(rate: float, seconds: float, seed: int) -> Workload:
    """About `seconds` of Poisson arrivals, with log-normal lengths: prompts of 16 to 512 tokens,
    107 in the mean, outputs of 4 to 256, 58 in the mean."""
    rng = np.random.default_rng(seed)
    num = max(2, round(rate * seconds))

    def lengths(median: float, sigma: float, low: int, high: int) -> npt.NDArray[np.int64]:
        drawn = median * np.exp(sigma * rng.standard_normal(num))
        return np.clip(drawn.round().astype(np.int64), low, high)

    prompt_len, output_len = lengths(80, 0.8, 16, 512), lengths(45, 0.8, 4, 256)
    return Workload("drawn", prompt_len, output_len, ArrivalProcess().times(num, rate, rng))


def requests_of(workload: Workload, prompts: Sequence[BenchPrompt], name: str) -> list[Request]:
    """The workload's requests with text in them, greedy, which end at their length and not before.
    Arrival times are relative."""
    assert workload.arrival_time is not None
    rows = zip(workload.prompt_len, workload.output_len, workload.arrival_time, strict=True)
    requests = []
    for i, (prompt_len, output_len, arrival_time) in enumerate(rows):
        (prompt,) = cut_prompts([prompts[i % len(prompts)]], int(prompt_len))
        requests.append(
            Request(
                id=f"{name}-{i}",
                prompt_len=int(prompt_len),
                max_tokens=int(output_len),
                arrival_time=float(arrival_time),
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(temperature=0.0),
                drafter=NO_DRAFTER,
            )
        )
    return requests


def mixed_prompts(target: Path) -> list[BenchPrompt]:
    """The bundled prompts, domains in turn."""
    tokenizer = load_tokenizer(target)
    by_domain = [load_prompts(domain) for domain in DOMAINS]
    return [
        BenchPrompt(tuple(tokenizer.encode(p.prompt)), p.domain)
        for one_of_each in zip(*by_domain, strict=False)
        for p in one_of_each
    ]


# --- what comes of it -----------------------------------------------------------------------------


@dataclass
class Latencies:
    """What became of the requests of some stretches of one load; times in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add(
        self, arrived: FloatArray, first: FloatArray, finished: FloatArray, tokens: FloatArray
    ) -> None:
        """Take in one stretch, which began at 0; arrays by request."""
        several = tokens > 1
        self.ttft += (first - arrived).tolist()
        self.tpot += ((finished - first)[several] / (tokens[several] - 1)).tolist()
        self.tokens += int(tokens.sum())
        self.seconds += float(finished.max())

    def figures(self) -> dict[str, float]:
        return {
            "ttft_s": float(np.mean(self.ttft)),
            "tpot_s": float(np.mean(self.tpot)),
            "throughput_tokens_per_s": self.tokens / self.seconds,
        }


def make_scheduler(
    admission: str, belief: StepProfile, max_model_len: int, counted: bool
) -> Scheduler:
    """A new scheduler, on either side. `belief`: the step times that its policies start from, which
    are what the engine measured when it was loaded."""
    return Scheduler(
        BlockPool(KV_TOKENS // BLOCK_SIZE, BLOCK_SIZE),
        [],
        admission=make_policy("admission", admission),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "priced"),
        max_model_len=max_model_len,
        learn=Estimators(belief),
        groups_decodes=counted,
    )


class CpuClock:
    """Seconds of CPU time of this process, all threads together."""

    def now(self) -> float:
        return time.process_time()


class LiveServer:
    """An engine in this process. Every stretch gets a new scheduler on it."""

    def __init__(self, target: Path, dtype: str) -> None:
        config = EngineConfig(
            target=target,
            dtype=dtype,
            num_threads=1,
            kv_tokens=KV_TOKENS,
            block_size=BLOCK_SIZE,
            # Requests of which only lengths are known share nothing.
            prefix_caching=False,
        )
        self.engine: Engine = load_engine(config)
        self.clock = CpuClock()
        self.executor = RunnerExecutor(
            self.engine.executor.target, (), self.clock, self.engine.max_model_len
        )
        estimators = Estimators()
        calibrate(self.executor, estimators, self.clock)
        self.belief = estimators.times.profile
        self.recorder = StepRecorder(self.clock)

    def rough_capacity(self, prompts: Sequence[BenchPrompt], num: int) -> float:
        """Requests a second with 48 of them at a time."""
        requests = requests_of(draw_workload(1.0, num, seed=0), prompts, "capacity")
        started_at = self.clock.now()
        complete(self._loop("vllm_v1"), requests, concurrency=48)
        return num / (self.clock.now() - started_at)

    def _loop(self, admission: str) -> Loop:
        scheduler = make_scheduler(admission, self.belief, self.engine.max_model_len, counted=False)
        return Loop(scheduler, self.executor, self.clock, (self.recorder,))

    def play(self, requests: Sequence[Request], admission: str, outcome: Latencies) -> None:
        """Let the requests arrive at their times, and wait for the last of them."""
        played = play_arrivals(self._loop(admission), self.clock, requests)
        outcome.add(np.array([r.arrival_time for r in requests]), *played)


def play_simulated(
    workload: Workload, profile: StepProfile, scheduler: Scheduler, outcome: Latencies
) -> None:
    """The same requests on the virtual clock, of which only lengths are known."""
    assert workload.arrival_time is not None
    rows = zip(
        workload.prompt_len.tolist(),
        workload.output_len.tolist(),
        workload.arrival_time.tolist(),
        strict=True,
    )
    requests = [Request(str(i), *row, drafter=NO_DRAFTER) for i, row in enumerate(rows)]
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, ProfiledStepTimes(profile))
    records = list(simulate(scheduler, executor, clock, requests).records.values())
    outcome.add(
        workload.arrival_time,
        np.array([r.first_token_time for r in records], dtype=float),
        np.array([r.finish_time for r in records], dtype=float),
        np.array([r.num_tokens for r in records], dtype=float),
    )


# --- the comparison -------------------------------------------------------------------------------


@dataclass
class LoadCell:
    """One load under one policy, live and simulated. `step_seconds`: what the live steps took
    together; `predicted_step_seconds`: what the profile says of the very same steps."""

    admission: str
    load: float
    rate: float
    workloads: list[Workload]
    live: Latencies = field(default_factory=Latencies)
    simulated: Latencies = field(default_factory=Latencies)
    step_seconds: float = 0.0
    predicted_step_seconds: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    steps: StepList = field(default_factory=list)

    def play(self, server: LiveServer, stretch: int, prompts: Sequence[BenchPrompt]) -> None:
        name = f"{self.load}-{stretch}"
        requests = requests_of(self.workloads[stretch], prompts, name)
        server.recorder.steps.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        server.play(requests, self.admission, self.live)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        self.steps += server.recorder.steps

    def predict(self, profile: StepProfile, server: LiveServer) -> None:
        for workload in self.workloads:
            length = server.engine.max_model_len
            scheduler = make_scheduler(self.admission, server.belief, length, counted=True)
            play_simulated(workload, profile, scheduler, self.simulated)
        self.step_seconds = sum(seconds for _, seconds in self.steps)
        self.predicted_step_seconds = sum(profile.seconds(work) for work, _ in self.steps)

    def report(self) -> dict[str, Any]:
        live, simulated = self.live.figures(), self.simulated.figures()
        return {
            "admission": self.admission,
            "load": self.load,
            "requests_per_s": self.rate,
            "requests": len(self.live.ttft),
            "engine": live,
            "simulator": simulated,
            "ratio": {key: simulated[key] / live[key] for key in live},
            "step_seconds_ratio": self.predicted_step_seconds / self.step_seconds,
            "busy_share": self.step_seconds / self.cpu_s,
            "cpu_share": self.cpu_s / self.wall_s,
        }


def fit(cell: LoadCell, server: LiveServer, folder: Path) -> Fit:
    """Fit and write a profile of the steps of one load."""
    server.recorder.steps = cell.steps
    server.recorder.write(folder / "steps.csv")
    fitted = fit_profile(folder / "steps.csv", name="zoo-large", kv_tokens=KV_TOKENS)
    engine = server.engine
    origin = (
        f"fitted to {len(cell.steps)} whole steps of {engine.target}, {engine.backend} "
        f"{engine.dtype}, one thread, under {cell.admission} at {cell.rate:.1f} requests/s "
        f"with {cell.cpu_s / cell.wall_s:.0%} of a core"
    )
    fitted = replace(fitted, profile=replace(fitted.profile, origin=origin))
    save_profile(fitted.profile, folder / "zoo-large.json")
    return fitted


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    target = model_path(args.target)
    prompts = mixed_prompts(target)
    server = LiveServer(target, args.dtype)
    gc.collect()
    gc.freeze()  # as the engine process does
    capacity = server.rough_capacity(prompts, 64 if args.quick else 256)
    say(f"capacity about {capacity:.1f} requests a second")
    stretches, seconds = (1, 8.0) if args.quick else (args.stretches, args.seconds)
    cells = []
    for admission, load in (CALIBRATION, *itertools.product(ADMISSIONS, LOADS)):
        rate = load * capacity
        # A load has the same requests under every policy.
        seeds = [round(1000 * load) + s for s in range(stretches)]
        workloads = [draw_workload(rate, seconds, seed) for seed in seeds]
        cells.append(LoadCell(admission, load, rate, workloads))
    for stretch, cell in itertools.product(range(stretches), cells):
        say(f"stretch {stretch + 1}/{stretches}: {cell.admission} at {cell.load}")
        cell.play(server, stretch, prompts)
    fitted = fit(cells[0], server, folder)
    for cell in cells:
        cell.predict(fitted.profile, server)
    calibration, *others = [cell.report() for cell in cells]
    deviations = [abs(r - 1) for row in others for r in row["ratio"].values()]
    return {
        **server.engine.describe(),
        "capacity_requests_per_s": capacity,
        "fit": [asdict(q) for q in fitted.quality],
        "calibration": calibration,
        "loads": others,
        "largest_deviation": max(deviations),
    }


# --- saying it ------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def results(found: dict[str, Any]) -> Results:
    """The first row is the load that the profile was fitted to. Engine → simulator (ratio); steps:
    the profile over the measured time of the live steps."""
    rows = [found["calibration"], *found["loads"]]
    shown = []
    for row in rows:
        cells = {}
        for key, scale in (("ttft_s", 1e3), ("tpot_s", 1e3), ("throughput_tokens_per_s", 1.0)):
            live, simulated = (row[who][key] * scale for who in ("engine", "simulator"))
            cells[key] = f"{live:.4g} → {simulated:.4g} ({row['ratio'][key]:.3f})"
        shown.append(row | cells)
    columns = {
        "admission": "{admission}",
        "load": "{load:.2f}",
        "requests": "{requests}",
        "TTFT ms": "{ttft_s}",
        "TPOT ms": "{tpot_s}",
        "tokens/s": "{throughput_tokens_per_s}",
        "steps": "{step_seconds_ratio:.3f}",
        "busy": "{busy_share:.2f}",
        "CPU": "{cpu_share:.3f}",
    }
    worst, share = found["largest_deviation"], min(row["cpu_share"] for row in rows)
    told = [bar("largest deviation at the other loads", f"{worst:.1%} (bar 10%)", worst <= 0.1)]
    if share < MIN_CPU_SHARE:
        told.append(bar("the core was not the engine's own", f"CPU share {share:.3f}", None))
    return Results(found, told, [table("engine → simulator (ratio)", shown, columns)])


def main() -> int:
    options = parser(__doc__, quick="one stretch of 8 seconds")
    options.add_argument("--target", default="target-large")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--stretches", type=int, default=8)
    options.add_argument("--seconds", type=float, default=8.0, help="of each stretch")
    options.add_argument("--out", type=Path, help="folder for steps.csv and zoo-large.json")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return tell(args, results(compare(args, folder)))


if __name__ == "__main__":
    sys.exit(main())
