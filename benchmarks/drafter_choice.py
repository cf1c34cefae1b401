"""What choosing a drafter for each request is worth, live on the bundled family.

    python -m benchmarks.drafter_choice [--quick] [--json] [--out DIR] [--batches 1,8,16]

For every target, batch size and domain, and for all domains mixed, the same requests are served by
no drafter, by the best single drafter at its best draft length, by a clairvoyant that gives each
request its best drafter in hindsight (each drafter at its own best length), and by selection
policies, in turn, on one engine in this process. What a request would have had accepted from every
drafter is known beforehand (`choice_traces`); that is what hindsight stands on. Learning policies
have served other prompts before (`--warm`). Rates are those of a full batch: what is made after the
last request was let in does not count. Every text is compared with the target's own.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.choice_traces import LONGEST, Trace, load, make_traces, request_of, target_names
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.core.blocks import BlockPool
from penstock.core.loop import Loop
from penstock.core.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter
from penstock.core.types import NO_DRAFTER, Output
from penstock.engine.build import Engine
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS

Option = tuple[str, int]
NONE: Option = (NO_DRAFTER, 0)
MIXED = "mixed"
POLICIES = ("adaptive", "lbss")
FIRST_OVERHEAD = 1.5e-4
"""Seconds of host work in a step, before it was measured."""
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "lbss": ("lbss", {}),
    "ucb": ("ucb", {}),
    "replay": ("replay", {}),
    "greedy": ("greedy", {}),
    "epsilon_greedy as printed": ("epsilon_greedy", {"explore": 0.8}),
    "epsilon_greedy as meant": ("epsilon_greedy", {"explore": 0.2}),
}


class Times:
    """Seconds of steps, as they were measured."""

    def __init__(
        self,
        target: Callable[[int], float],
        curves: Mapping[str, Callable[[int], float]],
        reading: Mapping[str, float],
        overhead: float = 0.0,
    ) -> None:
        """target: by rows. curves: of a drafter's token, by batch. reading: of a token of text.
        overhead: of the host in each step."""
        self.drafters = list(curves)
        self.overhead = overhead
        self._target = target
        self._curves = curves
        self._reading = reading

    @classmethod
    def of(cls, engine: Engine) -> Times:
        """As the engine has measured them."""
        times, drafters = engine.scheduler.learn.times, engine.executor.drafters
        return cls(
            times.target,
            {n: times.curve_of(n) for n in drafters},
            {n: times.catch_up_of(n) for n in drafters},
            times.overhead or FIRST_OVERHEAD,
        )

    def request(self, trace: Trace, option: Option, batch: int) -> float:
        """A request's share of the time, in a batch of requests like it."""
        drafter, length = option
        if drafter == NO_DRAFTER:
            return (len(trace.text) - 1) * (self.overhead + self._target(batch)) / batch
        step = self._target(batch * (1 + length)) + length * self._curves[drafter](batch)
        rounds = num_rounds(trace, drafter, length)
        reading = self._reading[drafter] * len(trace.prompt)
        return rounds * (self.overhead + step) / batch + reading

    def options(self) -> list[Option]:
        return [NONE, *((n, k) for n in self.drafters for k in range(1, LONGEST + 1))]


def num_rounds(trace: Trace, drafter: str, length: int) -> int:
    """Verifications after the first token, which the prompt's own step makes."""
    runs, end = trace.runs[drafter], len(trace.text)
    at, count = 1, 0
    while at < end:
        at += min(length, runs[at], max(end - at - 1, 0)) + 1
        count += 1
    return count


def best_single(times: Times, traces: Sequence[Trace], batch: int) -> Option:
    return min(times.options(), key=lambda o: sum(times.request(t, o, batch) for t in traces))


def clairvoyant(times: Times, traces: Sequence[Trace], batch: int) -> list[Option]:
    """Each request's best drafter in hindsight, each drafter at the length that is best for those
    that choose it; found by turns, from several beginnings."""
    names = times.drafters
    seconds = {o: np.array([times.request(t, o, batch) for t in traces]) for o in times.options()}
    best: tuple[float, list[Option]] = (float("inf"), [])
    for start in range(1, LONGEST + 1):
        lengths = dict.fromkeys(names, start)
        for _ in range(20):
            options = [*lengths.items(), NONE]
            picks = np.stack([seconds[o] for o in options]).argmin(axis=0)
            better = dict(lengths)
            for j, name in enumerate(names):
                mine = picks == j
                if mine.any():
                    better[name] = min(
                        range(1, LONGEST + 1), key=lambda k: seconds[name, k][mine].sum()
                    )
            if better == lengths:
                break
            lengths = better
        total = float(np.stack([seconds[o] for o in options]).min(axis=0).sum())
        if total < best[0]:
            best = total, [options[j] for j in picks]
    return best[1]


