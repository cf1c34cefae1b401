"""How long do requests wait above vLLM's workers, at shares of stock vLLM's capacity?

    python -m lab.bench.vllm_arrivals azure2023_conv.csv.gz --out arrivals.jsonl [--json]

Needs a Python that has vLLM. Stock is vLLM as it is, or with limits tuned in hindsight; beside it
the engine with `fluid_guided`, all with random weights. Requests are stretches of
a recorded trace, lengths `--scale` times shorter, gaps for a share of the rate at which stock
serves the stretch at once. KV memory is a quarter of what stock's most requests would hold.
Intervals are over the stretches. Every stretch is written down; the same command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.workers import Worker, WorkerError
from lab.common.cells import Cells, Figures
from lab.common.results import Results, machine, parser, table, tell
from lab.common.statistics import Interval, interval, ratio, rotated
from penstock.sim.workloads import load_workload

LOADS = (0.5, 0.8, 0.95)
MODEL = "llama-28m-random"
BLOCK_SIZE = 32
MOST_REQUESTS = 128
"""That stock runs at once, by its default."""
TUNED = [
    {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    for tokens, seqs in itertools.product((128, 256, 512, 2048), (16, 32, 128))
]
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("vllm", {}),
    "engine": ("penstock", {}),
}
_FIRST_REQUESTS = 120
"""Served before anything is measured."""
_TUNING_REQUESTS = 600

Rows = list[tuple[float, int, int]]


def write_model(folder: Path) -> Path:
    """The model, unless it is there."""
    path = folder / MODEL
    if not (path / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Trace:
    """Lengths and arrivals of a recorded workload, made shorter."""

    prompts: Sequence[int]
    outputs: Sequence[int]
    times: Sequence[float]

    @classmethod
    def read(cls, file: Path, scale: float) -> Trace:
        """Raises: ValueError."""
        recorded = load_workload(file)
        if recorded.arrival_time is None:
            raise ValueError(f"{file} has no arrival times")
        prompts, outputs = (
            np.clip(np.rint(lens / scale), 1, most).astype(int).tolist()
            for lens, most in ((recorded.prompt_len, 1500), (recorded.output_len, 500))
        )
        return cls(prompts, outputs, recorded.arrival_time.tolist())

    @property
    def mean_len(self) -> float:
        return float(np.mean(self.prompts) + np.mean(self.outputs))

    def stretch(self, number: int, num: int, rate: float | None) -> Rows:
        """Requests in a row, with `rate` of them a second; None: all at once."""
        rng = np.random.default_rng(number)
        begin = int(rng.integers(len(self.prompts) - num))
        rows = range(begin, begin + num)
        span = self.times[rows[-1]] - self.times[begin]
        pace = 0.0 if rate is None else (num - 1) / rate / span
        return [
            ((self.times[i] - self.times[begin]) * pace, self.prompts[i], self.outputs[i])
            for i in rows
        ]


class OutOfTimeError(Exception):
    """The run's minutes are over."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of a run that may be cut and goes on from its file."""
    parser.add_argument("--out", type=Path, required=True, help="file that a run goes on from")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/penstock/arrivals")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then nothing is begun")


