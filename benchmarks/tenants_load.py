"""Streaming clients of several tenants against one server, in a process of their own.

    python -m benchmarks.tenants_load HOST PORT < tenants.json > figures.json

tenants.json: `{"seconds": S, "warm_up": S, "max_tokens": N, "prompts": [...], "tenants": [{"name",
"key", "clients"}]}`. Every client asks one thing after the other. Figures of the seconds after the
warm-up, by tenant: tokens of the requests that ended in them, and their times to the first token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_CONNECTIONS_AT_ONCE = 64


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
    prompts = given["prompts"]
    tally, asked = tenant["tally"], number
    while True:
        body = {
            "prompt": prompts[asked % len(prompts)],
            "max_tokens": given["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked += 1 + number
        await ask(host, port, tenant["key"], json.dumps(body).encode(), tally)


async def load(host: str, port: int, given: dict[str, Any]) -> dict[str, Any]:
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


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    print(json.dumps(asyncio.run(load(host, port, json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
