"""What it costs to be operable: keys, limits, JSON logs, request ids, metrics that are read.

    python -m benchmarks.operation_cost [--clients 8] [--rounds 30] [--tokens 128] [--target MODEL]
        [--quick] [--json] [--result FILE]

Two servers of the same engine run side by side, of which one works at a time: in turns each gets
the same requests of so many clients at once. One has tenants whose keys are hashed and whose every
limit is in force, JSON logs with a line for each request, clients that set request ids, time limits
and a reader of `/metrics` each second. The other has none of that. The median of the rounds' ratios
is the cost; a third server with nothing on, in the same turns, says how far two equal servers
differ.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from benchmarks.bundled_server import bundled_server

from penstock.config.tenants import hash_of_key
from penstock.lab.bench import Results, parser, table, tell
from penstock.zoo.registry import DOMAINS, load_prompts

KEYS = ["key-of-north", "key-of-south"]
PLENTY = 10**9
SETTINGS: dict[str, Any] = {
    "log_format": "json",
    "request_timeout_s": 600.0,
    "max_wait_s": 300.0,
    "cors_origins": ["https://chat.example"],
    "engine": {
        "tenants": {
            key.removeprefix("key-of-"): {
                "api_keys": [hash_of_key(key)],
                "weight": 1.0 + number,
                "requests_per_minute": PLENTY,
                "tokens_per_minute": PLENTY,
                "max_running_requests": 64,
                "max_waiting_requests": 64,
                "max_prompt_tokens": 4096,
                "max_output_tokens": 4096,
                "allowed_drafters": ["none"],
            }
            for number, key in enumerate(KEYS)
        }
    },
}


class Server(NamedTuple):
    """is_on: with all of it."""

    url: str
    is_on: bool


async def read_metrics(client: httpx.AsyncClient) -> None:
    """As Prometheus does, but more often; until it is cancelled."""
    while True:
        (await client.get("/metrics", headers=headers_of(0, 0))).raise_for_status()
        await asyncio.sleep(1.0)


def headers_of(number: int, turn: int) -> dict[str, str]:
    key = KEYS[number % len(KEYS)]
    return {"Authorization": f"Bearer {key}", "X-Request-Id": f"client-{number}-{turn}"}


async def ask(client: httpx.AsyncClient, server: Server, number: int, num_tokens: int) -> int:
    """One client's two requests, the first streamed. Returns the tokens."""
    total = 0
    for turn, stream in enumerate((True, False)):
        prompts = load_prompts(DOMAINS[number % len(DOMAINS)])
        body = {
            "prompt": prompts[turn].prompt, "max_tokens": num_tokens, "seed": number,
            "ignore_eos": True, "speculation": {"drafter": "none"}, "stream": stream,
        }  # fmt: skip
        if server.is_on:
            body["timeout"] = 500.0
        headers = headers_of(number, turn) if server.is_on else {}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        answer.raise_for_status()
        total += num_tokens
    return total


async def rate(server: Server, clients: int, num_tokens: int) -> float:
    """Tokens a second."""
    limits = httpx.Limits(max_connections=clients + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        reader = asyncio.create_task(read_metrics(client)) if server.is_on else None
        began = time.perf_counter()
        made = await asyncio.gather(*(ask(client, server, n, num_tokens) for n in range(clients)))
        seconds = time.perf_counter() - began
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
    return sum(made) / seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    common = ["--kv-tokens", str(args.clients * 1024)]
    if args.target is not None:
        common += [str(args.target)]
    # What is measured stands between its two controls, so that a machine that slows down or
    # speeds up during a round favours neither.
    found: dict[str, list[float]] = {"off": [], "on": [], "off again": []}
    with ExitStack() as stack:
        servers = {
            name: Server(
                stack.enter_context(
                    bundled_server(*common, settings=SETTINGS if name == "on" else {})
                ).url,
                name == "on",
            )
            for name in found
        }
        for turn in range(args.rounds + 1):
            for name in list(found)[:: -1 if turn % 2 else 1]:
                one = asyncio.run(rate(servers[name], args.clients, args.tokens))
                if turn:  # the first round warms up
                    found[name].append(one)
    pairs = list(zip(found["off"], found["on"], found["off again"], strict=True))
    both = [statistics.mean((off, again)) for off, _, again in pairs]
    return {
        "clients": args.clients,
        "rates": found,
        **{name: statistics.median(rates) for name, rates in found.items()},
        "ratio": statistics.median(on / off for (_, on, _), off in zip(pairs, both, strict=True)),
        "ratio_of_equals": statistics.median(again / off for off, _, again in pairs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="four rounds of 64 tokens")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--target", type=Path)
    args = options.parse_args(arguments)
    if args.quick:
        args.rounds, args.tokens = 4, 64
    run = measure(args)
    columns = {
        "clients": "{clients}", "all of it off, tokens/s": "{off:.0f}",
        "a second one": "{off again:.0f}", "on": "{on:.0f}", "on / off": "{ratio:.3f}",
        "two with all off": "{ratio_of_equals:.3f}",
    }  # fmt: skip
    title = "keys, limits, JSON logs, request ids, metrics read each second"
    return tell(args, Results([run], tables=[table(title, [run], columns)]))


if __name__ == "__main__":
    sys.exit(main())
