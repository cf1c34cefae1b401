"""What does Penstock's scheduler cost above vLLM's engine, and what does its speculation gain?

    python -m lab.bench.vllm_engine [FOLDER ...] --out FILE.jsonl
    python -m lab.bench.vllm_engine TARGET --draft FOLDER --native-draft FILE --out FILE.jsonl

Needs a Python that has vLLM. Without a draft model: target-only, on the checkpoints or a Llama of
28 million random weights, batches of 1, 8 and 32. With one: real code and edits, in the prefix
cache, batches of 1, 4 and 8; vLLM with each of its ways to speculate, Penstock with its drafters, a
process at a time. Same prompts, greedy, bfloat16. All make a pass, in another order each time;
ratios are of passes of one turn. Every pass is written down; the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock
from lab.bench.real_prompts import real_prompts, token_ids
from lab.bench.vllm_arrivals import OutOfTimeError, add_run_options, write_model
from lab.bench.workers import Worker, WorkerError
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict
from lab.common.results import Results, machine, parser, table, tell
from lab.common.statistics import interval, ratio, rotated
from penstock.engine.tokenizer import load_tokenizer

OVERHEAD_BAR, SPECULATION_BAR = 0.99, 1.2
STOCK = "vllm"
PROMPT_TOKENS, WARM_TOKENS = 128, 8
CODE = ("completion", "docstring", "translation")
"""Kinds of real prompts whose answers are new code."""
MIN_SHARE = 1.85
"""CPU seconds per second of two cores; a pass with less is made again."""

QUIET = 0.1
"""CPU seconds per second of all other programs, up to which a low share is an arm's own."""


