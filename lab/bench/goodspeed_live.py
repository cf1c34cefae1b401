"""Does GoodSpeed share a live target more fairly among edge draft servers than equal lengths do?

    python -m lab.bench.goodspeed_live [--rounds 1000] [--runs 1] [--totals 8,16,32]
        [--verification coupled|ratio] [--out FILE] [--result FILE] [--json]

A verification server and four draft servers of the bundled family, processes of this machine that
speak gRPC, each with one user after another (temperature 1): a drafter that knows its user's domain
or one that does not. Each round waits for all drafts, C draft tokens in total (`--totals`); `auto`,
the default policy, decides both itself. Goodput is the tokens of a client, prompts included, over
rounds or seconds, utility Σ log of it; intervals are over spans of 100 rounds. x* is the fluid's
optimum for the acceptance that `fixed` met at its largest C.

A bar's control is `random` in GoodSpeed's place, its oracle x*; the trajectory's are `fixed` and
GoodSpeed with known acceptance on simulated clients. Every run is a line of FILE (default:
goodspeed_live.jsonl), from which the same command goes on. `--result` draws figures 2 and 4 of the
paper beside it. Twelve minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from lab.bench.bundled_server import BundledServer, Scrape, bundled_server, stopping
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, bar, check
from lab.common.fair_path import fair_optimum, fair_optimum_of
from lab.common.oracles import Told
from lab.common.report import Plot, draw
from lab.common.results import Results, ResultTable, counts, parser, table, tell
from lab.common.rounds import GeometricClients, play
from lab.common.statistics import FloatArray, Interval, interval, plus_minus
from lab.rivals import policy_named
from penstock.core.policies.bundles import AUTO
from penstock.zoo.registry import load_prompts

CLIENTS = {
    "math": "draft-data",
    "chat": "draft-lang",
    "summary": "draft-tiny",
    "entropy": "draft-code",
}
"""Each draft server's domain and drafter: two that know their domain, two that do not."""
OURS, RIVALS = "goodspeed", ("fixed", "random")
OPTIMUM = "x*"
WARM_ROUNDS, SPAN, PARTS = 100, 100, 10
MAX_TOKENS, LONGEST = 192, 16
"""Most tokens of a request, and of a draft."""
EARLY, NEAR = 50, 0.1
"""Rounds after which a trajectory has begun, and the distance from x*, over its own size, that is
near: the ε of the paper's theorems in `lab.papers.goodspeed_theorems`."""
WINDOW = 10
"""Rounds of the paper's moving average in figure 2."""
_POLL_S = 0.25
_START_S = 120


def settings_of(policy: str, total: int, verification: str, port: int) -> dict[str, Any]:
    """Of the verification server, by its file."""
    servers = {
        name: {
            "tenant": name,
            "token_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "trusted": True,
        }
        for name in CLIENTS
    }
    chosen: dict[str, Any] = {"policy": AUTO}
    if policy != AUTO:
        allocation = policy_named(policy, total=total)
        chosen = {"policy": "goodspeed", "allocation": allocation.model_dump()}
    return {
        "engine": {
            **chosen,
            "verification": verification,
            "tenants": {name: {} for name in CLIENTS},
            "num_threads": 1,
        },
        "drafters": {"listen": f"127.0.0.1:{port}", "servers": servers},
        "shutdown_grace_s": 1,
    }


@contextmanager
def draft_servers(port: int) -> Iterator[dict[str, str]]:
    """Until the end of the block; the address of each. They connect to whatever verification server
    is at the port, which must be there at first. Raises: RuntimeError."""
    started = {}
    with ExitStack() as stack:
        for name, drafter in CLIENTS.items():
            command = [sys.executable, "-m", "penstock.cli", "draft", "--model", drafter]
            command += ["--connect", f"127.0.0.1:{port}", "--listen", "0", "--no-assignments"]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_TOKEN": name}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=env, text=True, **pipes)
            started[name] = stack.enter_context(process)
            stack.enter_context(stopping(process))
        said = {n: next((x for x in p.stdout if "serving on" in x), "") for n, p in started.items()}
        if missing := [name for name, line in said.items() if not line]:
            raise RuntimeError(f"did not start: {', '.join(missing)}")
        yield {name: line.split()[-1] for name, line in said.items()}


