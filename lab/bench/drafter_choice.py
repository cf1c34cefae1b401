"""What is choosing a drafter for each request worth, live on the bundled family?

    python -m lab.bench.drafter_choice [--quick] [--json] [--out DIR] [--batches 1,8,16]
    python -m lab.bench.drafter_choice --family DIR --targets target-large --cells mixed

By target, batch size and domain, and for all domains mixed, the same requests are served in turn by
no drafter, by the best single drafter and draft length in hindsight, by the best ones of each
request, and by selection policies, which have served other prompts before (`--warm`). What would be
accepted from every drafter is known (`texts_of`). Rates are those of a full batch. Every text is
compared with the target's own. `--family`: served by larger copies (`penstock zoo grow`), which
make the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lab.bench.live_engine import (
    MIXED,
    by_domain,
    measured_costs,
    texts_of,
    texts_of_cell,
)
from lab.common.claims import ClaimVerdict, bar
from lab.common.families import SPIN
from lab.common.hindsight import LONGEST, NONE, KnownText, Option, best_single, clairvoyant
from lab.common.live import load, make_loop, request_of
from lab.common.results import Results, ResultTable, counts, names_of, parser, table, tell
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.loop import Loop
from penstock.core.types import Output
from penstock.engine.build import Engine
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, bundled_models

POLICIES = ("auto", *SPIN)
BASELINES = (*SPIN, "greedy", "epsilon_greedy")
HINDSIGHT = ("none", "best single", "clairvoyant")
CLOSE = 0.95


@dataclass
class Contender:
    """A way to serve: a loop, and what every request asks for."""

    name: str
    loop: Loop
    choices: list[Option] | None = None
    rates: list[float] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    switches: float = 0.0

    def play(self, texts: Sequence[KnownText], batch: int, temperature: float) -> None:
        """Serve the requests once."""
        requests = []
        for i, known in enumerate(texts):
            fields: dict[str, object] = {}
            if self.choices is not None:
                drafter, length = self.choices[i]
                fields = {"drafter": drafter, "max_draft_tokens": length}
            requests.append(
                request_of(known.prompt, known.seed, len(known.text), temperature, **fields)
            )
        self.used.clear()
        last: dict[str, str] = {}
        switches = tokens = ended = 0
        full_until = wall = time.perf_counter()

        def watch(output: Output) -> None:
            nonlocal switches, tokens, ended, full_until
            if ended <= len(texts) - batch:
                # While the batch is full: who ends early makes room for somebody.
                tokens += output.num_tokens
                full_until = time.perf_counter()
            ended += output.finish_reason is not None
            if output.drafter is not None:
                self.used[output.drafter] += 1
                switches += last.get(output.request_id, output.drafter) != output.drafter
                last[output.request_id] = output.drafter

        completions = complete(self.loop, requests, batch, watch)
        seconds = full_until - wall
        for known, completion in zip(texts, completions, strict=True):
            if tuple(completion.token_ids) != known.text:
                raise RuntimeError(f"{self.name}: a text differs from the target's own")
        self.rates.append(tokens / seconds)
        self.switches = switches / len(texts)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens_per_s": statistics.median(self.rates),
            "best_tokens_per_s": max(self.rates),
            "rounds_by_drafter": dict(self.used),
            "switches_per_request": self.switches,
        }


def measure_cell(
    engine: Engine,
    texts: Sequence[KnownText],
    learners: dict[str, Loop],
    batch: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All contenders in turn, `--repeats` times. Who learns begins every pass with what it had
    learned before: the passes serve the same texts."""
    costs = measured_costs(engine)
    single = best_single(costs, texts, batch)
    named = make_loop(
        engine, PolicyConfig.from_name("single"), PolicyConfig.from_name("fixed", k=LONGEST)
    )
    everybody = [
        Contender("none", named, [NONE] * len(texts)),
        Contender("best single", named, [single] * len(texts)),
        Contender("clairvoyant", named, clairvoyant(costs, texts, batch)),
        *(Contender(name, loop) for name, loop in learners.items()),
    ]
    for _ in range(args.repeats):
        for contender in everybody:
            if contender.name in learners:
                scheduler = deepcopy(learners[contender.name].scheduler)
                contender.loop = Loop(scheduler, engine.executor, engine.clock)
            contender.play(texts, batch, args.temperature)
    rows = {c.name: c.row() for c in everybody}
    return {
        "single": single,
        "choices": Counter(f"{d} {k}" for d, k in everybody[2].choices or ()),
        "hindsight_tokens_per_s": max(rows[n]["tokens_per_s"] for n in HINDSIGHT),
        "rows": list(rows.values()),
    }


