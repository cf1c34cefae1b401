"""How fast a draft server's engine drafts, on one core.

    python -m lab.bench.draft_rate [--passes 5] [--against SRC] [--json]

Rounds of 4 draft tokens by `draft-tiny` and `draft-base` for 1 and 8 requests, by the compiled
kernels with one thread: each request has got one more token of its own, which is read with the
draft. Neither network nor target is in it. Every pass is a process of its own; with --against, the
`src` folder of another checkout, passes of both take turns, with the weights of this one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = ("draft-tiny", "draft-base")
BATCHES = (1, 8)
DRAFT_TOKENS = 4
PROMPT_TOKENS = 64
BLOCK_SIZE, BLOCKS_EACH = 16, 32
REPEATS, ROUNDS = 40, 5
"""Measured repeats, and the rounds of each."""

# --- one pass, in a process of its own, of whichever checkout -------------------------------------


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
        orders = [
            DraftOrder(
                request_id=str(i),
                epoch=0,
                round=0,
                drafter=self._drafter.name,
                start=self._num_read,
                num_catch_up_tokens=num_unread,
                max_draft_tokens=DRAFT_TOKENS,
                new_blocks=tuple(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH)) if is_first else (),
            )
            for i in range(len(self._texts))
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
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    cell = {"model": path.name, "dtype": drafting.dtype, "batch": batch}
    return {**cell, "seconds": seconds, "cpu_share": share}


def one_pass(paths: list[Path]) -> None:
    """All cells, on the last core there is, as JSON on standard output."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    import penstock

    torch.set_num_threads(1)
    cells = [measure(path, batch) for path in paths for batch in BATCHES]
    print(json.dumps({"source": str(Path(penstock.__file__).parents[1]), "cells": cells}))


# --- all passes -----------------------------------------------------------------------------------


def run_pass(source: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """The cells of a process that imports Penstock from `source`."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, paths)],
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


def rate_of(source: str, passes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Draft tokens a second of one cell in all passes; cpu_share: CPU time over wall time."""
    seconds = [s for cell in passes for s in cell["seconds"]]
    tokens = passes[0]["batch"] * DRAFT_TOKENS
    return {
        "source": source,
        **{key: passes[0][key] for key in ("model", "dtype", "batch")},
        "best": tokens / min(seconds),
        "median": tokens / statistics.median(seconds),
        "cpu_share": statistics.fmean(cell["cpu_share"] for cell in passes),
    }


def main() -> int:
    from lab.common.results import Results, parser, table, tell
    from penstock.zoo.registry import bundled_models

    options = parser(__doc__)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--against", type=Path, metavar="SRC", help="src of another checkout")
    args = options.parse_args()
    if args.passes < 1:
        options.error(f"--passes must be at least 1, not {args.passes}")
    if args.against is not None and not (args.against / "penstock" / "__init__.py").is_file():
        options.error(f"--against takes the src folder of a checkout, not {args.against}")
    sources = {"this": Path(__file__).resolve().parents[2] / "src"}
    if args.against is not None:
        sources["other"] = args.against.resolve()
    paths = [bundled_models()[name].path for name in MODELS]
    passes: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in sources}
    for _ in range(args.passes):
        for name, source in sources.items():
            passes[name].append(run_pass(source, paths))
    rates = [rate_of(n, c) for n, found in passes.items() for c in zip(*found, strict=True)]
    this = {(r["model"], r["batch"]): r["best"] for r in rates if r["source"] == "this"}
    rows = [{**r, "ratio": this[r["model"], r["batch"]] / r["best"]} for r in rates]
    columns = {
        "model": "{model}",
        "batch": "{batch}",
        "source": "{source}",
        "best": "{best:,.0f}",
        "median": "{median:,.0f}",
        "this over it, best": "{ratio:.3f}",
        "CPU / wall": "{cpu_share:.2f}",
    }
    title = f"draft tokens a second, {rates[0]['dtype']}, one core"
    return tell(args, Results(rates, tables=[table(title, rows, columns)]))


if __name__ == "__main__":
    # A pass has the paths of models as its arguments, and nothing of this checkout's `penstock`.
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        one_pass([Path(path) for path in sys.argv[1:]])
    else:
        sys.exit(main())
