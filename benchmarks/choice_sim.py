"""What choosing costs to learn: the requests of `drafter_choice` again, on the virtual clock.

    python -m benchmarks.choice_sim [--quick] [--json] [--out DIR] [--policies adaptive,lbss]

Step times are measured on the engine first, with every drafter at work; then nothing is noise any
more: every request, one at a time, has accepted what it would have had accepted live, and host work
is in the steps. Requests are cut into parts that are served before and counted in turn (`--folds`).
Beside policies run two that know more than a policy can: `told` knows the share of every drafter's
tokens that the request will accept, `domains` its mean and covariance in the request's domain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.drafter_choice import CLOSE, HINDSIGHT, Contender
from benchmarks.live_engine import (
    FIRST_OVERHEAD,
    MIXED,
    by_domain,
    load,
    make_loop,
    target_names,
    texts_of,
    texts_of_cell,
)
from rich.console import Console
from rich.progress import Progress

from penstock.config import PolicyConfig
from penstock.core.policies.registry import policies, register
from penstock.core.types import Request
from penstock.engine.build import Engine
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import bar
from penstock.lab.families import OwnRow
from penstock.lab.hindsight import NONE, Costs, KnownText, best_single, clairvoyant
from penstock.lab.oracles import knows_domains, told
from penstock.lab.statistics import FloatArray
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.run import Setup, make_scheduler
from penstock.zoo.registry import DOMAINS

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64, 128, 256)
LENGTHS = (1, 3, 6)
"""Of the drafts that step times are measured with."""


def measured_profile(engine: Engine, texts: Sequence[KnownText], temperature: float) -> StepProfile:
    """Step times of one request at a time: without drafts first, then with each drafter."""
    loop = make_loop(engine, "single", {}, "fixed")
    times = loop.scheduler.learn.times
    drafters = list(engine.executor.drafters)
    Contender("", loop, [NONE] * len(texts)).play(texts, 1, temperature)
    plain = times.overhead or FIRST_OVERHEAD
    for option in ((d, k) for k in LENGTHS for d in drafters):
        Contender("", loop, [option] * len(texts)).play(texts, 1, temperature)
    drafting = max(plain, times.overhead + times.draft_overhead)
    seconds = [times.target(n) + (drafting if n > 1 else plain) for n in ROWS]
    return StepProfile(
        "measured",
        engine.scheduler.pool.num_blocks * engine.scheduler.pool.block_size,
        ROWS,
        tuple(np.maximum.accumulate(seconds).tolist()),
        drafters=tuple(
            DrafterProfile(d, (1,), (times.curve_of(d)(1),), times.catch_up_of(d)) for d in drafters
        ),
    )


class TextRates:
    """The acceptances of requests "0", "1", …"""

    def __init__(self, texts: Sequence[KnownText]) -> None:
        self._texts = texts

    def rates(self, request_id: str) -> dict[str, float]:
        text = self._texts[int(request_id)]
        return {d: text.acceptance(d) for d in text.runs}


def register_oracles(texts: Sequence[KnownText]) -> None:
    """`told` and `domains`, for these requests."""
    names = list(texts[0].runs)
    rates = np.array([[t.acceptance(d) for d in names] for t in texts])
    domains = np.array([DOMAINS.index(t.domain) for t in texts])
    register("selection", told(TextRates(texts)))
    register("selection", knows_domains(names, rates, domains))


def seconds_of(policy: str, profile: StepProfile, texts: Sequence[KnownText]) -> FloatArray:
    """[requests] seconds, prefill aside, one request after the other."""
    register_oracles(texts)
    setup = Setup(
        profile,
        admission=PolicyConfig.of("vllm_v1", max_num_seqs=1),
        selection=PolicyConfig.of(policy),
        block_size=16,
        drafters=tuple(d.name for d in profile.drafters),
    )
    clock = VirtualClock()
    rows = {d: [[n + 1 for n in t.runs[d]] for t in texts] for d in setup.drafters}
    executor = SimulatedExecutor(
        clock,
        ProfiledStepTimes(profile),
        OwnRow(rows),
        drafters=setup.make_drafters(),
        profiles={d.name: d for d in profile.drafters},
    )
    # With their prompts, whose words `adaptive` reads.
    requests = [
        Request(str(i), len(t.prompt), len(t.text), prompt_token_ids=t.prompt)
        for i, t in enumerate(texts)
    ]
    records = simulate(make_scheduler(setup), executor, clock, requests).records.values()
    ends = np.array([r.finish_time for r in records], dtype=np.float64)
    prefill = np.array([profile.linear(len(t.prompt)) for t in texts])
    return np.diff(ends, prepend=0.0) - prefill


def parts(
    texts: Sequence[KnownText], counted: int, folds: int
) -> Iterator[tuple[list[KnownText], dict[str, list[KnownText]]]]:
    """For each fold the requests that are served before, and those that count, by cell."""
    own = by_domain(texts)
    for first in range(0, folds * counted, counted):
        turned = {d: ts[first:] + ts[:first] for d, ts in own.items()}
        rest = [ts[counted:] for ts in turned.values()]
        now = [t for ts in turned.values() for t in ts[:counted]]
        cells = {c: texts_of_cell(now, c, counted) for c in (MIXED, *DOMAINS)}
        yield [t for turn in zip(*rest, strict=True) for t in turn], cells


def measure_target(
    target: str, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    engine = load(target, 16, args.new_tokens)
    texts = texts_of(engine, target, args)
    profile = measured_profile(engine, texts[:: args.requests + args.warm], args.temperature)
    costs = Costs(
        profile.linear,
        {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters},
        {d.name: d.per_catch_up_token for d in profile.drafters},
    )
    rates: dict[str, dict[str, list[float]]] = {c: {} for c in (MIXED, *DOMAINS)}
    task = progress.add_task(target, total=args.folds * len(args.policies))
    for warm, cells in parts(texts, args.requests, args.folds):
        served = [*warm, *(t for ts in cells.values() for t in ts)]
        seconds = {}
        for policy in args.policies:
            seconds[policy] = seconds_of(policy, profile, served)
            progress.advance(task)
        end = len(warm)
        for cell, mine in cells.items():
            begin, end = end, end + len(mine)
            spent = {p: float(s[begin:end].sum()) for p, s in seconds.items()}
            spent |= hindsight(costs, mine)
            tokens = sum(len(t.text) for t in mine)
            for name, value in spent.items():
                rates[cell].setdefault(name, []).append(tokens / value)
    return [_row(target, cell, found) for cell, found in rates.items()]


def hindsight(costs: Costs, texts: Sequence[KnownText]) -> dict[str, float]:
    """Seconds of who chooses nothing, once for all, and best for each request."""
    choices = {
        "none": [NONE] * len(texts),
        "best single": [best_single(costs, texts, 1)] * len(texts),
        "clairvoyant": clairvoyant(costs, texts, 1),
    }
    return {
        name: sum(costs.request(t, o, 1) for t, o in zip(texts, chosen, strict=True))
        for name, chosen in choices.items()
    }


def _row(target: str, cell: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the folds; shares are of the best that hindsight has in each."""
    best = np.max([rates[n] for n in HINDSIGHT], axis=0)
    return {
        "target": target,
        "cell": cell,
        "tokens_per_s": {n: float(np.mean(r)) for n, r in rates.items()},
        "share": {n: float(np.mean(r / best)) for n, r in rates.items()},
    }


