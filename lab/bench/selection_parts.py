"""What does each part of the default selection gain where there are drafters to choose from?

    python -m lab.bench.selection_parts [--json] [--seeds N] [--only TEXT] [--data DIR] [--out FILE]

Closed loops with several drafters (`lab.bench.several_drafters`) under `auto` as it is and without
each of its parts: replays, and the words of prompts; or the first requests begin with every drafter
in turn in their place. Tokens per second of the second half and of the first quarter of the time,
over `auto` with all parts, paired by seed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lab.bench.several_drafters import with_choice
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import SEEDS, Interval, ratio
from penstock.core.policies.base import View
from penstock.core.policies.bundles import AUTO
from penstock.core.policies.selection import auto
from penstock.core.state import RequestState
from penstock.sim.parallel import Workers, workers
from penstock.sim.workloads import WorkloadError

_SYSTEM = f"vllm_v1, priced, {AUTO}"
_TURNS = 2
"""First requests of each drafter, where they begin with all in turn."""

_TITLE = "Second half: tokens/s over `auto` with all parts; bold: not 1 with 95% confidence"

# --- parts ----------------------------------------------------------------------------------------

_select = auto.Auto.select


def _in_turn(self: Any, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
    new = [s.request.id for s in states if s.request.id not in self._known]
    chosen, names = _select(self, states, view), list(view.drafters)
    for request_id in new:
        number = self.__dict__.setdefault("_num_begun", 0)
        if number < _TURNS * len(names) and request_id in self._known:
            chosen[request_id] = names[number % len(names)]
            self._num_begun = number + 1
    return chosen


def _nothing(*_: object) -> None:
    return None


_WITHOUT: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "replays": [(auto.Auto, "_propose", _nothing)],
    "words": [(auto, "_words_of", lambda _: np.empty(0, dtype=np.int64))],
}
_ALL = [patch for patches in _WITHOUT.values() for patch in patches]
VARIANTS: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    AUTO: [],
    **{f"without {part}": patches for part, patches in _WITHOUT.items()},
    "without both": _ALL,
    "turns for replays": [*_WITHOUT["replays"], (auto.Auto, "select", _in_turn)],
    "turns for both": [*_ALL, (auto.Auto, "select", _in_turn)],
}
_OF_SERVERS = (AUTO, "without words", "turns for both")
"""Draft servers replay nothing."""


@contextmanager
def variant(name: str) -> Iterator[None]:
    """The default selection without some of its parts."""
    with ExitStack() as stack:
        for where, attribute, value in VARIANTS[name]:
            stack.enter_context(patch.object(where, attribute, value))
        yield


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A scene with so many clients."""

    scene: str
    batch: int
    data: Path

    @property
    def name(self) -> str:
        return f"{self.scene}, batch {self.batch}"

    @property
    def systems(self) -> Sequence[str]:
        return _OF_SERVERS if self.scene == "servers" else tuple(VARIANTS)

    def measure(self, system: str, seed: int) -> Figures:
        # The records name no domains.
        has_words = not self.scene.startswith("recorded")
        with variant(system):
            return with_choice(self.scene, self.data, self.batch, has_words, _SYSTEM, seed)


def cells(data: Path) -> list[Cell]:
    """The grid."""
    large = ("family a100-llama2-7b", "family zoo-grown", "spin 7B")
    small = ("specialists 0.05 0.4", "recorded sharegpt")
    axes = [*itertools.product(large, (1, 8, 32)), *itertools.product(small, (1, 8))]
    return [Cell(*axis, data) for axis in [*axes, ("servers", 1), ("servers", 8)]]


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """Every variant over `auto`, by cell."""
    wanted: dict[str, Callable[[], Figures]] = {
        f"{cell.name}/{system}/{seed}": partial(cell.measure, system, seed)
        for seed in seeds
        for cell in grid
        for system in cell.systems
    }
    done.measure_all(wanted, workers)
    over: dict[str, dict[str, dict[str, Interval]]] = {"value": {}, "early": {}}
    for figure, by_cell in over.items():
        for cell in grid:
            rates = {s: done.values(f"{cell.name}/{s}", figure) for s in cell.systems}
            by_cell[cell.name] = {s: ratio(r, rates[AUTO]) for s, r in rates.items() if s != AUTO}
    names = [name for name in VARIANTS if name != AUTO]
    rows = [
        {"cell": cell, **dict.fromkeys(names, ""), **{s: _told(x) for s, x in found.items()}}
        for cell, found in over["value"].items()
    ]
    means = {"cell": "geometric mean", **{n: f"{_mean(over['value'], n):.3f}" for n in names}}
    columns = {"cell": "{cell}"} | {n: f"{{{n}}}" for n in names}
    shown = table(_TITLE, [*rows, means], columns)
    runs = {
        f: {c: {s: x.mean for s, x in r.items()} for c, r in o.items()} for f, o in over.items()
    }
    return Results(runs, [_verdict(name, over) for name in names], [shown])


def _told(found: Interval) -> str:
    """In bold where the interval has 1 outside."""
    return f"{found.mean:.3f}" if found.low <= 1 <= found.high else f"**{found.mean:.3f}**"


def _mean(by_cell: Mapping[str, Mapping[str, Interval]], name: str) -> float:
    found = [np.log(over[name].mean) for over in by_cell.values() if name in over]
    return float(np.exp(np.mean(found))) if found else float("nan")


def _verdict(name: str, over: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> ClaimVerdict:
    """What the part gains, in how many cells for sure, and where it loses."""
    late, early = (_mean(by_cell, name) for by_cell in over.values())
    found = [x[name] for by_cell in over.values() for x in by_cell.values() if name in x]
    worse, better = (sum(x.high < 1 for x in found), sum(x.low > 1 for x in found))
    told = f"{late:.3f}, at first {early:.3f}; worse for sure in {worse} of {len(found)}"
    return bar(name, f"{told}, better for sure in {better}", None)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--seeds", type=int, default=len(SEEDS))
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("selection_parts.jsonl"))
    options.add_argument("--workers", type=int, help="processes; default: one for each core")
    args = options.parse_args(arguments)
    grid = [cell for cell in cells(args.data) if args.only in cell.name]
    try:
        with workers(args.workers) as some:
            return tell(args, compare(grid, SEEDS[: args.seeds], Cells(args.out), some))
    except (WorkloadError, OSError) as error:
        print(f"selection_parts: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
