"""Where does the time of a target step go, against the floor of bytes and operations?

    python -m lab.bench.step_parts [--batches 1,8,32] [--json]

The bundled family in this process, without a drafter and with `draft-tiny` (drafts of 3): target's
pass with samples, drafter, making of batches, and everything between two steps, by the engine's own
clock. The floor is the weights at the bandwidth of a torch sum, or the multiply-adds at the rate of
a large matrix product, whichever takes longer. Prefill is left out. Best of several passes.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import asdict, dataclass

import torch

from lab.bench.native_kernels import parameters
from lab.common.live import load, make_loop, request_of
from lab.common.results import Results, parser, table, tell
from penstock.config import PolicyConfig
from penstock.core.loop import Instrument, Loop
from penstock.core.types import NO_DRAFTER, StepPlan, StepResult
from penstock.engine.build import Engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, load_prompts

NEW_TOKENS = 64
DRAFTER, LENGTH = "draft-tiny", 3


@dataclass(frozen=True)
class Parts:
    """Of decoding steps, in the mean; milliseconds."""

    drafter: str
    batch: int
    rows: float
    step: float
    draft: float
    target: float
    batching: float
    between: float
    floor: float
    tokens_per_s: float


class Watch(Instrument):
    """Sums over the decoding steps that follow each other."""

    def __init__(self) -> None:
        self.steps = self.rows = self.tokens = 0
        self.draft = self.target = self.batching = self.between = 0.0
        self._last: float | None = None

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        is_decoding = all(i.num_scheduled_tokens == 1 for i in plan.items)
        if is_decoding and self._last is not None:
            phases = result.phases
            self.steps += 1
            self.rows += result.num_rows
            self.tokens += sum(len(v.token_ids) for v in result.verdicts)
            self.draft += phases.draft
            self.target += phases.verify + phases.sample
            self.batching += phases.other
            self.between += result.started_at - self._last
        self._last = result.finished_at if is_decoding else None


def bandwidth_and_rate(num_bytes: int) -> tuple[float, float]:
    """Bytes and multiply-adds a second, best of many."""
    torch.set_num_threads(os.cpu_count() or 1)
    memory, square = torch.ones(num_bytes // 4), torch.randn(768, 768)

    def best(run: object) -> float:
        times = []
        for _ in range(60):
            start = time.perf_counter()
            run()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    ceilings = num_bytes / best(memory.sum), 768**3 / best(lambda: square @ square)
    torch.set_num_threads(1)
    time.sleep(0.1)  # its threads go on spinning for a while
    return ceilings


def measure(
    engine: Engine, prompts: list[tuple[int, ...]], batch: int, drafter: str, passes: int
) -> Parts:
    weights = sum(parameters(engine.executor.target.config))
    found = []
    for _ in range(passes):
        bandwidth, rate = bandwidth_and_rate(2 * weights)
        watch = Watch()
        scheduler = make_loop(
            engine, PolicyConfig.from_name("single"), PolicyConfig.from_name("fixed", k=LENGTH)
        ).scheduler
        loop = Loop(scheduler, engine.executor, engine.clock, [watch])
        length = 0 if drafter == NO_DRAFTER else LENGTH
        fields = {"drafter": drafter, "max_draft_tokens": length}
        requests = [request_of(p, i, NEW_TOKENS, 0.0, **fields) for i, p in enumerate(prompts)]
        complete(loop, requests[: 4 * batch], batch)
        rows = watch.rows / watch.steps
        parts = [watch.draft, watch.target, watch.batching, watch.between]
        milliseconds = [1e3 * p / watch.steps for p in parts]
        floor = 1e3 * max(2 * weights / bandwidth, rows * weights / rate)
        step = sum(milliseconds)
        tokens_per_s = watch.tokens / (1e-3 * step * watch.steps)
        found.append(Parts(drafter, batch, rows, step, *milliseconds, floor, tokens_per_s))
    return min(found, key=lambda p: p.step)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--passes", type=int, default=5)
    args = options.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    engine = load("target-large", max(batches), NEW_TOKENS)
    tokenizer = load_tokenizer(engine.tokenizer_path)
    prompts = [tuple(tokenizer.encode(p.prompt)) for d in DOMAINS for p in load_prompts(d)[:16]]
    prompts = [prompts[16 * (i % 8) + i // 8] for i in range(len(prompts))]
    gc.collect()
    gc.freeze()  # as the engine process does
    found = [
        measure(engine, prompts, batch, drafter, args.passes)
        for drafter in (NO_DRAFTER, DRAFTER)
        for batch in batches
    ]
    rows = [asdict(parts) for parts in found]
    columns = {"drafter": "{drafter}", "batch": "{batch}"}
    parts = ("rows", "step", "draft", "target", "batching", "between", "floor")
    columns |= {name: f"{{{name}:.2f}}" for name in parts} | {"tokens/s": "{tokens_per_s:.0f}"}
    return tell(args, Results(rows, tables=[table("a decoding step, ms", rows, columns)]))


if __name__ == "__main__":
    sys.exit(main())
