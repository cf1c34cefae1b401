"""What share of a served step is not model or sampler: scheduling, messages, detokenising, HTTP.

    python -m lab.bench.host_share [--clients 8] [--seconds 15] [--json]

Starts `penstock serve` on the bundled family and keeps so many clients of the `openai` package
busy, in this process and thus on the same cores, first streaming and then not (streaming clients
cost the machine more than the server does). The server's own counters say how long models and
samplers were at work; the rest of the time that passed is the share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict, dataclass

from openai import AsyncOpenAI

from lab.bench.bundled_server import BundledServer, bundled_server
from lab.common.results import Results, parser, table, tell
from penstock.zoo.registry import DOMAINS, load_prompts

MAX_TOKENS = 128
WARM_S = 3.0


@dataclass(frozen=True)
class Share:
    """One way to ask. step_ms: wall-clock time by target step; busy_ms: of that inside models and
    samplers."""

    drafter: str
    streaming: bool
    tokens_per_s: float
    step_ms: float
    busy_ms: float

    @property
    def share(self) -> float:
        return 1 - self.busy_ms / self.step_ms


async def ask_on(client: AsyncOpenAI, number: int, drafter: str, streaming: bool) -> None:
    """One client, until it is cancelled."""
    prompts = [load_prompts(d)[number % 8].prompt for d in DOMAINS]
    turn = number
    while True:
        answer = await client.completions.create(
            model="target-large",
            prompt=prompts[turn % len(prompts)],
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            stream=streaming,
            extra_body={"ignore_eos": True, "speculation": {"drafter": drafter}},
        )
        if streaming:
            async for _ in answer:
                pass
        turn += 1


async def measure(
    server: BundledServer, clients: int, seconds: float, drafter: str, streaming: bool
) -> Share:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    asking = [asyncio.create_task(ask_on(client, n, drafter, streaming)) for n in range(clients)]
    await asyncio.sleep(WARM_S)
    names = ("engine_busy_seconds_total", "target_steps_total", "generation_tokens_total")
    before, since = [await asyncio.to_thread(server.metric, n) for n in names], time.perf_counter()
    await asyncio.sleep(seconds)
    after, passed = (
        [await asyncio.to_thread(server.metric, n) for n in names],
        time.perf_counter() - since,
    )
    for task in asking:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await client.close()
    busy, steps, tokens = (b - a for a, b in zip(before, after, strict=True))
    return Share(drafter, streaming, tokens / passed, 1e3 * passed / steps, 1e3 * busy / steps)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--seconds", type=float, default=15.0)
    args = options.parse_args()
    with bundled_server("--dtype", "float32", "--kv-tokens", str(args.clients * 1024)) as server:
        shares = [
            asyncio.run(measure(server, args.clients, args.seconds, drafter, streaming))
            for drafter in ("none", "auto")
            for streaming in (True, False)
        ]
    rows = [{**asdict(s), "share": s.share} for s in shares]
    columns = {
        "drafter": "{drafter}",
        "streaming": "{streaming}",
        "tokens/s": "{tokens_per_s:.0f}",
        "step, ms": "{step_ms:.2f}",
        "model, ms": "{busy_ms:.2f}",
        "other share": "{share:.0%}",
    }
    return tell(args, Results(rows, tables=[table(f"{args.clients} clients", rows, columns)]))


if __name__ == "__main__":
    sys.exit(main())
