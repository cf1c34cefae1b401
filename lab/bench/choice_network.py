"""The case `network` of `lab.bench.choice`: draft servers in processes of their own, far away."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx

from lab.bench.bundled_server import BundledServer, bundled_server, stopping
from lab.bench.choice_systems import BEHIND, CONTEXT, Asked, Bench, System, seat_prompts, while_busy
from lab.bench.real_prompts import PARTS
from lab.common.cells import Cells, Figures
from lab.common.statistics import rotated
from penstock.config import SUFFIX
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER
from penstock.engine.tokenizer import load_tokenizer

SERVERS = {"north": 1.0, "south": 3.0}
"""Draft servers, and how much further away each is; the last one leaves and comes back."""
_START_S = 120
_AWAY = (0.3, 0.6)
"""Shares of a pass's requests, between which the last draft server is away."""


class NetworkBench:
    """Prompts, and servers that are started for every pass."""

    def __init__(self, args: argparse.Namespace, kept: Cells) -> None:
        self.args, self.models = args, tuple(SERVERS)
        cores = os.sched_getaffinity(0)
        if "first edits" not in kept.done:
            Bench(args, kept)
        os.sched_setaffinity(0, cores)  # which the engine took, and draft servers would inherit
        answers, tokenizer = kept.done["first edits"], load_tokenizer(args.target)
        self.learn = seat_prompts(tokenizer, PARTS[0], args.warm, answers)
        self.held = seat_prompts(tokenizer, PARTS[1], args.prompts, answers)

    def systems(self) -> dict[str, System]:
        """The control is not among them."""
        fixed = {f"{name} {BEHIND}": System((name,), wanted=name) for name in SERVERS}
        for name in (NO_DRAFTER, SUFFIX):
            fixed[name] = System((), wanted=name)
        return {**fixed, AUTO_DRAFTER: System(self.models)}

    def play(self, systems: Mapping[str, System], turn: int) -> dict[str, Figures]:
        """Serve the held prompts once by every system, one after the other."""
        return {name: self._pass(systems[name], turn) for name in rotated(list(systems), turn)}

    def _pass(self, system: System, turn: int) -> Figures:
        """Serve the held prompts by a server that has served those to learn from."""
        wanted = system.wanted
        each = [wanted] * len(self.held) if isinstance(wanted, str) else wanted
        # The control's server learns as the default does.
        one = wanted if isinstance(wanted, str) else AUTO_DRAFTER
        learn = [self._body(asked, one) for asked in self.learn]
        held = [self._body(*pair) for pair in zip(self.held, each, strict=True)]
        found = asyncio.run(play(self.args, learn, held, turn))
        for asked, told in zip(self.held, found["requests"], strict=True):
            told["kind"] = asked.label
        return found

    def _body(self, asked: Asked, wanted: str) -> dict[str, Any]:
        body = {"prompt": asked.token_ids, "max_tokens": self.args.tokens, "temperature": 0}
        return body if wanted == AUTO_DRAFTER else {**body, "speculation": {"drafter": wanted}}


def settings_of(args: argparse.Namespace, port: int) -> dict[str, Any]:
    """Return the verification server's settings; every draft server drafts for one request."""
    servers = {
        name: {
            "token_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "trusted": True,
            "max_num_seqs": 1,
        }
        for name in SERVERS
    }
    room = CONTEXT + args.tokens + 32
    return {
        "engine": {
            "target": str(args.target),
            "device": "cpu:0",
            "look_up": SUFFIX,
            "max_model_len": room,
            "kv_tokens": (1 + args.clients) * room,
            "prefix_caching": False,
            "tenants": {"default": {"share_prompts": True}},
        },
        "drafters": {"listen": f"127.0.0.1:{port}", "servers": servers},
        "shutdown_grace_s": 1,
    }


