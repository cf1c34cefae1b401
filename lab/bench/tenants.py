"""Measures what one tenant costs another, and what fairness between them costs.

    python -m lab.bench.tenants price [--out FILE] [--result FILE] [--json]
    python -m lab.bench.tenants live [MODEL.gguf] [--turns 5] [--requests 12] [--out FILE] [--json]

`price`: one client beside 8 to 128 of another tenant, each with one request after another (200
tokens of prompt, 150 of output), on the virtual clock.

`live`: a victim's two clients at `penstock serve` of the bundled family or MODEL with look-up,
temperature 0, beside another tenant. It sends texts of the same kinds, or what may harm: tokens at
random at temperature 2, of which no draft is accepted; the victim's own prompts backwards; 32
requests at once. Every cell has a server of its own, so that nothing learned is left over, and the
same prompts; scenes take turns. Cells are lines of FILE (default: tenants.jsonl), from which the
same command goes on. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.bench.bundled_server import bundled_server
from lab.bench.real_prompts import real_prompts, token_ids
from lab.bench.soak_clients import Refused, events, posted
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.clients import served
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import FloatArray, Interval, interval, plus_minus, ratio, rotated
from penstock.config import PolicyConfig, hash_of_key
from penstock.core.types import FairnessRule
from penstock.engine.tokenizer import load_tokenizer
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup
from penstock.sim.workloads import Workload
from penstock.zoo.registry import DEFAULT_TARGET, DOMAINS, load_prompts, model_path

LEAST = 0.97
"""Share of its fair share that every tenant is to have."""
MOST_COST = 1 / 3

# --- what fairness costs, on the virtual clock ----------------------------------------------------

PROFILES = ("a100-llama2-7b", "zoo-large")
HEAVY = (8, 32, 128)
RULES: tuple[FairnessRule, ...] = (False, True, "strict")
PROMPT, OUTPUT = 200, 150
_MOST_PER_S = 20  # requests of a tenant that end in a second


def beside(profile: str, heavy: int, rule: FairnessRule, seconds: float = 20.0) -> Figures:
    """Tokens/s of the one client and of all, in the second half of a run."""
    rng = np.random.default_rng(0)
    later = int(_MOST_PER_S * seconds)
    names = ["light", *["heavy"] * heavy, *["light", "heavy"] * later]
    tenants = np.array([n for n in names if heavy or n == "light"])
    num = len(tenants)
    prompts = rng.integers(PROMPT - 50, PROMPT + 51, num)
    load = Workload("beside", prompts, np.full(num, OUTPUT), np.zeros(num), tenants)
    setup = Setup(load_profile(profile), PolicyConfig.from_bundle("admission"), fairness=rule)
    made = served(setup, load, 1 + heavy, (seconds / 2, seconds))
    rates = {tenant: float(tokens[1]) / (seconds / 2) for tenant, tokens in made.items()}
    return {"light": rates["light"], "all": sum(rates.values())}


def price(args: argparse.Namespace) -> Results:
    cells, runs = Cells(args.out), []
    for profile, heavy in itertools.product(PROFILES, HEAVY):
        alone = cells.measure(f"{profile}/alone", partial(beside, profile, 0, False))["light"]
        each = {f"{profile}/{heavy}/{r}": partial(beside, profile, heavy, r) for r in RULES}
        found = cells.measure_all(each)
        run: Figures = {f: [one[f] for one in found] for f in ("light", "all")}
        run |= {"share": [rate / (alone / 2) for rate in run["light"]]}
        run |= {"cost": [1 - rate / run["all"][0] for rate in run["all"]]}
        runs.append({"profile": profile, "heavy": heavy, **run})

    def row(run: Figures) -> Figures:
        forms = {"light": "{:.0f}", "share": "{:.2f}", "all": "{:.0f}", "cost": "{:.0%}"}
        return run | {n: "/".join(map(form.format, run[n])) for n, form in forms.items()}

    columns = {"profile": "`{profile}`", "others": "{heavy}", "its tokens/s": "{light}"}
    columns |= {"of half a server's": "{share}", "all tokens/s": "{all}", "cost": "{cost}"}
    cost = np.max([r["cost"] for r in runs], axis=0)
    share = np.min([r["share"] for r in runs], axis=0)
    verdicts = [
        bar("largest cost", f"{cost[1]:.0%} (bar a third)", cost[1] <= MOST_COST),
        bar("least of its share", f"{share[1]:.2f} (bar 0.97)", share[1] >= LEAST),
        bar("control, `strict`: costs more", f"{cost[2]:.0%}", cost[2] > MOST_COST),
        bar("control, `false`: gives less", f"{share[0]:.2f}", share[0] < LEAST),
    ]
    return Results(runs, verdicts, [table("`false`/`true`/`strict`", map(row, runs), columns)])


# --- what one tenant costs another, live ----------------------------------------------------------

CLIENTS, FLOOD, MAX_TOKENS = 2, 32, 96
WARM = 2
"""Requests of a victim's client that do not count."""
_MOST_S = 60.0


