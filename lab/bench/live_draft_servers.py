"""Which allocation of draft lengths is fairest and fastest, live, with eight draft servers near and
far away?

    python -m lab.bench.live_draft_servers [--quick] [--json] [--delays 0,5,30] [--rounds 600]
        [--total 20] [--temperature 1] [--family DIR]

Ten processes of one machine: the bundled target, or that of a `--family` which `penstock zoo grow`
has made, behind its own port; a draft server for each domain of the bundled prompts (generalists
and specialists); and this one, which makes the users' requests, one after the other at each draft
server, and delays every byte between draft servers and verification server by half of the round
trip (milliseconds). Rates are the verification server's own counts, in ten stretches of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from tests.serving.links import Delay
from tests.serving.scripted import free_port

from lab.bench.bundled_server import BundledServer, bundled_server
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, ResultTable, parser, table, tell
from lab.common.statistics import FloatArray, interval, jain
from penstock.zoo.registry import WEIGHTS, load_prompts, model_path

CLIENTS = {
    "instruction": "draft-tiny",
    "roleplay": "draft-lang",
    "summary": "draft-base",
    "qa": "draft-lang",
    "chat": "draft-tiny",
    "math": "draft-data",
    "sql": "draft-code",
    "entropy": "draft-base",
}
"""The drafter of each domain's draft server: generalists and specialists."""
POLICIES = (
    ("fixed", "off"),
    ("random", "off"),
    ("goodspeed", "off"),
    ("goodspeed_adaptive", "off"),
    ("deadline", "off"),
    ("deadline", "async"),
)
STRETCHES = 10
_POLL_S, _START_S = 0.2, 300
_KV_TOKENS = 32_768
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class DraftServers:
    """Eight of them behind links. They outlive a verification server: a request waits meanwhile."""

    def __init__(self, args: argparse.Namespace, http: httpx.AsyncClient) -> None:
        self._args, self._http = args, http
        self.port = free_port()
        self.links = {name: Delay(self.port) for name in CLIENTS}
        self.tokens = {name: secrets.token_hex(16) for name in CLIENTS}
        self._urls: dict[str, str] = {}

    def start(self, stack: ExitStack) -> None:
        """A verification server must be there. Raises: RuntimeError."""
        processes = {}
        for name, drafter in CLIENTS.items():
            model = str(model_path(drafter, self._args.family))
            link = f"127.0.0.1:{self.links[name].port}"
            command = [sys.executable, "-m", "penstock.cli", "draft", "--connect", link]
            command += ["--model", model, "--listen", "0", "--no-assignments"]
            env = os.environ | _ONE_THREAD | {"PENSTOCK_TOKEN": self.tokens[name]}
            # A draft server says so whenever a verification server is gone.
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            processes[name] = process = subprocess.Popen(command, env=env, **pipes)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for name, process in processes.items():
            said = next((x for x in process.stdout if "serving on http" in x), None)
            if said is None:
                raise RuntimeError(f"the draft server {name} did not start")
            self._urls[name] = said.split()[-1]

    async def use(self, name: str) -> None:
        """A user of one draft server: one request after the other, for ever."""
        for n, prompt in enumerate(itertools.cycle(load_prompts(name))):
            body = {"prompt": prompt.prompt, "max_tokens": 192, "seed": n}
            body["temperature"] = self._args.temperature
            answer = await self._http.post(f"{self._urls[name]}/v1/completions", json=body)
            answer.raise_for_status()

    def settings(self, allocation: str, pipeline: str) -> dict[str, Any]:
        """Of a verification server that knows them."""
        total = self._args.total
        options = {"total": total} | ({"k": total} if allocation == "fixed" else {})
        digests = {n: hashlib.sha256(t.encode()).hexdigest() for n, t in self.tokens.items()}
        servers = {n: {"tenant": n, "token_sha256": d} for n, d in digests.items()}
        engine = {
            "target": str(model_path("target-large", self._args.family)),
            "verification": "coupled",
            "pipeline": pipeline,
            "allocation": {"name": allocation, "options": options},
            "kv_tokens": _KV_TOKENS,
            "num_threads": 1,
        }
        drafters = {"listen": f"127.0.0.1:{self.port}", "servers": servers}
        return {"engine": engine, "drafters": drafters, "shutdown_grace_s": 1}


async def play(
    args: argparse.Namespace, progress: Progress, silent: IO[str]
) -> list[dict[str, Any]]:
    """A row for each policy at each round trip. silent: where servers log."""
    jobs = [(delay, *policy) for delay in args.delays for policy in POLICIES]
    task = progress.add_task("live", total=len(jobs) * args.rounds)
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    rows = []
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        drafters = DraftServers(args, http)
        for link in drafters.links.values():
            await stack.enter_async_context(link.running())
        processes = stack.enter_context(ExitStack())
        for number, (delay, allocation, pipeline) in enumerate(jobs):
            for link in drafters.links.values():
                link.seconds = delay / 2e3
            progress.update(task, description=f"{allocation}, {pipeline}, {delay:g} ms")
            settings = drafters.settings(allocation, pipeline)
            with bundled_server(settings=settings, log=silent) as server:
                if not number:
                    await asyncio.to_thread(drafters.start, processes)
                async with asyncio.timeout(_START_S):
                    while await asyncio.to_thread(server.metric, "draft_servers") < len(CLIENTS):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_S)
                counts = await observe(drafters, server, args.rounds)
            progress.advance(task, args.rounds)
            where = {"round_trip_ms": delay, "allocation": allocation, "pipeline": pipeline}
            rows.append(where | figures(counts))
    return rows


