"""Micro-batches, asynchronous hand-over and `auto`: on the virtual clock, and live.

    python -m benchmarks.pipeline simulate [--json]
    python -m benchmarks.pipeline live [--batch 4,8,16] [--repeats 5] [--target NAME] [--json]

`simulate`: five ratios of drafting to verification (of a batch of 16), three batches; the drafter's
time grows with its batch as the target's does, on `a100-llama2-7b`; a device each. All settings,
the best of them, what `auto` makes of it, and what the paper's heuristic would have chosen.

`live`: the bundled family; one engine, its pipeline changed from run to run, the settings in turn,
so that a slow spell of the machine meets all of them. Overlap is the time in which the target and a
drafter were both at work, over the shorter of their two times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import track

from penstock.config import NGRAM, EngineConfig
from penstock.core.kv.blocks import BlockPool
from penstock.core.loop import Loop
from penstock.core.policies.pipeline.parts.planner import (
    MOST_MICRO_BATCHES,
    PipelineSetting,
    cycle_seconds,
)
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter
from penstock.core.types import TARGET, Output, Request, SamplingParams, StepPlan, StepResult
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.fluid.step_profile import DrafterProfile
from penstock.lab.bench import Results, parser, table, tell
from penstock.lab.steady_batch import SteadyBatch, play, spin_setting
from penstock.serving.offline import complete
from penstock.sim.profiles import load_profile
from penstock.zoo.registry import DOMAINS, bundled_models, load_prompts

RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0)
BATCHES = (4, 16, 64)
LENGTH = 4
ROUNDS = 200
FIXED = ("off", *(str(n) for n in range(2, MOST_MICRO_BATCHES + 1)), "async")
LIVE = ("off", "auto", "2", "async")
NEW_TOKENS = 96


# --- on the virtual clock -------------------------------------------------------------------------


def make_batch(ratio: float, size: int) -> SteadyBatch:
    """One drafter, whose whole draft for 16 takes `ratio` times their verification."""
    target = load_profile("a100-llama2-7b")
    each = LENGTH + 1
    unit = ratio / LENGTH
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    drafter = DrafterProfile("d", counts, tuple(unit * target.linear(n * each) for n in counts))
    return SteadyBatch(replace(target, drafters=(drafter,)), {"d": size}, LENGTH, {"d": 0.7})


def simulate_cell(ratio: float, size: int) -> dict[str, Any]:
    """Tokens a second of every setting; share: of `auto` over the best of the others."""
    batch = make_batch(ratio, size)
    rates = {p: play(batch, p, rounds=ROUNDS).tokens_per_s for p in FIXED}
    auto = play(batch, "auto", rounds=ROUNDS)
    best = max(rates, key=rates.__getitem__)
    work = batch.round()
    most = min(MOST_MICRO_BATCHES, size)
    spin = spin_setting(lambda setting: cycle_seconds(work, setting), most).num
    return {
        "ratio": ratio,
        "batch": size,
        "tokens_per_s": {**rates, "auto": auto.tokens_per_s},
        "best": best,
        "chosen": named(auto.chosen),
        "share": auto.tokens_per_s / rates[best],
        "spin": spin,
        "spin_share": rates[str(spin)] / rates[best],
    }


def simulated() -> Results:
    pairs = [(r, b) for r in RATIOS for b in BATCHES]
    console = Console(stderr=True)
    rows = [simulate_cell(*pair) for pair in track(pairs, "simulating", console=console)]
    columns = {"draft : verify": "{ratio:g}", "batch": "{batch}"}
    # A number in brackets would be an index.
    shown = [{**r, **{f"p{p}": rate for p, rate in r["tokens_per_s"].items()}} for r in rows]
    columns |= {p: f"{{p{p}:.0f}}" for p in FIXED} | {"auto": "{pauto:.0f} ({chosen})"}
    columns |= {"auto / best": "{share:.3f}", "heuristic": "{spin}", "/ best": "{spin_share:.3f}"}
    return Results(rows, tables=[table("tokens a second on the virtual clock", shown, columns)])


def named(setting: PipelineSetting | None) -> str:
    if setting is None or not setting.num:
        return "off"
    return str(setting.num) if setting.share is None else f"2, {setting.share:g}"


# --- live -----------------------------------------------------------------------------------------


@dataclass
class OverlapWatch:
    """An instrument: when target and drafters were at work. A drafter inside the target's step is
    not beside it."""

    target: list[tuple[float, float]] = field(default_factory=list)
    lanes: list[tuple[float, float]] = field(default_factory=list)

    def on_plan(self, plan: StepPlan) -> None:
        """Results have the times."""

    def on_output(self, output: Output) -> None:
        """Results have the times."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        into = self.target if result.lane == TARGET else self.lanes
        into.append((result.started_at, result.finished_at))

    def overlap(self) -> float | None:
        """None where nobody worked beside the target."""
        lanes, target = union(self.lanes), union(self.target)
        both = sum(
            max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in lanes for b in near(target, a)
        )
        shorter = min(sum(b - a for a, b in lanes), sum(b - a for a, b in target))
        return both / shorter if shorter else None


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def near(
    spans: Sequence[tuple[float, float]], span: tuple[float, float]
) -> Iterator[tuple[float, float]]:
    return (s for s in spans if s[0] < span[1] and s[1] > span[0])


