"""How fast a draft server's engine drafts, on one core.

    python -m benchmarks.draft_rate [--passes 5] [--against SRC] [--json]

Rounds of 4 draft tokens by `draft-tiny` and `draft-base` for 1 and 8 requests, by the compiled
kernels with one thread: each request has got one more token of its own, which is read with the
draft. Neither network nor target is in it. Every pass is a process of its own; with --against, the
`src` folder of another checkout, passes of both take turns, with the weights of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = ("draft-tiny", "draft-base")
BATCHES = (1, 8)
DRAFT_TOKENS = 4
PROMPT_TOKENS = 64
BLOCK_SIZE, BLOCKS_EACH = 16, 32
REPEATS, ROUNDS = 40, 5
"""Measured repeats, and the rounds of each."""


@dataclass(frozen=True)
class Rate:
    """Draft tokens a second; cpu_share: CPU time over wall time."""

    source: str
    model: str
    dtype: str
    batch: int
    best: float
    median: float
    cpu_share: float


class Drafting:
    """One model that drafts for so many requests at once."""

    def __init__(self, path: Path, batch: int) -> None:
        import numpy as np
        import torch

        from penstock.core.types import Request, SamplingParams
        from penstock.engine.drafters.model import ModelDrafter
        from penstock.engine.models.dtypes import resolve_dtype
        from penstock.engine.native.runner import NativeRunner
        from penstock.engine.sequences import TokenBuffer

        dtype = resolve_dtype("auto", torch.device("cpu"))
        self.dtype = str(dtype).removeprefix("torch.")
        runner = NativeRunner.load(path, dtype, batch * BLOCKS_EACH, BLOCK_SIZE, 1)
        longest = BLOCKS_EACH * BLOCK_SIZE
        self._drafter = ModelDrafter(path.name, runner, longest)
        self._rng = np.random.default_rng(0)
        self._vocab = runner.config.vocab_size
        self._texts = [
            TokenBuffer(
                Request(
                    id=str(i),
                    prompt_len=PROMPT_TOKENS,
                    prompt_token_ids=tuple(self._some_tokens(PROMPT_TOKENS)),
                    max_tokens=longest - PROMPT_TOKENS,
                    sampling=SamplingParams(temperature=1.0, seed=i),
                )
            )
            for i in range(batch)
        ]
        self._num_read = 0
        self._draft(PROMPT_TOKENS)

    def round(self) -> None:
        """Every request gets a token, and a draft after it."""
        for text in self._texts:
            text.append(self._some_tokens(1))
        self._draft(1)

    def _draft(self, num_unread: int) -> None:
        from penstock.core.types import DraftOrder

        is_first = not self._num_read
        blocks = [range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH) for i in range(len(self._texts))]
        orders = [
            DraftOrder(
                request_id=str(i),
                epoch=0,
                round=0,
                drafter=self._drafter.name,
                start=self._num_read,
                num_catch_up_tokens=num_unread,
                max_draft_tokens=DRAFT_TOKENS,
                new_blocks=tuple(own) if is_first else (),
            )
            for i, own in enumerate(blocks)
        ]
        drafts = self._drafter.draft(orders, self._texts).drafts
        if [len(d.token_ids) for d in drafts] != [DRAFT_TOKENS] * len(self._texts):
            raise SystemExit("draft_rate: a draft has not the length that was asked for")
        self._num_read += num_unread

    def _some_tokens(self, number: int) -> list[int]:
        tokens: list[int] = self._rng.integers(self._vocab, size=number).tolist()
        return tokens


def measure(path: Path, batch: int) -> dict[str, Any]:
    """Seconds of a round, once for each repeat, in this process."""
    drafting = Drafting(path, batch)
    seconds = []
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            drafting.round()
        seconds.append((time.perf_counter() - begun) / ROUNDS)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "model": path.name,
        "dtype": drafting.dtype,
        "batch": batch,
        "seconds": seconds,
        "cpu_share": cpu / wall,
    }


def one_pass(paths: Sequence[Path]) -> None:
    """All cells, on the last core there is, as JSON on standard output."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    import penstock

    torch.set_num_threads(1)
    cells = [measure(path, batch) for path in paths for batch in BATCHES]
    print(json.dumps({"source": str(Path(penstock.__file__).parents[1]), "cells": cells}))


def run_pass(source: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The cells of a process that imports Penstock from `source`."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"draft_rate: measuring {source} failed with status {done.returncode}")
    answer = json.loads(done.stdout)
    if Path(answer["source"]) != source:
        raise SystemExit(f"draft_rate: {source} was asked for, {answer['source']} was imported")
    cells: list[dict[str, Any]] = answer["cells"]
    return cells


def measure_all(sources: Sequence[Path], paths: Sequence[Path], passes: int) -> list[Rate]:
    """Every source's cells, over all passes."""
    by_source: dict[Path, list[list[dict[str, Any]]]] = {source: [] for source in sources}
    for _ in range(passes):
        for source, found in by_source.items():
            found.append(run_pass(source, paths))
    return [
        rate_of(str(source), cells)
        for source, found in by_source.items()
        for cells in zip(*found, strict=True)
    ]


def rate_of(source: str, cells: Sequence[dict[str, Any]]) -> Rate:
    """Of one cell in all passes."""
    first = cells[0]
    seconds = [s for cell in cells for s in cell["seconds"]]
    tokens = first["batch"] * DRAFT_TOKENS
    return Rate(
        source,
        first["model"],
        first["dtype"],
        first["batch"],
        best=tokens / min(seconds),
        median=tokens / statistics.median(seconds),
        cpu_share=statistics.fmean(cell["cpu_share"] for cell in cells),
    )


def print_table(rates: Sequence[Rate], own: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"draft tokens a second, {rates[0].dtype}, one core")
    for column in ("model", "batch", "source", "best", "median", "this / other", "CPU / wall"):
        table.add_column(column, justify="left" if column in ("model", "source") else "right")
    ours = {(r.model, r.batch): r for r in rates if r.source == own}
    for r in rates:
        mine = ours[r.model, r.batch]
        ratio = "" if r is mine else f"{mine.best / r.best:.3f} ({mine.median / r.median:.3f})"
        table.add_row(
            r.model,
            str(r.batch),
            "this" if r is mine else "other",
            f"{r.best:,.0f}",
            f"{r.median:,.0f}",
            ratio,
            f"{r.cpu_share:.2f}",
        )
    Console(file=sys.stdout).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument(
        "--against", type=Path, metavar="SRC", help="src folder of another checkout"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        one_pass(args.measure)
        return
    if args.passes < 1:
        parser.error(f"--passes must be at least 1, not {args.passes}")
    if args.against is not None and not (args.against / "penstock" / "__init__.py").is_file():
        parser.error(f"--against takes the src folder of a checkout, not {args.against}")
    from penstock.zoo.registry import bundled_models

    own = Path(__file__).resolve().parents[1] / "src"
    sources = [own] if args.against is None else [own, args.against.resolve()]
    cards = bundled_models()
    rates = measure_all(sources, [cards[name].path for name in MODELS], args.passes)
    if args.json:
        print(json.dumps([asdict(r) for r in rates]))
        return
    print_table(rates, str(own))


if __name__ == "__main__":
    main()