@dataclass(frozen=True)
class Arm:
    """A way to serve. process: arms of one name share one; drafter: of Penstock's requests."""

    process: str
    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = "none"


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all calls of a case.

    share: CPU time over wall time. other: the same of all other programs on the machine.
    """

    tokens_per_s: float
    share: float
    other: float

    @property
    def is_clean(self) -> bool:
        return self.share >= MIN_SHARE

    @property
    def is_idle_by_itself(self) -> bool:
        """Too little CPU time, and nobody else took it."""
        return not self.is_clean and self.other <= QUIET


class Played(NamedTuple):
    """A pass, and what it made."""

    timed: Pass
    token_ids: list[list[int]]


Arms = Mapping[str, Arm]
Turn = Mapping[str, Played]
"""A pass of each arm."""


class Bench:
    """Workers, and what they have measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cells = Cells(args.out, silent=True)
        self._workers: dict[tuple[Path, str], Worker] = {}
        self._warm: set[tuple[Case, str]] = set()
        self._ends_at = time.monotonic() + 60 * args.minutes

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._warm.clear()

    def measure(self, groups: Sequence[Arms], cases: Sequence[Case]) -> list[dict[str, Any]]:
        """A row for each arm of each case: its tokens a second in every turn, the CPU's share, its
        answers. Arms of one group are in memory together; a group that cannot be is left out.
        Raises: OutOfTimeError; WorkerError where none can."""
        able = list(groups)
        turns: dict[Case, list[Turn]] = {case: [] for case in cases}
        while not all(map(self._is_finished, turns.values())):
            turn = self._turn(able, cases, len(turns[cases[0]]))
            for case, made in turn.items():
                turns[case].append(made)
                _tell(case, made, len(turns[case]))
        return [row for case, made in turns.items() for row in _rows(case, made)]

    def _turn(
        self, groups: list[Arms], cases: Sequence[Case], number: int
    ) -> dict[Case, dict[str, Played]]:
        """A pass of each arm of all cases. groups: those that fail are taken out."""
        made: dict[Case, dict[str, Played]] = {case: {} for case in cases}
        for group in list(rotated(groups, number)):
            try:
                passes = [
                    (case, name, self._kept(name, group, case, number))
                    for case in cases
                    for name in rotated(tuple(group), number)
                ]
            except WorkerError as error:
                print(f"left out: {', '.join(group)}: {error}", file=sys.stderr, flush=True)
                if len(groups) == 1:
                    raise
                self.close()
                groups.remove(group)
                continue
            for case, name, played in passes:
                made[case][name] = played
        return made

    def _kept(self, name: str, group: Arms, case: Case, number: int) -> Played:
        """A pass, from the file if it is there. Raises: OutOfTimeError."""
        arm, calls = group[name], case.calls(self._args.requests)
        about = {
            "case": [case.model, case.prompts, case.batch, case.new_tokens, len(calls)],
            "code": own_code(),
            "machine": machine(),
            "arm": [name, arm.kind, dict(arm.args), arm.drafter],
            "turn": number,
        }
        measure = partial(self._made, name, group, case, calls)
        found = self._cells.measure(json.dumps(about, sort_keys=True), measure)
        return Played(Pass(*found["timed"]), found["token_ids"])

    def _made(self, name: str, group: Arms, case: Case, calls: Sequence[Any]) -> Figures:
        """The same, made now. Raises: OutOfTimeError, WorkerError."""
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError
        self._load(case.target, group)
        if (case, name) not in self._warm:
            self._pass(group[name], case, calls, WARM_TOKENS)
            self._warm.add((case, name))
        timed, token_ids = self._pass(group[name], case, calls, case.new_tokens)
        return {"timed": astuple(timed), "token_ids": token_ids}

    def _is_finished(self, turns: Sequence[Turn]) -> bool:
        wanted = self._args.turns
        return sum(map(_is_clean, turns)) >= wanted or len(turns) >= 2 * wanted

    def _load(self, target: Path, group: Arms) -> None:
        """A group, before anything of it is measured: whoever loads takes both cores. Raises:
        WorkerError."""
        needed = {(target, arm.process) for arm in group.values()}
        if needed <= self._workers.keys():
            return
        self.close()
        for arm in group.values():
            self._worker(target, arm)

    def _pass(self, arm: Arm, case: Case, calls: Sequence[Any], tokens: int) -> Played:
        worker = self._worker(case.target, arm)
        answer = worker.ask(do="run", calls=calls, new_tokens=tokens, drafter=arm.drafter)
        seconds, num = answer["wall_s"], sum(map(len, answer["token_ids"]))
        timed = Pass(num / seconds, answer["cpu_s"] / seconds, answer["other_s"] / seconds)
        return Played(timed, answer["token_ids"])

    def _worker(self, target: Path, arm: Arm) -> Worker:
        key = (target, arm.process)
        if key not in self._workers:
            own = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            # In one process: otherwise three of them poll on a small machine's cores.
            own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            script = Path(__file__).with_name("vllm_engine_worker.py")
            worker = Worker(script, self._args.out.with_suffix(".stderr"), **own)
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


@cache
def own_code() -> str:
    """A digest of what a request passes through in Penstock."""
    root, digest = Path(penstock.__file__).parent, hashlib.sha256()
    for part in (root / name for name in ("config", "core", "engine", "serving")):
        for file in sorted([*part.rglob("*.py"), *part.rglob("*.so")]):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _is_clean(turn: Turn) -> bool:
    """Whether no pass was disturbed by other programs."""
    return all(p.timed.is_clean or p.timed.is_idle_by_itself for p in turn.values())


def _counted(turns: list[Turn]) -> list[Turn]:
    """Those that nothing disturbed; all, where these are too few."""
    clean = [turn for turn in turns if _is_clean(turn)]
    return clean if len(clean) * 2 >= len(turns) else turns


def _rows(case: Case, turns: list[Turn]) -> list[dict[str, Any]]:
    turns = _counted(turns)
    names = [name for name in turns[0] if all(name in turn for turn in turns)]
    first = next(iter(turns[0].values())).token_ids
    return [
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
        for name in names
    ]


def _tell(case: Case, turn: Turn, number: int) -> None:
    timed = {name: played.timed for name, played in turn.items()}
    shown = ", ".join(f"{n} {p.tokens_per_s:.1f} ({p.share:.2f})" for n, p in timed.items())
    line = f"{case.model} {case.prompts} batch {case.batch} turn {number}: {shown}"
    print(line, file=sys.stderr, flush=True)


