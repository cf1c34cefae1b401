"""Penstock's scheduler on vLLM's engine against vLLM as it is: tokens a second, in turn.

    python -m benchmarks.vllm_engine [FOLDER ...] --out FILE.jsonl
    python -m benchmarks.vllm_engine TARGET --draft FOLDER --native-draft FILE --out FILE.jsonl

To be run by a Python that has vLLM. Without a draft model: target-only, on the checkpoints named or
on a Llama of 28 million random weights, for batches of 1, 8 and 32. With one: the target on
real prompts (FOLDER has its tokenizer), code and edits, for batches of 1, 4 and 8, which are in the
prefix cache, so that decoding is what takes the time; vLLM with each of its own ways to speculate,
Penstock with its drafters. Same checkpoints, same prompts, greedy, end of text ignored, bfloat16,
else vLLM's own defaults. All ways make a pass, in another order each time; a ratio is of passes of
one turn. What is measured is written down, and the same command goes on behind it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.passes import Pass
from benchmarks.peers.store import Store, about_engine
from benchmarks.peers.workers_pool import Worker, WorkerError
from benchmarks.real_prompts import real_prompts, token_ids
from benchmarks.vllm_arrivals import write_model

from penstock.engine.tokenizer import load_tokenizer
from penstock.lab.bench import Results, parser, table, tell
from penstock.lab.claims import ClaimVerdict
from penstock.lab.statistics import interval, ratio

OVERHEAD_BAR, SPECULATION_BAR = 0.98, 1.2
STOCK = "vllm"
PROMPT_TOKENS, WARM_TOKENS = 128, 8
PLUGIN = {"scheduler_cls": "penstock.engine.vllm.make_scheduler"}
CODE = ("completion", "docstring", "translation")
"""Kinds of real prompts whose answers are new code."""


@dataclass(frozen=True)
class Arm:
    """A way to serve. process: arms of one name share one; drafter: of Penstock's requests."""

    process: str
    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = "none"


@dataclass(frozen=True)
class Case:
    """Prompts for one model, in batches of one size."""

    model: str
    target: Path
    prompts: str
    token_ids: Sequence[Sequence[int]]
    batch: int
    new_tokens: int

    def calls(self, requests: int) -> list[Sequence[Sequence[int]]]:
        """Of a pass over `requests` prompts, or one batch if that is more."""
        chosen = self.token_ids[: max(self.batch, requests)]
        return [chosen[i : i + self.batch] for i in range(0, len(chosen), self.batch)]


class Played(NamedTuple):
    """A pass, and what it made."""

    timed: Pass
    token_ids: list[list[int]]


Turn = Mapping[str, Played]
"""A pass of each arm."""


class Bench:
    """Workers, and what they have measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._store = Store(args.out)
        self._workers: dict[tuple[Path, str], Worker] = {}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def measure(self, arms: Mapping[str, Arm], case: Case) -> list[dict[str, Any]]:
        """A row for each arm: its tokens a second in every turn, the CPU's share, its answers."""
        calls = case.calls(self._args.requests)
        about = {
            "case": [case.model, case.prompts, case.batch, case.new_tokens, len(calls)],
            "code": about_engine(ENGINES["penstock"]),
            "arms": {name: [arm.kind, dict(arm.args), arm.drafter] for name, arm in arms.items()},
        }
        kept = self._store.get(about)
        if kept is not None:
            return list(kept["found"])
        for arm in arms.values():
            self._pass(arm, case, calls, WARM_TOKENS)
        turns: list[Turn] = []
        while not self._is_finished(turns):
            order = _rotated(list(arms), len(turns))
            turns.append(
                {name: self._pass(arms[name], case, calls, case.new_tokens) for name in order}
            )
            _tell(case, turns)
        turns = _counted(turns)
        first = turns[0][next(iter(arms))].token_ids
        rows = [
            {
                "model": case.model,
                "prompts": case.prompts,
                "batch": case.batch,
                "arm": name,
                "rates": [turn[name].timed.tokens_per_s for turn in turns],
                "shares": [turn[name].timed.share for turn in turns],
                "equal": statistics.mean(
                    a == b for a, b in zip(first, turns[0][name].token_ids, strict=True)
                ),
            }
            for name in arms
        ]
        self._store.put(about, rows)
        return rows

    def _is_finished(self, turns: Sequence[Turn]) -> bool:
        wanted = self._args.turns
        return sum(map(_is_clean, turns)) >= wanted or len(turns) >= 2 * wanted

    def load(self, target: Path, arms: Mapping[str, Arm]) -> dict[str, Arm]:
        """Before anything is measured: whoever loads takes both cores. Returns those that can."""
        able = {}
        for name, arm in arms.items():
            try:
                self._worker(target, arm)
            except WorkerError as error:
                print(f"left out: {target.name} {name}: {error}", file=sys.stderr, flush=True)
                continue
            able[name] = arm
        return able

    def _pass(self, arm: Arm, case: Case, calls: Sequence[Any], tokens: int) -> Played:
        worker = self._worker(case.target, arm)
        answer = worker.ask(do="run", calls=calls, tokens=tokens, drafter=arm.drafter)
        seconds, num = answer["seconds"], sum(map(len, answer["token_ids"]))
        timed = Pass(num / seconds, answer["cpu"] / seconds, answer["other"] / seconds)
        return Played(timed, answer["token_ids"])

    def _worker(self, target: Path, arm: Arm) -> Worker:
        key = (target, arm.process)
        if key not in self._workers:
            own = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            # In one process: otherwise three of them poll on a small machine's cores.
            own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            script = Path(__file__).with_name("vllm_engine_worker.py")
            worker = Worker(
                Path(sys.executable),
                script,
                {**os.environ, **own},
                self._args.out.with_suffix(".stderr"),
            )
            try:
                worker.ask(
                    do="load",
                    kind=arm.kind,
                    target=str(target),
                    prefix_caching=self._args.draft is not None,
                    args=dict(arm.args),
                )
            except WorkerError:
                worker.close()
                raise
            self._workers[key] = worker
            print(f"loaded {target.name} {arm.process}", file=sys.stderr, flush=True)
        return self._workers[key]


