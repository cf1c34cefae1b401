"""Many streaming clients against a server that is short of memory.

    python -m benchmarks.soak [--clients 64] [--seconds 60]

Starts `penstock serve` on the bundled family with a quarter of the KV memory that the clients want,
and lets every client ask, stream and ask again. Seeds make the text of a (prompt, seed) pair a
fact, so a token that is lost, doubled or given to somebody else shows as another text. Exit code 1
if anything failed; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter

from benchmarks.bundled_server import bundled_server
from openai import AsyncOpenAI, OpenAIError

from penstock.zoo.registry import DOMAINS, load_prompts

MAX_TOKENS = 128
WANTED_PER_CLIENT = 256


class Soak:
    """The clients, and what they saw."""

    def __init__(self, url: str, seconds: float) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.end = time.monotonic() + seconds
        self.prompts = [p.prompt for d in DOMAINS for p in load_prompts(d)[:4]]
        self.texts: dict[tuple[str, int], str] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self.run_client(n) for n in range(clients)))

    async def run_client(self, number: int) -> None:
        turn = 0
        while time.monotonic() < self.end:
            prompt = self.prompts[(number + 7 * turn) % len(self.prompts)]
            try:
                await self.ask(prompt, seed=number % 3)
            except OpenAIError as error:
                self.errors.append(f"client {number}: {error}")
            turn += 1

    async def ask(self, prompt: str, seed: int) -> None:
        self.counts["started"] += 1
        stream = await self.client.completions.create(
            model="target-large",
            prompt=prompt,
            seed=seed,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, tokens, finished = "", 0, 0
        async for chunk in stream:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                text += choice.text
                finished += choice.finish_reason is not None
        self.counts["completed"] += 1
        self.counts["tokens"] += tokens
        if finished != 1 or tokens != MAX_TOKENS:
            self.errors.append(f"{finished} ends and {tokens} tokens, not 1 and {MAX_TOKENS}")
        if self.texts.setdefault((prompt, seed), text) != text:
            self.errors.append(f"two texts for one prompt and seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    kv_tokens = args.clients * WANTED_PER_CLIENT // 4
    with bundled_server("--dtype", "float32", "--kv-tokens", str(kv_tokens)) as server:
        soak = Soak(server.url, args.seconds)
        asyncio.run(soak.run(args.clients))
        time.sleep(0.5)
        left = {
            "kv_use_afterwards": server.metric("kv_cache_usage_perc"),
            "running_afterwards": server.metric("num_requests_running"),
            "waiting_afterwards": server.metric("num_requests_waiting"),
        }
        preemptions = server.metric("num_preemptions_total")
    counts = {**soak.counts, "kv_tokens": kv_tokens, "preemptions": preemptions}
    print(json.dumps({**counts, **left, "errors": soak.errors[:5]}))
    failed = soak.errors or soak.counts["started"] != soak.counts["completed"]
    sys.exit(bool(failed or any(left.values())))


if __name__ == "__main__":
    main()
