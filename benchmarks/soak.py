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
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter

from openai import AsyncOpenAI, OpenAIError

from penstock.zoo.registry import DOMAINS, load_prompts

MAX_TOKENS = 128
WANTED_PER_CLIENT = 256


def start_server(kv_tokens: int) -> tuple[subprocess.Popen[str], str]:
    command = ["penstock", "serve", "--dtype", "float32", "--port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *command[1:], "--kv-tokens", str(kv_tokens)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"http://\S+", line)
        if found:
            return server, found.group()
    raise RuntimeError("the server did not start")


def metric(url: str, name: str) -> float:
    """Sum over all labels of a metric."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    lines = [x for x in text.splitlines() if x.startswith(f"penstock:{name}")]
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines)


class Soak:
    """The clients, and what they saw."""

    def __init__(self, url: str, seconds: float) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.end = time.monotonic() + seconds
        self.prompts = [p.prompt for d in DOMAINS for p in load_prompts(d)[:4]]
        self.texts: dict[tuple[str, int], str] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

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


async def soak(url: str, clients: int, seconds: float) -> Soak:
    run = Soak(url, seconds)
    await asyncio.gather(*(run.run_client(n) for n in range(clients)))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    kv_tokens = args.clients * WANTED_PER_CLIENT // 4
    server, url = start_server(kv_tokens)
    try:
        run = asyncio.run(soak(url, args.clients, args.seconds))
        time.sleep(0.5)
        result = {
            **run.counts,
            "kv_tokens": kv_tokens,
            "preemptions": metric(url, "num_preemptions_total"),
            "kv_use_afterwards": metric(url, "kv_cache_usage_perc"),
            "running_afterwards": metric(url, "num_requests_running"),
            "waiting_afterwards": metric(url, "num_requests_waiting"),
            "errors": run.errors[:5],
        }
    finally:
        server.terminate()
        server.wait(60)
    failed = run.errors or run.counts["started"] != run.counts["completed"]
    left = [result[k] for k in ("kv_use_afterwards", "running_afterwards", "waiting_afterwards")]
    print(json.dumps(result))
    sys.exit(bool(failed or any(left)))


if __name__ == "__main__":
    main()
