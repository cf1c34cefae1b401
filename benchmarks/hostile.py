"""One hostile draft server among honest ones: what the others notice.

    python -m benchmarks.hostile [--quick] [--json]

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

The server and the honest ones share core 0, the hostile one has core 1 to itself (Linux): what is
measured is what it makes the server do. Rates are of the honest ones' tokens; every pair of windows
gives a ratio, hostile over well-behaved, and the median of them counts. Every finished text is
compared with the target's own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.serving.scripted import ScriptedServer, free_port, greedy, scripted_server, seeded

from penstock.engine.tokenizer import load_tokenizer
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

TARGET = "target-small"
HONEST = ("ann", "ben", "cleo")
REQUESTS_EACH = 2
NUM_TOKENS = 160
MAX_OPEN = 16
WRONG_EVERY = 4
BAR = 0.05
SETTLE_S = 1.0
ATTACKS = ("late", "quota", "flood", "opens", "false")
MESSAGES_PER_S = 1000
"""Of one stream, the server's default."""

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Job:
    """What the honest ones ask for, again and again."""

    prompt: list[int]
    sampling: pb.Sampling


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > core:
        os.sched_setaffinity(0, {core})


async def receive(server: ScriptedServer) -> pb.Down:
    """Without the time limit of tests, which can lose a cancellation. Raises: EOFError."""
    data = await server.call.read()
    if data is grpc.aio.EOF:
        raise EOFError
    return pb.Down.FromString(data)


# --- the hostile one ----------------------------------------------------------------------------


class Hostile:
    """One draft server that can do all of it. `is_bad`: otherwise it behaves, as a control."""

    def __init__(self, address: str, digest: str, prompt: list[int]) -> None:
        self._address, self._digest, self._prompt = address, digest, prompt
        self._rng = random.Random(4)
        self._writing = asyncio.Lock()
        self.num_sent = 0
        self.num_streams = 0

    async def run(self, attack: str, is_bad: bool) -> None:
        """Until cancelled."""
        kinds: dict[str, Callable[[ScriptedServer, bool], Awaitable[None]]] = {
            "late": self._late,
            "quota": self._quota,
            "flood": self._flood,
            "opens": self._opens,
            "false": self._false,
        }
        task = asyncio.current_task()
        while task is None or not task.cancelling():
            self.num_streams += 1
            try:
                async with scripted_server(self._address, token="bad") as server:
                    await server.hello(self._digest)
                    await kinds[attack](server, is_bad)
            except* (grpc.RpcError, EOFError, asyncio.InvalidStateError):
                pass  # thrown out

    async def _open(self, server: ScriptedServer, number: int, sampling: pb.Sampling) -> None:
        for n in range(number):
            await server.open(f"r{n}", self._prompt, 1500, sampling)

    async def _send(self, server: ScriptedServer, **message: Any) -> None:
        async with self._writing:  # a gRPC call takes one write at a time
            await server.send(**message)
        self.num_sent += 1

    async def _answer(self, server: ScriptedServer, ratio: bool = False) -> None:
        """Promptly, with drafts that are always wrong."""
        while True:
            assign = server.take(await receive(server))
            if assign is not None:
                tokens = [7] * assign.num_draft_tokens
                weights = [pb.TopWeights(token_ids=[7], weights=[65536])] * (len(tokens) * ratio)
                await self._send(server, draft=server.draft(assign, tokens, weights=weights))

    async def _late(self, server: ScriptedServer, is_bad: bool) -> None:
        await self._open(server, 8, greedy())
        if not is_bad:
            await self._answer(server)
        delay = 0.0
        newest: dict[str, int] = {}

        async def answer(assign: pb.Assign) -> None:
            nonlocal delay
            await asyncio.sleep(delay)
            if newest[assign.request_id] != assign.round:
                delay *= 0.9
            else:
                delay = 1.05 * delay + 0.0002
            tokens = [7] * assign.num_draft_tokens
            await self._send(server, draft=server.draft(assign, tokens))

        async with asyncio.TaskGroup() as answers:
            while True:
                message = await receive(server)
                if message.HasField("verdict"):
                    newest[message.verdict.request_id] = -1
                assign = server.take(message)
                if assign is not None:
                    newest[assign.request_id] = assign.round
                    answers.create_task(answer(assign))

    async def _quota(self, server: ScriptedServer, is_bad: bool) -> None:
        async def flood() -> None:
            while True:
                for _ in range(19):
                    await self._send(server, **self._harmless())
                await asyncio.sleep(20 / MESSAGES_PER_S)

        await _with_reader(server, flood if is_bad else None)

    async def _flood(self, server: ScriptedServer, is_bad: bool) -> None:
        async def flood() -> None:
            while True:
                for _ in range(50):
                    await self._send(server, **self._harmless())
                if self._rng.random() < 0.01:
                    await server.send_bytes(self._rng.randbytes(self._rng.randrange(400)))

        await _with_reader(server, flood if is_bad else None)

    def _harmless(self) -> dict[str, Any]:
        """A message that is refused or ignored, but does not end the stream."""
        rng = self._rng
        if rng.random() < 0.5:
            return {"close": pb.Close(request_id=str(rng.random()))}
        ids = [rng.randrange(1 << 32) for _ in range(8)]
        return {"draft": pb.Draft(request_id=f"r{rng.randrange(9)}", round=1, token_ids=ids)}

    async def _opens(self, server: ScriptedServer, is_bad: bool) -> None:
        await self._open(server, MAX_OPEN, greedy())

        async def flood() -> None:
            for number in range(1 << 30):
                opening = pb.Open(
                    request_id=f"more{number}",
                    prompt_token_ids=self._prompt,
                    max_tokens=1500,
                    sampling=greedy(),
                )
                await self._send(server, open=opening)
                await asyncio.sleep(1 / MESSAGES_PER_S)

        async with asyncio.TaskGroup() as both:
            both.create_task(self._answer(server))
            if is_bad:
                both.create_task(flood())

    async def _false(self, server: ScriptedServer, is_bad: bool) -> None:
        sampling = pb.Sampling(temperature=1.2, top_p=1, seed=3, ratio=is_bad)
        await self._open(server, 8, sampling)
        await self._answer(server, ratio=is_bad)


