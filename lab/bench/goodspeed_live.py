"""Does GoodSpeed share a live target more fairly among edge draft servers than equal lengths do?

    python -m lab.bench.goodspeed_live [--rounds 1000] [--runs 5] [--total 8] [--out FILE] [--json]

A verification server and four draft servers of the bundled family, processes of this machine that
speak gRPC, each with one user after another (temperature 1): a drafter that knows its user's
domain or one that does not. Rounds wait for all drafts, `ratio` verifies them, and the policies
share 8 draft tokens a round. Goodput is the tokens of a client over rounds (Σ log: GoodSpeed's
utility), prompts included; what else the machine does hardly matters. Every run is a line of FILE
(default: goodspeed_live.jsonl), from which the same command goes on. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from lab.bench.bundled_server import BundledServer, bundled_server, stopping
from lab.common.cells import Cells, Figures
from lab.common.claims import bar
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import interval, plus_minus, rotated
from penstock.zoo.registry import load_prompts

CLIENTS = {
    "math": "draft-data",
    "chat": "draft-lang",
    "summary": "draft-tiny",
    "entropy": "draft-code",
}
"""Each draft server's domain and drafter: two that know their domain, two that do not."""
POLICIES = ("goodspeed", "fixed", "random")
WARM_ROUNDS = 100
MAX_TOKENS = 192
_POLL_S = 0.2
_START_S = 120


def settings_of(policy: str, total: int, port: int) -> dict[str, Any]:
    """Of the verification server, by its file."""
    servers = {
        name: {
            "tenant": name,
            "token_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "trusted": True,
        }
        for name in CLIENTS
    }
    return {
        "engine": {
            "policy": "goodspeed",
            "allocation": {"name": policy, "options": {"total": total}},
            "tenants": {name: {} for name in CLIENTS},
            "num_threads": 1,
        },
        "drafters": {"listen": f"127.0.0.1:{port}", "servers": servers},
        "shutdown_grace_s": 1,
    }


@contextmanager
def draft_servers(port: int) -> Iterator[dict[str, str]]:
    """Until the end of the block; the address of each. Raises: RuntimeError."""
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
    """Tokens of every client over so many rounds, of which the first do not count."""

    async def snapshot() -> tuple[float, dict[str, float]]:
        steps = await asyncio.to_thread(server.metric, "target_steps_total")
        made = await asyncio.to_thread(server.by_label, "generation_tokens_total", "tenant")
        return steps, made

    async with httpx.AsyncClient(timeout=120) as http:
        users = [asyncio.create_task(use(http, *client, run)) for client in urls.items()]
        try:
            seen = [await snapshot()]
            for wanted in (WARM_ROUNDS, WARM_ROUNDS + rounds):
                while (now := await snapshot())[0] - seen[0][0] < wanted:
                    await asyncio.sleep(_POLL_S)
                    for user in users:
                        if user.done():
                            user.result()
                seen.append(now)
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
    _, (first, before), (last, after) = seen
    goodput = {name: (after[name] - before.get(name, 0)) / (last - first) for name in CLIENTS}
    return {
        "rounds": last - first,
        "goodput": goodput,
        "sum_log": float(np.log(list(goodput.values())).sum()),
        "tokens_per_round": sum(goodput.values()),
    }


def measure(policy: str, total: int, rounds: int, run: int) -> Figures:
    """One run, with processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        server = stack.enter_context(bundled_server(settings=settings_of(policy, total, port)))
        urls = stack.enter_context(draft_servers(port))
        end = time.monotonic() + _START_S
        while server.metric("draft_servers") < len(CLIENTS):
            if time.monotonic() > end:
                raise RuntimeError("a draft server did not connect")
            time.sleep(_POLL_S)
        return asyncio.run(rounds_of(server, urls, rounds, run))


def compare(args: argparse.Namespace) -> Results:
    cells = Cells(args.out)
    for run in range(args.runs):
        for policy in rotated(POLICIES, run):
            one = partial(measure, policy, args.total, args.rounds, run)
            cells.measure(f"{policy}/{args.total}/{args.rounds}/{run}", one)

    def found(policy: str, figure: str) -> list[float]:
        return cells.values(f"{policy}/{args.total}/{args.rounds}", figure)[: args.runs]

    figures = {"Σ log": "sum_log", "tokens a round": "tokens_per_round"}
    rows = []
    for policy in POLICIES:
        row = {"policy": f"`{policy}`"}
        row |= {f: plus_minus(interval(found(policy, f))) for f in figures.values()}
        each = found(policy, "goodput")
        row |= {name: f"{np.mean([g[name] for g in each]):.2f}" for name in CLIENTS}
        rows.append(row)
    columns = {"allocation": "{policy}"} | {title: f"{{{f}}}" for title, f in figures.items()}
    columns |= {f"{name} ({drafter})": f"{{{name}}}" for name, drafter in CLIENTS.items()}
    ours, verdicts = np.array(found(POLICIES[0], "sum_log")), []
    for rival in ("fixed", "random"):
        gain = interval(ours - found(rival, "sum_log"))
        verdicts.append(bar(f"Σ log a round over `{rival}`'s", f"{gain} (bar 0)", gain.low > 0))
    return Results(rows, verdicts, [table("", rows, columns)])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--total", type=int, default=8, help="draft tokens a round (C)")
    out = Path("goodspeed_live.jsonl")
    options.add_argument("--out", type=Path, default=out, help="every run")
    return tell(args := options.parse_args(), compare(args))


if __name__ == "__main__":
    sys.exit(main())