def make_loop(
    engine: Engine,
    selection: str,
    options: dict[str, Any],
    allocation: str = "throughput",
    max_num_seqs: int | None = None,
) -> Loop:
    """A scheduler of its own over the engine's executor, with what the engine has measured."""
    pool = engine.scheduler.pool

    def new_pool() -> BlockPool:
        return BlockPool(pool.num_blocks, pool.block_size, prefix_caching=False)

    pools = engine.scheduler.table.memory.pools
    scheduler = Scheduler(
        new_pool(),
        [
            Drafter(n, new_pool() if n in pools else None, max_num_seqs=max_num_seqs)
            for n in engine.executor.drafters
        ],
        admission=make_policy("admission", "vllm_v1"),
        selection=make_policy("selection", selection, options),
        allocation=make_policy(
            "allocation", allocation, {"k": LONGEST} if allocation == "fixed" else {}
        ),
        max_model_len=engine.max_model_len,
    )
    scheduler.learn.times = deepcopy(engine.scheduler.learn.times)
    return Loop(scheduler, engine.executor, engine.clock)


@dataclass
class Player:
    """A way to serve: a loop, and what every request asks for."""

    name: str
    loop: Loop
    choices: list[Option] | None = None
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    switches: float = 0.0

    def play(self, traces: Sequence[Trace], batch: int, temperature: float) -> None:
        """Serve the requests once."""
        requests = []
        for i, trace in enumerate(traces):
            fields: dict[str, object] = {}
            if self.choices is not None:
                drafter, length = self.choices[i]
                fields = {"drafter": drafter, "max_draft_tokens": length}
            requests.append(
                request_of(trace.prompt, trace.seed, len(trace.text), temperature, **fields)
            )
        self.used.clear()
        last: dict[str, str] = {}
        switches = 0

        tokens = ended = 0
        full_until = wall = time.perf_counter()

        def watch(output: Output) -> None:
            nonlocal switches, tokens, ended, full_until
            if ended <= len(traces) - batch:
                # While the batch is full: who ends early makes room for somebody.
                tokens += output.num_tokens
                full_until = time.perf_counter()
            ended += output.finish_reason is not None
            if output.drafter is not None:
                self.used[output.drafter] += 1
                switches += last.get(output.request_id, output.drafter) != output.drafter
                last[output.request_id] = output.drafter

        cpu = time.process_time()
        completions = complete(self.loop, requests, batch, watch)
        seconds = full_until - wall
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for trace, completion in zip(traces, completions, strict=True):
            if tuple(completion.token_ids) != trace.text:
                raise RuntimeError(f"{self.name}: a text differs from the target's own")
        self.rates.append(tokens / seconds)
        self.cpu.append(cpu / wall)
        self.switches = switches / len(traces)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens_per_s": statistics.median(self.rates),
            "best_tokens_per_s": max(self.rates),
            "cpu_share": statistics.mean(self.cpu),
            "rounds_by_drafter": dict(self.used),
            "switches_per_request": self.switches,
        }