async def _with_reader(
    server: ScriptedServer, write: Callable[[], Coroutine[Any, Any, None]] | None
) -> None:
    """Read what comes, and write."""
    async with asyncio.TaskGroup() as both:
        if write is not None:
            both.create_task(write())
        while True:
            await receive(server)


def hostile_process(pipe: Any, address: str, digest: str, prompt: list[int]) -> None:
    """Does what the pipe says: (attack, is_bad) begins a window, None ends it."""
    pin(1)

    async def window(attack: str, is_bad: bool) -> dict[str, float]:
        hostile = Hostile(address, digest, prompt)
        begun, cpu = time.perf_counter(), time.process_time()
        running = asyncio.create_task(hostile.run(attack, is_bad))
        await asyncio.to_thread(pipe.recv)
        seconds = time.perf_counter() - begun
        while not running.done():  # a single cancellation can get lost between gRPC's futures
            running.cancel()
            await asyncio.wait((running,), timeout=0.2)
        return {
            "cpu_share": (time.process_time() - cpu) / seconds,
            "messages_per_s": hostile.num_sent / seconds,
            "streams": hostile.num_streams,
        }

    async def windows() -> None:
        # One loop for all: gRPC's poller outlives a loop that is closed.
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await window(*order))

    asyncio.run(windows())


# --- the honest ones ----------------------------------------------------------------------------


@dataclass
class Honest:
    """All honest draft servers. `expected`: the target's own text of each job; empty at first."""

    jobs: dict[str, list[Job]]
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


def make_jobs(tokenizer: Any) -> dict[str, list[Job]]:
    prompts = [load_prompts(domain)[0].prompt for domain in DOMAINS]
    jobs: dict[str, list[Job]] = {name: [] for name in HONEST}
    for n in range(len(HONEST) * REQUESTS_EACH):
        ids = tokenizer.encode(prompts[n])
        sampling = seeded(100 + n) if n % 2 else greedy()
        jobs[HONEST[n % len(HONEST)]].append(Job(list(ids), sampling))
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