def measure_target(
    target: str, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    room = max(*args.batches, 16), args.new_tokens
    dtype = "float32" if args.family is None else "auto"
    engine = load(target, *room, dtype=dtype)
    texts = by_domain(texts_of(engine, target, args))
    if args.family is not None:
        engine = load(target, *room, dtype=dtype, family=args.family)
    measured = [t for own in texts.values() for t in own[: args.requests]]
    last = args.requests + args.warm
    warm = [texts[d][i] for i in range(args.requests, last) for d in DOMAINS]
    cells = []
    task = progress.add_task(target, total=len(args.batches) * len(args.cells))
    for batch in args.batches:
        learners = {}
        for name in args.policies:
            learners[name] = make_loop(engine, SPIN.get(name) or policy_named(name))
            if warm and name in POLICIES:
                Contender(name, learners[name]).play(warm, batch, args.temperature)
        for cell in args.cells:
            shown = (
                learners if cell == MIXED else {n: learners[n] for n in POLICIES if n in learners}
            )
            chosen = texts_of_cell(measured, cell, args.requests)
            result = measure_cell(engine, chosen, shown, batch, args)
            cells.append({"target": target, "batch": batch, "cell": cell, **result})
            (args.out / f"{target}-cells.json").write_text(json.dumps(cells))
            progress.advance(task)
    return cells


def verdicts(cells: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    shares: list[tuple[float, str]] = []
    gains = []
    for c in cells:
        rate = {r["name"]: r["tokens_per_s"] for r in c["rows"]}
        where = f"{c['target']}, batch {c['batch']}"
        best = c["hindsight_tokens_per_s"]
        shares.append((rate["auto"] / best, f"{where}, {c['cell']}"))
        if c["cell"] == MIXED:
            gain = f"hindsight {best / rate['best single']:.3f} of best single"
            own = f"auto {rate['auto'] / rate['best single']:.3f} of it"
            gains.append(bar(where, f"{gain}, {own}", None))
    shares.sort()
    reached = sum(share >= CLOSE for share, _ in shares)
    worst = "; ".join(f"{where} {share:.3f}" for share, where in shares[:6])
    text = f"{CLOSE} of the clairvoyant or more in {reached} of {len(shares)} cells; {worst}"
    return [bar("auto", text, reached == len(shares)), *gains]


def tables(cells: Sequence[dict[str, Any]]) -> list[ResultTable]:
    found = []
    for target in dict.fromkeys(c["target"] for c in cells):
        mine = [c for c in cells if c["target"] == target]
        names = list(dict.fromkeys(r["name"] for c in mine for r in c["rows"]))
        rows = []
        for c in mine:
            by_name = {r["name"]: r for r in c["rows"]}
            best = c["hindsight_tokens_per_s"]
            rates = {n: by_name[n]["tokens_per_s"] for n in names if n in by_name}
            shown = {n: f"{r:.0f} {r / best:.3f}" for n, r in rates.items()}
            switches = by_name["auto"]["switches_per_request"]
            rows.append({**c, **dict.fromkeys(names, ""), **shown, "switches": switches})
        columns = {"batch": "{batch}", "cell": "{cell}", "best single": "{single[0]} {single[1]}"}
        columns |= {f"{n} ": f"{{{n}}}" for n in names} | {"switches": "{switches:.2f}"}
        found.append(table(f"{target}: tokens/s, and the share of hindsight", rows, columns))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, quick="two domains, few requests")
    options.add_argument("--out", type=Path, default=Path("choice"), help="folder for texts")
    targets = [name for name, model in bundled_models().items() if model.role == "target"]
    options.add_argument("--targets", type=names_of(targets), default="target-large")
    options.add_argument("--batches", type=counts, default="1,8,16")
    for option, known in {"--cells": (MIXED, *DOMAINS), "--policies": ("auto", *BASELINES)}.items():
        options.add_argument(option, type=names_of(known), default=[*known])
    options.add_argument("--family", type=Path, help="folder that `penstock zoo grow` has written")
    options.add_argument("--requests", type=int, default=16, help="of a domain")
    options.add_argument("--warm", type=int, default=48, help="of a domain, served before")
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--repeats", type=int, default=2)
    args = options.parse_args(arguments)
    if args.quick:
        args.requests, args.warm, args.cells, args.batches = 4, 4, [MIXED, "chat"], [1]
    if "auto" not in args.policies:
        options.error("--policies: without auto there is nothing to judge")
    if args.family is not None:
        args.out /= args.family.name
    if args.cells != [MIXED] and args.requests < max(args.batches):
        options.error(f"--requests must be {max(args.batches)} or more: a domain fills the batch")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    cells: list[dict[str, Any]] = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        for target in args.targets:
            cells += measure_target(target, args, progress)
    return tell(args, Results(cells, verdicts(cells), tables(cells)))


if __name__ == "__main__":
    sys.exit(main())
