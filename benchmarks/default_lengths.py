"""What the default allocation makes of a drafter, against no drafter and fixed lengths, by batch.

    python -m benchmarks.default_lengths [--batches 1,8,32] [--passes 5] [--json]

`draft-tiny` drafts for the large bundled target as it is served: prompts of all domains, outputs of
48 to 144 tokens, sampled with seeds at temperature 1. Tokens per second are those while the batch
is full; with drafts, without and with fixed lengths take turns, and a ratio is of one turn. Where
drafting does not pay a ratio under 1 is what it costs to find that out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.config import PolicyConfig
from penstock.core.loop import Loop
from penstock.core.types import NO_DRAFTER, Output
from penstock.engine.tokenizer import load_tokenizer
from penstock.lab.bench import Results, parser, table, tell
from penstock.lab.live import load, make_loop, request_of
from penstock.serving.offline import complete
from penstock.zoo.registry import DEFAULT_DRAFTER, DEFAULT_TARGET, DOMAINS, load_prompts

LEAST_TOKENS, MOST_TOKENS = 48, 144
FIXED = (2, 3, 4)
_STRIDE = 37
"""Between lengths of requests that follow each other, so that their ends are spread."""


def full_rate(loop: Loop, prompts: Sequence[tuple[int, ...]], batch: int, drafter: str) -> float:
    """Tokens per second until there are too few requests for a full batch."""
    ended = tokens = 0
    begun = full_until = time.perf_counter()

    def watch(output: Output) -> None:
        nonlocal ended, tokens, full_until
        if ended <= len(prompts) - batch:
            tokens += output.num_tokens
            full_until = time.perf_counter()
        ended += output.finish_reason is not None

    spread = MOST_TOKENS - LEAST_TOKENS + 1
    requests = [
        request_of(p, i, LEAST_TOKENS + i * _STRIDE % spread, 1.0, drafter=drafter)
        for i, p in enumerate(prompts)
    ]
    complete(loop, requests, batch, watch)
    return tokens / (full_until - begun)


def measure(batch: int, passes: int) -> dict[str, Any]:
    engine = load(DEFAULT_TARGET, batch, MOST_TOKENS, dtype="auto")
    tokenizer = load_tokenizer(engine.tokenizer_path)
    per_domain = max(3, batch // 2)
    prompts = [
        tuple(tokenizer.encode(own[i % len(own)].prompt))
        for i in range(per_domain)
        for own in map(load_prompts, DOMAINS)
    ]
    single = PolicyConfig.of("single")
    systems = {
        "plain": (make_loop(engine, single), NO_DRAFTER),
        "drafting": (make_loop(engine, single), DEFAULT_DRAFTER),
    }
    for k in FIXED:
        loop = make_loop(engine, single, PolicyConfig.of("fixed", k=k))
        systems[f"fixed_{k}"] = (loop, DEFAULT_DRAFTER)
    rates = [
        {
            name: full_rate(loop, prompts, batch, drafter)
            for name, (loop, drafter) in systems.items()
        }
        for _ in range(passes)
    ]
    ratios = [r["drafting"] / r["plain"] for r in rates]
    return {
        "batch": batch,
        "plain": statistics.median(r["plain"] for r in rates),
        "drafting": statistics.median(r["drafting"] for r in rates),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        **{
            f"over_fixed_{k}": statistics.median(r["drafting"] / r[f"fixed_{k}"] for r in rates)
            for k in FIXED
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--passes", type=int, default=5)
    args = options.parse_args(arguments)
    rows = [measure(int(batch), args.passes) for batch in args.batches.split(",")]
    columns = {
        "batch": "{batch}",
        "no drafter, tokens/s": "{plain:.0f}",
        "`draft-tiny`": "{drafting:.0f}",
        "ratio, median": "{ratio:.3f}",
        "least": "{least:.3f}",
        "most": "{most:.3f}",
        **{f"over fixed {k}": f"{{over_fixed_{k}:.3f}}" for k in FIXED},
    }
    shown = table("while the batch is full", rows, columns)
    return tell(args, Results(rows, tables=[shown]))


if __name__ == "__main__":
    sys.exit(main())