async def observe(drafters: DraftServers, server: BundledServer, rounds: int) -> FloatArray:
    """Let users in until there were enough rounds. Returns counts at the ends of the stretches,
    [stretches + 1, 2 + clients]: seconds, rounds, and each client's tokens. A stretch more comes
    first and counts nothing."""
    users = [asyncio.create_task(drafters.use(name)) for name in CLIENTS]
    loop = asyncio.get_running_loop()
    begun = await asyncio.to_thread(server.metric, "target_steps_total")
    counts: list[list[float]] = []
    try:
        while len(counts) <= STRETCHES:
            await asyncio.sleep(_POLL_S)
            for user in users:
                if user.done():
                    user.result()
            now = loop.time()
            tokens = await asyncio.to_thread(server.by_label, "generation_tokens_total", "tenant")
            steps = await asyncio.to_thread(server.metric, "target_steps_total")
            if steps - begun >= rounds / STRETCHES * (len(counts) + 1):
                counts.append([now, steps, *(tokens.get(name, 0.0) for name in CLIENTS)])
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    return np.array(counts)


# --- what it comes to -----------------------------------------------------------------------------


def figures(counts: FloatArray) -> dict[str, Any]:
    """Σ log of the clients' tokens a second and a round, with intervals over the stretches; all
    tokens, the smallest client's, and Jain's index."""
    spent = np.diff(counts, axis=0)
    seconds, rounds, tokens = spent[:, 0], spent[:, 1], np.maximum(spent[:, 2:], 0.5)
    by_second = np.log(tokens / seconds[:, None]).sum(axis=1)
    by_round = np.log(tokens / rounds[:, None]).sum(axis=1)
    rates = tokens.sum(axis=0) / seconds.sum()
    return {
        "round_ms": float(1e3 * seconds.sum() / rounds.sum()),
        "per_second": interval(by_second).mean,
        "per_second_half": interval(by_second).half,
        "per_round": interval(by_round).mean,
        "per_round_half": interval(by_round).half,
        "tokens_per_s": float(rates.sum()),
        "smallest": float(rates.min()),
        "jain": jain(rates),
        "clients": dict(zip(CLIENTS, rates.tolist(), strict=True)),
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    told = []
    for delay in dict.fromkeys(r["round_trip_ms"] for r in rows):
        here = {(r["allocation"], r["pipeline"]): r for r in rows if r["round_trip_ms"] == delay}
        equal = here["fixed", "off"]["per_round"]
        gains = ", ".join(
            f"{name} {here[name, 'off']['per_round'] - equal:+.2f}"
            for name, pipeline in POLICIES
            if pipeline == "off" and name != "fixed"
        )
        where = f"round trip {delay:g} ms"
        told.append(bar(f"{where}, sum of logs a round over fixed", gains, None))
        best = max(here.values(), key=lambda r: r["per_second"])
        text = f"{best['allocation']}, {best['pipeline']} ({best['per_second']:.2f})"
        told.append(bar(f"{where}, largest sum of logs a second", text, None))
    return told


def tables(rows: Sequence[dict[str, Any]]) -> list[ResultTable]:
    columns = {
        "round trip ms": "{round_trip_ms:g}",
        "allocation, pipeline": "{allocation}, {pipeline}",
        "round ms": "{round_ms:.1f}",
        "sum log a round": "{per_round:.2f} ± {per_round_half:.2f}",
        "sum log a second": "{per_second:.2f} ± {per_second_half:.2f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "smallest": "{smallest:.1f}",
        "Jain": "{jain:.3f}",
    }
    return [table("", rows, columns)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="60 rounds, round trips 0 and 5 ms")
    options.add_argument("--delays", default="0,5,30", help="round trips in milliseconds")
    options.add_argument("--rounds", type=int, default=600)
    options.add_argument("--total", type=int, default=20, help="draft tokens a round (C)")
    options.add_argument("--temperature", type=float, default=1.0, help="of seeded requests")
    options.add_argument("--family", type=Path, default=WEIGHTS, help="folder of the models")
    args = options.parse_args(arguments)
    if args.quick:
        args.rounds, args.delays = 60, "0,5"
    args.delays = [float(delay) for delay in args.delays.split(",")]
    with (
        Path(os.devnull).open("w") as silent,
        Progress(console=Console(file=sys.stderr)) as progress,
    ):
        rows = asyncio.run(play(args, progress, silent))
    return tell(args, Results(rows, verdicts(rows), tables(rows)))


if __name__ == "__main__":
    sys.exit(main())