class Bench:
    """Two workers, and what they have measured."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, stretches: int, requests: int) -> None:
        parser.add_argument("trace", type=Path)
        add_run_options(parser)
        parser.add_argument("--stretches", type=int, default=stretches, help="of each load")
        parser.add_argument("--requests", type=int, default=requests, help="of a stretch")
        parser.add_argument("--scale", type=float, default=8.0, help="lengths are divided by it")

    @classmethod
    @contextmanager
    def opened(cls, args: argparse.Namespace) -> Iterator[Bench]:
        """For a command, which ends with a line where it cannot go on."""
        try:
            bench = cls(args)
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from error
        try:
            yield bench
        except OutOfTimeError:
            raise SystemExit("out of time; the same command goes on") from None
        except WorkerError as error:
            raise SystemExit(f"{error}; more in {args.folder}/*.stderr") from error
        finally:
            bench.close()

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises: OSError, ValueError."""
        for folder in (args.folder, args.out.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self.trace = Trace.read(args.trace, args.scale)
        if max(args.requests, _FIRST_REQUESTS) >= len(self.trace.prompts):
            raise ValueError(f"{args.trace} has only {len(self.trace.prompts)} requests")
        self._args = args
        self._cells = Cells(args.out, silent=True)
        self._target = write_model(args.folder)
        self.kv_tokens = int(MOST_REQUESTS * self.trace.mean_len / 4 // BLOCK_SIZE * BLOCK_SIZE)
        self._workers: dict[str, Worker] = {}
        self._num_done = 0
        self._ends_at = time.monotonic() + 60 * args.minutes

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _worker(self, kind: str) -> Worker:
        if kind not in self._workers:
            self._workers[kind] = worker = Worker(
                Path(__file__).with_name("vllm_arrivals_worker.py"),
                self._args.folder / f"{kind}.stderr",
            )
            worker.ask(
                do="load",
                kind=kind,
                target=str(self._target),
                kv_tokens=self.kv_tokens,
                block_size=BLOCK_SIZE,
            )
            # The first steps of a process are slow.
            rows = self.trace.stretch(0, _FIRST_REQUESTS, None)
            worker.ask(do="serve", settings={}, requests=rows, seed=0)
        return self._workers[kind]

    def serve(
        self,
        arm: tuple[str, dict[str, Any]],
        number: int,
        rate: float | None,
        num: int | None = None,
        turn: int | None = None,
    ) -> Figures:
        """What a stretch comes to, from the file if it is there. num: requests, if fewer than of
        others; turn: of a stretch that is served several times, with its steps. Raises:
        OutOfTimeError."""
        kind, settings = arm
        num = num or self._args.requests
        about = {
            "arm": [kind, settings],
            "stretch": number,
            "rate": rate,
            "requests": num,
            "scale": self._args.scale,
            "kv_tokens": self.kv_tokens,
            "trace": self._args.trace.name,
            "machine": machine(),
        } | ({} if turn is None else {"turn": turn})
        self._num_done += 1
        requests = self.trace.stretch(number, num, rate)
        command = dict(settings=settings, requests=requests, seed=number)
        measure = partial(self._served, kind, command, rate, turn is not None)
        return self._cells.measure(json.dumps(about, sort_keys=True), measure)

    def _served(
        self, kind: str, command: dict[str, Any], rate: float | None, with_steps: bool
    ) -> Figures:
        """The same, measured now. Raises: OutOfTimeError, WorkerError."""
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError
        found = self._worker(kind).ask(do="serve", **command)
        if not with_steps:
            del found["steps"]
        latency = np.mean(found["latency"])
        name = "at once" if rate is None else f"{rate:.2f} a second"
        print(
            f"{self._num_done}: stretch {command['seed']}, {name}, {kind} "
            f"{command['settings'] or ''}: {found['seconds']:.0f} s, mean latency {latency:.2f} s",
            file=sys.stderr,
            flush=True,
        )
        return found

    def capacity(self, number: int, num: int | None = None) -> float:
        """Requests a second that stock serves when all of a stretch come at once."""
        num = num or self._args.requests
        return num / float(self.serve(ARMS["default"], number, None, num)["seconds"])

    def load(self, share: float) -> dict[str, Any]:
        """Figures of all arms at one load."""
        numbers = range(1, 1 + self._args.stretches)
        rates = {i: round(share * self.capacity(i), 3) for i in numbers}
        tuned = self._tuned(share)
        arms = {**ARMS, "tuned": ("vllm", tuned)}
        runs: dict[str, list[Figures]] = {name: [] for name in arms}
        for number, rate in rates.items():
            for name in rotated(list(arms), number):
                runs[name].append(self.serve(arms[name], number, rate))
        latency = {n: [float(np.mean(r["latency"])) for r in found] for n, found in runs.items()}
        ttft = {n: [float(np.mean(r["ttft"])) for r in found] for n, found in runs.items()}
        p99 = {n: [float(np.quantile(r["ttft"], 0.99)) for r in found] for n, found in runs.items()}
        return {
            "load": share,
            "rates": list(rates.values()),
            "tuned": tuned,
            "arms": {
                name: {
                    "mean_latency_s": _shown(interval(latency[name])),
                    "mean_ttft_s": _shown(interval(ttft[name])),
                    "p99_ttft_s": _shown(interval(p99[name])),
                    "latency_to_default": _shown(ratio(latency[name], latency["default"])),
                    "latency_to_tuned": _shown(ratio(latency[name], latency["tuned"])),
                    "p99_ttft_to_default": _shown(ratio(p99[name], p99["default"])),
                    "adding_share": max(r["adding"] / r["seconds"] for r in runs[name]),
                }
                for name in arms
            },
        }

    def _tuned(self, share: float) -> dict[str, int]:
        """The limits with the lowest mean latency in a shorter stretch at that load."""
        num = min(_TUNING_REQUESTS, self._args.requests)
        rate = round(share * self.capacity(1, num), 3)

        def latency(limits: dict[str, int]) -> float:
            return float(np.mean(self.serve(("vllm", limits), 1, rate, num)["latency"]))

        return min(TUNED, key=latency)


def _shown(found: Interval) -> list[float | None]:
    """Mean, and its interval; None for an endless one."""
    values = (found.mean, found.low, found.high)
    return [round(v, 4) if np.isfinite(v) else None for v in values]


def _row(load: dict[str, Any], name: str) -> dict[str, str]:
    """As it is printed."""
    arm = load["arms"][name]
    columns = ("mean_latency_s", "latency_to_default", "latency_to_tuned", "p99_ttft_to_default")
    cells = {column: _cell(arm[column]) for column in columns}
    adding = f"{arm['adding_share']:.1%}"
    return cells | {"load": f"{load['load']:g}", "arm": name, "adding": adding}


def _cell(values: list[float | None]) -> str:
    mean, low, high = values
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


COLUMNS = {
    "load": "{load}",
    "way": "{arm}",
    "mean latency, s": "{mean_latency_s}",
    "to default": "{latency_to_default}",
    "to tuned": "{latency_to_tuned}",
    "p99 TTFT to default": "{p99_ttft_to_default}",
    "adding": "{adding}",
}


def main() -> int:
    options = parser(__doc__)
    Bench.add_options(options, stretches=3, requests=2000)
    options.add_argument("--loads", type=lambda t: tuple(map(float, t.split(","))), default=LOADS)
    args = options.parse_args()
    with Bench.opened(args) as bench:
        loads = [bench.load(share) for share in args.loads]
    found = {"model": MODEL, "kv_tokens": bench.kv_tokens, "loads": loads}
    rows = [_row(load, name) for load in loads for name in load["arms"]]
    return tell(args, Results(found, tables=[table("", rows, COLUMNS)]))


if __name__ == "__main__":
    raise SystemExit(main())
