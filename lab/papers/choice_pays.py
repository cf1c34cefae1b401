"""Spin's premise: where is it worth choosing a drafter for every request?

Four specialists for four equally frequent domains (`lab.common.families`): no drafter is better
than another for a mixture. The batch is always full. Drafters work inside the target's step, with
lengths by `priced`, or each on a device of its own, with drafts of four tokens.

Compared with the better of no drafter and one for all: `clairvoyant`, which knows the domains and
is the better of the specialists and of two drafters by domain; `auto` and both Spins, which find
out; for `auto, words` the prompts' words say the domain. The oracle is the best of all at each
spot, one drafter and none included; for the premise, where drafters differ most.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Effort, Experiment, Trial
from lab.common.families import (
    SPECIALISTS,
    SPIN,
    always_live,
    closed_loop,
    prompt_lengths,
    specialists_acceptances,
    specialists_profile,
)
from lab.common.oracles import assigned
from lab.common.report import Plot, draw, write_table
from penstock.config import PolicyConfig
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.run import Report
from penstock.sim.run import run as simulate

NAME = "choice_pays"

_FIXED = 4
_OUTPUT = 96
WORTH_IT = 1.1
_NO_LOSS = 0.95

CHOOSERS = ("clairvoyant", "auto, words", "auto", *SPIN)
_BEST = "the best of all in hindsight"
_CONTROL = "at random"
"""Gives every request the drafter of a domain, but not of its own but for chance."""


class Machine(NamedTuple):
    """Where the drafters are, and how many requests are always live."""

    own_devices: bool
    batch: int

    @property
    def title(self) -> str:
        where = "a device each" if self.own_devices else "one device"
        return f"{where}, batch {self.batch}"


class Spot(NamedTuple):
    """A point of the map."""

    machine: Machine
    ratio: float
    contrast: float


@dataclass(frozen=True, slots=True)
class MapGrid:
    """What is tried; `warm` requests are served before `counted` ones are counted."""

    machines: tuple[Machine, ...]
    ratios: tuple[float, ...]
    contrasts: tuple[float, ...]
    warm: int
    counted: int

    @classmethod
    def from_effort(cls, effort: Effort) -> MapGrid:
        inside = tuple(Machine(False, batch) for batch in (1, 8, 32))
        beside = tuple(Machine(True, batch) for batch in (8, 32))
        if effort.curve_arrivals >= 10_000:
            ratios = (0.02, 0.05, 0.1, 0.2, 0.5)
            return cls(inside + beside, ratios, (0.0, 0.1, 0.2, 0.4), 24, 40)
        if effort.curve_arrivals >= 1_000:
            return cls((*inside[:2], beside[0]), (0.05, 0.2), (0.0, 0.2, 0.4), 24, 32)
        return cls((Machine(False, 2), Machine(True, 2)), (0.05,), (0.4,), 2, 4)

    @property
    def spots(self) -> list[Spot]:
        return list(itertools.starmap(Spot, itertools.product(*self._axes)))

    @property
    def _axes(self) -> tuple[tuple[Machine, ...], tuple[float, ...], tuple[float, ...]]:
        return self.machines, self.ratios, self.contrasts


@dataclass(frozen=True, slots=True)
class Gains:
    """Tokens per second at one spot: without drafters, with one for all, and by chooser."""

    none: float
    one: float
    chosen: Mapping[str, float]

    def over(self, chooser: str) -> float:
        """Over the better one of two that choose nothing."""
        return self.chosen[chooser] / max(self.none, self.one)


Map = dict[Spot, Gains]


def run(job: Trial) -> list[ClaimVerdict]:
    grid = MapGrid.from_effort(job.effort)
    without = {m: Requests(Spot(m, grid.ratios[0], 0.0), grid) for m in grid.machines}
    none = {m: requests.tokens_per_s(None) for m, requests in without.items()}

    def what(spot: Spot, *_: object) -> str:
        machine, ratio, contrast = spot
        return f"{NAME}: {machine.title}, drafter {ratio:g} of a step, contrast {contrast:g}"

    gains = job.each(measure, ((spot, grid, none[spot.machine]) for spot in grid.spots), what)
    found: Map = dict(zip(grid.spots, gains, strict=True))
    everybody = (*CHOOSERS, _CONTROL)
    write_table(
        job.out / f"{NAME}.csv",
        ("own_devices", "batch", "ratio", "contrast", "none", "one", *everybody),
        ((*s.machine, *s[1:], g.none, g.one, *map(g.over, everybody)) for s, g in found.items()),
    )
    _draw(job, grid, found)
    return verdicts(found)


def measure(spot: Spot, grid: MapGrid, none: float) -> Gains:
    """Everybody at one point of the map. Raises: PolicyError."""
    requests = Requests(spot, grid)
    one = requests.tokens_per_s("single")
    own_devices = spot.machine.own_devices
    k_max = {"k_max": _FIXED} if own_devices else {}
    # Drafters that work at the same time need not be few; of equal ones nothing need be known.
    numbers = (4,) if own_devices else (2, 4)
    knows = [requests.specialists(n) for n in numbers] if spot.contrast else [max(none, one)]
    return Gains(
        none,
        one,
        {
            "clairvoyant": max(knows),
            "auto, words": requests.tokens_per_s("auto", k_max, words=True),
            "auto": requests.tokens_per_s("auto", k_max),
            **{n: requests.tokens_per_s(c.name, dict(c.options)) for n, c in SPIN.items()},
            _CONTROL: requests.at_random(),
        },
    )


class Requests:
    """The same requests under different policies."""

    def __init__(self, spot: Spot, grid: MapGrid) -> None:
        self._spot = spot
        self._grid = grid
        total = grid.warm + grid.counted + spot.machine.batch
        rng = np.random.default_rng(0)
        rounds = [rng.permutation(len(SPECIALISTS)) for _ in range(-(-total // len(SPECIALISTS)))]
        self._domains = np.concatenate(rounds)[:total]
        self._tenants = np.array(SPECIALISTS)[self._domains]
        self._prompts = prompt_lengths(rng, total)

    def specialists(self, num: int) -> float:
        """Tokens per second if the first `num` drafters are used, each request's own if it is among
        them."""
        return self._assigned(self._domains % num)

    def at_random(self) -> float:
        """Tokens per second if each request has a drafter that is drawn for it."""
        rng = np.random.default_rng(1)
        return self._assigned(rng.integers(len(SPECIALISTS), size=len(self._domains)))

    def _assigned(self, numbers: Any) -> float:
        with assigned({str(i): SPECIALISTS[n] for i, n in enumerate(numbers)}) as name:
            return self.tokens_per_s(name)

    def tokens_per_s(
        self, selection: str | None, options: dict[str, Any] | None = None, *, words: bool = False
    ) -> float:
        """Of the requests that are counted; `selection` None is without drafters. words: each
        request's prompt says of which domain it is. Raises: PolicyError."""
        machine, ratio, contrast = self._spot
        fit = specialists_acceptances(contrast)
        setup = always_live(
            specialists_profile(ratio),
            DomainAcceptance(fit, 0, self._tenants.tolist()),
            SPECIALISTS if selection else (),
            machine.batch,
            PolicyConfig.from_name(selection or "single", **(options or {})),
            draft_tokens=_FIXED if machine.own_devices else None,
            beside=machine.own_devices,
        )
        load = closed_loop(self._prompts, _OUTPUT, self._tenants if words else None)
        return tokens_per_s(simulate(setup, load), self._grid.warm, self._grid.counted)