def cell_traces(traces: Sequence[Trace], cell: str, per_cell: int) -> list[Trace]:
    """The requests of a domain, or of all in turn."""
    by_domain = {d: [t for t in traces if t.domain == d] for d in DOMAINS}
    if cell != MIXED:
        return by_domain[cell][:per_cell]
    return [by_domain[d][i] for i in range(max(1, per_cell // 2)) for d in DOMAINS]


def measure_cell(
    engine: Engine,
    traces: Sequence[Trace],
    learners: dict[str, Loop],
    batch: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All players in turn, `--repeats` times."""
    times = Times.of(engine)
    single = best_single(times, traces, batch)
    named = make_loop(engine, "single", {}, "fixed")
    players = [
        Player("none", named, [NONE] * len(traces)),
        Player("best single", named, [single] * len(traces)),
        Player("clairvoyant", named, clairvoyant(times, traces, batch)),
        *(Player(name, loop) for name, loop in learners.items()),
    ]
    for _ in range(args.repeats):
        for player in players:
            player.play(traces, batch, args.temperature)
    rows = {p.name: p.row() for p in players}
    hindsight = max(rows[n]["tokens_per_s"] for n in ("none", "best single", "clairvoyant"))
    return {
        "single": single,
        "choices": Counter(f"{d} {k}" for d, k in players[2].choices or ()),
        "hindsight_tokens_per_s": hindsight,
        "rows": list(rows.values()),
    }


def traces_of(engine: Engine, target: str, args: argparse.Namespace) -> list[Trace]:
    """Traces of all prompts that are asked for, from `--out` where they were made before."""
    total = args.requests + args.warm
    path = args.out / f"{target}-{total}-{args.new_tokens}-{args.temperature}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())  # a file of this program's own
    traces = make_traces(engine, 0, total, args.new_tokens, args.temperature)
    path.write_bytes(pickle.dumps(traces))
    return traces


def measure_target(
    target: str, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    engine = load(target, max(*args.batches, 16), args.new_tokens)
    traces = traces_of(engine, target, args)
    by_domain = {d: [t for t in traces if t.domain == d] for d in DOMAINS}
    measured = [t for d in DOMAINS for t in by_domain[d][: args.requests]]
    warm = [
        by_domain[d][i] for i in range(args.requests, args.requests + args.warm) for d in DOMAINS
    ]
    cells = []
    task = progress.add_task(target, total=len(args.batches) * len(args.cells))
    for batch in args.batches:
        learners = {}
        for name in ("adaptive", *BASELINES):
            policy, options = BASELINES.get(name, (name, {}))
            learners[name] = make_loop(engine, policy, options)
            if warm and name in POLICIES:
                Player(name, learners[name]).play(warm, batch, args.temperature)
        for cell in args.cells:
            shown = learners if cell == MIXED else {n: learners[n] for n in POLICIES}
            chosen = cell_traces(measured, cell, args.requests)
            result = measure_cell(engine, chosen, shown, batch, args)
            cells.append({"target": target, "batch": batch, "cell": cell, **result})
            (args.out / f"{target}-cells.json").write_text(json.dumps(cells))
            progress.advance(task)
    return cells


def verdicts(cells: Sequence[dict[str, Any]]) -> list[tuple[bool | None, str]]:
    lines: list[tuple[bool | None, str]] = []
    worst: list[tuple[float, str]] = []
    behind: list[str] = []
    for c in cells:
        rate = {r["name"]: r["tokens_per_s"] for r in c["rows"]}
        where = f"{c['target']}, batch {c['batch']}, {c['cell']}"
        worst.append((rate["adaptive"] / c["hindsight_tokens_per_s"], where))
        if rate["adaptive"] < rate["lbss"]:
            behind.append(f"{where} ({rate['adaptive'] / rate['lbss']:.3f})")
    worst.sort()
    reached = sum(share >= 0.95 for share, _ in worst)
    lines.append(
        (
            reached == len(worst),
            f"adaptive at 0.95 of the clairvoyant or more in {reached} of {len(worst)} cells; "
            + "; ".join(f"{where} {share:.3f}" for share, where in worst[:6]),
        )
    )
    lines.append((not behind, f"adaptive behind lbss in {len(behind)} cells: {', '.join(behind)}"))
    for c in cells:
        if c["cell"] == MIXED:
            rate = {r["name"]: r["tokens_per_s"] for r in c["rows"]}
            gain = c["hindsight_tokens_per_s"] / rate["best single"]
            lines.append(
                (None, f"{c['target']}, batch {c['batch']}: hindsight {gain:.3f} of best single")
            )
    return lines


def show(cells: Sequence[dict[str, Any]]) -> None:
    console = Console(width=200)
    for target in dict.fromkeys(c["target"] for c in cells):
        mine = [c for c in cells if c["target"] == target]
        names = list(dict.fromkeys(r["name"] for c in mine for r in c["rows"]))
        table = Table(title=f"{target}: tokens/s, and the share of hindsight")
        for column in ("batch", "cell", "best single", *names, "switches"):
            table.add_column(column, justify="left" if column == "cell" else "right")
        for c in mine:
            rows = {r["name"]: r for r in c["rows"]}
            best = c["hindsight_tokens_per_s"]
            values = [
                f"{rows[n]['tokens_per_s']:.0f} {rows[n]['tokens_per_s'] / best:.3f}"
                if n in rows
                else ""
                for n in names
            ]
            drafter, length = c["single"]
            switches = f"{rows['adaptive']['switches_per_request']:.2f}"
            table.add_row(str(c["batch"]), c["cell"], f"{drafter} {length}", *values, switches)
        console.print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two domains, few requests")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", type=Path, default=Path("choice"), help="folder for traces")
    parser.add_argument("--targets", type=target_names, default="target-large,target-small")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--cells", default=",".join((MIXED, *DOMAINS)))
    parser.add_argument("--requests", type=int, default=16, help="of a domain")
    parser.add_argument("--warm", type=int, default=48, help="of a domain, served before")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.quick:
        args.requests, args.warm, args.cells, args.batches = 4, 4, "mixed,chat", "1"
    args.cells = args.cells.split(",")
    args.batches = [int(b) for b in args.batches.split(",")]
    if args.cells != [MIXED] and args.requests < max(args.batches):
        parser.error(f"--requests must be {max(args.batches)} or more: a domain fills the batch")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    cells: list[dict[str, Any]] = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        for target in args.targets:
            cells += measure_target(target, args, progress)
    lines = verdicts(cells)
    if args.json:
        met = all(reached is not False for reached, _ in lines)
        verdict = {"met": met, "lines": [text for _, text in lines]}
        print(json.dumps({"runs": cells, "verdict": verdict}))
    else:
        show(cells)
        for reached, text in lines:
            print(f"{'      ' if reached is None else 'met   ' if reached else 'MISSED'}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