async def use(http: httpx.AsyncClient, name: str, url: str, run: int) -> None:
    """One request after the other, until cancelled."""
    prompts = load_prompts(name)
    for n in range(run * len(prompts), sys.maxsize):
        body = {"prompt": prompts[n % len(prompts)].prompt, "max_tokens": MAX_TOKENS, "seed": n}
        answer = await http.post(f"{url}/v1/completions", json={**body, "temperature": 1})
        answer.raise_for_status()


async def rounds_of(server: BundledServer, urls: dict[str, str], rounds: int, run: int) -> Figures:
    """Return the server's counters, read again and again over so many rounds."""
    polls: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=120) as http:
        users = [asyncio.create_task(use(http, *client, run)) for client in urls.items()]
        try:
            while not polls or polls[-1]["rounds"] < rounds + WARM_ROUNDS:
                await asyncio.sleep(_POLL_S)
                scrape = await asyncio.to_thread(server.scrape)
                polls.append(_counted(scrape))
                for user in users:
                    if user.done():
                        user.result()
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
    drafts = scrape.by_label("spec_decode_num_drafts_total", "drafter")
    accepted = [
        [
            sum(x for line, x in scrape.named(f"{_ACCEPTED}_total") if _is_of(line, name, position))
            for position in range(LONGEST)
        ]
        for name in CLIENTS
    ]
    return {
        "polls": polls,
        "drafts": [drafts.get(name, 0.0) for name in CLIENTS],
        "accepted": accepted,
    }


_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"


def _is_of(line: str, drafter: str, position: int) -> bool:
    return f'drafter="{drafter}"' in line and f'position="{position}"' in line


def _counted(scrape: Scrape) -> dict[str, Any]:
    """At one time: seconds, rounds, and by client tokens and X of eq. 4, if the policy has it."""
    tokens = scrape.by_label("generation_tokens_total", "tenant")
    estimates = scrape.by_label("goodput_estimate", "tenant")
    return {
        "seconds": round(time.monotonic(), 3),
        "rounds": scrape.metric("target_steps_total"),
        "tokens": [tokens.get(name, 0.0) for name in CLIENTS],
        "estimates": [round(estimates[n], 4) for n in CLIENTS]
        if set(CLIENTS) <= set(estimates)
        else [],
    }


def measure(
    draft: Callable[[], dict[str, str]], settings: dict[str, Any], rounds: int, run: int
) -> Figures:
    """One run, with a verification server of its own. draft: the addresses of the draft servers.
    Raises: RuntimeError."""
    with bundled_server(settings=settings) as server:
        urls = draft()
        end = time.monotonic() + _START_S
        while server.metric("draft_servers") < len(CLIENTS):
            if time.monotonic() > end:
                raise RuntimeError("a draft server did not connect")
            time.sleep(_POLL_S)
        return asyncio.run(rounds_of(server, urls, rounds, run))


# --- what came of it ------------------------------------------------------------------------------