def _rotated(names: list[str], turn: int) -> Iterator[str]:
    """Whoever is first in one turn is last in the next."""
    first = turn % len(names)
    yield from names[first:]
    yield from names[:first]


def _is_clean(turn: Turn) -> bool:
    """Whether no pass was disturbed by other programs."""
    return all(p.timed.is_clean or p.timed.is_idle_by_itself for p in turn.values())


def _counted(turns: list[Turn]) -> list[Turn]:
    """Those that nothing disturbed; all, where these are too few."""
    clean = [turn for turn in turns if _is_clean(turn)]
    return clean if len(clean) * 2 >= len(turns) else turns


def _tell(case: Case, turns: Sequence[Turn]) -> None:
    timed = {name: played.timed for name, played in turns[-1].items()}
    shown = ", ".join(f"{n} {p.tokens_per_s:.1f} ({p.share:.2f})" for n, p in timed.items())
    line = f"{case.model} {case.prompts} batch {case.batch} turn {len(turns)}: {shown}"
    print(line, file=sys.stderr, flush=True)


# --- target-only ----------------------------------------------------------------------------------


def target_only(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    arms = {
        STOCK: Arm(STOCK, "vllm"),
        "plug-in": Arm("plug-in", "vllm", PLUGIN),
        "engine": Arm("engine", "penstock"),
    }
    rows = []
    for target in args.targets or [write_model(args.folder)]:
        rng = np.random.default_rng(1)
        prompts = rng.integers(8, 8192, (max(args.batches), PROMPT_TOKENS)).tolist()
        able = bench.load(target, arms)
        for batch in args.batches:
            case = Case(target.name, target, "random", prompts, batch, args.tokens)
            rows += _with_ratios(bench.measure(able, case), [STOCK])
        bench.close()
    return rows


# --- speculation ----------------------------------------------------------------------------------


def speculation(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    target, stock = args.targets[0], {} if args.skip_plain else {STOCK: Arm(STOCK, "vllm")}
    for num in args.ngram:
        stock[f"{STOCK}, ngram {num}"] = _stock(num, method="ngram", **args.lookup)
    for num in args.draft_model:
        stock[f"{STOCK}, draft model {num}"] = _stock(
            num, method="draft_model", model=str(args.draft)
        )
    native = {"look-up": "ngram", "model": str(args.native_draft)}
    native["both"] = f"ngram+{args.native_draft}"
    ours = {
        f"engine, {name}": Arm("engine", "penstock", {"drafters": native}, name)
        for name in args.drafters or ("none", *native)
    }
    arms = bench.load(target, ours | stock)
    rivals = [name for name in arms if name in stock or arms[name].drafter == "none"]
    tokenizer = load_tokenizer(target)
    held = [p for p in real_prompts() if p.part == "held"]
    code = zip(*([p for p in held if p.kind == kind] for kind in CODE), strict=True)
    chosen = {"code": list(chain(*code)), "edit": [p for p in held if p.kind == "edit"]}
    rows = []
    for batch, name in product(args.batches, chosen):
        prompts = [token_ids(p, tokenizer) for p in chosen[name]]
        case = Case(target.name, target, name, prompts, batch, args.tokens)
        rows += _with_ratios(bench.measure(arms, case), rivals)
    return rows


def _stock(num: int, **speculation: Any) -> Arm:
    args = {"speculative_config": {**speculation, "num_speculative_tokens": num}}
    return Arm(f"{speculation['method']} {num}", "vllm", args)


# --- figures --------------------------------------------------------------------------------------


def _with_ratios(rows: list[dict[str, Any]], stock: Sequence[str]) -> list[dict[str, Any]]:
    """Each row with its ratio to the best of stock's ways, turn by turn."""
    medians = {row["arm"]: statistics.median(row["rates"]) for row in rows}
    best = max(stock, key=medians.__getitem__)
    rival = next(row["rates"] for row in rows if row["arm"] == best)
    for row in rows:
        found = ratio(row["rates"], rival) if len(rival) > 1 else interval([1.0])
        row |= {
            "rate": medians[row["arm"]],
            "share": statistics.median(row["shares"]),
            "best": best,
            "ratio": statistics.median(a / b for a, b in zip(row["rates"], rival, strict=True)),
            "low": found.low,
            "high": found.high,
        }
    return rows


def verdicts(
    rows: Sequence[Mapping[str, Any]], bar: float, ours: Sequence[str]
) -> list[ClaimVerdict]:
    """Of every cell and each of our arms; of several drafters the best one counts."""
    cells = dict.fromkeys((r["model"], r["prompts"], r["batch"]) for r in rows)
    found = []
    for cell in cells:
        mine = [r for r in rows if (r["model"], r["prompts"], r["batch"]) == cell]
        for name in ours:
            row = max((r for r in mine if r["arm"].startswith(name)), key=lambda r: r["rate"])
            claim = f"{cell[0]}, {cell[1]}, batch {cell[2]}: {row['arm']} ≥ {bar} × {row['best']}"
            measured = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            found.append(ClaimVerdict(claim, measured, "met" if row["ratio"] >= bar else "missed"))
    return found


COLUMNS = {
    "model": "{model}",
    "prompts": "{prompts}",
    "batch": "{batch}",
    "way": "{arm}",
    "tokens/s": "{rate:.1f}",
    "to the best of vLLM's own": "{ratio:.3f} ({low:.3f} to {high:.3f})",
    "CPU seconds a second": "{share:.2f}",
    "answers as vLLM's": "{equal:.0%}",
}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("targets", type=Path, nargs="*", metavar="FOLDER")
    options.add_argument("--out", type=Path, required=True, help="file that a run goes on from")
    options.add_argument("--folder", type=Path, default=Path.home() / ".cache/penstock/arrivals")
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--tokens", type=int, default=64, help="new ones of each request")
    options.add_argument("--requests", type=int, default=4, help="of a pass, at least")
    options.add_argument("--batches", type=_numbers)
    options.add_argument("--draft", type=Path, help="vLLM's draft model, a folder")
    options.add_argument("--native-draft", type=Path, help="Penstock's: a folder or a GGUF file")
    options.add_argument(
        "--drafters", type=lambda t: t.split(","), help="of none, look-up, model and both"
    )
    options.add_argument("--ngram", type=_numbers, default=[4], help="lengths of vLLM's look-up")
    options.add_argument("--draft-model", type=_numbers, default=[3], help="of its draft model")
    options.add_argument(
        "--skip-plain",
        action="store_true",
        help="where memory is short: no vLLM without drafts, Penstock without is the rival",
    )
    args = options.parse_args()
    args.lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    speculates = args.draft is not None
    if speculates and (args.native_draft is None or len(args.targets) != 1):
        options.error("--draft goes with --native-draft and one FOLDER")
    args.batches = args.batches or ([1, 4, 8] if speculates else [1, 8, 32])
    bench = Bench(args)
    try:
        rows = (speculation if speculates else target_only)(bench, args)
    finally:
        bench.close()
    found = (
        verdicts(rows, SPECULATION_BAR, ["engine"])
        if speculates
        else verdicts(rows, OVERHEAD_BAR, ["plug-in", "engine"])
    )
    return tell(args, Results(rows, found, [table("", rows, COLUMNS)]))


if __name__ == "__main__":
    sys.exit(main())
