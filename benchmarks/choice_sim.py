"""What choosing costs to learn, on the virtual clock.

    python -m benchmarks.choice_sim [--quick] [--json] [--out DIR] [--policies adaptive,lbss]
    python -m benchmarks.choice_sim --profile FILE [--skip 32]

What every drafter would have had accepted of every request is recorded once, on the bundled models;
then requests of all domains, in random order and one at a time, are served on the virtual clock,
`--warm` of a domain before those that count. Step times are measured on the engine first, with
every drafter at work and the host's part, or come from a profile: `penstock profile measure` of a
family that `penstock zoo grow` has made, whose acceptance is the bundled one's. Whatever a shuffle
(`--shuffles`) draws, all policies serve the same. Beside them run two that know more than a policy
can: `told` knows the share of every drafter's tokens that the request will accept, `domains` its
mean and covariance in the request's domain. `placebo` is `adaptive` where every prompt is made of
the words of another request.
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
    target_names,
    texts_of,
)
from rich.console import Console
from rich.progress import Progress

from penstock.config import NGRAM, PolicyConfig
from penstock.core.policies.registry import policies, register
from penstock.core.types import Request
from penstock.engine.build import Engine
from penstock.fluid.step_profile import DrafterProfile, StepProfile, StepWork
from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.families import OwnRow
from penstock.lab.hindsight import LONGEST, NONE, Costs, KnownText, best_single, clairvoyant
from penstock.lab.live import load, make_loop
from penstock.lab.oracles import knows_domains, told
from penstock.lab.statistics import FloatArray, interval
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import ProfileError, load_profile
from penstock.sim.run import Setup, make_scheduler
from penstock.zoo.registry import DOMAINS

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64, 128, 256)
LENGTHS = (1, 3, 6)
"""Of the drafts that step times are measured with."""
CONTEXT = 200
"""Tokens, of the steps that are taken from a profile."""
GAIN = 1.08
PLACEBO = "placebo"
LEAST = 0.98
"""Wanted over the best single drafter: with all domains mixed, and of each domain's requests."""


def measured_profile(engine: Engine, texts: Sequence[KnownText], temperature: float) -> StepProfile:
    """Step times of one request at a time: without drafts first, then with each drafter."""
    loop = make_loop(engine, PolicyConfig.of("single"), PolicyConfig.of("fixed", k=LONGEST))
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


def at_one_context(profile: StepProfile) -> StepProfile:
    """The same steps of one request at a time, all of them behind `CONTEXT` tokens, so that
    hindsight can add up the same times as the simulator."""
    seconds = [profile.seconds(StepWork(0, 0.0, 1, CONTEXT, n - 1)) for n in ROWS]
    drafters = [
        # Look-up has no KV: what it reads is part of its step.
        DrafterProfile(
            d.name, (1,), (d.seconds(1, 1),), d.per_catch_up_token if d.name != NGRAM else 0.0
        )
        for d in profile.drafters
    ]
    rising = tuple(np.maximum.accumulate(seconds).tolist())
    return StepProfile(profile.name, profile.kv_tokens, ROWS, rising, drafters=tuple(drafters))


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
        selection=PolicyConfig.of("adaptive" if policy == PLACEBO else policy),
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
    prompts = [t.prompt for t in texts]
    if policy == PLACEBO:
        order = np.random.default_rng(24).permutation(len(texts))
        prompts = [
            tuple(np.resize(prompts[i], len(t.prompt)).tolist())
            for i, t in zip(order, texts, strict=True)
        ]
    requests = [
        Request(str(i), len(prompt), len(t.text), prompt_token_ids=prompt)
        for i, (prompt, t) in enumerate(zip(prompts, texts, strict=True))
    ]
    records = simulate(make_scheduler(setup), executor, clock, requests).records.values()
    ends = np.array([r.finish_time for r in records], dtype=np.float64)
    prefill = np.array([profile.linear(len(t.prompt)) for t in texts])
    return np.diff(ends, prepend=0.0) - prefill


def shuffles(
    texts: Sequence[KnownText], args: argparse.Namespace
) -> Iterator[tuple[list[KnownText], list[KnownText]]]:
    """Of every shuffle the requests that are served before, and those that count: equally many of
    every domain, in random order."""
    own = by_domain(texts)
    for seed in range(args.shuffles):
        rng = np.random.default_rng((24, seed))
        warm, counted = [], []
        for ts in own.values():
            drawn = rng.permutation(np.arange(args.skip, len(ts)))
            warm += [ts[i] for i in drawn[: args.warm]]
            counted += [ts[i] for i in drawn[args.warm :][: args.requests]]
        yield (
            [warm[i] for i in rng.permutation(len(warm))],
            [counted[i] for i in rng.permutation(len(counted))],
        )