class Run:
    """A run's counts. rounds, seconds: [polls]; tokens: [polls, clients]."""

    def __init__(self, figures: Figures) -> None:
        polls = figures["polls"]
        self.rounds, self.seconds, self.tokens = (
            np.array([poll[name] for poll in polls], dtype=np.float64)
            for name in ("rounds", "seconds", "tokens")
        )
        self.estimates = [poll["estimates"] for poll in polls]
        self.drafts, self.accepted = np.array(figures["drafts"]), np.array(figures["accepted"])

    def spans(self) -> list[tuple[FloatArray, FloatArray]]:
        """Return each client's goodput a round and a second, by span behind the first rounds."""
        wanted = np.arange(WARM_ROUNDS, self.rounds[-1] + 1, SPAN)
        ends = np.searchsorted(self.rounds, wanted)
        tokens, rounds, seconds = (
            np.diff(x[ends], axis=0) for x in (self.tokens, self.rounds, self.seconds)
        )
        return [(n / r, n / s) for n, r, s in zip(tokens, rounds, seconds, strict=True)]

    def mean(self) -> tuple[FloatArray, FloatArray]:
        """x̄(T): rounds since the first poll, and tokens of each client over them."""
        since = self.rounds[1:] - self.rounds[0]
        return since, (self.tokens[1:] - self.tokens[0]) / since[:, None]

    def moving(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Figure 2, over windows of rounds: their middle, tokens of all clients a round, and what
        was expected of them: the estimate at the poll before."""
        ends = np.searchsorted(self.rounds, self.rounds + WINDOW)
        first = next(i for i, own in enumerate(self.estimates) if own)
        kept = [i for i in range(first, len(ends)) if ends[i] < len(self.rounds)]
        real = [
            (self.tokens[ends[i]] - self.tokens[i]).sum() / (self.rounds[ends[i]] - self.rounds[i])
            for i in kept
        ]
        told = [np.mean([sum(self.estimates[j]) for j in range(i, ends[i])]) for i in kept]
        middle = (self.rounds[kept] + self.rounds[ends[kept]]) / 2
        return middle, np.array(real), np.array(told)


def survival(runs: Sequence[Run], known: int) -> FloatArray:
    """G(s) of each client, [clients, longest draft], by drafts of `known` tokens; further positions
    are accepted as often as those were in the mean."""
    found = np.ones((len(CLIENTS), LONGEST + 1))
    accepted = np.sum([run.accepted for run in runs], axis=0)[:, :known]
    found[:, 1 : known + 1] = accepted / np.sum([run.drafts for run in runs], axis=0)[:, None]
    rates = found[:, 1 : known + 1].sum(axis=1) / found[:, :known].sum(axis=1)
    behind = np.arange(1, LONGEST - known + 1)
    found[:, known + 1 :] = found[:, [known]] * rates[:, None] ** behind
    return found[:, 1:]


def lost(runs: Sequence[Run]) -> FloatArray:
    """Rounds without a draft for each token of each client: prompts, and between requests."""
    rounds = sum(run.rounds[-1] for run in runs) - np.sum([run.drafts for run in runs], axis=0)
    return np.asarray(rounds / np.sum([run.tokens[-1] for run in runs], axis=0))


class Scene(NamedTuple):
    """Runs by budget and policy, those of `auto`, and x* by budget in tokens of all rounds."""

    runs: Mapping[int, Mapping[str, Sequence[Run]]]
    auto: Sequence[Run]
    optima: Mapping[int, FloatArray]
    rates: FloatArray
    """Acceptance of each client, as if it were the same at every position."""


def scene_of(runs: Mapping[int, Mapping[str, Sequence[Run]]], auto: Sequence[Run]) -> Scene:
    most = max(runs)
    fixed = runs[most]["fixed"]
    curves = survival(fixed, known := min(LONGEST, most // len(CLIENTS)))
    before = np.hstack([np.ones((len(CLIENTS), 1)), curves])
    optima = {c: 1 / (1 / fair_optimum_of(curves, c).goodput + lost(fixed)) for c in runs}
    return Scene(runs, auto, optima, curves[:, :known].sum(axis=1) / before[:, :known].sum(axis=1))


def spans_of(runs: Sequence[Run]) -> list[tuple[FloatArray, FloatArray]]:
    return [span for run in runs for span in run.spans()]


def utilities(runs: Sequence[Run], per_second: bool = False) -> list[float]:
    """Σ log of the goodput in each span."""
    return [float(np.log(span[per_second]).sum()) for span in spans_of(runs)]


def differences(ours: Sequence[Run], rival: Sequence[Run]) -> list[float]:
    """Σ log over the rival's, on parts of the same texts: each client's tokens are cut alike, and
    what counts is the rounds that they took."""
    found = []
    for own, other in zip(ours, rival, strict=False):
        parts = np.zeros(PARTS)
        for i in range(len(CLIENTS)):
            cuts = np.linspace(
                max(
                    run.tokens[np.searchsorted(run.rounds, WARM_ROUNDS), i] for run in (own, other)
                ),
                min(run.tokens[-1, i] for run in (own, other)),
                PARTS + 1,
            )
            took = (np.diff(np.interp(cuts, r.tokens[:, i], r.rounds)) for r in (own, other))
            parts -= np.subtract(*map(np.log, took))
        found += parts.tolist()
    return found


def verdicts(scene: Scene) -> list[ClaimVerdict]:
    apart = 0
    for by in scene.runs.values():
        own, *others = (interval(utilities(by[name])) for name in (OURS, *RIVALS))
        apart += all(own.low > x.high for x in others)
    wanted = min(2, len(scene.runs))
    told = f"at {apart} of {len(scene.runs)} budgets (bar {wanted})"
    return [
        *(advantage(scene, total) for total in scene.runs),
        bar("intervals of Σ log apart from both", told, apart >= wanted),
        nearness(scene),
    ]


def advantage(scene: Scene, total: int) -> ClaimVerdict:
    by, best = scene.runs[total], float(np.log(scene.optima[total]).sum())

    def above(found: Mapping[str, Sequence[float]]) -> Measurement:
        gains = {name: interval(gained) for name, gained in found.items()}
        told = ", ".join(f"{gain} over `{name}`" for name, gain in gains.items())
        return Measurement(f"{told}", tuple(g.low > 0 for g in gains.values()))

    def over_rivals(name: str) -> dict[str, list[float]]:
        return {rival: differences(by[name], by[rival]) for rival in RIVALS}

    return check(
        f"C = {total}: Σ log a round is higher, on the same texts",
        above,
        over_rivals(OURS),
        "`random` in its place",
        over_rivals("random"),
        (OPTIMUM, {rival: [best - u for u in utilities(by[rival])] for rival in RIVALS}),
    )


Trajectory = tuple[FloatArray, FloatArray, FloatArray]
"""Rounds, x̄ [points, clients], x* [clients]."""


def nearness(scene: Scene) -> ClaimVerdict:
    def paths(name: str) -> dict[int, Trajectory]:
        return {c: (*by[name][0].mean(), scene.optima[c]) for c, by in scene.runs.items()}

    claim = f"x̄ comes within {NEAR:.0%} of x* (after {EARLY} rounds, at the end)"
    known = ("known, steady acceptance on simulated clients", simulated(scene))
    return check(claim, near, paths(OURS), "`fixed`", paths("fixed"), known)


def near(paths: Mapping[int, Trajectory]) -> Measurement:
    """Nearer at the end than when it had begun, and near."""
    told, parts = [], []
    for total, (rounds, goodput, best) in paths.items():
        away = np.linalg.norm(goodput - best, axis=1) / np.linalg.norm(best)
        begun = away[np.searchsorted(rounds, EARLY)]
        told.append(f"C = {total}: {begun:.0%}, then {away[-1]:.0%}")
        parts += [bool(away[-1] <= NEAR), bool(away[-1] < begun)]
    return Measurement("; ".join(told), tuple(parts))


def simulated(scene: Scene) -> dict[int, Trajectory]:
    """GoodSpeed that knows acceptance."""
    found = {}
    for total, by in scene.runs.items():
        num = round(by[OURS][0].rounds[-1])
        steady = np.tile(scene.rates, (num, 1))
        tokens = play(
            Told(steady, total=total, beta=0.02), GeometricClients(steady, 0).clients(), total, num
        ).tokens
        since = np.arange(1.0, num + 1)
        best = fair_optimum(scene.rates, total, limits=[LONGEST] * len(CLIENTS)).goodput
        found[total] = (since, tokens.cumsum(axis=0) / since[:, None], best)
    return found


# --- how it is told -------------------------------------------------------------------------------


def figures(scene: Scene) -> ResultTable:
    columns = {
        "C": "{total}",
        "allocation": "{name}",
        "Σ log a round": "{per_round}",
        "Σ log a second": "{per_second}",
        "tokens a round": "{tokens}",
        "tokens/s": "{rate}",
    } | {f"{name} ({drafter})": f"{{{name}:.0%}}" for name, drafter in CLIENTS.items()}
    rows = [_row(AUTO, scene.auto) | {"total": ""}]
    for total, by in scene.runs.items():
        best = scene.optima[total]
        fluid = {"name": OPTIMUM, "per_round": f"{np.log(best).sum():.2f}", "per_second": ""}
        fluid |= {"tokens": f"{best.sum():.2f}", "rate": ""}
        each = [_row(name, of) for name, of in by.items()]
        each.append(fluid | dict(zip(CLIENTS, best / best.sum(), strict=True)))
        rows += [row | {"total": total} for row in each]
    return table("", rows, columns)


def _row(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    spans = spans_of(runs)
    shares = sum(per_round for per_round, _ in spans)
    intervals: dict[str, Interval] = {
        "per_round": interval(utilities(runs)),
        "per_second": interval(utilities(runs, per_second=True)),
        "tokens": interval([float(x.sum()) for x, _ in spans]),
        "rate": interval([float(x.sum()) for _, x in spans]),
    }
    told = {key: plus_minus(x) for key, x in intervals.items()}
    return {"name": name, **told, **dict(zip(CLIENTS, shares / shares.sum(), strict=True))}


def picture(path: Path, scene: Scene) -> None:
    """Figure 2 above figure 4, and the way to x* below, a column for each budget."""
    rows: list[list[Plot]] = [[], [], []]
    for total, by in scene.runs.items():
        best, title = scene.optima[total], f"C = {total}"
        ours = by[OURS][0]
        middle, real, told = ours.moving()
        axes = {"title": title, "xlabel": "round", "ylabel": "tokens a round", "ylim": (0, None)}
        rows[0].append(Plot({"real": (middle, real), "estimate": (middle, told)}, axes))
        lines: dict[str, Any] = {OPTIMUM: ([0, ours.rounds[-1]], 2 * [np.log(best).sum()])}
        for name, runs in by.items():
            rounds, goodput = runs[0].mean()
            kept = (rounds >= WINDOW) & (goodput > 0).all(axis=1)
            lines[name] = rounds[kept], np.log(goodput[kept]).sum(axis=1)
        axes = {"title": title, "xlabel": "round", "ylabel": "U(x̄), nats"}
        rows[1].append(Plot(lines, axes, styles={OPTIMUM: "k--"}))
        rounds, goodput = ours.mean()
        kept = rounds >= WINDOW
        ways = {n: (rounds[kept], goodput[kept, i] / best[i]) for i, n in enumerate(CLIENTS)}
        ways[OPTIMUM] = [0, rounds[-1]], [1, 1]
        axes = {"title": title, "xlabel": "round", "ylabel": "x̄ over x*", "ylim": (0.5, 1.5)}
        rows[2].append(Plot(ways, axes, styles={OPTIMUM: "k--"}))
    draw(path, "Estimated and real goodput, utility, and the way to x* (GoodSpeed live)", rows)


def compare(args: argparse.Namespace) -> Results:
    cells = Cells(args.out, silent=True)
    wanted = [(total, name) for total in args.totals for name in (OURS, *RIVALS)] + [(0, AUTO)]

    def key(total: int, name: str, run: int) -> str:
        return f"{args.verification}/{name}/{total}/{args.rounds}/{run}"

    def found(total: int, name: str) -> list[Run]:
        return [Run(cells.done[key(total, name, run)]) for run in range(args.runs)]

    with ExitStack() as stack:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # They outlive the verification servers, the first of which they need to start.
        urls = cache(lambda: stack.enter_context(draft_servers(port)))
        for run, (total, name) in itertools.product(range(args.runs), wanted):
            settings = settings_of(name, total, args.verification, port)
            one = partial(measure, urls, settings, args.rounds, run)
            cells.measure(key(total, name, run), one)
    runs = {c: {name: found(c, name) for name in (OURS, *RIVALS)} for c in args.totals}
    scene = scene_of(runs, found(0, AUTO))
    if args.result:
        picture(args.result.with_suffix(".png"), scene)
    kept = {f"{c}/{name}": utilities(of) for c, by in runs.items() for name, of in by.items()}
    return Results(kept, verdicts(scene), [figures(scene)])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1000)
    options.add_argument("--runs", type=int, default=1)
    options.add_argument("--totals", type=counts, default=[8, 16, 32], help="draft tokens (C)")
    options.add_argument("--verification", choices=("coupled", "ratio"), default="coupled")
    out = Path("goodspeed_live.jsonl")
    options.add_argument("--out", type=Path, default=out, help="every run")
    return tell(args := options.parse_args(), compare(args))


if __name__ == "__main__":
    sys.exit(main())
