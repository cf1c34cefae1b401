"""WAIT paper, figures 4 to 6: the memory bound of eq. 12 against the number of segments.

The paper gives no times of a step. Its bound takes the logarithm of T + 1, iterations, and appendix
C has arrivals by time step; so a rate is read as requests an iteration and T as iterations: an
iteration that takes one unit of time whatever is in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.nested import NestedThresholds, nested_thresholds, segments_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, TrafficType
from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Experiment, Trial
from penstock.lab.report import Plot, draw, write_table

NAME = "wait_fig4_6"

UNIT_STEP = StepProfile("an iteration a unit", 1, (0,), (1.0,))
_NUM_TYPES = 500
_PROMPT_LEN = 62
_SCALE = 210.0
_SEGMENTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 35, 50, 75, 100, 150, 200, 300, 400, 500)
_UNLIMITED = 10**15
_PRACTICAL = 10
_FIRST_SHARE = 0.5
_MARGINAL = 0.1
_GRAIN = 0.01


@dataclass(frozen=True)
class BoundCase:
    """One case: total rate in requests an iteration, T in iterations, δ."""

    figure: int
    rate: float
    horizon: int
    delta: float

    @property
    def label(self) -> str:
        return f"figure {self.figure}: rate {self.rate:g}, T {self.horizon}, δ {self.delta:g}"


CASES = (
    BoundCase(4, 50, 200, 0.1),
    BoundCase(4, 50, 200, 1e-5),
    BoundCase(5, 500, 200, 0.1),
    BoundCase(5, 500, 200, 1e-5),
    BoundCase(6, 50, 20, 1e-3),
    BoundCase(6, 50, 2000, 1e-3),
)


def run(job: Trial) -> list[ClaimVerdict]:
    curves: Curves = {}
    for case in CASES:
        job.tell(f"{NAME}: {case.label}")
        curves[case] = bounds(case, _SEGMENTS)
    write_table(
        job.out / f"{NAME}.csv",
        ("figure", "rate", "horizon", "delta", "segments", "batch", "queue", "tail", "total"),
        (
            (p.figure, p.rate, p.horizon, p.delta, len(b.thresholds), *terms(b), b.kv_bound_tokens)
            for p, curve in curves.items()
            for b in curve
        ),
    )
    _draw(job, curves)
    return [*verdicts(curves), _seconds_verdict()]


def traffic_of(rate: float, num_types: int = _NUM_TYPES) -> Traffic:
    """Decode lengths 1 to m with weights e^(−l'/210), prompts of 62 tokens: figure 3's types."""
    weights = [math.exp(-length / _SCALE) for length in range(1, num_types + 1)]
    total = sum(weights)
    return tuple(
        TrafficType(rate * weight / total, _PROMPT_LEN, length)
        for length, weight in enumerate(weights, start=1)
    )


def bounds(case: BoundCase, segments: tuple[int, ...]) -> list[NestedThresholds]:
    """The bound of the thresholds that make it smallest, for each number of segments."""
    traffic = traffic_of(case.rate)
    return [
        nested_thresholds(
            UNIT_STEP, segments_of(traffic, count), _UNLIMITED, case.delta, case.horizon
        )
        for count in segments
    ]


def terms(bound: NestedThresholds) -> tuple[float, float, float]:
    """Peak batch, queues and their tails, in KV tokens."""
    return bound.batch_kv_tokens, bound.queue_kv_tokens, bound.tail_kv_tokens


Curves = dict[BoundCase, list[NestedThresholds]]
"""By rising number of segments."""


def verdicts(curves: Curves) -> list[ClaimVerdict]:
    """What the curves say about the paper's claims."""
    least = {p: min(b.kv_bound_tokens for b in c) for p, c in curves.items()}
    fluid = {p: equilibrium(UNIT_STEP, traffic_of(p.rate)).kv_tokens for p in curves}
    chosen = {
        "best": {p: min(c, key=lambda b: b.kv_bound_tokens) for p, c in curves.items()},
        "one": {p: c[0] for p, c in curves.items()},
        "ten": {
            p: next((b for b in c if len(b.thresholds) >= _PRACTICAL), c[-1])
            for p, c in curves.items()
        },
    }

    def beyond(what: str, limit: dict[BoundCase, float]) -> Callable[[str], Measurement]:
        return lambda which: _excess(
            what, [b.kv_bound_tokens / limit[p] - 1 for p, b in chosen[which].items()]
        )

    return [
        *_shape(curves, chosen["best"]),
        check(
            f"only marginally more than the fluid's M* (at most {_MARGINAL:.0%} at the best L)",
            beyond("the bound exceeds it by", fluid),
            "best",
            "one segment",
            "one",
        ),
        check(
            f"L = {_PRACTICAL} is sufficient (within {_MARGINAL:.0%} of the best L)",
            beyond("its bound is higher by", least),
            "ten",
            "one segment",
            "one",
        ),
    ]


def _shape(curves: Curves, best: dict[BoundCase, NestedThresholds]) -> list[ClaimVerdict]:
    totals = {p: [b.kv_bound_tokens for b in c] for p, c in curves.items()}

    def u_shaped(heights: dict[BoundCase, list[float]]) -> Measurement:
        least = {p: int(np.argmin(h)) for p, h in heights.items()}
        counts = {p: len(curves[p][i].thresholds) for p, i in least.items()}
        at = ", ".join(f"{p.figure}: L = {count}" for p, count in counts.items())
        parts = (_falls_and_rises(h, least[p]) for p, h in heights.items())
        return Measurement(f"smallest at (figure) {at}", tuple(parts))

    def most(shares: list[list[float]]) -> Measurement:
        at_best, least = map(_percents, shares)
        text = f"its share at the best L is {at_best}, the least over all L {least}"
        return Measurement(text, tuple(x > _FIRST_SHARE for x in itertools.chain(*shares)))

    first = [
        [b.batch_kv_tokens / b.kv_bound_tokens for b in best.values()],
        [min(b.batch_kv_tokens / b.kv_bound_tokens for b in c) for c in curves.values()],
    ]
    dealt = {p: np.random.default_rng(0).permutation(h).tolist() for p, h in totals.items()}
    others = [[1 - share for share in shares] for shares in first]
    what = "the first term, the batch's memory, is most of the bound"
    return [
        check(
            "the bound is U-shaped in L",
            u_shaped,
            totals,
            "the same bounds dealt to other L",
            dealt,
        ),
        check(what, most, first, "the other two terms", others),
    ]


def _falls_and_rises(heights: list[float], least: int) -> bool:
    """Whether it falls to an inner minimum and rises behind it, but for the grain of thresholds."""
    falls = all(b <= (1 + _GRAIN) * a for a, b in itertools.pairwise(heights[: least + 1]))
    rises = all(b >= (1 - _GRAIN) * a for a, b in itertools.pairwise(heights[least:]))
    return 0 < least < len(heights) - 1 and falls and rises


def _excess(what: str, excess: list[float]) -> Measurement:
    return Measurement(f"{what} {_percents(excess)}", tuple(e <= _MARGINAL for e in excess))


def _percents(values: list[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def _seconds_verdict() -> ClaimVerdict:
    """The same rates as requests a second of the machine that section 6 names."""
    rates = sorted({case.rate for case in CASES})
    return check(
        "the rates, 50 and 500, can be requests a second of paper-linear",
        _bearable,
        rates,
        "a hundred times the rates",
        [100 * rate for rate in rates],
    )


def _bearable(rates: list[float]) -> Measurement:
    parts, found = [], []
    for rate in rates:
        try:
            fluid = equilibrium(PAPER_LINEAR, traffic_of(rate)).kv_tokens
        except ValueError:
            found.append(False)
            parts.append(f"{rate:g}/s has no equilibrium, whatever the memory")
        else:
            found.append(fluid <= PAPER_LINEAR.kv_tokens)
            parts.append(f"{rate:g}/s needs {fluid:,.0f} of {PAPER_LINEAR.kv_tokens:,} KV tokens")
    return Measurement("; ".join(parts) + "; taken as requests an iteration", tuple(found))


def _draw(job: Trial, curves: Curves) -> None:
    plots = []
    for case, curve in curves.items():
        counts = [len(b.thresholds) for b in curve]
        sums = np.cumsum([terms(b) for b in curve], axis=1).T
        names = ("batch", "and queues", "and tails")
        lines = {name: (counts, y) for name, y in zip(names, sums, strict=True)}
        axes = {"xscale": "log", "title": case.label, "xlabel": "segments L", "ylabel": "KV tokens"}
        plots.append(Plot(lines, {**axes, "ylim": (0, None)}))
    title = "Nested WAIT's memory bound (WAIT paper, figures 4 to 6)"
    draw(job.out / f"{NAME}.png", title, [plots[::2], plots[1::2]])


EXPERIMENT = Experiment(NAME, "Nested WAIT's memory bound against the number of segments", run)