# --- target-only ----------------------------------------------------------------------------------


def target_only(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    arms = {STOCK: Arm(STOCK, "vllm"), "engine": Arm("engine", "penstock")}
    rows = []
    for target in args.targets or [write_model(args.folder)]:
        rng = np.random.default_rng(1)
        prompts = rng.integers(8, 8192, (max(args.batches), PROMPT_TOKENS)).tolist()
        cases = [Case(target.name, target, "random", prompts, b, args.tokens) for b in args.batches]
        rows += _with_ratios(bench.measure([arms], cases), [STOCK])
    return rows


# --- speculation ----------------------------------------------------------------------------------


def speculation(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    target, stock = args.targets[0], {} if args.skip_plain else {STOCK: Arm(STOCK, "vllm")}
    for num in args.ngram:
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        stock[f"{STOCK}, ngram {num}"] = _stock(num, method="ngram", **lookup)
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
    arms = ours | stock
    # One process at a time: a real pair is most of a small machine's memory.
    groups: dict[str, dict[str, Arm]] = {}
    for name, arm in arms.items():
        groups.setdefault(arm.process, {})[name] = arm
    rivals = [name for name, arm in arms.items() if name in stock or arm.drafter == "none"]
    tokenizer = load_tokenizer(target)
    held = [p for p in real_prompts() if p.part == "held"]
    code = zip(*([p for p in held if p.kind == kind] for kind in CODE), strict=True)
    chosen = {"code": list(chain(*code)), "edit": [p for p in held if p.kind == "edit"]}
    prompts = {name: [token_ids(p, tokenizer) for p in some] for name, some in chosen.items()}
    cases = [
        Case(target.name, target, name, prompts[name], batch, args.tokens)
        for batch, name in product(args.batches, chosen)
    ]
    return _with_ratios(bench.measure(list(groups.values()), cases), rivals)


def _stock(num: int, **speculation: Any) -> Arm:
    args = {"speculative_config": {**speculation, "num_speculative_tokens": num}}
    return Arm(f"{speculation['method']} {num}", "vllm", args)


# --- figures --------------------------------------------------------------------------------------


def _with_ratios(rows: list[dict[str, Any]], stock: Sequence[str]) -> list[dict[str, Any]]:
    """Each row with its ratio to the best of stock's ways in its case, turn by turn."""
    cases = dict.fromkeys((row["prompts"], row["batch"]) for row in rows)
    for case in cases:
        _add_ratios([row for row in rows if (row["prompts"], row["batch"]) == case], stock)
    return rows


def _add_ratios(rows: Sequence[dict[str, Any]], stock: Sequence[str]) -> None:
    """Of one case."""
    medians = {row["arm"]: statistics.median(row["rates"]) for row in rows}
    best = max((name for name in stock if name in medians), key=medians.__getitem__)
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


def verdicts(rows: Sequence[Mapping[str, Any]], bar: float) -> list[ClaimVerdict]:
    """Of every cell; of several drafters the best one counts."""
    cells = dict.fromkeys((r["model"], r["prompts"], r["batch"]) for r in rows)
    found = []
    for cell in cells:
        mine = [r for r in rows if (r["model"], r["prompts"], r["batch"]) == cell]
        ours = (r for r in mine if r["arm"].startswith("engine"))
        row = max(ours, key=lambda r: r["rate"])
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
    add_run_options(options)
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
    speculates = args.draft is not None
    if speculates and (args.native_draft is None or len(args.targets) != 1):
        options.error("--draft goes with --native-draft and one FOLDER")
    args.batches = args.batches or ([1, 4, 8] if speculates else [1, 8, 32])
    bench = Bench(args)
    try:
        rows = (speculation if speculates else target_only)(bench, args)
    except OutOfTimeError:
        raise SystemExit("out of time; the same command goes on") from None
    finally:
        bench.close()
    found = verdicts(rows, SPECULATION_BAR if speculates else OVERHEAD_BAR)
    return tell(args, Results(rows, found, [table("", rows, COLUMNS)]))


if __name__ == "__main__":
    sys.exit(main())
