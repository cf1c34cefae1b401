"""Spin's premise: where is it worth choosing a drafter for every request?

Four drafters, equally fast, and four domains, equally frequent. A drafter is a specialist in one
domain: there a draft token of it is accepted more often by `contrast` than elsewhere, and by 0.6 in
the mean over the domains, so that no drafter is better than another for a mixture. A drafter's step
takes `ratio` times what the target's takes for as many rows, and so does what it reads. The target
is `a100-llama2-7b`; the batch is always full. Drafters work inside the target's step, one after the
other and with lengths by `throughput`, or each on a device of its own, with drafts of four tokens:
`throughput` adds up the times of drafters that work at the same time, and refuses drafts that pay.

Compared are tokens per second with the better one of two that choose nothing, no drafter and one
for all (by symmetry any). `clairvoyant` knows the domains and is the better of two that give every
request a drafter by them: its specialist, or the one of two drafters. `adaptive` and `lbss` find
out; for `adaptive, words` the prompts' words say the domain, for the other two they say nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.core.policies.selection import SelectionPolicy
from penstock.core.registry import policies, register
from penstock.core.state import RequestState
from penstock.core.view import View
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.repro import Effort, Entry, Finding, Run, Verdict, check
from penstock.repro.output import pyplot, save_figure, write_table
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.domains import AcceptanceFit, DomainFit
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload

NAME = "choice_pays"

DRAFTERS = ("north", "east", "south", "west")
"""And the domains that they are made for."""
_MEAN = 0.6
_FIXED = 4
_OUTPUT = 96
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
WORTH_IT = 1.1
_NO_LOSS = 0.95

CHOOSERS = ("clairvoyant", "adaptive, words", "adaptive", "lbss")
_CONTROL = "at random"
"""Gives every request the drafter of a domain, but not of its own but for chance."""


class Panel(NamedTuple):
    """Where the drafters are, and how many requests are always live."""

    own_devices: bool
    batch: int

    @property
    def title(self) -> str:
        where = "a device each" if self.own_devices else "one device"
        return f"{where}, batch {self.batch}"


class Cell(NamedTuple):
    panel: Panel
    ratio: float
    contrast: float


@dataclass(frozen=True, slots=True)
class Grid:
    """What is tried; `warm` requests are served before `counted` ones are counted."""

    panels: tuple[Panel, ...]
    ratios: tuple[float, ...]
    contrasts: tuple[float, ...]
    warm: int
    counted: int

    @classmethod
    def of(cls, effort: Effort) -> Grid:
        inside = tuple(Panel(False, batch) for batch in (1, 8, 32))
        beside = tuple(Panel(True, batch) for batch in (8, 32))
        if effort.curve_arrivals >= 10_000:
            ratios = (0.02, 0.05, 0.1, 0.2, 0.5)
            return cls(inside + beside, ratios, (0.0, 0.1, 0.2, 0.4), 24, 40)
        if effort.curve_arrivals >= 1_000:
            return cls((*inside[:2], beside[0]), (0.05, 0.2), (0.0, 0.2, 0.4), 24, 32)
        return cls((Panel(False, 2), Panel(True, 2)), (0.05,), (0.4,), 2, 4)

    @property
    def cells(self) -> list[Cell]:
        every = itertools.product(self.panels, self.ratios, self.contrasts)
        return list(itertools.starmap(Cell, every))


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one cell: without drafters, with one for all, and by chooser."""

    none: float
    one: float
    chosen: Mapping[str, float]

    def gain(self, chooser: str) -> float:
        """Over the better one of two that choose nothing."""
        return self.chosen[chooser] / max(self.none, self.one)


Found = dict[Cell, Rates]


def run(job: Run) -> list[Verdict]:
    grid = Grid.of(job.effort)
    found: Found = {}
    for panel in grid.panels:
        plain = Player(Cell(panel, grid.ratios[0], 0.0), grid)
        none = plain.tokens_per_s(None)
        for ratio, contrast in itertools.product(grid.ratios, grid.contrasts):
            cell = Cell(panel, ratio, contrast)
            job.tell(f"{NAME}: {panel.title}, drafter {ratio:g} of a step, contrast {contrast:g}")
            found[cell] = measure(cell, grid, none)
    write_table(
        job.out / f"{NAME}.csv",
        ("own_devices", "batch", "ratio", "contrast", "none", "one", *CHOOSERS, _CONTROL),
        (
            (
                *(*cell.panel, cell.ratio, cell.contrast, r.none, r.one),
                *map(r.gain, (*CHOOSERS, _CONTROL)),
            )
            for cell, r in found.items()
        ),
    )
    _draw(job, grid, found)
    return verdicts(found)


