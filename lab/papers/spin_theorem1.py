"""Spin, theorem 1: regret and switching cost over time, against log T.

Eight requests of all texts that never end, Spin's five drafters on a device each, four draft tokens
in a slot (`lab.common.slots`, `lab.common.families`). Counted in slots of each request's best
drafter is what is lost by worse drafters (eq. 6) and by reading the text after a switch.

T doubles from horizon to horizon. A regret of log T grows by as much each time, one of T by twice
as much: claimed is an exponent of 0, and one below a half is nearer to that than to 1. The paper
says not how many slots of an epoch explore (α): 6 to 240 here. LBSS runs as printed, and for its
regret with additions, too (`SPIN`). The control is a drafter drawn at random in every slot. The
oracle is the same policy with the same α, which knows goodput; where switching counts, it keeps the
best drafter from the first slot on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import (
    AS_PRINTED,
    SPIN,
    SPIN_DRAFTERS,
    SPIN_TEXTS,
    prompt_lengths,
    spin_acceptances,
    spin_profile,
)
from lab.common.report import Plot, draw, write_table
from lab.common.slots import Regret, Slots
from lab.common.statistics import SEEDS, FloatArray, Interval, interval, ratio
from lab.rivals import policy_named
from penstock.core.policies.base import SelectionPolicy
from penstock.core.policies.selection.papers.lbss import Lbss
from penstock.sim.acceptance import DomainAcceptance

NAME = "spin_theorem1"

_REQUESTS = 8
_DRAFT_TOKENS = 4
_FIRST = 4
"""Horizons are powers of two from 2^4 on."""
_DOUBLINGS = {10_000: 10, 1_000: 9, 0: 5}
"""By the effort."""
_SHORT = 2
"""Number of the horizon at which requests of some hundred tokens end: 64 slots."""
_NOTHING = 1e-3
"""Slots or switches: less than that was not lost."""


def knowing(name: str) -> str:
    """The oracle of a policy."""
    return f"{name}, goodput known"


class Knowing(Lbss):
    """With true goodput, by request and drafter, in place of estimates."""

    goodput: Mapping[str, Mapping[str | None, float]]

    def __init__(self, options: Lbss.Options) -> None:
        super().__init__(options)
        self._observed.estimate = lambda request_id, model: self.goodput[request_id][model]  # type: ignore[method-assign]


def _lbss(spin: str, kind: type[Lbss] = Lbss, **options: object) -> Callable[[int], Lbss]:
    given: dict[str, Any] = {**SPIN[spin].options, **options}
    return lambda seed: kind(Lbss.Options(seed=seed, **given))


_ALPHAS = (6, 24, 60, 240)
LBSS = {(spin, alpha): f"{spin}, α = {alpha}" for spin in SPIN for alpha in _ALPHAS}
PRINTED = LBSS[AS_PRINTED, _ALPHAS[0]]
SLOW, SINGLE = f"{AS_PRINTED}, no fast switch", f"{AS_PRINTED}, chunks of 1"
RANDOM = "at random"
POLICIES: Mapping[str, Callable[[int], SelectionPolicy]] = {
    **{name: _lbss(spin, alpha=alpha) for (spin, alpha), name in LBSS.items()},
    **{knowing(n): _lbss(spin, Knowing, alpha=alpha) for (spin, alpha), n in LBSS.items()},
    SLOW: _lbss(AS_PRINTED, fast_switch=False),
    SINGLE: _lbss(AS_PRINTED, beta=1, fast_switch=False),
    RANDOM: lambda seed: policy_named("epsilon_greedy", explore=1.0, seed=seed).make("selection"),
}


@dataclass(frozen=True)
class Losses:
    """By policy, [seeds, horizons] each; see `Regret`."""

    horizons: list[int]
    goodput: dict[str, FloatArray]
    reading: dict[str, FloatArray]
    if_constant: dict[str, FloatArray]
    switches: dict[str, FloatArray]
    best: dict[str, FloatArray]

    @property
    def total(self) -> dict[str, FloatArray]:
        """Eq. 6."""
        return {name: lost + self.reading[name] for name, lost in self.goodput.items()}


def run(job: Trial) -> list[ClaimVerdict]:
    doublings = next(n for least, n in _DOUBLINGS.items() if job.effort.curve_arrivals >= least)
    horizons = [2 ** (_FIRST + k) for k in range(doublings + 1)]
    seeds = SEEDS[: job.effort.repetitions]
    cells = [(name,) for name in POLICIES]
    played = job.by_cell(regret, cells, seeds, horizons, what=lambda name, *_: f"{NAME}: {name}")
    regrets = {name: found for (name,), found in played.items()}
    fields = Regret.__dataclass_fields__
    found = Losses(
        horizons,
        **{
            f: {n: np.array([getattr(r, f) for r in rs]) for n, rs in regrets.items()}
            for f in fields
        },
    )
    write_table(
        job.out / f"{NAME}.csv",
        (
            "policy",
            "seed",
            "slots",
            *(f"{field}_slots" if field in _LOST else field for field in fields),
        ),
        (
            (name, seed, t, *(float(getattr(found, field)[name][seed, k]) for field in fields))
            for name in POLICIES
            for seed in seeds
            for k, t in enumerate(horizons)
        ),
    )
    _draw(job, found)
    return verdicts(found)


_LOST = ("goodput", "reading", "if_constant")


def regret(policy: str, horizons: list[int], seed: int) -> Regret:
    """Of one policy, with requests of a seed."""
    drawn = DomainAcceptance(spin_acceptances(tuple(SPIN_TEXTS)), seed)
    rates = [[drawn.rates(str(i))[name] for name in SPIN_DRAFTERS] for i in range(_REQUESTS)]
    made = POLICIES[policy](seed)
    slots = Slots(
        made,
        spin_profile("7B"),
        np.array(rates),
        prompt_lengths(np.random.default_rng(seed), _REQUESTS),
        _DRAFT_TOKENS,
        seed,
    )
    if isinstance(made, Knowing):
        made.goodput = {str(i): own for i, own in enumerate(slots.goodput)}
    timed = isinstance(made, Lbss) and "modelled_time" not in made.options.corrections
    return slots.play(horizons, is_timed=timed)


def verdicts(found: Losses) -> list[ClaimVerdict]:
    def grows(claim: str, lost: Mapping[str, FloatArray], policy: str = PRINTED) -> ClaimVerdict:
        random, best = (lost[RANDOM], found), (lost[knowing(policy)], found)
        oracle = "goodput known", best
        claim = f"{policy}: {claim} O(log T)"
        return check(claim, like_log, (lost[policy], found), "drafters at random", random, oracle)

    reading, switches = found.reading, found.switches
    none = np.zeros_like(switches[SINGLE])
    return [
        *(grows("total regret is", found.total, policy) for policy in LBSS.values()),
        *(grows("goodput regret is", found.goodput, LBSS[spin, _ALPHAS[0]]) for spin in SPIN),
        grows("the number of switches is", found.switches),
        check(
            f"{AS_PRINTED} uses the best drafter more and more often",
            more_often,
            (found.best[PRINTED], found),
            "drafters at random",
            (found.best[RANDOM], found),
            ("goodput known", (found.best[knowing(PRINTED)], found)),
        ),
        check(
            f"{AS_PRINTED}: chunks of two slots reduce switching",
            less,
            (switches[SLOW], switches[SINGLE]),
            "chunks of one against themselves, with other seeds",
            (np.roll(switches[SINGLE], 1, axis=0), switches[SINGLE]),
            ("one drafter for ever", (none, switches[SINGLE])),
        ),
        check(
            f"{AS_PRINTED}: fast switching reduces its cost (section IV-C)",
            less,
            (reading[PRINTED], reading[SLOW]),
            "without it, against itself with other seeds",
            (np.roll(reading[SLOW], 1, axis=0), reading[SLOW]),
            ("one drafter for ever", (none, reading[SLOW])),
        ),
    ]


def exponent(lost: FloatArray) -> Interval:
    """0 for log T, 1 for T: from what the last two doublings added, over what the two before did.
    lost: [seeds, horizons]."""
    growth = np.maximum(lost[:, [-1, -3]] - lost[:, [-3, -5]], _NOTHING)
    return interval(np.log(growth[:, 0] / growth[:, 1]) / np.log(4))


def like_log(given: tuple[FloatArray, Losses]) -> Measurement:
    """Nearer to log T than to T, with certainty."""
    lost, found = given
    power = exponent(lost)
    ends = lost.mean(axis=0)
    return Measurement(
        f"{ends[-1]:.3g} in {found.horizons[-1]:,} slots, T^{power}",
        (power.high < 0.5,),
    )


def more_often(given: tuple[FloatArray, Losses]) -> Measurement:
    """In the second half of the slots, and in the first ones."""
    best, found = given
    first, last = interval(best[:, 0]), interval(best[:, -1])
    gain = interval(best[:, -1] - best[:, 0])
    return Measurement(
        f"in {first.mean:.0%} of the first {found.horizons[0]} slots, in {last.mean:.0%} of the "
        f"second {found.horizons[-1] // 2:,}",
        (gain.low > 0,),
    )


def less(given: tuple[FloatArray, FloatArray]) -> Measurement:
    """Where requests end, and at the last horizon."""
    parts, told = [], []
    for when, k in ((f"after {2 ** (_FIRST + _SHORT)} slots", _SHORT), ("at the end", -1)):
        found = ratio(*(np.maximum(lost[:, k], _NOTHING) for lost in given))
        parts.append(found.high < 1)
        told.append(f"{found} times {when}")
    return Measurement(", ".join(told), tuple(parts))


def _draw(job: Trial, found: Losses) -> None:
    slots = found.horizons

    def lines(lost: Mapping[str, FloatArray], names: Sequence[str]) -> dict[str, Any]:
        return {name: (slots, lost[name].mean(axis=0)) for name in names}

    def bands(lost: Mapping[str, FloatArray], names: Sequence[str]) -> dict[str, Any]:
        return {name: (lost[name].min(axis=0), lost[name].max(axis=0)) for name in names}

    start = float(found.total[PRINTED][:, 0].mean())
    laws = {
        "like T": (slots, [start * t / slots[0] for t in slots]),
        "like log T": (slots, [start * np.log(t) / np.log(slots[0]) for t in slots]),
    }
    axes = {"xlabel": "slots T", "xscale": "log", "yscale": "log"}

    def regret_of(spin: str) -> Plot:
        names = {f"α = {alpha}": name for (own, alpha), name in LBSS.items() if own == spin}
        lost = {label: found.total[name] for label, name in (names | {RANDOM: RANDOM}).items()}
        return Plot(
            lines(lost, list(lost)) | laws,
            {**axes, "title": f"{spin}: regret", "ylabel": "slots lost a request"},
            "o-",
            {"like T": "k:", "like log T": "k--"},
            bands(lost, list(lost)),
        )

    switching = (PRINTED, SLOW, SINGLE, RANDOM)
    reading = Plot(
        lines(found.reading, switching),
        {**axes, "title": "by reading after switches", "ylabel": "slots lost a request"},
        "o-",
        {},
        bands(found.reading, switching),
    )
    switches = Plot(
        lines(found.switches, switching),
        {**axes, "title": "switches", "ylabel": "switches of a request"},
        "o-",
        {},
        bands(found.switches, switching),
    )
    title = "LBSS over time (Spin, theorem 1); bands: all seeds"
    draw(job.out / f"{NAME}.png", title, [[*map(regret_of, SPIN)], [reading, switches]])


EXPERIMENT = Experiment(NAME, "Theorem 1: regret and switching cost against log T", run)