class Scene(NamedTuple):
    """Beside whom the victim is. texts: the other's; key: whose tenant the other claims to be."""

    clients: int = CLIENTS
    texts: str = "alike"
    key: str = "other"
    fairness: FairnessRule = True


SCENES = {
    "nobody": Scene(clients=0),
    "texts of the same kinds": Scene(),
    "nothing accepted": Scene(texts="random"),
    "the victim's texts backwards": Scene(texts="backwards"),
    "a flood": Scene(clients=FLOOD),
    "a flood, `fairness: false`": Scene(clients=FLOOD, fairness=False),
    "a flood, `fairness: strict`": Scene(clients=FLOOD, fairness="strict"),
    "backwards, in the victim's tenant": Scene(texts="backwards", key="victim"),
}
ALONE, ALIKE, RANDOM, BACKWARDS, FLOODED, UNFAIR, STRICT, SHARED = SCENES
Prompt = Sequence[int]


def prompts_of(model: Path | None) -> tuple[list[Prompt], list[Prompt]]:
    """The victim's prompts and others of the same kinds."""
    tokenizer = load_tokenizer(model or model_path(DEFAULT_TARGET))
    if model is None:
        kinds = [[tokenizer.encode(p.prompt) for p in load_prompts(d)] for d in DOMAINS]
    else:
        found = [p for p in real_prompts() if p.part == "held"]
        names = dict.fromkeys(p.kind for p in found)
        kinds = [[token_ids(p, tokenizer) for p in found if p.kind == kind] for kind in names]
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for n, row in enumerate(zip(*kinds, strict=False)):
        for i, prompt in enumerate(row):
            halves[(n + i) % 2].append(prompt)
    return halves


class Attack:
    """A victim and another tenant at one server. prompts: of both."""

    def __init__(self, url: str, scene: Scene, prompts: Sequence[Sequence[Prompt]], turn: int):
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._scene, self._turn, self._others_done = scene, turn, 0
        self._mine, alike = prompts
        rng = np.random.default_rng(turn)
        known = np.unique(np.concatenate([np.asarray(p) for half in prompts for p in half]))
        self._theirs = {
            "alike": alike,
            "random": [rng.choice(known, len(p)).tolist() for p in alike],
            "backwards": [list(p)[::-1] for p in self._mine],
        }[scene.texts]

    async def run(self, num_requests: int) -> Figures:
        """The victim's clients' requests, so many each, while the other goes on. Raises: ValueError
        where the other's fail, which would leave the victim alone."""
        others = [asyncio.create_task(self._other(i)) for i in range(self._scene.clients)]
        try:
            end = time.monotonic() + _MOST_S
            mine = [self._victim(i, num_requests, end) for i in range(CLIENTS)]
            seen = [one for client in await asyncio.gather(*mine) for one in client]
            for other in others:
                if other.done():
                    other.result()
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        tokens, seconds, first = np.array(seen).T
        rate = CLIENTS * tokens.sum() / seconds.sum()
        return {
            "tokens_per_s": float(rate),
            "ttft_s": float(np.median(first)),
            "requests": len(seen),
            "all_per_s": float(rate * (1 + self._others_done / (len(seen) + CLIENTS * WARM))),
        }

    async def _victim(self, client: int, num: int, end: float) -> list[tuple[float, float, float]]:
        """Tokens, seconds and seconds to the first of each request, but for the first ones."""
        done = []
        for n in range(WARM + num):
            if time.monotonic() > end and len(done) > WARM:
                break
            prompt = self._mine[(self._turn * num + n * CLIENTS + client) % len(self._mine)]
            done.append(await self._ask("victim", prompt, temperature=0))
        return done[WARM:]

    async def _other(self, client: int) -> None:
        for n in range(client, sys.maxsize, self._scene.clients):
            sampling = {"temperature": 2 if self._scene.texts == "random" else 0, "seed": n}
            with suppress(Refused):
                await self._ask(self._scene.key, self._theirs[n % len(self._theirs)], **sampling)
                self._others_done += 1
                continue
            await asyncio.sleep(0.1)

    async def _ask(self, key: str, prompt: Prompt, **fields: Any) -> tuple[float, float, float]:
        body = {"prompt": list(prompt), "max_tokens": MAX_TOKENS, "ignore_eos": True, **fields}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, first, tokens = time.monotonic(), 0.0, 0
        async with posted(self._address, f"{key}-key", body) as (reader, _):
            async for event in events(reader):
                first = first or time.monotonic()
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        return tokens, time.monotonic() - began, first - began