def measure(cell: Cell, grid: Grid, none: float) -> Rates:
    """Everybody at one point of the map. Raises: PolicyError."""
    player = Player(cell, grid)
    one = player.tokens_per_s("single")
    k_max = {"k_max": _FIXED} if cell.panel.own_devices else {}
    # Drafters that work at the same time need not be few; of equal ones nothing need be known.
    numbers = (4,) if cell.panel.own_devices else (2, 4)
    knows = [player.specialists(n) for n in numbers] if cell.contrast else [max(none, one)]
    return Rates(
        none,
        one,
        {
            "clairvoyant": max(knows),
            "adaptive, words": player.tokens_per_s("adaptive", k_max, words=True),
            "adaptive": player.tokens_per_s("adaptive", k_max),
            "lbss": player.tokens_per_s("lbss"),
            _CONTROL: player.at_random(),
        },
    )


class Player:
    """Runs the same requests under different policies."""

    def __init__(self, cell: Cell, grid: Grid) -> None:
        self._cell = cell
        self._grid = grid
        total = grid.warm + grid.counted + cell.panel.batch
        rng = np.random.default_rng(0)
        rounds = [rng.permutation(len(DRAFTERS)) for _ in range(-(-total // len(DRAFTERS)))]
        self._domains = np.concatenate(rounds)[:total]
        self._tenants = np.array(DRAFTERS)[self._domains]
        self._prompts = np.exp(rng.normal(math.log(60), 0.8, total)).astype(np.int64).clip(8, 1024)

    def specialists(self, num: int) -> float:
        """Tokens per second if the first `num` drafters are used, each request's own if it is among
        them."""
        drafters = {str(i): DRAFTERS[d % num] for i, d in enumerate(self._domains)}
        with _known(drafters) as name:
            return self.tokens_per_s(name)

    def at_random(self) -> float:
        """Tokens per second if each request has a drafter that is drawn for it."""
        drawn = np.random.default_rng(1).integers(len(DRAFTERS), size=len(self._domains))
        with _known({str(i): DRAFTERS[d] for i, d in enumerate(drawn)}) as name:
            return self.tokens_per_s(name)

    def tokens_per_s(
        self, selection: str | None, options: dict[str, Any] | None = None, *, words: bool = False
    ) -> float:
        """Of the requests that are counted; `selection` None is without drafters. words: each
        request's prompt says of which domain it is. Raises: PolicyError."""
        panel, grid = self._cell.panel, self._grid
        fit = acceptances(self._cell.contrast)
        report = simulate(
            Setup(
                profile(self._cell.ratio),
                admission_options={"max_num_seqs": panel.batch},
                allocation="fixed" if panel.own_devices else "throughput",
                allocation_options={"k": _FIXED} if panel.own_devices else {},
                selection=selection or "single",
                selection_options=options or {},
                block_size=16,
                acceptance=DomainAcceptance(fit, 0, self._tenants.tolist()),
                drafters=DRAFTERS if selection else (),
                pipeline="async" if panel.own_devices and selection else "off",
            ),
            Workload(
                "closed loop",
                self._prompts,
                np.full(len(self._prompts), _OUTPUT, dtype=np.int64),
                np.zeros(len(self._prompts)),
                self._tenants if words else None,
            ),
        )
        return tokens_per_s(report, grid.warm, grid.counted)


def tokens_per_s(report: Report, warm: int, counted: int) -> float:
    """While the `counted` requests end that come after the first `warm`. Everybody's tokens in that
    time count, evenly spread over a request's decoding: those that began together end together."""
    ends = np.sort(report.finished_at)
    begin, end = ends[warm - 1], ends[warm + counted - 1]
    first, last = report.first_token_at, report.finished_at
    inside = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0.0, None)
    return float((report.num_tokens * inside / (last - first)).sum() / (end - begin))


@contextmanager
def _known(drafters: Mapping[str, str]) -> Iterator[str]:
    """The name of a policy that gives every request the drafter that it has here, by id."""

    class Known(SelectionPolicy):
        name: ClassVar[str] = "known"

        @dataclass(frozen=True, slots=True)
        class Options:
            """There are none."""

        def __init__(self, options: Options) -> None:
            pass

        def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
            return {s.request.id: drafters[s.request.id] for s in states}

    register("selection", Known)
    try:
        yield Known.name
    finally:
        del policies("selection")[Known.name]


def profile(ratio: float) -> StepProfile:
    """The target's, with drafters whose steps take `ratio` times as long."""
    target = load_profile("a100-llama2-7b")
    seconds = tuple(ratio * target.linear(n) for n in _BATCHES)
    reading = ratio * (target.linear(1024) - target.linear(512)) / 512
    drafters = tuple(DrafterProfile(name, _BATCHES, seconds, reading) for name in DRAFTERS)
    return replace(target, drafters=drafters)


def acceptances(contrast: float) -> AcceptanceFit:
    """Every drafter's acceptance is `contrast` higher in its own domain than in the others, and the
    same in the mean over all of them."""
    num = len(DRAFTERS)
    elsewhere = _logit(_MEAN - contrast / num)
    own = _logit(_MEAN + contrast * (num - 1) / num)
    alike = ((0.0,) * num,) * num
    return AcceptanceFit(
        drafters=DRAFTERS,
        domains={
            d: DomainFit(
                mean=tuple(own if n == d else elsewhere for n in DRAFTERS), covariance=alike
            )
            for d in DRAFTERS
        },
    )


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def verdicts(found: Found) -> list[Verdict]:
    """Where a choice gains a tenth, and who gains it; the control is a choice by chance."""
    worth = {c for c, r in found.items() if r.gain("clairvoyant") >= WORTH_IT}
    elsewhere = found.keys() - worth

    def pays(chooser: str) -> Finding:
        found_there = _reaching([r.gain(chooser) for r in found.values()], WORTH_IT)
        if chooser == _CONTROL:
            return found_there
        return Finding(f"{found_there.measured}; {_least_contrasts(found)}", found_there.parts)

    def gains(chooser: str) -> Finding:
        return _reaching([found[c].gain(chooser) for c in worth], WORTH_IT)

    def loses_little(chooser: str) -> Finding:
        return _reaching([found[c].gain(chooser) for c in elsewhere], _NO_LOSS)

    control = "drafters at random"
    claims = [
        check(
            f"a clairvoyant choice gains {WORTH_IT:g}× over the best single drafter or none",
            pays,
            "clairvoyant",
            control,
            _CONTROL,
        )
    ]
    for chooser in CHOOSERS[1:]:
        gained = f"{chooser} gains {WORTH_IT:g}× where clairvoyance does"
        lost = f"{chooser} loses at most {1 - _NO_LOSS:.0%} elsewhere"
        claims.append(check(gained, gains, chooser, control, _CONTROL))
        claims.append(check(lost, loses_little, chooser, control, _CONTROL))
    return claims


def _reaching(gains: Sequence[float], bar: float) -> Finding:
    reached = [gain >= bar for gain in gains]
    span = f", {min(gains):.2f}× to {max(gains):.2f}×" if gains else ""
    return Finding(
        f"in {sum(reached)} of {len(gains)} cells{span}", tuple(reached) if reached else (False,)
    )


def _least_contrasts(found: Found) -> str:
    """By panel: the smallest contrast that pays, for every ratio."""
    parts = []
    for panel in dict.fromkeys(c.panel for c in found):
        least = []
        for ratio in dict.fromkeys(c.ratio for c in found):
            pays = [
                c.contrast
                for c, r in found.items()
                if c.panel == panel and c.ratio == ratio and r.gain("clairvoyant") >= WORTH_IT
            ]
            least.append(f"{min(pays):g} at {ratio:g}" if pays else f"never at {ratio:g}")
        parts.append(f"{panel.title}: contrast {', '.join(least)}")
    return "; ".join(parts)


def _draw(job: Run, grid: Grid, found: Found) -> None:
    rows, columns = len(CHOOSERS), len(grid.panels)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(2.6 * columns + 1, 9), layout="constrained", squeeze=False
    )
    for (row, chooser), (column, panel) in itertools.product(
        enumerate(CHOOSERS), enumerate(grid.panels)
    ):
        gains = np.array(
            [[found[Cell(panel, r, c)].gain(chooser) for c in grid.contrasts] for r in grid.ratios]
        )
        axis = axes[row, column]
        image = axis.imshow(gains, vmin=0.5, vmax=1.5, cmap="RdBu", aspect="auto", origin="lower")
        for (y, x), gain in np.ndenumerate(gains):
            color = "white" if abs(gain - 1) > 0.35 else "black"
            axis.text(
                x, y, f"{gain:.2f}", ha="center", va="center", fontsize="x-small", color=color
            )
        axis.set_xticks(range(len(grid.contrasts)), [f"{c:g}" for c in grid.contrasts])
        axis.set_yticks(range(len(grid.ratios)), [f"{r:g}" for r in grid.ratios])
        axis.set_title(f"{chooser}: {panel.title}", fontsize="x-small")
    figure.supxlabel("contrast of acceptance")
    figure.supylabel("drafter's step over the target's")
    figure.colorbar(image, ax=axes, label="tokens/s over the best single drafter or none")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Where choosing a drafter for every request pays", run)
