"""One hostile draft server among honest ones: what the others notice.

    python -m lab.bench.hostile [--quick] [--json]

A verification server (`penstock serve --drafters-listen`, the small bundled target, float32) runs
in processes of its own; three honest draft servers keep two requests each open over real sockets,
know what the target will say, and draft it with every fourth token wrong. A fourth draft server, of
another tenant and in another process, is well-behaved and hostile in turn. Either way it has the
same number of requests open, so that both times it takes the share that it may take. Its attacks:

late      answers every order as late as it can without missing the deadline (it learns when)
quota     malformed drafts and unknown ids as fast as the quota of one stream lets it
flood     random bytes and malformed messages without any limit; connects again when thrown out
opens     as many requests as are allowed, and tries to open more as fast as the quota lets it
false     `ratio` requests at a temperature, tokens of its own liking, false weights
again     eight loops, each of which connects, has a request opened, and leaves
strange   eight loops, each of which connects with a token that nobody has

The server and the honest ones share core 0, the hostile one has core 1 to itself (Linux): what is
measured is what it makes the server do. Rates are of the honest ones' tokens; every pair of windows
gives a ratio, hostile over well-behaved, and the median of them counts. Every finished text is
compared with the target's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress
from tests.serving.scripted import ScriptedServer, free_port, greedy, scripted_server, seeded

from lab.bench.hostile_attacks import (
    ATTACKS,
    END_S,
    MAX_OPEN,
    MESSAGES_PER_S,
    ended,
    hostile_process,
    pin,
    receive,
)
from lab.bench.live_rig import Process
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, parser, table, tell
from penstock.engine.tokenizer import load_tokenizer
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

TARGET = "target-small"
HONEST = ("ann", "ben", "cleo")
REQUESTS_EACH = 2
NUM_TOKENS = 160
WRONG_EVERY = 4
BAR = 0.05
SETTLE_S = 1.0
START_S = 300.0
ANSWER_S = 2 * END_S
"""For the hostile process to be there, and to end a window."""

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Question:
    """What the honest ones ask for, again and again."""

    prompt: list[int]
    sampling: pb.Sampling


# --- the honest ones ----------------------------------------------------------------------------


@dataclass
class Honest:
    """All honest draft servers. `expected`: the target's own text of each job; empty at first."""

    jobs: dict[str, list[Question]]
    expected: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    num_tokens: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_refused: int = 0

    async def learn(self, address: str, digest: str) -> None:
        """What the target says when nobody drafts."""
        for name, jobs in self.jobs.items():
            async with scripted_server(address, token=name) as server:
                await server.hello(digest)
                for n, job in enumerate(jobs):
                    await server.open(f"{n}.0", job.prompt, NUM_TOKENS, job.sampling)
                await server.run(lambda text, num: [], server.all_finished)
                for n in range(len(jobs)):
                    self.expected[name, n] = server.texts[f"{n}.0"].output

    async def work(self, name: str, address: str, digest: str) -> None:
        """Keep this server's requests open, until cancelled."""
        async with scripted_server(address, token=name) as server:
            await server.hello(digest)
            for n, job in enumerate(self.jobs[name]):
                await server.open(f"{n}.0", job.prompt, NUM_TOKENS, job.sampling)
            while True:
                message = await receive(server)
                assign = server.take(message)
                if assign is not None:
                    await server.send(draft=server.draft(assign, self._guess(name, server, assign)))
                elif message.HasField("verdict"):
                    self.num_tokens += len(message.verdict.token_ids)
                    if message.verdict.finish_reason:
                        await self._again(name, server, message.verdict.request_id)
                self.num_refused += message.HasField("refused")

    def _guess(self, name: str, server: ScriptedServer, assign: pb.Assign) -> list[int]:
        number = int(assign.request_id.partition(".")[0])
        at = assign.prefix_len - len(self.jobs[name][number].prompt)
        coming = self.expected[name, number][at : at + assign.num_draft_tokens]
        return [t ^ 1 if (at + i) % WRONG_EVERY == 0 else t for i, t in enumerate(coming)]

    async def _again(self, name: str, server: ScriptedServer, request_id: str) -> None:
        number, _, turn = request_id.partition(".")
        output = server.texts.pop(request_id).output
        self.num_compared += 1
        self.num_different += output != self.expected[name, int(number)]
        job = self.jobs[name][int(number)]
        await server.open(f"{number}.{int(turn) + 1}", job.prompt, NUM_TOKENS, job.sampling)


