"""A draft server that sends ahead, live and far away: tokens a second, and bytes on the wire.

    python -m lab.bench.live_ahead [--quick] [--json] [--delays 30,100,300]

Three processes of one machine: the bundled target behind its own port (drafts of 4 as they come:
`fixed`, `async`), a draft server with `draft-base`, and this one, which makes four users' seeded
requests at the draft server and delays every byte between the two by half of the round trip. Each
user asks for the same texts in turns with drafts sent ahead and without: a request with a
`max_draft_tokens` of its own is left to orders. Every text is compared with what the target says
alone. Bytes are those that the draft server sends, gRPC's own included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from tests.serving.fault_rig import draft_process, url_of, verification_process
from tests.serving.scripted import free_port

from lab.bench.live_rig import Delay
from lab.common.results import Results, parser, table, tell
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

NUM_TOKENS = 128
USERS = 4
WAYS: dict[str, dict[str, Any]] = {
    "sent ahead": {},
    "ordered": {"speculation": {"max_draft_tokens": 16}},
}


class CountingDelay(Delay):
    """Counts what comes from the draft server, which connects to it."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.num_bytes = 0

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await super()._relay(_Counted(self, reader), writer)  # type: ignore[arg-type]


class _Counted:
    """A reader whose bytes are counted."""

    def __init__(self, link: CountingDelay, reader: asyncio.StreamReader) -> None:
        self._link, self._reader = link, reader

    async def read(self, most: int) -> bytes:
        data = await self._reader.read(most)
        self._link.num_bytes += len(data)
        return data


async def ask(http: httpx.AsyncClient, url: str, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": 3, "ignore_eos": True, **fields}
    answer = await http.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def play(delays: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    port = free_port()
    link = CountingDelay(port)
    prompts = [load_prompts(domain)[0].prompt for domain in DOMAINS][:USERS]
    async with httpx.AsyncClient(timeout=300) as http, link.running():
        with (
            verification_process(model_path("target-large"), port, free_port()) as target,
            draft_process(model_path("draft-base"), link.port) as drafter,
        ):
            await target.start()
            await drafter.start(2)
            centre, edge = url_of(target), url_of(drafter)
            alone = {"speculation": {"drafter": "none"}}
            known = [await ask(http, centre, prompt, **alone) for prompt in prompts]
            rows = []
            for delay in delays:
                link.seconds = delay / 2e3
                rows.append(await compare(http, edge, link, prompts, known, repeats))
                rows[-1]["round_trip_ms"] = delay
    return rows


async def compare(
    http: httpx.AsyncClient,
    edge: str,
    link: CountingDelay,
    prompts: Sequence[str],
    known: Sequence[str],
    repeats: int,
) -> dict[str, Any]:
    """Both ways in turns at one round trip; medians of the rates."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    num_bytes: Counter[str] = Counter()
    num_wrong = 0
    for _ in range(repeats):
        for way, fields in WAYS.items():
            before, began = link.num_bytes, time.perf_counter()
            texts = await asyncio.gather(*(ask(http, edge, p, **fields) for p in prompts))
            rates[way].append(len(prompts) * NUM_TOKENS / (time.perf_counter() - began))
            num_bytes[way] += link.num_bytes - before
            num_wrong += sum(a != b for a, b in zip(texts, known, strict=True))
    tokens = repeats * len(prompts) * NUM_TOKENS
    found = {way: statistics.median(rate) for way, rate in rates.items()}
    return {
        "rates": rates,
        **{f"{way} rate": rate for way, rate in found.items()},
        "gain": found["sent ahead"] / found["ordered"],
        **{f"{way} bytes": num_bytes[way] / tokens for way in WAYS},
        "num_wrong": num_wrong,
    }


def delays_of(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="one repeat, round trip 100 ms")
    options.add_argument("--delays", type=delays_of, default=[30.0, 100.0, 300.0])
    args: argparse.Namespace = options.parse_args(arguments)
    delays, repeats = ([100.0], 1) if args.quick else (args.delays, 3)
    rows = asyncio.run(play(delays, repeats))
    columns = {
        "round trip, ms": "{round_trip_ms:g}",
        "ordered, tokens/s": "{ordered rate:.0f}",
        "sent ahead": "{sent ahead rate:.0f}",
        "gain": "{gain:.2f}",
        "bytes a token, ordered": "{ordered bytes:.0f}",
        "sent ahead ": "{sent ahead bytes:.0f}",
        "texts that differ": "{num_wrong}",
    }
    return tell(args, Results(rows, tables=[table("live, four users", rows, columns)]))


if __name__ == "__main__":
    sys.exit(main())