def measure_target(
    target: str, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    engine = load(target, 16, args.new_tokens)
    texts = texts_of(engine, target, args)
    profile = args.profile or measured_profile(engine, texts[:: args.prompts], args.temperature)
    costs = Costs(
        profile.linear,
        {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters},
        {d.name: d.per_catch_up_token for d in profile.drafters},
    )
    rates: dict[str, dict[str, list[float]]] = {c: {} for c in (MIXED, *DOMAINS)}
    task = progress.add_task(target, total=args.shuffles * len(args.policies))
    for warm, counted in shuffles(texts, args):
        seconds = {}
        for policy in args.policies:
            seconds[policy] = seconds_of(policy, profile, [*warm, *counted])[len(warm) :]
            progress.advance(task)
        for cell, found in rates.items():
            mine = [i for i, t in enumerate(counted) if cell in (MIXED, t.domain)]
            own = [counted[i] for i in mine]
            spent = {p: float(s[mine].sum()) for p, s in seconds.items()} | hindsight(costs, own)
            tokens = sum(len(t.text) for t in own)
            for name, value in spent.items():
                found.setdefault(name, []).append(tokens / value)
    name = profile.name if args.profile else target
    return [_row(name, cell, found) for cell, found in rates.items()]


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
    """Means over the shuffles; shares are of the best that hindsight has in each, and gains are
    over the best single drafter, both with half their intervals of 95%."""
    best = np.max([rates[n] for n in HINDSIGHT], axis=0)
    shares = {n: interval(r / best) for n, r in rates.items()}
    gains = {n: interval(np.divide(r, rates["best single"])) for n, r in rates.items()}
    return {
        "target": target,
        "cell": cell,
        "tokens_per_s": {n: float(np.mean(r)) for n, r in rates.items()},
        "share": {n: i.mean for n, i in shares.items()},
        "share_half_width": {n: i.half for n, i in shares.items()},
        "gain": {n: i.mean for n, i in gains.items()},
        "gain_half_width": {n: i.half for n, i in gains.items()},
    }


def tables(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[ResultTable]:
    found = []
    columns = {"cell": "{cell}"} | {n: f"{{tokens_per_s[{n}]:.4g}}" for n in HINDSIGHT}
    shares = {n: f"{{share[{n}]:.3f}} ± {{share_half_width[{n}]:.3f}}" for n in names}
    gains = {n: f"{{gain[{n}]:.3f}} ± {{gain_half_width[{n}]:.3f}}" for n in (HINDSIGHT[2], *names)}
    for target in dict.fromkeys(r["target"] for r in rows):
        mine = [r for r in rows if r["target"] == target]
        title = f"{target}, one request at a time: tokens/s, and shares of hindsight"
        found.append(table(title, mine, columns | {f"{n} ": s for n, s in shares.items()}))
        title = f"{target}: tokens/s over those of the best single drafter"
        found.append(table(title, mine, {"cell": "{cell}"} | gains))
    return found


def verdicts(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """Of `adaptive`, by target."""
    found = []
    for target in dict.fromkeys(r["target"] for r in rows):
        mine = {r["cell"]: r for r in rows if r["target"] == target}
        share, gain = (mine[MIXED][figure]["adaptive"] for figure in ("share", "gain"))
        text = f"mixed, {share:.3f} of hindsight (bar {CLOSE})"
        found.append(bar(target, text, share >= CLOSE))
        text = f"mixed, {gain:.3f} of the best single drafter (bar {GAIN})"
        found.append(bar(target, text, gain >= GAIN))
        least, cell = min((mine[d]["gain"]["adaptive"], d) for d in DOMAINS)
        text = f"{cell}, {least:.3f} of the domain's best single drafter (bar {LEAST}; the least)"
        found.append(bar(target, text, least >= LEAST))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, quick="one shuffle, the first target")
    options.add_argument("--out", type=Path, default=Path("choice"), help="folder for texts")
    options.add_argument("--targets", type=target_names, default="target-large")
    options.add_argument("--profile", help="of step times; default: measured here")
    options.add_argument("--policies", default="adaptive,domains,told,lbss,single")
    options.add_argument("--prompts", type=int, default=64, help="of a domain, to draw from")
    options.add_argument("--skip", type=int, default=0, help="prompts that are left out")
    options.add_argument("--requests", type=int, default=8, help="of a domain, counted")
    options.add_argument("--warm", type=int, default=8, help="of a domain, served before")
    options.add_argument("--shuffles", type=int, default=5)
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=1.0)
    args = options.parse_args(arguments)
    if args.quick:
        args.shuffles, args.targets = 1, args.targets[:1]
    if args.skip + args.warm + args.requests > args.prompts:
        options.error("--skip, --warm and --requests: more than there are prompts (--prompts)")
    args.policies = args.policies.split(",")
    known = (*policies("selection"), "domains", "told", PLACEBO)
    if unknown := [name for name in args.policies if name not in known]:
        options.error(f"--policies: {unknown[0]!r}; choose from {', '.join(known)}")
    try:
        args.profile = at_one_context(load_profile(args.profile)) if args.profile else None
    except ProfileError as error:
        options.error(str(error))
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(file=sys.stderr)) as progress:
        for target in args.targets:
            rows += measure_target(target, args, progress)
    judged = verdicts(rows) if "adaptive" in args.policies else []
    return tell(args, Results(rows, judged, tables(rows, args.policies)))


if __name__ == "__main__":
    sys.exit(main())