def tables(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[ResultTable]:
    found = []
    columns = {"cell": "{cell}"} | {n: f"{{tokens_per_s[{n}]:.0f}}" for n in HINDSIGHT}
    columns |= {f"{n} " if n in columns else n: f"{{share[{n}]:.3f}}" for n in names}
    for target in dict.fromkeys(r["target"] for r in rows):
        mine = [r for r in rows if r["target"] == target]
        figures = ("tokens_per_s", "share")
        means = {f: {n: np.mean([r[f][n] for r in mine]) for n in mine[0][f]} for f in figures}
        title = f"{target}, one request at a time: tokens/s, and shares of hindsight"
        found.append(table(title, [*mine, {"cell": "mean", **means}], columns))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="one fold, the first target")
    options.add_argument("--out", type=Path, default=Path("choice"), help="folder for texts")
    options.add_argument("--targets", type=target_names, default="target-large,target-small")
    options.add_argument("--policies", default="adaptive,domains,told,lbss,ucb,replay,single")
    options.add_argument("--requests", type=int, default=8, help="of a domain, counted in a fold")
    options.add_argument("--warm", type=int, default=32, help="of a domain, served before")
    options.add_argument("--folds", type=int, default=4)
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=1.0)
    args = options.parse_args(arguments)
    if args.quick:
        args.folds, args.targets = 1, args.targets[:1]
    if not 1 <= args.folds <= 1 + args.warm // args.requests:
        options.error(f"--folds is from 1 to {1 + args.warm // args.requests}, not {args.folds}")
    args.policies = args.policies.split(",")
    known = (*policies("selection"), "domains", "told")
    if unknown := [name for name in args.policies if name not in known]:
        options.error(f"--policies: {unknown[0]!r}; choose from {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        for target in args.targets:
            rows += measure_target(target, args, progress)
    reached = [r["share"]["adaptive"] >= CLOSE for r in rows if "adaptive" in r["share"]]
    text = f"{CLOSE} of hindsight in {sum(reached)} of {len(reached)} cells"
    return tell(
        args, Results(rows, [bar("adaptive", text, all(reached))], tables(rows, args.policies))
    )


if __name__ == "__main__":
    sys.exit(main())