def attacked(
    model: Path | None, name: str, num: int, prompts: Sequence[Sequence[Prompt]], turn: int
) -> Figures:
    """One scene with a server of its own, on one core: the clients have the other."""
    scene = SCENES[name]
    engine: dict[str, Any] = {"num_threads": 1, "fairness": scene.fairness}
    if model is not None:
        engine |= {"target": str(model), "look_up": "suffix"}
    engine["tenants"] = {t: {"api_keys": [hash_of_key(f"{t}-key")]} for t in ("victim", "other")}
    with bundled_server(settings={"engine": engine, "shutdown_grace_s": 1}) as server:
        return asyncio.run(Attack(server.url, scene, prompts, turn).run(num))


def live(args: argparse.Namespace) -> Results:
    cells, turns = Cells(args.out), range(args.turns)
    family = args.model.stem if args.model else "bundled"
    prompts = prompts_of(args.model)
    for turn in turns:
        for name in rotated(list(SCENES), turn):
            one = partial(attacked, args.model, name, args.requests, prompts, turn)
            cells.measure(f"{family}/{args.requests}/{name}/{turn}", one)

    def found(name: str, figure: str = "tokens_per_s") -> FloatArray:
        return np.array(cells.values(f"{family}/{args.requests}/{name}", figure)[: args.turns])

    floods = dict.fromkeys((FLOODED, UNFAIR, STRICT), found(ALONE) / 2)
    fair = dict.fromkeys(SCENES, found(ALIKE)) | floods
    of_fair = {name: ratio(found(name), fair[name]) for name in SCENES}
    rows = [
        {
            "beside": name,
            "rate": plus_minus(interval(found(name))),
            "of fair": str(of_fair[name]) if name not in (ALONE, ALIKE) else "",
            "ttft": plus_minus(interval(1e3 * found(name, "ttft_s"))),
            "all": plus_minus(interval(found(name, "all_per_s"))),
        }
        for name in SCENES
    ]
    columns = {"beside": "{beside}", "tokens/s": "{rate}", "of its fair share": "{of fair}"}
    columns |= {"median TTFT, ms": "{ttft}", "all tokens/s": "{all}"}
    kept = ratio(found(FLOODED, "all_per_s"), found(UNFAIR, "all_per_s"))
    cost = bar("a flood: of all tokens kept", f"{kept} (bar 2/3)", kept.mean >= 1 - MOST_COST)
    return Results(rows, [*_verdicts(of_fair), cost], [table(family, rows, columns)])


def _verdicts(of_fair: dict[str, Interval]) -> Iterator[ClaimVerdict]:
    for name in (RANDOM, BACKWARDS, FLOODED):
        share = of_fair[name]
        yield bar(f"{name}: of the fair share", f"{share} (bar 0.97)", share.low >= LEAST)
    yield bar(f"oracle, {STRICT}", f"{of_fair[STRICT]}", of_fair[STRICT].low >= LEAST)
    for name in (UNFAIR, SHARED):
        yield bar(f"control, {name}: less", f"{of_fair[name]}", of_fair[name].high < LEAST)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("case", choices=("price", "live"))
    options.add_argument("model", type=Path, nargs="?", help="GGUF, in place of the bundled family")
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--requests", type=int, default=12, help="of each of the victim's clients")
    options.add_argument("--out", type=Path, default=Path("tenants.jsonl"), help="every cell")
    args = options.parse_args()
    return tell(args, (price if args.case == "price" else live)(args))


if __name__ == "__main__":
    sys.exit(main())