class LiveBench:
    """One engine, and a fresh scheduler over it for every run."""

    def __init__(self, target: str, num_threads: int) -> None:
        models = bundled_models()
        drafters = {n: str(c.path) for n, c in models.items() if c.role == "drafter"}
        self.engine: Engine = load_engine(
            EngineConfig(
                target=models[target].path,
                drafters={**drafters, "ngram": NGRAM},
                kv_tokens=64 * 512,
                num_threads=num_threads,
                pipeline="auto",
            )
        )
        tokenizer = load_tokenizer(models[target].path)
        texts = [load_prompts(domain)[i].prompt for i in range(4) for domain in DOMAINS]
        self.prompts = [tuple(tokenizer.encode(text)[-200:]) for text in texts]
        self.names = list(drafters)
        # What `auto` has learned outlives a run, as it would in a server.
        self._pipelines = {name: make_pipeline(name) for name in LIVE}
        self._count = 0

    def run(self, batch: int, drafters: Sequence[str], pipeline: str) -> tuple[float, Any]:
        """Tokens a second, and (CPU share, overlap, setting in the end)."""
        scheduler = self._scheduler(pipeline)
        watch = OverlapWatch()
        loop = Loop(scheduler, self.engine.executor, self.engine.clock, (watch,))
        requests = list(self._requests(2 * batch, drafters))
        cpu, wall = time.process_time(), time.perf_counter()
        done = complete(loop, requests, batch)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        while loop.num_plans_in_flight:
            loop.wait()
            loop.turn([])
        chosen = named(self._pipelines["auto"].setting) if pipeline == "auto" else None
        rate = sum(len(c.token_ids) for c in done) / wall
        return rate, (cpu / wall, watch.overlap(), chosen)

    def _scheduler(self, pipeline: str) -> Scheduler:
        blocks = self.engine.scheduler.pool.num_blocks
        drafters = [
            Drafter(d.name, d.pool and BlockPool(blocks, 16), has_lane=pipeline != "off")
            for d in self.engine.scheduler.table.drafters.values()
        ]
        return Scheduler(
            BlockPool(blocks, 16),
            drafters,
            admission=make_policy("admission", "vllm_v1"),
            selection=make_policy("selection", "single"),
            allocation=make_policy("allocation", "throughput"),
            pipeline=self._pipelines[pipeline],
            max_model_len=self.engine.max_model_len,
            learn=self.engine.scheduler.learn,
        )

    def _requests(self, num: int, drafters: Sequence[str]) -> Iterator[Request]:
        for i in range(num):
            prompt = self.prompts[i % len(self.prompts)]
            self._count += 1
            yield Request(
                f"b{self._count}",
                len(prompt),
                NEW_TOKENS,
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                drafter=drafters[i % len(drafters)],
            )


def live(args: argparse.Namespace) -> Results:
    """Of each batch and setting: medians over the repeats. ratio_to_off: of runs next to each
    other, with the smallest and largest; cpu_share: CPU time over wall time, cores used at once."""
    bench = LiveBench(args.target, args.threads)
    console = Console(stderr=True)
    rows = []
    for what, drafters in {"draft-tiny": ["draft-tiny"], "all": [*bench.names, "ngram"]}.items():
        for batch in map(int, args.batch.split(",")):
            runs: dict[str, list[tuple[float, Any]]] = {p: [] for p in LIVE}
            for repeat in track(range(args.repeats + 1), f"{what}, batch {batch}", console=console):
                for p in LIVE[:: -1 if repeat % 2 else 1]:
                    found = bench.run(batch, drafters, p)
                    if repeat:  # the first pass warms up
                        runs[p].append(found)
            rows += [{"drafters": what, "batch": batch, **_live_row(p, runs)} for p in LIVE]
    shown = [
        r
        | {
            "chosen": f" ({r['chosen']})" if r["chosen"] else "",
            "overlap": "" if r["overlap"] is None else f"{r['overlap']:.2f}",
        }
        for r in rows
    ]
    columns = {
        "drafters": "{drafters}",
        "batch": "{batch}",
        "pipeline": "{pipeline}{chosen}",
        "tokens/s": "{tokens_per_s:.0f}",
        "over off": "{ratio_to_off:.3f} ({lowest:.2f} to {highest:.2f})",
        "CPU s/s": "{cpu_share:.2f}",
        "overlap": "{overlap}",
    }
    return Results(rows, tables=[table("live, bundled family", shown, columns)])


def _live_row(pipeline: str, runs: dict[str, list[tuple[float, Any]]]) -> dict[str, Any]:
    mine = runs[pipeline]
    ratios = [a[0] / b[0] for a, b in zip(mine, runs["off"], strict=True)]
    overlaps = [r[1][1] for r in mine if r[1][1] is not None]
    return {
        "pipeline": pipeline,
        "tokens_per_s": statistics.median(r[0] for r in mine),
        "ratio_to_off": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "cpu_share": statistics.median(r[1][0] for r in mine),
        "overlap": statistics.median(overlaps) if overlaps else None,
        "chosen": mine[-1][1][2],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=("simulate", "live"))
    options.add_argument("--batch", default="4,8,16")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--target", default="target-large")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    tell(args, simulated() if args.part == "simulate" else live(args))


if __name__ == "__main__":
    main()
