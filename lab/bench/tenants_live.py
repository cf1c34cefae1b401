"""A quiet tenant beside a greedy one, on `penstock serve` with the bundled family: real sockets,
streaming clients in a process of their own.

    python -m lab.bench.tenants_live HOST PORT < tenants.json > figures.json

are the clients. tenants.json: `{"seconds": S, "warm_up": S, "max_tokens": N, "prompts": [...],
"tenants": [{"name", "key", "clients"}]}`. Every client asks one thing after the other. Figures of
the seconds after the warm-up, by tenant: tokens of the requests that ended in them, and their times
to the first token.

Keys and limits are in force, though no limit is reached: what is measured is what tenants have by
their weights. The server reads other settings every second.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.bench.bundled_server import BundledServer, bundled_server
from penstock.config import hash_of_key
from penstock.zoo.registry import load_prompts

CASES = ((80, 1.0), (400, 1.0), (80, 10.0), (400, 10.0))
"""Greedy clients, and the weight of the quiet tenant, whose clients are four."""
QUIET = 4
_DOMAINS = ("instruction", "chat", "qa", "math")
_CONNECTIONS_AT_ONCE = 64


@dataclass(frozen=True)
class Seconds:
    """Of warming up and of measuring."""

    warm_up: float
    measured: float


def settings(weight: float, requests_per_minute: int) -> dict[str, Any]:
    """Keys of two tenants, and limits."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": 100_000_000,
        "max_running_requests": 512,
        "max_waiting_requests": 1024,
        "max_prompt_tokens": 1024,
        "max_output_tokens": 128,
    }
    tenants = {
        "quiet": {"weight": weight, "api_keys": [hash_of_key("quiet-key")], **limits},
        "greedy": {"weight": 1.0, "api_keys": [hash_of_key("greedy-key")], **limits},
    }
    return {"open_metrics": True, "engine": {"tenants": tenants}}


def serving(weight: float) -> AbstractContextManager[BundledServer]:
    """A server with two tenants."""
    return bundled_server(settings=settings(weight, 1_000_000))


@contextmanager
def reloading(server: BundledServer, weight: float) -> Iterator[None]:
    """Other limits every second."""
    is_over = threading.Event()

    def reload() -> None:
        turn = 0
        while not is_over.wait(1):
            turn += 1
            server.reload(settings(weight, 1_000_000 + turn))

    thread = threading.Thread(target=reload)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def load(server: BundledServer, seconds: Seconds, shift: int, **clients: int) -> dict[str, Any]:
    """Figures by tenant of so many clients of each."""
    prompts = [p.prompt for domain in _DOMAINS for p in load_prompts(domain)[:40]]
    given = {
        "seconds": seconds.measured,
        "warm_up": seconds.warm_up,
        "max_tokens": 64,
        "prompts": prompts[shift:] + prompts[:shift],
        "tenants": [{"name": n, "key": f"{n}-key", "clients": c} for n, c in clients.items()],
    }
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "lab.bench.tenants_live", "127.0.0.1", port],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def measure(
    server: BundledServer, greedy: int, weight: float, seconds: Seconds, seed: int
) -> dict[str, Any]:
    """The quiet tenant alone, then beside the greedy one, in one run on one server."""
    with reloading(server, weight):
        alone = load(server, seconds, 7 * seed, quiet=QUIET)["quiet"]
        before, started = server.metric("target_steps_total"), time.perf_counter()
        both = load(server, seconds, 7 * seed, quiet=QUIET, greedy=greedy)
    steps = server.metric("target_steps_total") - before
    step_s = (time.perf_counter() - started) / max(1.0, steps)
    quiet, other = both["quiet"], both["greedy"]
    made = quiet["tokens_per_s"] + other["tokens_per_s"]
    share = weight / (weight + 1.0)
    due = min(alone["tokens_per_s"], share * made)
    ttft_alone, ttft = (float(np.percentile(f["ttft_s"] or [1e9], 99)) for f in (alone, quiet))
    return {
        "alone_tokens_per_s": alone["tokens_per_s"],
        "quiet_tokens_per_s": quiet["tokens_per_s"],
        "greedy_tokens_per_s": other["tokens_per_s"],
        "of_what_is_due": quiet["tokens_per_s"] / max(due, 1e-9),
        "of_all_tokens": quiet["tokens_per_s"] / max(made, 1e-9),
        "ttft_p99_s": ttft,
        "step_s": step_s,
        "ttft_over_bar": ttft / (1.5 * ttft_alone / share + 2 * step_s),
    }


# --- the clients ----------------------------------------------------------------------------------


@dataclass
class Tally:
    """What one tenant's clients have seen: (end, time to first token, tokens) of each request."""

    requests: list[tuple[float, float, int]] = field(default_factory=list)
    refused: int = 0

    def between(self, start: float, end: float) -> dict[str, Any]:
        ended = [r for r in self.requests if start <= r[0] < end]
        return {
            "tokens_per_s": sum(tokens for _, _, tokens in ended) / (end - start),
            "requests": len(ended),
            "refused": self.refused,
            "ttft_s": sorted(ttft for _, ttft, _ in ended),
        }


async def ask(host: str, port: int, key: str, body: bytes, tally: Tally) -> None:
    """One streamed completion. Read by hand: four hundred clients must not cost what they
    measure."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        if b" 200 " not in await reader.readline():
            tally.refused += 1
            await asyncio.sleep(0.2)
            return
        first, tokens = 0.0, 0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter()
            if b'"completion_tokens"' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        if tokens:
            tally.requests.append((time.perf_counter(), first - started, tokens))
    finally:
        writer.close()


async def client(host: str, port: int, tenant: dict[str, Any], number: int, given: Any) -> None:
    prompts, asked = given["prompts"], number
    while True:
        body = {
            "prompt": prompts[asked % len(prompts)],
            "max_tokens": given["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked += 1 + number
        await ask(host, port, tenant["key"], json.dumps(body).encode(), tenant["tally"])


async def all_clients(host: str, port: int, given: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        tasks = []
        for tenant in given["tenants"]:
            tenant["tally"] = Tally()
            for number in range(tenant["clients"]):
                tasks.append(group.create_task(client(host, port, tenant, number, given)))
                if len(tasks) % _CONNECTIONS_AT_ONCE == 0:
                    await asyncio.sleep(0.05)
        await asyncio.sleep(given["warm_up"])
        start = time.perf_counter()
        await asyncio.sleep(given["seconds"])
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
    return {tenant["name"]: tenant["tally"].between(start, end) for tenant in given["tenants"]}


if __name__ == "__main__":
    host, port = sys.argv[1], int(sys.argv[2])
    print(json.dumps(asyncio.run(all_clients(host, port, json.load(sys.stdin)))))
