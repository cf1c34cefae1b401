"""What clients that want too much, or do nothing, cost the others; and how a server comes back.

    python -m benchmarks.bad_clients [--only prompts,bodies,readers,headers,restart]

Starts `penstock serve` on the bundled family for each case, on this machine alone. Honest clients
have the address 127.0.0.2, the others 127.0.0.1. Every case is bounded in time. The last line is
JSON; of times only ratios within one case mean anything on a machine that does other work, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

WINDOW_S = 15.0
NUM_HONEST = 4
SHORT = {"prompt": "The river", "max_tokens": 8, "ignore_eos": True}
LONG = {"prompt": "The river", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Server:
    """`penstock serve`, and how long it took to start."""

    def __init__(self, process: subprocess.Popen[str], url: str, start_s: float) -> None:
        self.process = process
        self.url = url
        self.start_s = start_s

    @property
    def memory_mib(self) -> int:
        """Of the HTTP process."""
        return int(psutil.Process(self.process.pid).memory_info().rss >> 20)

    def is_up(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=60).is_success

    def num_running(self) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        name = "penstock:num_requests_running"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def engine_pid(self) -> int:
        """The process that would be missed: the largest of its descendants."""
        found = httpx.get(f"{self.url}/health", timeout=30).json()["engine"].get("pid")
        children = psutil.Process(self.process.pid).children(recursive=True)
        return int(found or max(children, key=lambda c: c.memory_info().rss).pid)


@contextmanager
def server() -> Iterator[Server]:
    started_at = time.perf_counter()
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving on http" in line)
        yield Server(process, line.split()[-1], time.perf_counter() - started_at)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


# --- clients ------------------------------------------------------------------------------------


def client(server: Server, address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        local_address=address, limits=httpx.Limits(max_connections=256)
    )
    return httpx.AsyncClient(base_url=server.url, transport=transport, timeout=WINDOW_S)


async def honest(server: Server, seconds: float = WINDOW_S) -> dict[str, Any]:
    """Short requests, one after the other from each client: how many were answered how."""
    seen: dict[str, Any] = {"answered": 0, "refused": 0, "late": 0}
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def one(http: httpx.AsyncClient) -> None:
        while (began := time.perf_counter()) < end:
            try:
                answer = await http.post("/v1/completions", json=SHORT)
            except httpx.HTTPError:
                seen["late"] += 1
                continue
            seen["answered" if answer.is_success else "refused"] += 1
            times.append(time.perf_counter() - began)
            if answer.is_error:
                await asyncio.sleep(0.1)

    async with client(server, "127.0.0.2") as http:
        await asyncio.gather(*(one(http) for _ in range(NUM_HONEST)))
    return {**seen, "median_s": round(statistics.median(times), 3) if times else None}


@contextlib.asynccontextmanager
async def beside(work: Callable[[], Awaitable[None]], num: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_for_ever(work)) for _ in range(num)]
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            await work()
        await asyncio.sleep(0.01)


# --- cases --------------------------------------------------------------------------------------


async def posted(body: dict[str, Any], num: int) -> dict[str, Any]:
    """Honest clients alone, and beside `num` that post one body again and again."""
    data = json.dumps(body).encode()
    with server() as running:
        alone, before = await honest(running), running.memory_mib
        async with client(running, "127.0.0.1") as http:

            async def work() -> None:
                await http.post("/v1/completions", content=data)

            async with beside(work, num):
                beside_them = await honest(running)
        return {
            "alone": alone, "beside": beside_them,
            "memory_mib": [before, running.memory_mib],
        }  # fmt: skip


async def prompts() -> dict[str, Any]:
    """Prompts of 4 MB, against a context of 2,048 tokens."""
    return await posted({"prompt": "a river " * 500_000}, 4)


async def bodies() -> dict[str, Any]:
    """Bodies of 4,096 prompts."""
    return await posted({"prompt": ["a river"] * 4096, "max_tokens": 64}, 2)


async def readers() -> dict[str, Any]:
    """64 streams that nobody reads: what runs of them after a while, and what others get."""
    data = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with server() as running, contextlib.ExitStack() as stack:
        alone = await honest(running)
        host, port = running.url.removeprefix("http://").split(":")
        for _ in range(64):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + data)
        turns = [await honest(running) for _ in range(4)]
        left = await asyncio.to_thread(running.num_running)
        return {"alone": alone, "beside": turns, "left_after_60_s": left}


async def headers() -> dict[str, Any]:
    """Streams behind 512 others: when the headers come, and when the first token."""
    with server() as running:
        async with client(running, "127.0.0.1") as busy, client(running, "127.0.0.2") as http:

            async def work() -> None:
                await busy.post("/v1/completions", json={**SHORT, "max_tokens": 256, "n": 16})

            async with beside(work, 32):
                began = time.perf_counter()
                async with http.stream(
                    "POST", "/v1/completions", json={**LONG, "max_tokens": 4}, timeout=120
                ) as answer:
                    headers_s = time.perf_counter() - began
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            break
                    first_s = time.perf_counter() - began
        return {"headers_s": round(headers_s, 3), "first_token_s": round(first_s, 3)}


async def restart() -> dict[str, Any]:
    """From SIGKILL of the engine until it is up again, beside the server's own start."""
    with server() as running:
        times = []
        for _ in range(3):
            os.kill(await asyncio.to_thread(running.engine_pid), signal.SIGKILL)
            began = time.perf_counter()
            for is_up in (False, True):
                while await asyncio.to_thread(running.is_up) is not is_up:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            times.append(time.perf_counter() - began)
        first, median = running.start_s, statistics.median(times)
        return {"start_s": round(first, 2), "restart_s": [round(t, 2) for t in times],
                "ratio": round(median / first, 3)}  # fmt: skip


CASES = {c.__name__: c for c in (prompts, bodies, readers, headers, restart)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES))
    found: dict[str, Any] = {}
    for name in parser.parse_args().only.split(","):
        found[name] = asyncio.run(CASES[name]())
        print(name, json.dumps(found[name]), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
