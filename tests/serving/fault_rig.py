"""Real processes to break: verification server, draft servers, and the links between them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
from tests.serving.harness import FORKS, load_libraries_once
from tests.serving.links import Relay, sum_of

from penstock.api.edge import DraftSettings, serve_drafts
from penstock.api.server import serve
from penstock.config import parse_config
from penstock.serving.drafting import DrafterOptions
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.serving.link import Endpoint
from penstock.transport import service

PROMPTS = ["The quick brown fox", "def main():", "select * from t", "0123456789", "Once upon a"]
NUM_TOKENS = 180


class Child(AbstractContextManager["Child"]):
    """A process that says a line for each thing that is ready. It is one's own to kill."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        self._body = body
        self._arguments = arguments
        self.process: BaseProcess | None = None
        self.lines: list[str] = []

    async def start(self, num_lines: int = 1) -> None:
        """Start, and wait until it has said so many lines. (Links of the test must go on.)"""
        await asyncio.to_thread(self._start, num_lines)

    def _start(self, num_lines: int) -> None:
        load_libraries_once()
        ours, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=self._body, args=(theirs, *self._arguments))
        self.process.start()
        theirs.close()
        self.lines = [ours.recv() for _ in range(num_lines)]

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Send a signal, and wait for the end; returns the exit code."""
        assert self.process is not None
        self.send(number)
        await asyncio.to_thread(self.process.join, 30)
        assert not self.process.is_alive(), "it does not end"
        return self.process.exitcode

    def __exit__(self, *exc: object) -> None:
        process = self.process
        if process is None or process.pid is None or process.exitcode is not None:
            return
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.join()


def verification_process(
    target: Path, drafters_port: int, http_port: int, **settings: Any
) -> Child:
    """Says its address."""
    engine = {
        "target": target,
        "dtype": "float32",
        "verification": "coupled",
        "pipeline": "async",
        "allocation": {"name": "fixed"},
        "kv_tokens": 16384,
        "num_threads": 1,
    }
    drafters = {"listen": f"127.0.0.1:{drafters_port}", **settings.pop("drafters", {})}
    data = {"engine": engine, "drafters": drafters, "port": http_port, **settings}
    return Child(_verify, data)


def draft_process(
    model: Path, connect_port: int, token: str | None = None, **options: Any
) -> Child:
    """Says that it is connected, and then the address for its users."""
    settings = DraftSettings(
        Endpoint(f"127.0.0.1:{connect_port}", token=token),
        DrafterOptions(model.name, model, dtype="float32", **options),
        ("127.0.0.1", 0),
    )
    return Child(_draft, settings)


def _verify(pipe: Connection, data: dict[str, Any]) -> None:
    asyncio.run(serve(parse_config(data), pipe.send, LOAD_ENGINE))


def _draft(pipe: Connection, settings: DraftSettings) -> None:
    asyncio.run(serve_drafts(settings, pipe.send))


def url_of(child: Child) -> str:
    return child.lines[-1].removeprefix("serving on ")


class Proxy(Relay):
    """A link that can be cut, and stalled."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self.num_connections = 0

    def cut(self) -> None:
        """Break what is open, and take nothing new."""
        self._is_cut = True
        self.drop()

    def drop(self) -> None:
        self._flows.set()
        super().drop()

    def stall(self) -> None:
        """Let nothing through, without a word."""
        self._flows.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._flows.set()

    def admits(self) -> bool:
        self.num_connections += not self._is_cut
        return not self._is_cut

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()


class Mangler:
    """A relay of whole messages: each goes on twice, in any order among its neighbours."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._behind = port
        self._rng = random.Random(seed)
        self.num_messages = 0
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mangler]:
        server = grpc.aio.server(options=service.server_options())
        service.add_service(server, self._connect)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    async def _connect(self, messages: Any, context: Any) -> None:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{self._behind}", options=service.channel_options()
        ) as channel:
            call = channel.stream_stream(f"/{service.SERVICE}/Connect")()
            up = asyncio.create_task(self._relay(messages, call.write))
            try:
                await self._relay(call, context.write)
            finally:
                up.cancel()
                call.cancel()

    async def _relay(self, messages: Any, write: Callable[[bytes], Any]) -> None:
        waiting: list[bytes] = []
        has_come = asyncio.Event()

        async def pass_on() -> None:
            while await has_come.wait():
                has_come.clear()
                await asyncio.sleep(0.004)
                due = waiting * 2
                waiting.clear()
                self._rng.shuffle(due)
                for message in due:
                    await write(message)

        # Hello and welcome come first, or there is no stream.
        await write(await anext(aiter(messages)))
        passing_on = asyncio.create_task(pass_on())
        try:
            async for message in messages:
                self.num_messages += 1
                waiting.append(message)
                has_come.set()
        finally:
            passing_on.cancel()
            await asyncio.gather(passing_on, return_exceptions=True)


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests, greedy and seeded, by name."""
    for n, prompt in enumerate(PROMPTS):
        for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 100 + n}):
            name = f"{prompt} {fields}"
            yield name, {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


async def complete(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=600) as http:
        return await http.post(f"{url}/v1/completions", json=body)


async def complete_all(url: str, **fields: Any) -> dict[str, str]:
    """Texts by name of all requests, made at once; every one of them must be whole."""
    made = list(bodies())
    answers = await asyncio.gather(*(complete(url, {**body, **fields}) for _, body in made))
    texts = {}
    for (name, _), answer in zip(made, answers, strict=True):
        assert answer.status_code == 200, answer.text
        data = answer.json()
        assert data["usage"]["completion_tokens"] == NUM_TOKENS
        assert data["choices"][0]["finish_reason"] == "length"
        texts[name] = data["choices"][0]["text"]
    return texts


async def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).text
    return sum_of(text, name)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
