"""Penstock's target-only and speculative decoding against transformers' `generate`, in one run.

    python -m benchmarks.foundation [--dtype float32] [--batch 1,8,32] [--repeats 5] [--json]

Same checkpoint, same prompts, greedy, end-of-text ignored, the three in turn. A pass whose CPU time
over wall time shows that another program held the cores is marked, not hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.config import NGRAM, EngineConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, bundled_models, load_prompts, model_path


@dataclass
class Pass:
    """One timed pass: generated tokens per second, and CPU time over wall time."""

    tokens_per_s: float
    cpu_over_wall: float


def timed(run, num_tokens: int) -> Pass:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    wall = time.perf_counter() - wall
    return Pass(num_tokens / wall, (time.process_time() - cpu) / wall)


class Transformers:
    """`generate` on left-padded batches."""

    def __init__(self, path, dtype: torch.dtype) -> None:
        self.threads = torch.get_num_threads()
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def run(self, prompts: list[str], batch: int, new_tokens: int) -> None:
        torch.set_num_threads(self.threads)
        for first in range(0, len(prompts), batch):
            inputs = self.tokenizer(
                prompts[first : first + batch],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
                return_token_type_ids=False,
            )
            with torch.inference_mode():
                self.model.generate(
                    **inputs,
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    pad_token_id=self.tokenizer.pad_token_id,
                )


class Penstock:
    """The engine in this process."""

    def __init__(self, config: EngineConfig, tokenizer) -> None:
        self.engine = load_engine(config)
        self.tokenizer = tokenizer
        self.count = 0

    def run(self, prompts: list[str], batch: int, new_tokens: int, drafter: str) -> None:
        torch.set_num_threads(1)  # as the native backend has it
        requests = []
        for prompt in prompts:
            ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=False))
            self.count += 1
            requests.append(
                Request(
                    id=f"r{self.count}",
                    prompt_len=len(ids),
                    prompt_token_ids=ids,
                    max_tokens=new_tokens,
                    sampling=SamplingParams(temperature=0.0),
                    drafter=drafter,
                )
            )
        done = complete(self.engine.loop, requests, batch)
        assert all(len(c.token_ids) == new_tokens for c in done)


def mixed_prompts(num: int) -> list[str]:
    """One prompt of each domain in turn."""
    domains = {d: load_prompts(d) for d in DOMAINS}
    return [domains[DOMAINS[i % len(DOMAINS)]][i // len(DOMAINS)].prompt for i in range(num)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="target-large")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    path = model_path(args.target)
    drafters = {n: str(c.path) for n, c in bundled_models().items() if c.role == "drafter"}
    peer = Transformers(path, getattr(torch, args.peer_dtype))
    config = EngineConfig(
        target=path,
        drafters={**drafters, "ngram": NGRAM},
        dtype=args.dtype,
        kv_tokens=65_536,
        prefix_caching=False,
    )
    ours = Penstock(config, peer.tokenizer)
    table = []
    for batch in map(int, args.batch.split(",")):
        prompts = mixed_prompts(max(batch, 16))
        tokens = len(prompts) * args.new_tokens
        runs = {
            "transformers": lambda p=prompts, b=batch: peer.run(p, b, args.new_tokens),
            "target": lambda p=prompts, b=batch: ours.run(p, b, args.new_tokens, NO_DRAFTER),
        }
        for name in [*drafters, "ngram"]:
            runs[name] = lambda p=prompts, b=batch, d=name: ours.run(p, b, args.new_tokens, d)
        passes: dict[str, list[Pass]] = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                one = timed(run, tokens)
                if repeat:
                    passes[name].append(one)
        for name, done in passes.items():
            table.append(
                {
                    "batch": batch,
                    "what": name,
                    "median": statistics.median(p.tokens_per_s for p in done),
                    "best": max(p.tokens_per_s for p in done),
                    "cpu_over_wall": statistics.median(p.cpu_over_wall for p in done),
                    "passes": [asdict(p) for p in done],
                }
            )
        report(table, batch) if not args.json else None
    if args.json:
        print(json.dumps({"engine": ours.engine.describe(), "runs": table}))


def report(table: list[dict], batch: int) -> None:
    rows = {r["what"]: r for r in table if r["batch"] == batch}
    target, peer = rows["target"], rows["transformers"]
    print(f"batch {batch}: tokens/s (median, best), against target-only, CPU over wall")
    for name, row in rows.items():
        ratio = row["median"] / target["median"]
        print(
            f"  {name:14} {row['median']:8.0f} {row['best']:8.0f}  {ratio:5.2f}x"
            f"  {row['cpu_over_wall']:.2f}"
        )
    print(f"  target-only over transformers: {target['median'] / peer['median']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