def tokens_per_s(report: Report, warm: int, counted: int) -> float:
    """While the `counted` requests end that come after the first `warm`. Everybody's tokens in that
    time count, evenly spread over a request's decoding: those that began together end together."""
    ends = np.sort(report.finished_at)
    begin, end = ends[warm - 1], ends[warm + counted - 1]
    first, last = report.first_token_at, report.finished_at
    inside = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0.0, None)
    return float((report.num_tokens * inside / (last - first)).sum() / (end - begin))


def verdicts(found: Map) -> list[ClaimVerdict]:
    """Where a choice gains a tenth, and who gains it; the control is a choice by chance."""
    worth = {s for s, g in found.items() if g.over("clairvoyant") >= WORTH_IT}
    elsewhere = found.keys() - worth

    def over(spot: Spot, chooser: str) -> float:
        gains = found[spot]
        return max(1.0, *map(gains.over, CHOOSERS)) if chooser == _BEST else gains.over(chooser)

    def pays(chooser: str) -> Measurement:
        most = max(s.contrast for s in found)
        where = [s for s in found if chooser != _BEST or s.contrast == most]
        there = _reaching([over(s, chooser) for s in where], WORTH_IT)
        if chooser != "clairvoyant":
            return there
        return Measurement(f"{there.measured}; {_least_contrasts(found)}", there.parts)

    def gains(chooser: str) -> Measurement:
        return _reaching([over(s, chooser) for s in worth], WORTH_IT)

    def loses_little(chooser: str) -> Measurement:
        return _reaching([over(s, chooser) for s in elsewhere], _NO_LOSS)

    tests = [
        (
            f"an ideal choice gains {WORTH_IT:g}× over the best single drafter or none",
            pays,
            "clairvoyant",
        )
    ]
    for chooser in CHOOSERS[1:]:
        gained = f"{chooser} gains {WORTH_IT:g}× where an ideal choice does"
        lost = f"{chooser} loses at most {1 - _NO_LOSS:.0%} elsewhere"
        tests += [(gained, gains, chooser), (lost, loses_little, chooser)]
    return [check(*test, "drafters at random", _CONTROL, (_BEST, _BEST)) for test in tests]