def make_jobs(tokenizer: Any) -> dict[str, list[Question]]:
    prompts = [load_prompts(domain)[0].prompt for domain in DOMAINS]
    jobs: dict[str, list[Question]] = {name: [] for name in HONEST}
    for n in range(len(HONEST) * REQUESTS_EACH):
        ids = tokenizer.encode(prompts[n])
        sampling = seeded(100 + n) if n % 2 else greedy()
        jobs[HONEST[n % len(HONEST)]].append(Question(list(ids), sampling))
    return jobs


# --- the verification server --------------------------------------------------------------------


def settings(port: int) -> dict[str, Any]:
    servers = {
        name: {"token_sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name}
        for name in (*HONEST, "bad")
    }
    return {
        "engine": {
            "target": str(model_path(TARGET)),
            "dtype": "float32",
            "num_threads": 1,
            "kv_tokens": 65536,
            "allocation": {"name": "fixed"},
        },
        "port": 0,
        "drafters": {
            "listen": f"127.0.0.1:{port}",
            "servers": servers,
            "max_open_requests": MAX_OPEN,
            "max_messages_per_s": MESSAGES_PER_S,
        },
    }


@asynccontextmanager
async def verification_server() -> AsyncIterator[tuple[Process, str]]:
    """Its process and the address for draft servers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump(settings(port)))
        server = Process("penstock.cli", "serve", "--config", str(path))
        try:
            await server.start("penstock: serving on")
            yield server, f"127.0.0.1:{port}"
        finally:
            await server.end()


# --- measuring ----------------------------------------------------------------------------------


@dataclass(slots=True)
class AttackRates:
    """Of one attack. Rates: the honest ones' tokens a second, one a window; memory after it."""

    attack: str
    good: list[float] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    messages_per_s: float = 0.0
    streams: float = 0.0
    memory_mib: float = 0.0

    @property
    def ratios(self) -> list[float]:
        return sorted(b / g for b, g in zip(self.bad, self.good, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class HostileProcess:
    """The hostile one's process, window by window."""

    def __init__(self, address: str, digest: str, prompt: list[int]) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=hostile_process, args=(theirs, address, digest, prompt), daemon=True
        )
        self._process.start()
        theirs.close()

    async def is_ready(self) -> None:
        """Wait until it can begin."""
        await self._said(START_S)

    def begin(self, attack: str, is_bad: bool) -> None:
        self._pipe.send((attack, is_bad))

    async def end(self) -> dict[str, float]:
        """What it did in the window that ends now."""
        self._pipe.send(None)
        return await self._said(ANSWER_S)

    async def _said(self, seconds: float) -> Any:
        """Raises: RuntimeError where it says nothing."""
        if not await asyncio.to_thread(self._pipe.poll, seconds):
            raise RuntimeError(f"the hostile process has said nothing for {seconds:g} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("the hostile process has died") from error

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass(slots=True)
class Everybody:
    """Everybody at work. seconds: of a window"""

    honest: Honest
    hostile: HostileProcess
    working: list[asyncio.Task[None]]
    seconds: float

    async def window(self, attack: str, is_bad: bool) -> tuple[float, dict[str, float]]:
        """Tokens a second of the honest ones, and what the hostile one did."""
        self.hostile.begin(attack, is_bad)
        await asyncio.sleep(SETTLE_S)
        before, begun = self.honest.num_tokens, time.perf_counter()
        await asyncio.sleep(self.seconds)
        rate = (self.honest.num_tokens - before) / (time.perf_counter() - begun)
        for task in self.working:
            if task.done():
                task.result()
        return rate, await self.hostile.end()


@asynccontextmanager
async def scene(address: str, tokenizer: Any, seconds: float) -> AsyncIterator[Everybody]:
    """The honest ones, who know what the target will say, and the hostile one, behaved so far."""
    honest = Honest(make_jobs(tokenizer))
    await honest.learn(address, tokenizer.digest)
    hostile = HostileProcess(address, tokenizer.digest, honest.jobs[HONEST[0]][0].prompt)
    working = [
        asyncio.create_task(honest.work(name, address, tokenizer.digest), name=name)
        for name in HONEST
    ]
    try:
        await hostile.is_ready()
        yield Everybody(honest, hostile, working, seconds)
    finally:
        hostile.kill()
        await asyncio.gather(*(ended(task) for task in working))


async def measure(pairs: int, seconds: float) -> tuple[Honest, list[AttackRates], float]:
    """All attacks, and the server's memory before them."""
    tokenizer = load_tokenizer(model_path(TARGET))
    pin(0)
    found = []
    async with (
        verification_server() as (process, address),
        scene(address, tokenizer, seconds) as everybody,
    ):
        with Progress(console=Console(file=sys.stderr)) as progress:
            bar = progress.add_task("windows", total=2 * pairs * len(ATTACKS))
            await everybody.window("late", False)
            before = process.memory_mib()
            for attack in ATTACKS:
                found.append(await _attack(everybody, attack, pairs, lambda: progress.advance(bar)))
                found[-1].memory_mib = process.memory_mib()
    return everybody.honest, found, before


async def _attack(
    everybody: Everybody, attack: str, pairs: int, on_window: Callable[[], None]
) -> AttackRates:
    found = AttackRates(attack)
    for pair in range(pairs):
        for is_bad in (False, True) if pair % 2 else (True, False):
            rate, did = await everybody.window(attack, is_bad)
            (found.bad if is_bad else found.good).append(rate)
            if is_bad:
                found.cpu_share += did["cpu_share"] / pairs
                found.messages_per_s += did["messages_per_s"] / pairs
                found.streams += did["streams"] / pairs
            on_window()
    return found


# --- report -------------------------------------------------------------------------------------


def verdicts(honest: Honest, found: Sequence[AttackRates], before: float) -> list[ClaimVerdict]:
    unharmed = honest.num_different == 0 and honest.num_compared > 0 and not honest.num_refused
    texts = (
        f"{honest.num_compared} compared with the target's own, {honest.num_different} different, "
        f"{honest.num_refused} messages refused"
    )
    after = max(f.memory_mib for f in found)
    memory = f"{before:.0f} MiB before, at most {after:.0f} MiB after"
    return [
        bar("texts of others", texts, unharmed),
        *(
            bar(
                f.attack,
                f"rate of others {100 * (f.ratio - 1):+.1f}% (pairs from "
                f"{100 * (f.ratios[0] - 1):+.1f} to {100 * (f.ratios[-1] - 1):+.1f}; bar -5%)",
                f.ratio >= 1 - BAR,
            )
            for f in found
        ),
        bar("memory", memory, after <= before + 64),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser(__doc__, quick="fewer and shorter windows").parse_args(arguments)
    pairs, seconds = (3, 2.0) if args.quick else (7, 3.0)
    honest, found, before = asyncio.run(measure(pairs, seconds))
    rows = [
        {**asdict(f), "ratio": f.ratio}
        | {"behaved": statistics.median(f.good), "hostile": statistics.median(f.bad)}
        for f in found
    ]
    columns = {
        "attack": "{attack}",
        "behaved": "{behaved:.0f}",
        "hostile": "{hostile:.0f}",
        "ratio": "{ratio:.3f}",
        "its messages/s": "{messages_per_s:.0f}",
        "streams": "{streams:.0f}",
        "its core": "{cpu_share:.0%}",
        "MiB": "{memory_mib:.0f}",
    }
    shown = table("others' tokens a second; what the hostile server spent", rows, columns)
    runs = {"attacks": rows, "memory_before_mib": before}
    return tell(args, Results(runs, verdicts(honest, found, before), [shown]))


if __name__ == "__main__":
    sys.exit(main())