@contextmanager
def verification_server() -> Iterator[tuple[psutil.Process, str]]:
    """Its process and the address for draft servers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump(settings(port)))
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "serve", "--config", str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if re.search(r"serving on http", line):
                    break
            yield psutil.Process(server.pid), f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def memory_mib(process: psutil.Process) -> float:
    """Resident memory of a process and its children."""
    family = [process, *process.children(recursive=True)]
    return float(sum(p.memory_info().rss for p in family)) / 2**20


# --- measuring ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
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


async def window(
    pipe: Any, honest: Honest, attack: str, is_bad: bool, seconds: float
) -> tuple[float, dict[str, float]]:
    """Tokens a second of the honest ones, and what the hostile one did."""
    pipe.send((attack, is_bad))
    await asyncio.sleep(SETTLE_S)
    before, begun = honest.num_tokens, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (honest.num_tokens - before) / (time.perf_counter() - begun)
    pipe.send(None)
    return rate, await asyncio.to_thread(pipe.recv)


async def measure(pairs: int, seconds: float) -> tuple[Honest, list[Found], float]:
    """All attacks, and the server's memory before them."""
    tokenizer = load_tokenizer(model_path(TARGET))
    honest = Honest(make_jobs(tokenizer))
    pin(0)
    with verification_server() as (process, address):
        await honest.learn(address, tokenizer.digest)
        ours, theirs = _SPAWN.Pipe()
        prompt = honest.jobs[HONEST[0]][0].prompt
        hostile = _SPAWN.Process(
            target=hostile_process, args=(theirs, address, tokenizer.digest, prompt), daemon=True
        )
        hostile.start()
        working = [
            asyncio.create_task(honest.work(name, address, tokenizer.digest)) for name in HONEST
        ]
        found = []
        with Progress(console=Console(file=sys.stderr)) as progress:
            bar = progress.add_task("windows", total=2 * pairs * len(ATTACKS))
            await window(ours, honest, "late", False, seconds)
            before = memory_mib(process)
            for attack in ATTACKS:
                found.append(await _attack(ours, honest, attack, pairs, seconds, progress, bar))
                found[-1].memory_mib = memory_mib(process)
        ours.send(None)
        for task in working:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        hostile.join(10)
    return honest, found, before


async def _attack(
    pipe: Any,
    honest: Honest,
    attack: str,
    pairs: int,
    seconds: float,
    progress: Progress,
    bar: Any,
) -> Found:
    found = Found(attack)
    for pair in range(pairs):
        for is_bad in (False, True) if pair % 2 else (True, False):
            rate, did = await window(pipe, honest, attack, is_bad, seconds)
            (found.bad if is_bad else found.good).append(rate)
            if is_bad:
                found.cpu_share += did["cpu_share"] / pairs
                found.messages_per_s += did["messages_per_s"] / pairs
                found.streams += did["streams"] / pairs
            progress.advance(bar)
    return found


# --- report -------------------------------------------------------------------------------------


def verdicts(honest: Honest, found: Sequence[Found], before: float) -> list[tuple[bool, str]]:
    """A line for each claim, and whether it holds."""
    lines = [
        (
            honest.num_different == 0 and honest.num_compared > 0 and not honest.num_refused,
            f"texts of others: {honest.num_compared} compared with the target's own, "
            f"{honest.num_different} different, {honest.num_refused} messages refused",
        )
    ]
    lines += [
        (
            f.ratio >= 1 - BAR,
            f"{f.attack}: rate of others {100 * (f.ratio - 1):+.1f}% (pairs from "
            f"{100 * (f.ratios[0] - 1):+.1f} to {100 * (f.ratios[-1] - 1):+.1f}; bar -5%)",
        )
        for f in found
    ]
    after = max(f.memory_mib for f in found)
    lines.append(
        (after <= before + 64, f"memory: {before:.0f} MiB before, at most {after:.0f} MiB after")
    )
    return lines


def show(found: Sequence[Found]) -> None:
    table = Table(title="others' tokens a second; what the hostile server spent")
    table.add_column("attack")
    for column in ("behaved", "hostile", "ratio", "its messages/s", "streams", "its core", "MiB"):
        table.add_column(column, justify="right")
    for f in found:
        rates = (f"{statistics.median(x):.0f}" for x in (f.good, f.bad))
        table.add_row(
            f.attack,
            *rates,
            f"{f.ratio:.3f}",
            f"{f.messages_per_s:.0f}",
            f"{f.streams:.0f}",
            f"{100 * f.cpu_share:.0f}%",
            f"{f.memory_mib:.0f}",
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    pairs, seconds = (3, 2.0) if options.quick else (7, 3.0)
    honest, found, before = asyncio.run(measure(pairs, seconds))
    lines = verdicts(honest, found, before)
    if options.json:
        report = {
            "attacks": [{**asdict(f), "ratio": f.ratio} for f in found],
            "memory_before_mib": before,
            "verdict": {"met": all(m for m, _ in lines), "lines": [t for _, t in lines]},
        }
        print(json.dumps(report))
    else:
        show(found)
        for met, text in lines:
            print(f"{'met   ' if met else 'MISSED'}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
