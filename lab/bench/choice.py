"""Does choosing a drafter for each request beat the best policy that does not, on real models?

    python -m lab.bench.choice TARGET.gguf MODEL.gguf [OTHER.gguf] [--case unlike|seat|network]
        [--clients 1] [--prompts 8] [--warm 2] [--turns 5] [--tokens 96] [--out FILE] [--json]

The target has one core, its drafters another. Requests are greedy, from `lab.bench.real_prompts`,
in random order; the policies learn from other prompts, then take turns at each of the same ones
(several clients: at every few).

- `unlike`: MODEL and OTHER, each alone and behind look-up (`suffix`); five kinds of text. Two
  clients' control is from what was measured with one.
- `seat`: MODEL behind look-up, for one request at a time. Half of the requests go on with new
  code, the others edit once more what was edited before: only a choice can give the seat to the
  former and look-up to the latter.
- `network`: the same with two draft servers that have MODEL, a seat each, on one core; one is
  `--milliseconds` away, there and back, the other three times as far, and frozen for a third of
  every pass.

Control: each prompt has what was best for it in the other turns (`seat`: what suits its kind).
Where that gains too little, nothing can be told; it moved on by one kind must fail. With one client
rates are from a request's first token on, else those of all together while none is idle. Every turn
is a line of FILE (default: choice.jsonl), from which the same command goes on.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.choice_network import NetworkBench
from lab.bench.choice_systems import AGAIN, Asked, Bench, System
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, count, parser, table, tell
from lab.common.statistics import FloatArray, Interval, ratio
from penstock.config import SUFFIX
from penstock.core.types import AUTO_DRAFTER

OVER = "auto over it, by prompt"
CONTROL, MOVED = "best of each", "best of each, moved on"
TELLS = {"unlike": 1.15, "seat": 1.1, "network": 1.05}
"""Gains of the control over the best fixed policy, under which nothing can be told."""
GAIN_BAR = {"unlike": 1.0, "seat": 1.1, "network": 1.05}
KIND_BAR = 0.97
AnyBench = Bench | NetworkBench


class Passes:
    """Rates that were measured, by system and turn."""

    def __init__(self, bench: AnyBench, kept: Cells, turns: int, clients: int) -> None:
        args = bench.args
        self._bench, self._kept, self.turns = bench, kept, turns
        away = f"/{args.milliseconds}" if args.case == "network" else ""
        self._prefix = f"{args.case}{away}/{clients}"
        self.names = [*bench.systems()]

    def measure(self, systems: Mapping[str, System], turn: int) -> None:
        play = partial(self._bench.play, systems, turn)
        self._kept.measure(f"{self._prefix}/{turn}", lambda: {"systems": play()})

    def figures(self, name: str, turn: int) -> Figures:
        found: Figures = self._kept.done[f"{self._prefix}/{turn}"]["systems"][name]
        return found

    def rates(self, name: str, label: str | None = None) -> FloatArray:
        """Tokens per second by turn, of one kind or all."""
        return np.array([self._rate(self.figures(name, t), label) for t in range(self.turns)])

    def _rate(self, of: Figures, label: str | None) -> float:
        if label is None and self._bench.args.clients > 1:
            return float(of["tokens"] / of["seconds"])
        mine = [r for r in of["requests"] if label in (None, r["kind"])]
        return float(sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine))

    def by_prompt(self, name: str) -> FloatArray:
        """Tokens per second of each prompt, in the mean of all turns."""
        return 1 / sum(self._seconds(name, turn) for turn in range(self.turns))

    def best_fixed(self) -> str:
        """All turns together."""
        fixed = [n for n, s in self._bench.systems().items() if s.is_fixed]
        return max(fixed, key=lambda name: self.rates(name).mean())

    def best_of_each(self, turn: int, names: Sequence[str]) -> list[str]:
        """Return for each prompt the fixed policy that was best in the turns but this one."""
        others = [t for t in range(self.turns) if t != turn] or [turn]
        seconds = {n: sum(self._seconds(n, t) for t in others) for n in names}
        return [min(names, key=lambda n: seconds[n][i]) for i in range(len(self._bench.held))]

    def composed(self, moved: bool) -> FloatArray:
        """Rates by turn of the best of each prompt, as it was in the turns but this one, or of the
        best of the prompt one kind further on."""
        fixed = [n for n, s in self._bench.systems().items() if s.is_fixed]
        rates = []
        for turn in range(self.turns):
            assigned = self.best_of_each(turn, fixed)
            if moved:
                assigned = moved_on(assigned, self._bench.held)
            mine = [self.figures(n, turn)["requests"][i] for i, n in enumerate(assigned)]
            rates.append(sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine))
        return np.array(rates)

    def _seconds(self, name: str, turn: int) -> FloatArray:
        """A token, by prompt."""
        requests = self.figures(name, turn)["requests"]
        return np.array([r["seconds"] / max(r["tokens"], 1) for r in requests])


def moved_on(assigned: Sequence[str], asked: Sequence[Asked]) -> list[str]:
    """Each prompt gets what one of the next kind has."""
    labels = list(dict.fromkeys(a.label for a in asked))
    of_label = {
        b: [x for x, a in zip(assigned, asked, strict=True) if a.label == b] for b in labels
    }
    taken = {b: iter(of_label[labels[(i + 1) % len(labels)]]) for i, b in enumerate(labels)}
    return [next(taken[a.label]) for a in asked]


def measured(bench: AnyBench, kept: Cells) -> Passes:
    """Let all systems take turns, the controls among them where they are not composed. Raises:
    SystemExit where what a control is made from is missing."""
    args, systems = bench.args, bench.systems()
    if not is_composed(args):
        suited = _suited(bench, kept)
        systems[CONTROL] = System(bench.models, wanted=suited)
        systems[MOVED] = System(bench.models, wanted=moved_on(suited, bench.held))
    for turn in range(args.turns):
        passes = Passes(bench, kept, turn + 1, args.clients)
        passes.measure(systems, turn)
    return passes


def is_composed(args: argparse.Namespace) -> bool:
    """One request after another: what each had is known from the fixed policies' passes."""
    return bool(args.case == "unlike" and args.clients == 1)


