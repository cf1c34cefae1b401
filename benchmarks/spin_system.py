"""The whole of Spin's system against one drafter for everybody, live on the bundled family.

    python -m benchmarks.spin_system [--batch 8] [--repeats 3] [--json]

Every Vanilla is one drafter with drafts of four tokens, padded attention and nothing beside the
target, as in the paper's section VI. Then the three ablations: the choice of drafter (`adaptive`),
with packed verification instead of padded, and with the pipeline chosen by `auto`; and draft
lengths by `throughput`, which Spin has not. All on the PyTorch path, the only one with several
attention backends; the native kernels as they are served come last. Domains are mixed, requests are
sampled (seeded) at temperature 1, and the configurations are measured in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.live_engine import load, request_of
from rich.console import Console
from rich.progress import Progress

from penstock.config import PolicyConfig
from penstock.core.types import AUTO_DRAFTER
from penstock.engine.build import Engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.lab.bench import Results, parser, table, tell
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, load_prompts

FIXED = PolicyConfig(name="fixed", options={"k": 4})
ADAPTIVE = PolicyConfig(name="adaptive", options={"k_max": 4})


@dataclass
class ServedSystem:
    """A way to serve. `drafter`: what every request asks for."""

    name: str
    engine: Engine
    drafter: str = AUTO_DRAFTER
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def play(self, prompts: Sequence[tuple[int, ...]], batch: int, new_tokens: int) -> None:
        requests = [
            request_of(prompt, seed, new_tokens, 1.0, drafter=self.drafter)
            for seed, prompt in enumerate(prompts)
        ]
        torch.set_num_threads(self.engine.num_threads if self.engine.backend == "eager" else 1)
        cpu, wall = time.process_time(), time.perf_counter()
        completions = complete(self.engine.loop, requests, batch)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.rates.append(sum(len(c.token_ids) for c in completions) / wall)
        self.cpu.append(cpu / wall)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def systems(args: argparse.Namespace) -> list[ServedSystem]:
    sizes = (args.target, args.batch, args.new_tokens)
    eager: dict[str, Any] = {"backend": "eager"}
    padded = eager | {"attention": "padded", "allocation": FIXED}
    packed = eager | {"attention": "packed", "allocation": FIXED}
    chosen = {"selection": ADAPTIVE}
    vanilla = load(*sizes, **padded)
    found = [ServedSystem(f"Vanilla {n}", vanilla, n) for n in vanilla.executor.drafters]
    found += [
        ServedSystem("choice", load(*sizes, **padded, **chosen)),
        ServedSystem("choice, packed", load(*sizes, **packed, **chosen)),
        ServedSystem("choice, packed, pipeline", load(*sizes, **packed, **chosen, pipeline="auto")),
        ServedSystem(
            "the same, lengths by throughput",
            load(*sizes, **eager, selection=PolicyConfig(name="adaptive"), pipeline="auto"),
        ),
        ServedSystem("no drafter, packed", load(*sizes, **packed), "none"),
        ServedSystem("native, as served", load(*sizes, selection=PolicyConfig(name="adaptive"))),
        ServedSystem("native, no drafter", load(*sizes), "none"),
    ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--target", default="target-large")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--requests", type=int, default=4, help="of a domain")
    options.add_argument("--new-tokens", type=int, default=100)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args(arguments)
    found = systems(args)
    tokenizer = load_tokenizer(found[0].engine.tokenizer_path)
    prompts = [
        tuple(tokenizer.encode(load_prompts(domain)[i].prompt))
        for i in range(args.requests)
        for domain in DOMAINS
    ]
    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("measuring", total=(args.repeats + 1) * len(found))
        for repeat in range(args.repeats + 1):
            for system in found:
                system.play(prompts, args.batch, args.new_tokens)
                if not repeat:  # learns, and warms up
                    system.rates.clear()
                    system.cpu.clear()
                progress.advance(task)
    return tell(args, results(found, f"{args.target}, batch {args.batch}, mixed"))


def results(found: Sequence[ServedSystem], where: str) -> Results:
    vanillas = sorted(
        (s for s in found if s.name.startswith("Vanilla")), key=lambda s: s.rate, reverse=True
    )
    rows = [
        {
            "name": s.name,
            "tokens_per_s": s.rate,
            "cpu_share": statistics.mean(s.cpu),
            "over": {v.name: s.rate / v.rate for v in vanillas},
        }
        for s in found
    ]
    columns = {"system": "{name}", "tokens/s": "{tokens_per_s:.0f}", "CPU": "{cpu_share:.2f}"}
    columns |= {f"over {v.name.split()[1]}": f"{{over[{v.name}]:.2f}}" for v in vanillas}
    return Results(rows, tables=[table(f"{where}: ratio to each Vanilla", rows, columns)])


if __name__ == "__main__":
    sys.exit(main())
