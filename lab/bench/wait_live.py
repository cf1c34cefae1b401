"""Are WAIT's admission and the default's better than vLLM's rule on a live engine?

    python -m lab.bench.wait_live [MODEL.gguf] [--classes 64+32,256+128] [--loads 0.8,0.95]
        [--requests 200] [--stretches 6] [--out FILE] [--json]

Poisson arrivals at the bundled target or MODEL, in this process, without drafts, under the
admission of `--policy` `vllm`, `wait` and `auto`: two classes of prompt and output tokens, half of
the requests each, and KV memory for 16 mean ones. Capacity is what `vllm` completes a second of a
stretch that is there at once. The policies take turns with each stretch; a fifth of it warms up.
Every cell is a line of FILE (default: wait_live.jsonl), from which the same command goes on. Eight
minutes on two cores for the bundled target.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.bench.real_prompts import source_texts
from lab.bench.servers import Prompts
from lab.common.cells import Cells, Figures
from lab.common.live import make_loop, play_arrivals
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import interval, plus_minus, ratio, rotated
from penstock.config import EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import DEFAULT_TARGET, model_path

POLICIES = ("vllm", "wait", "auto")
AT_ONCE = 16
"""Mean requests for which there is memory."""
WARM = 0.2


class Kind(NamedTuple):
    """A class of requests. prompt, output: tokens."""

    prompt: int
    output: int


class LiveAdmission:
    """The engine, and stretches of requests for it."""

    def __init__(self, model: Path, kinds: Sequence[Kind]) -> None:
        mean = sum(map(sum, kinds)) / len(kinds)
        self.kinds = kinds
        self.engine = load_engine(
            EngineConfig(
                target=model,
                drafters={},
                kv_tokens=int(AT_ONCE * mean),
                max_model_len=2 * max(map(sum, kinds)),  # some prompts come out longer
                prefix_caching=False,
                num_threads=os.cpu_count(),
            )
        )
        self._prompts = Prompts(load_tokenizer(model), "\n".join(source_texts()))

    def serve(self, policy: str, stretch: int, rate: float, num: int) -> Figures:
        """One stretch. rate: arrivals a second; 0: all are there at once."""
        rng = np.random.default_rng(stretch)
        kinds = [self.kinds[i] for i in rng.permutation(num) % len(self.kinds)]
        gaps = rng.exponential(1 / rate, num) if rate else np.zeros(num)
        numbers = itertools.count(stretch * num)
        requests = []
        for kind, arrival in zip(kinds, np.cumsum(gaps).tolist(), strict=True):
            (prompt,) = self._prompts.make("code", kind.prompt, numbers, 1)
            requests.append(
                Request(
                    id=f"{policy}-{len(requests)}",
                    prompt_len=len(prompt),
                    max_tokens=kind.output,
                    arrival_time=arrival,
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(temperature=0.0),
                    drafter=NO_DRAFTER,
                )
            )
        admission = PolicyConfig.from_bundle("admission", policy)
        loop = make_loop(self.engine, PolicyConfig.from_name("single"), admission=admission)
        played = play_arrivals(loop, self.engine.clock, requests)
        counted = slice(round(WARM * num) if rate else 0, None)
        arrived = np.array([r.arrival_time for r in requests])
        first, latency = (t[counted] - arrived[counted] for t in (played.first, played.finished))
        return {
            "seconds": float(played.finished.max()),
            "tokens_per_s": float(played.tokens.sum() / played.finished.max()),
            "latency_s": float(latency.mean()),
            "ttft_p99_s": float(np.quantile(first, 0.99)),
        }


def measure(args: argparse.Namespace) -> Results:
    cells, kinds = Cells(args.out), [Kind(*map(int, k.split("+"))) for k in args.classes]
    live = LiveAdmission(args.model, kinds)
    name = f"{args.model.stem}/{','.join(args.classes)}/{args.requests}"
    stretches = range(1, args.stretches + 1)
    live.serve("vllm", 0, 0, 8)  # the first steps of a process are slow
    at_once = partial(live.serve, "vllm", 1, 0, args.requests)
    seconds = cells.measure(f"{name}/capacity/0", at_once)["seconds"]
    capacity = args.requests / seconds
    for stretch, load in itertools.product(stretches, args.loads):
        for policy in rotated(POLICIES, stretch):
            serve = partial(live.serve, policy, stretch, load * capacity, args.requests)
            cells.measure(f"{name}/{load}/{policy}/{stretch}", serve)
    rows = []
    for load, policy in itertools.product(args.loads, POLICIES):
        row = {"load": f"{load:g}", "policy": f"`{policy}`"}
        for figure in ("tokens_per_s", "latency_s", "ttft_p99_s"):
            base, own = (
                cells.values(f"{name}/{load}/{p}", figure)[: len(stretches)]
                for p in (POLICIES[0], policy)
            )
            row |= {figure: plus_minus(interval(own)), f"{figure}, ratio": str(ratio(own, base))}
        rows.append(row)
    columns = {"load": "{load}", "policy": "{policy}", "tokens/s": "{tokens_per_s}"}
    columns |= {"mean latency, s": "{latency_s}", "over `vllm`'s": "{latency_s, ratio}"}
    columns |= {"p99 of TTFT, s": "{ttft_p99_s}", "over it": "{ttft_p99_s, ratio}"}
    title = f"{args.model.stem}: {capacity:.3g} requests/s at once"
    return Results({"capacity": capacity, "rows": rows}, tables=[table(title, rows, columns)])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("model", type=Path, nargs="?", default=model_path(DEFAULT_TARGET))
    options.add_argument("--classes", type=lambda t: t.split(","), default=["64+32", "256+128"])
    loads = dict(type=lambda t: [float(x) for x in t.split(",")], default=[0.8, 0.95])
    options.add_argument("--loads", **loads)
    options.add_argument("--requests", type=int, default=200, help="of a stretch")
    options.add_argument("--stretches", type=int, default=6)
    options.add_argument("--out", type=Path, default=Path("wait_live.jsonl"), help="every cell")
    args = options.parse_args()
    return tell(args, measure(args))


if __name__ == "__main__":
    sys.exit(main())