def _suited(bench: AnyBench, kept: Cells) -> list[str]:
    """Return the drafter of each prompt's control: by its kind, or the best for it alone."""
    if bench.args.case != "unlike":
        seats = itertools.cycle(bench.models)
        return [SUFFIX if a.label == AGAIN else next(seats) for a in bench.held]
    looking_up = {n: s for n, s in bench.systems().items() if s.is_fixed and s.looks_up}
    alone = Passes(bench, kept, bench.args.turns, 1)
    try:
        best = alone.best_of_each(-1, [*looking_up])
    except KeyError as error:
        raise SystemExit(
            "first run the same with --clients 1, from which the control is"
        ) from error
    return [str(looking_up[name].wanted) for name in best]


def verdicts_of(bench: AnyBench, passes: Passes) -> list[ClaimVerdict]:
    case, clients = bench.args.case, bench.args.clients
    best = passes.best_fixed()
    base = passes.rates(best)
    auto = ratio(passes.rates(AUTO_DRAFTER), base)
    if is_composed(bench.args):
        control, moved = (ratio(passes.composed(m), base) for m in (False, True))
    else:
        control, moved = (ratio(passes.rates(n), base) for n in (CONTROL, MOVED))
    wanted = GAIN_BAR[case]
    reached = auto.low >= 1.0 and auto.mean >= wanted
    if case == "unlike":
        reached = reached and auto.mean - 1 >= (control.mean - 1) / 2
    text = (
        f"{auto.times} of {best} (bar {wanted}, lower end 1.0), control {control.times}, moved on "
        f"by one kind {moved.times}, {passes.turns} turns"
    )
    tells = control.mean >= TELLS[case] and moved.mean < 1
    found = bar(f"{_named(clients)}: auto against the best fixed policy", text, reached)
    verdicts = [found if reached or tells else replace(found, outcome="inconclusive")]
    if is_composed(bench.args):
        verdicts.append(_in_each_kind(bench, passes))
    texts = [
        {
            passes.figures(n, t)["requests"][i]["text"]
            for n in passes.names
            for t in range(passes.turns)
        }
        for i in range(len(bench.held))
    ]
    same = sum(len(t) == 1 for t in texts)
    text = f"for {same} of {len(texts)} prompts"
    return [*verdicts, bar("every policy gives the same text", text, same == len(texts))]


def _in_each_kind(bench: AnyBench, passes: Passes) -> ClaimVerdict:
    """Compare `auto` with the best fixed policy of each kind of prompt."""
    shares: dict[str, Interval] = {}
    fixed = [n for n, s in bench.systems().items() if s.is_fixed]
    for label in dict.fromkeys(a.label for a in bench.held):
        best = max(fixed, key=lambda n: passes.rates(n, label).mean())
        shares[label] = ratio(passes.rates(AUTO_DRAFTER, label), passes.rates(best, label))
    text = ", ".join(f"{label} {share.mean:.2f}" for label, share in shares.items())
    reached = min(share.mean for share in shares.values()) >= KIND_BAR
    return bar(
        "auto against the best fixed policy of each kind", f"{text} (bar {KIND_BAR})", reached
    )


def _rows(bench: AnyBench, passes: Passes) -> list[dict[str, Any]]:
    labels = list(dict.fromkeys(a.label for a in bench.held))
    rows = []
    for name in passes.names:
        rates = {label: passes.rates(name, label).mean() for label in labels}
        over = ratio(passes.by_prompt(AUTO_DRAFTER), passes.by_prompt(name)).times
        rows.append({"policy": name, "all": passes.rates(name).mean(), **rates, OVER: over})
    return rows


def _named(clients: int) -> str:
    return "one client" if clients == 1 else f"{clients} clients"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("model", type=Path)
    options.add_argument("other", type=Path, nargs="?", help="a second small model")
    options.add_argument("--case", choices=tuple(GAIN_BAR), default="unlike")
    options.add_argument("--clients", type=count, default=1, help="requests at once")
    options.add_argument("--prompts", type=count, default=8, help="measured, of each kind")
    options.add_argument("--warm", type=count, default=2, help="to learn from, of each kind")
    options.add_argument("--turns", type=count, default=5)
    options.add_argument("--tokens", type=count, default=96)
    away = "of the near draft server, there and back"
    options.add_argument("--milliseconds", type=count, default=5, help=away)
    options.add_argument("--out", type=Path, default=Path("choice.jsonl"), metavar="FILE")
    args = options.parse_args()
    kept = Cells(args.out, silent=True)
    bench = NetworkBench(args, kept) if args.case == "network" else Bench(args, kept)
    passes = measured(bench, kept)
    rows = _rows(bench, passes)
    columns = {
        name: "{" + name + "}" if name in ("policy", OVER) else "{" + name + ":.1f}"
        for name in rows[0]
    }
    title = f"{args.case}, {_named(args.clients)}, output tokens/s"
    return tell(args, Results(rows, verdicts_of(bench, passes), [table(title, rows, columns)]))


if __name__ == "__main__":
    raise SystemExit(main())
