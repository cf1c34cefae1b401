"""What allocation makes of one drafter, against no drafter and the best fixed length, by batch.

    python -m lab.bench.default_lengths [--batches 1,8,32] [--passes 5] [--json]
    python -m lab.bench.default_lengths --family DIR --allocations throughput,confident

`draft-tiny` drafts for the large bundled target as it is served, or for its larger copy in a folder
that `penstock zoo grow` has written: prompts of all domains, outputs of 48 to 144 tokens, sampled
with seeds at temperature 1. Tokens per second are those while the batch is full; all ways take
turns, and a ratio is of one turn. The best fixed length is the one of the highest median. Where
drafting does not pay a ratio under 1 is what it costs to find that out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.common.live import load, make_loop, request_of
from lab.common.results import Results, parser, table, tell
from penstock.config import PolicyConfig
from penstock.core.loop import Loop
from penstock.core.types import NO_DRAFTER, Output
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.zoo.registry import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    DOMAINS,
    WEIGHTS,
    load_prompts,
)

LEAST_TOKENS, MOST_TOKENS = 48, 144
FIXED = (1, 2, 3, 4)
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


def measure(batch: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each allocation."""
    engine = load(DEFAULT_TARGET, batch, MOST_TOKENS, dtype="auto", family=args.family)
    tokenizer = load_tokenizer(engine.tokenizer_path)
    per_domain = max(args.requests, batch // 2)
    prompts = [
        tuple(tokenizer.encode(own[i % len(own)].prompt))
        for i in range(per_domain)
        for own in map(load_prompts, DOMAINS)
    ]
    fixed = {f"fixed {k}": PolicyConfig.of("fixed", k=k) for k in FIXED}
    allocations = {name: PolicyConfig.of(name) for name in args.allocations} | fixed
    single = PolicyConfig.of("single")
    systems = {"none": (make_loop(engine, single), NO_DRAFTER)}
    systems |= {n: (make_loop(engine, single, a), DEFAULT_DRAFTER) for n, a in allocations.items()}
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(args.passes):
        for name, (loop, drafter) in systems.items():
            rates[name].append(full_rate(loop, prompts, batch, drafter))
            line = f"batch {batch}, turn {turn + 1}, {name}: {rates[name][-1]:.0f} tokens/s"
            print(line, file=sys.stderr, flush=True)
    best = max(fixed, key=lambda name: statistics.median(rates[name]))
    for name in args.allocations:
        yield {
            "batch": batch,
            "allocation": name,
            "none": statistics.median(rates["none"]),
            "tokens_per_s": statistics.median(rates[name]),
            "over_none": _ratios(rates[name], rates["none"]),
            "best_fixed": best,
            "over_fixed": _ratios(rates[name], rates[best]),
        }


def _ratios(rates: Sequence[float], others: Sequence[float]) -> str:
    """Turn by turn: the median, least and most."""
    found = [a / b for a, b in zip(rates, others, strict=True)]
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--requests", type=int, default=3, help="of a domain, at least")
    options.add_argument("--allocations", type=lambda t: t.split(","), default=["throughput"])
    options.add_argument("--family", type=Path, default=WEIGHTS)
    args = options.parse_args(arguments)
    rows = [row for batch in args.batches.split(",") for row in measure(int(batch), args)]
    columns = {
        "batch": "{batch}",
        "no drafter, tokens/s": "{none:.0f}",
        "allocation": "{allocation}",
        "tokens/s": "{tokens_per_s:.0f}",
        "over no drafter": "{over_none}",
        "best fixed length": "{best_fixed}",
        "over it": "{over_fixed}",
    }
    shown = table("`draft-tiny`, while the batch is full", rows, columns)
    return tell(args, Results(rows, tables=[shown]))


if __name__ == "__main__":
    sys.exit(main())
