"""Do plans come true? A live server over HTTP beside the simulator, with a profile of this machine.

    python -m lab.bench.plans_live [MODEL.gguf] [--drafter NAME[=FILE]] [--cases none,look-up]
        [--loads 0.3,0.6,0.9] [--seconds 50] [--texts 400] [--out FILE] [--json]

`penstock profile measure` times the bundled target or MODEL, and its drafter. The simulator then
gets the arrivals, lengths and texts that `penstock serve` gets: what look-up finds in these texts,
and how many of their tokens the drafter has right. Cases: no drafts, `look-up`, the `chain` (the
drafter behind look-up), and the drafter on a draft `server` of this machine.

Poisson arrivals; a load is a share of the requests a second that the simulator completes. Clients
stream greedy completions, prefix caching is off. All cells are served, then once more, each a line
of FILE (default: plans_live.jsonl), from which the same command goes on; the profile and the texts
are kept beside it. A prediction is the median of 20 simulations whose step times differ as the
profile says, its interval what 95% of them are within.

Oracle: a live run predicts the other one of its cell, with as wide an interval. Control: each cell
has the prediction for the next load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.bundled_server import BundledServer, bundled_server, stopping
from lab.bench.plans_texts import Model, known_texts
from lab.bench.servers import Streamed, streamed
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.played_texts import KnownText, PlayedTexts
from lab.common.results import Results, names_of, parser, table, tell
from lab.common.statistics import FloatArray
from penstock.config import SUFFIX
from penstock.config.devices import cores_of
from penstock.core.scheduler import Scheduler
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.arrivals import ArrivalProcess
from penstock.sim.links import DraftServer, Link
from penstock.sim.parallel import workers
from penstock.sim.plots import Sampler
from penstock.sim.profiles import load_profile, paces
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload
from penstock.zoo.registry import DEFAULT_DRAFTER, DEFAULT_TARGET, model_path

CASES = ("none", "look-up", "chain", "server")
BLOCK_SIZE, KV_TOKENS = 16, 16_384
FIGURES = {
    "TTFT p50, ms": "ttft_p50",
    "TTFT p99, ms": "ttft_p99",
    "TPOT p50, ms": "tpot_p50",
    "TPOT p99, ms": "tpot_p99",
    "latency p50, ms": "latency_p50",
    "latency p99, ms": "latency_p99",
    "tokens/s": "tokens_per_s",
    "KV peak, tokens": "kv_peak",
}
BARS = {
    "p50 and throughput": (("ttft_p50", "tpot_p50", "latency_p50", "tokens_per_s"), 0.05),
    "p99": (("ttft_p99", "tpot_p99", "latency_p99"), 0.12),
}
COVERED = 0.9
RUNS, TURNS = 20, 2
WARM, WARM_PROMPT = 8, 64
"""Requests before those that count, one by one, and the tokens of their prompts."""
_AT_ONCE = 400
_POLL_S = 0.1
_START_S = 120
_ONE_WAY_S = 1e-3


# --- the simulator --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Everything known of a model: its profile and its texts."""

    model: Model
    profile: StepProfile
    texts: Sequence[KnownText]

    def setup(self, case: str, pace: float = 1.0) -> Setup:
        """The simulated server, as `serve_settings` has the live one. pace: factor on its times."""
        drafter, profile = self.model.drafter, self.profile.served(pace, drafts=case != "none")
        played = PlayedTexts.new(self.texts)
        servers: tuple[DraftServer, ...] = ()
        if case == "server":
            (times,) = profile.drafters
            servers = (DraftServer(drafter, times.seconds(1, 1), Link(_ONE_WAY_S)),)
        return Setup(
            profile,
            kv_tokens=KV_TOKENS,
            block_size=BLOCK_SIZE,
            acceptance=played,
            drafters=(drafter,) if case == "chain" else (),
            draft_servers=servers,
            pipeline="off" if case in ("none", "look-up") else "auto",
            look_up=played if case in ("look-up", "chain") else None,
        )

    def workload(self, num: int, rate: float) -> Workload:
        """The first so many texts, as Poisson arrivals: at another rate the same, closer."""
        lengths = [[len(t.prompt_ids), len(t.output)] for t in self.texts[:num]]
        times = ArrivalProcess().times(num, rate, np.random.default_rng(11))
        return Workload("texts", *np.array(lengths).T, times)

    def capacity(self, case: str) -> Figures:
        """Requests a second that the simulator completes while there are always more."""
        again = -(-_AT_ONCE // len(self.texts))
        many = replace(self, texts=[*self.texts] * again)
        report = run(many.setup(case), many.workload(len(many.texts), 1e6))
        ends = np.sort(report.finished_at)
        low, high = len(ends) // 4, 3 * len(ends) // 4
        return {"per_s": float((high - low) / (ends[high] - ends[low]))}

    def predicted(self, case: str, num: int, rate: float, http_s: float) -> dict[str, FloatArray]:
        """Figures of every run, [runs]. http_s: seconds before the first token."""
        workload, runs = self.workload(num, rate), []
        for pace in paces(self.profile.spread, RUNS):
            samplers: list[Sampler] = []

            def watch(scheduler: Scheduler, made: list[Sampler] = samplers) -> list[Sampler]:
                made.append(Sampler(scheduler, _POLL_S, (1,)))
                return made

            report = run(self.setup(case, pace), workload, watch=watch)
            first, total = (
                at - report.arrived_at + http_s
                for at in (report.first_token_at, report.finished_at)
            )
            kv_peak = max(samplers[0].kv_tokens)
            runs.append(figures_of(report.arrived_at, first, total, report.num_tokens, kv_peak))
        return {name: np.array([r[name] for r in runs]) for name in runs[0]}


def figures_of(
    arrived: FloatArray, first: FloatArray, total: FloatArray, tokens: FloatArray, kv_peak: float
) -> dict[str, float]:
    """Return a cell's figures. By request: arrival, seconds until first token and end, tokens."""
    several = tokens > 1
    times = {
        "ttft": first,
        "tpot": (total - first)[several] / (tokens[several] - 1),
        "latency": total,
    }
    found = {
        f"{name}_p{q}": 1e3 * float(np.percentile(values, q))
        for name, values in times.items()
        for q in (50, 99)
    }
    seconds = float((arrived + total).max())
    return {**found, "tokens_per_s": float(tokens.sum() / seconds), "kv_peak": float(kv_peak)}


# --- the live server ------------------------------------------------------------------------------


def serve_settings(bench: Bench, case: str, profile: Path, port: int) -> dict[str, Any]:
    drafters: dict[str, Any] = {}
    if case in ("look-up", "chain"):
        drafters[SUFFIX] = SUFFIX
    if case == "chain":
        drafters[bench.model.drafter] = str(bench.model.drafter_file)
    engine = {
        "target": str(bench.model.target),
        "drafters": drafters,
        "kv_tokens": KV_TOKENS,
        "block_size": BLOCK_SIZE,
        "prefix_caching": False,
        "device": bench.model.device,
        "profile": str(profile),
    }
    listen = {"drafters": {"listen": f"127.0.0.1:{port}"}} if case == "server" else {}
    return {"engine": engine, "shutdown_grace_s": 1, **listen}


@contextmanager
def serving(bench: Bench, case: str, profile: Path) -> Iterator[BundledServer]:
    """The live server, with its draft server. Raises: RuntimeError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        settings = serve_settings(bench, case, profile, port)
        server = stack.enter_context(bundled_server(settings=settings))
        if case == "server":
            command = [sys.executable, "-m", "penstock.cli", "draft"]
            command += ["--connect", f"127.0.0.1:{port}", "--model", str(bench.model.drafter_file)]
            command += ["--device", f"cpu:{max(os.sched_getaffinity(0))}"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.enter_context(stopping(process))
            end = time.monotonic() + _START_S
            while server.metric("draft_servers") < 1:
                if time.monotonic() > end:
                    raise RuntimeError("the draft server did not connect")
                time.sleep(_POLL_S)
        yield server


@contextmanager
def apart(server: BundledServer, model: Model) -> Iterator[None]:
    """Keep the HTTP process and this one off the core of a model that has one."""
    before = os.sched_getaffinity(0)
    others = before - {*cores_of(model.device)}
    if others:
        for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), others)
        os.sched_setaffinity(0, others)
    yield
    os.sched_setaffinity(0, before)


def live(bench: Bench, case: str, profile: Path, num: int, rate: float) -> Figures:
    """Serve a cell; return what clients see of every request, and KV tokens at each poll."""
    with serving(bench, case, profile) as server, apart(server, bench.model):
        return asyncio.run(_play(server, bench, num, rate))


async def _play(server: BundledServer, bench: Bench, num: int, rate: float) -> Figures:
    warm = [[1 + (7 * i + j) % 97 for j in range(WARM_PROMPT)] for i in range(WARM)]
    warmed = [list(await streamed(server, prompt, 24)) for prompt in warm]
    arrived = bench.workload(num, rate).arrival_time
    assert arrived is not None
    began = time.perf_counter()

    async def ask(text: KnownText, at: float) -> Streamed:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await streamed(server, list(text.prompt_ids), len(text.output))

    kv: list[float] = []

    async def poll() -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            kv.append(await asyncio.to_thread(server.metric, "kv_cache_usage_perc"))

    polling = asyncio.create_task(poll())
    cpu = server.cpu_seconds()
    done = await asyncio.gather(*map(ask, bench.texts[:num], arrived.tolist()))
    wall, cpu = time.perf_counter() - began, server.cpu_seconds() - cpu
    polling.cancel()
    columns = [[round(v, 6) for v in column] for column in zip(*done, strict=True)]
    return {
        **dict(zip(Streamed._fields, columns, strict=True)),
        "kv_peak": max(kv) * KV_TOKENS,
        "rate": rate,
        "cores": cpu / wall,
        "busy_s": server.metric("engine_busy_seconds_total"),
        "phases": server.by_label("target_step_seconds_total", "phase"),
        "warm": warmed,
        "steps": server.metric("target_steps_total"),
        "accepted": server.metric("spec_decode_num_accepted_tokens_total"),
        "drafted": server.metric("spec_decode_num_draft_tokens_total"),
    }


# --- both -----------------------------------------------------------------------------------------


def measured_profile(model: Model, folder: Path, more: Sequence[str]) -> Path:
    """The file of the model's profile, measured unless it is there."""
    path = folder / f"{model.name}.profile.json"
    if not path.exists():
        command = [sys.executable, "-m", "penstock.cli", "profile", "measure", str(model.target)]
        command += ["--drafter", f"{model.drafter}={model.drafter_file}", "--drafter", SUFFIX]
        command += ["--out", str(path)]
        command += ["--device", model.device, *more]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


@dataclass(frozen=True)
class Cell:
    """One case at one load: its requests, and what became of them in a live run."""

    case: str
    load: float
    turn: int
    rate: float
    num: int
    found: Figures

    def seen(self, bench: Bench) -> dict[str, float]:
        columns = (np.array(self.found[name]) for name in Streamed._fields)
        arrived = bench.workload(self.num, self.rate).arrival_time
        assert arrived is not None
        return figures_of(arrived, *columns, self.found["kv_peak"])

    def http_s(self, bench: Bench) -> float:
        """Seconds that HTTP takes before the first token, by the later of the requests alone."""
        alone = self.found["warm"][WARM // 2 :]
        first = float(np.median([first for first, *_ in alone]))
        step = StepWork(WARM_PROMPT, WARM_PROMPT * WARM_PROMPT / 2)
        return max(0.0, first - bench.setup(self.case).profile.seconds(step))


def measure(args: argparse.Namespace, model: Model) -> Results:
    kept = Cells(args.out.with_suffix(".texts.jsonl"), silent=True)
    cells = Cells(args.out, silent=True)
    profile = measured_profile(model, args.out.parent, args.measure.split())
    bench = Bench(model, load_profile(profile), known_texts(model, args.texts, kept))
    made = []
    for turn, case, load in itertools.product(range(TURNS), args.cases, args.loads):
        key = f"{model.name}/{case}/{load:g}"
        rate = load * cells.measure(f"{key}/capacity", partial(bench.capacity, case))["per_s"]
        num = min(args.texts, max(12, round(rate * args.seconds)))
        found = cells.measure(f"{key}/{turn}", partial(live, bench, case, profile, num, rate))
        made.append(Cell(case, load, turn, rate, num, found))
        print(key, num, found["busy_s"], cell_line(made[-1], bench), file=sys.stderr, flush=True)
    cells_of = [made[i :: len(made) // TURNS] for i in range(len(made) // TURNS)]
    with workers(None) as pool:
        pairs = [*pool.map(partial(rows_of, bench), cells_of)]
    return results([pair[turn] for turn in range(TURNS) for pair in pairs])


def cell_line(cell: Cell, bench: Bench) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in cell.seen(bench).items())


def rows_of(bench: Bench, turns: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row for each live run of a cell; all have the same prediction."""
    cell, http_s = turns[0], float(np.mean([turn.http_s(bench) for turn in turns]))
    runs = bench.predicted(cell.case, cell.num, cell.rate, http_s)
    rows = []
    for cell in turns:
        row: dict[str, Any] = {"model": bench.model.name, "drafts": cell.case, "load": cell.load}
        row["turn"] = cell.turn
        for name, live_value in cell.seen(bench).items():
            low, middle, high = np.quantile(runs[name], [0.025, 0.5, 0.975]).tolist()
            row[name] = {"live": live_value, "predicted": middle, "low": low, "high": high}
        rows.append(row)
    return rows


def error(figure: Mapping[str, float]) -> float:
    return abs(figure["predicted"] / figure["live"] - 1)


def covers(figure: Mapping[str, float]) -> bool:
    return figure["low"] <= figure["live"] <= figure["high"]


def beside(row: Mapping[str, Any], other: Mapping[str, Any], said: str) -> dict[str, Any]:
    """The row, as if it had been predicted what was said for the other one."""
    told = dict(row)
    for name in FIGURES.values():
        predicted = other[name][said]
        by = predicted / row[name]["predicted"]
        told[name] = {
            "live": row[name]["live"],
            "predicted": predicted,
            "low": by * row[name]["low"],
            "high": by * row[name]["high"],
        }
    return told


def oracle_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each live run, predicted by the other one of its cell."""
    half = len(rows) // TURNS
    return [beside(row, rows[(i + half) % len(rows)], "live") for i, row in enumerate(rows)]


def control_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each live run, predicted as the next load of its case."""
    told = []
    for row in rows:
        same = [r for r in rows if (r["drafts"], r["turn"]) == (row["drafts"], row["turn"])]
        told.append(beside(row, same[(same.index(row) + 1) % len(same)], "predicted"))
    return told


def shown(figure: Mapping[str, float]) -> str:
    return f"{figure['live']:.4g} → {figure['predicted']:.4g}"


def results(rows: Sequence[dict[str, Any]]) -> Results:
    told = [{**r, **{n: shown(r[n]) for n in FIGURES.values()}} for r in rows]
    columns = {name: f"{{{name}}}" for name in ("model", "drafts", "load", "turn")}
    columns |= {title: f"{{{name}}}" for title, name in FIGURES.items()}
    errors = []
    for title, name in FIGURES.items():
        found = [row[name] for row in rows]
        off, covered = [error(f) for f in found], sum(map(covers, found))
        row = {"figure": title, "median": np.median(off), "largest": max(off)}
        errors.append({**row, "covered": f"{covered} of {len(found)}"})
    by_figure = {"figure": "{figure}", "median error": "{median:.1%}"}
    by_figure |= {"largest": "{largest:.1%}", "within the interval": "{covered}"}
    tables = [
        table("Predicted against live, over all cells", errors, by_figure),
        table("Live → predicted", told, columns),
    ]
    return Results(rows, verdicts(rows), tables)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """Each bar for the predictions, the oracle and the control."""

    def median(names: Sequence[str], most: float, of: Sequence[dict[str, Any]]) -> Measurement:
        found = float(np.median([error(row[name]) for row in of for name in names]))
        return Measurement(f"{found:.1%} (bar {most:.0%})", (found <= most,))

    def within(of: Sequence[dict[str, Any]]) -> Measurement:
        covered = [covers(row[name]) for row in of for name in FIGURES.values()]
        share = f"{sum(covered)} of {len(covered)} (bar {COVERED:.0%})"
        return Measurement(share, (float(np.mean(covered)) >= COVERED,))

    tests = {f"median error of {what}": partial(median, *bars) for what, bars in BARS.items()}
    tests["live figures within the intervals"] = within
    moved, oracle = control_of(rows), ("the other live run", oracle_of(rows))
    return [
        check(claim, test, rows, "predictions for another load", moved, oracle)
        for claim, test in tests.items()
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path, nargs="?", metavar="MODEL.gguf")
    options.add_argument("--drafter", metavar="NAME=FILE", default=DEFAULT_DRAFTER)
    options.add_argument("--cases", type=names_of(CASES), default=[*CASES])
    options.add_argument(
        "--loads", type=lambda t: [*map(float, t.split(","))], default=[0.3, 0.6, 0.9]
    )
    told = {"default": "--batch 1,2,4,8,16", "help": "options of `penstock profile measure`"}
    options.add_argument("--measure", **told)
    options.add_argument("--seconds", type=float, default=50.0, help="of a cell")
    options.add_argument("--texts", type=int, default=400, help="at most, of a cell")
    options.add_argument("--out", type=Path, default=Path("plans_live.jsonl"), help="every cell")
    args = options.parse_args()
    name, _, file = args.drafter.partition("=")
    if args.target is None:
        drafter = Path(file) if file else model_path(name)
        model = Model(
            model_path(DEFAULT_TARGET), name, drafter, "cpu:0", (60, 16, 256), (40, 4, 128)
        )
    else:
        model = Model(args.target, name, Path(file), "cpu:0,1", (40, 16, 96), (24, 4, 64))
    return tell(args, measure(args, model))


if __name__ == "__main__":
    sys.exit(main())