def _reaching(gains: Sequence[float], least: float) -> Measurement:
    reached = [gain >= least for gain in gains]
    span = f", {min(gains):.2f}× to {max(gains):.2f}×" if gains else ""
    return Measurement(
        f"in {sum(reached)} of {len(gains)} settings{span}", tuple(reached) if reached else (False,)
    )


def _least_contrasts(found: Map) -> str:
    """By machine: the smallest contrast that pays, for every ratio."""
    parts = []
    for machine in dict.fromkeys(s.machine for s in found):
        least = []
        for ratio in dict.fromkeys(s.ratio for s in found):
            pays = [
                s.contrast
                for s, g in found.items()
                if s[:2] == (machine, ratio) and g.over("clairvoyant") >= WORTH_IT
            ]
            least.append(f"{min(pays):g} at {ratio:g}" if pays else f"never at {ratio:g}")
        parts.append(f"{machine.title}: contrast {', '.join(least)}")
    return "; ".join(parts)


def _draw(job: Trial, grid: MapGrid, found: Map) -> None:
    def gains(chooser: str, machine: Machine, ratio: float) -> list[float]:
        return [found[Spot(machine, ratio, c)].over(chooser) for c in grid.contrasts]

    plots = []
    for chooser, machine in itertools.product(CHOOSERS, grid.machines):
        lines = {
            f"a drafter's step {r:g} of the target's": (grid.contrasts, gains(chooser, machine, r))
            for r in grid.ratios
        }
        axes = {"title": f"{chooser}: {machine.title}", "xlabel": "contrast", "ylabel": "gain"}
        plots.append(Plot(lines, {**axes, "ylim": (0.5, None)}, "o-"))
    num = len(grid.machines)
    title = "Tokens/s over the best single drafter or none"
    draw(job.out / f"{NAME}.png", title, [plots[i : i + num] for i in range(0, len(plots), num)])


EXPERIMENT = Experiment(NAME, "Where choosing a drafter for every request pays", run)