@asynccontextmanager
async def relay(port: int, seconds: float) -> AsyncIterator[int]:
    """A port from which everything arrives so much later, in both directions."""
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while (item := await pending.get())[1]:
                await asyncio.sleep(item[0] - loop.time())
                writer.write(item[1])
                await writer.drain()
            writer.close()

        task = asyncio.create_task(deliver())
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                pending.put_nowait((loop.time() + seconds, chunk))
        pending.put_nowait((0.0, b""))
        with suppress(ConnectionError):
            await task

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        with suppress(asyncio.CancelledError):  # at the end, of which asyncio would print a trace
            await asyncio.gather(carry(reader, back), carry(there, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@contextmanager
def draft_server(args: argparse.Namespace, name: str, port: int) -> Iterator[subprocess.Popen[Any]]:
    """With the small model on a core that it shares with the others."""
    command = [sys.executable, "-m", "penstock.cli", "draft", "--model", str(args.model)]
    command += ["--connect", f"127.0.0.1:{port}", "--device", "cpu:1"]
    env = {**os.environ, "PENSTOCK_TOKEN": name}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, **quiet) as process, stopping(process):
        yield process


async def play(
    args: argparse.Namespace,
    learn: Sequence[Mapping[str, Any]],
    held: Sequence[Mapping[str, Any]],
    seed: int,
) -> Figures:
    """A pass on a server of its own. learn, held: bodies of requests. Raises: RuntimeError,
    httpx.HTTPError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        server = stack.enter_context(bundled_server(settings=settings_of(args, port)))
        async with (
            relay(port, args.milliseconds / 2000 * SERVERS["north"]) as north,
            relay(port, args.milliseconds / 2000 * SERVERS["south"]) as south,
            httpx.AsyncClient(timeout=600) as http,
        ):
            ports = zip(SERVERS, (north, south), strict=True)
            processes = [stack.enter_context(draft_server(args, *one)) for one in ports]
            await _connected(server)
            await _ask_all(args, http, server.url, learn, lambda _: None)

            # The last server freezes, and thaws.
            signals = (signal.SIGSTOP, signal.SIGCONT)
            marks = {int(len(held) * n): s for n, s in zip(_AWAY, signals, strict=True)}

            def begins(n: int) -> None:
                if n in marks:
                    processes[-1].send_signal(marks[n])

            order = list(range(len(held)))
            random.Random(seed).shuffle(order)
            try:
                shuffled = [held[i] for i in order]
                done = await _ask_all(args, http, server.url, shuffled, begins)
            finally:
                processes[-1].send_signal(signal.SIGCONT)
    told = dict(zip(order, done, strict=True))
    requests = [told[i] for i in range(len(held))]
    tokens, seconds = while_busy(requests, args.clients)
    return {"seconds": seconds, "tokens": tokens, "requests": requests}


async def _connected(server: BundledServer) -> None:
    end = time.monotonic() + _START_S
    while await asyncio.to_thread(server.metric, "draft_servers") < len(SERVERS):
        if time.monotonic() > end:
            raise RuntimeError("a draft server did not connect")
        await asyncio.sleep(0.2)


async def _ask_all(
    args: argparse.Namespace,
    http: httpx.AsyncClient,
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    begins: Callable[[int], None],
) -> list[dict[str, Any]]:
    """As many at once as there are clients. begins: hears of each request's number."""
    room, start = asyncio.Semaphore(args.clients), time.perf_counter()

    async def ask(n: int, body: Mapping[str, Any]) -> dict[str, Any]:
        async with room:
            begins(n)
            began = time.perf_counter()
            answer = await http.post(f"{url}/v1/completions", json=body)
            if answer.status_code == 400 and "speculation" in body:
                # Its draft server is away: a client would go on with look-up.
                other = {**body, "speculation": {"drafter": SUFFIX}}
                answer = await http.post(f"{url}/v1/completions", json=other)
            answer.raise_for_status()
            ended = time.perf_counter()
        found = answer.json()
        digest = hashlib.sha256(found["choices"][0]["text"].encode()).hexdigest()[:16]
        tokens = found["usage"]["completion_tokens"]
        told = {"seconds": ended - began, "ended": ended - start, "text": digest}
        return {"tokens": tokens, "all_tokens": tokens, **told}

    return list(await asyncio.gather(*(ask(n, body) for n, body in enumerate(bodies))))
