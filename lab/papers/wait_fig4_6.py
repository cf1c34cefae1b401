"""WAIT paper, figures 4 to 6: the memory bound of eq. 12 against the number of segments.

The paper gives no times of a step. Its bound takes the logarithm of T + 1, iterations, and appendix
C has arrivals by time step; so a rate is read as requests an iteration and T as iterations: an
iteration that takes one unit of time whatever is in it.

Figure 3's types are drawn from e^(−l'/210) and, with measurements, from the lengths of recorded
conversations, which are figure 3 again: the paper's LMSYS-Chat-1M is not at hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check, not_measured
from lab.common.experiment import Experiment, Trial
from lab.common.recorded import RECORDED, recorded_lengths
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import FloatArray
from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.nested import NestedThresholds, nested_thresholds, segments_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, TrafficType

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
_HEAVIER, _HEAVY_SEGMENTS = 1000, 35
"""Times the rates, as heavy traffic, and the number of segments that is best there."""
_ALIKE = 0.05


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
    sources = {"drawn": weights_of()}
    recorded = recorded_lengths(job.data)
    if recorded is not None:
        counts = np.bincount(recorded.output_len, minlength=_NUM_TYPES + 1)[1:]
        sources["recorded"] = counts / counts.sum()
    curves: dict[str, Curves] = {}
    for source, weights in sources.items():
        curves[source] = {}
        for case in CASES:
            job.tell(f"{NAME}: {source}, {case.label}")
            curves[source][case] = bounds(case, _SEGMENTS, weights)
    write_table(
        job.out / f"{NAME}.csv",
        ("lengths", "figure", "rate", "horizon", "delta", *("segments", "batch", "queue", "tail")),
        (
            (source, p.figure, p.rate, p.horizon, p.delta, len(b.thresholds), *terms(b))
            for source, found in curves.items()
            for p, curve in found.items()
            for b in curve
        ),
    )
    _draw(job, curves, sources)
    _draw_lengths(job, sources)
    return [
        *(v for s in sources for v in verdicts(curves[s], sources[s], f"{s}: ")),
        _seconds_verdict(),
        lengths_verdict(sources["recorded"])
        if "recorded" in sources
        else not_measured("figure 3 and recorded lengths", f"{RECORDED} (--data)"),
    ]


def weights_of(num_types: int = _NUM_TYPES, scale: float = _SCALE) -> FloatArray:
    """Shares of decode lengths 1 to m: e^(−l'/scale)."""
    weights = np.exp(-np.arange(1, num_types + 1) / scale)
    return np.asarray(weights / weights.sum())


def traffic_of(rate: float, weights: FloatArray | None = None) -> Traffic:
    """Decode lengths 1 to m with their shares, prompts of 62 tokens: figure 3's types. What never
    occurs is left out."""
    shares = weights_of() if weights is None else weights
    return tuple(
        TrafficType(rate * share, _PROMPT_LEN, length)
        for length, share in enumerate(shares.tolist(), start=1)
        if share > 0
    )


def bounds(
    case: BoundCase, segments: tuple[int, ...], weights: FloatArray | None = None
) -> list[NestedThresholds]:
    """The bound of the thresholds that make it smallest, for each number of segments."""
    traffic = traffic_of(case.rate, weights)
    merged = (segments_of(traffic, min(count, len(traffic))) for count in segments)
    return [
        nested_thresholds(UNIT_STEP, one, _UNLIMITED, case.delta, case.horizon) for one in merged
    ]


def terms(bound: NestedThresholds) -> tuple[float, float, float]:
    """Peak batch, queues and their tails, in KV tokens."""
    return bound.batch_kv_tokens, bound.queue_kv_tokens, bound.tail_kv_tokens


Curves = dict[BoundCase, list[NestedThresholds]]
"""By rising number of segments."""


def verdicts(
    curves: Curves, weights: FloatArray | None = None, where: str = ""
) -> list[ClaimVerdict]:
    """What the curves say about the paper's claims. where: of which lengths."""
    best = {p: min(c, key=lambda b: b.kv_bound_tokens) for p, c in curves.items()}
    heavy = [replace(p, rate=_HEAVIER * p.rate) for p in curves]
    in_heavy_traffic = {p: bounds(p, (_HEAVY_SEGMENTS,), weights)[0] for p in heavy}
    ten = {
        p: next((b for b in c if len(b.thresholds) >= _PRACTICAL), c[-1]) for p, c in curves.items()
    }

    def marginal(chosen: dict[BoundCase, NestedThresholds]) -> Measurement:
        first, fluid = [], []
        for p, b in chosen.items():
            first.append(b.kv_bound_tokens / b.batch_kv_tokens - 1)
            lengths = traffic_of(p.rate, weights)
            fluid.append(b.kv_bound_tokens / equilibrium(UNIT_STEP, lengths).kv_tokens - 1)
        return Measurement(
            f"over the first term {_range(first)}, over M* (eq. 5) {_range(fluid)}",
            (max(first) <= _MARGINAL, max(fluid) <= _MARGINAL),
        )

    def sufficient(chosen: dict[BoundCase, NestedThresholds]) -> Measurement:
        excess = [b.kv_bound_tokens / best[p].kv_bound_tokens - 1 for p, b in chosen.items()]
        return Measurement(f"higher by {_range(excess)}", (max(excess) <= _MARGINAL,))

    return [
        *_shape(curves, best, where),
        check(
            f"{where}at the best L a marginal increase over the equilibrium ({_MARGINAL:.0%})",
            marginal,
            best,
            f"{_SEGMENTS[-1]} segments",
            {p: c[-1] for p, c in curves.items()},
            (f"{_HEAVIER:,} times the rates", in_heavy_traffic),
        ),
        check(
            f"{where}L = {_PRACTICAL} is sufficient ({_MARGINAL:.0%})",
            sufficient,
            ten,
            "one segment",
            {p: c[0] for p, c in curves.items()},
        ),
    ]


def _shape(
    curves: Curves, best: dict[BoundCase, NestedThresholds], where: str
) -> list[ClaimVerdict]:
    totals = {p: [b.kv_bound_tokens for b in c] for p, c in curves.items()}

    def u_shaped(heights: dict[BoundCase, list[float]]) -> Measurement:
        least = {p: int(np.argmin(h)) for p, h in heights.items()}
        counts = {p: len(curves[p][i].thresholds) for p, i in least.items()}
        at = ", ".join(map(str, counts.values()))
        parts = (_falls_and_rises(h, least[p]) for p, h in heights.items())
        return Measurement(f"smallest at L = {at}", tuple(parts))

    def most(shares: list[list[float]]) -> Measurement:
        named = zip(("best L", "all L from"), shares, strict=False)
        text = ", ".join(f"{name} {_range(found)}" for name, found in named)
        return Measurement(text, tuple(x > _FIRST_SHARE for x in itertools.chain(*shares)))

    first = [
        [b.batch_kv_tokens / b.kv_bound_tokens for b in best.values()],
        [min(b.batch_kv_tokens / b.kv_bound_tokens for b in c) for c in curves.values()],
    ]
    dealt = {p: np.random.default_rng(0).permutation(h).tolist() for p, h in totals.items()}
    others = [[1 - share for share in shares] for shares in first]
    what = f"{where}the batch's memory is most of the bound"
    return [
        check(
            f"{where}the bound is U-shaped in L",
            u_shaped,
            totals,
            "the same bounds dealt to other L",
            dealt,
        ),
        check(what, most, first, "the other two terms", others, ("the best L alone", first[:1])),
    ]


def _falls_and_rises(heights: list[float], least: int) -> bool:
    """Whether it falls to an inner minimum and rises behind it, but for the grain of thresholds."""
    falls = all(b <= (1 + _GRAIN) * a for a, b in itertools.pairwise(heights[: least + 1]))
    rises = all(b >= (1 - _GRAIN) * a for a, b in itertools.pairwise(heights[least:]))
    return 0 < least < len(heights) - 1 and falls and rises


def _range(values: list[float]) -> str:
    return f"{min(values):.0%}-{max(values):.0%}"


def _seconds_verdict() -> ClaimVerdict:
    """The same rates as requests a second of the machine that section 6 names."""
    rates = sorted({case.rate for case in CASES})
    return check(
        "the rates, 50 and 500, can be requests a second of paper-linear",
        _bearable,
        rates,
        "a hundred times the rates",
        [100 * rate for rate in rates],
        ("a tenth of the rates", [rate / 10 for rate in rates]),
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
    return Measurement("; ".join(parts), tuple(found))


def lengths_verdict(recorded: FloatArray) -> ClaimVerdict:
    """The stand-in for figure 3 against recorded lengths of conversations."""

    def like(weights: FloatArray) -> Measurement:
        apart = float(np.abs(weights.cumsum() - recorded.cumsum()).max())
        means = [float(w @ np.arange(1, len(w) + 1)) for w in (weights, recorded)]
        return Measurement(
            f"they differ by at most {apart:.2f}; mean lengths {means[0]:.0f} and {means[1]:.0f}",
            (apart <= _ALIKE,),
        )

    scales = np.geomspace(10, 1e4, 100)
    best = min(
        (weights_of(scale=scale) for scale in scales),
        key=lambda weights: np.abs(weights.cumsum() - recorded.cumsum()).max(),
    )
    return check(
        f"figure 3: e^(−l'/{_SCALE:g}) (cumulative shares within {_ALIKE:g} of recorded lengths)",
        like,
        weights_of(),
        "the longest lengths as frequent as the shortest",
        weights_of()[::-1],
        ("the best exponential in hindsight", best),
    )


def _draw_lengths(job: Trial, sources: Mapping[str, FloatArray]) -> None:
    """Figure 3: shares of decode lengths, over ten tokens each."""
    width = 10
    lines = {
        name: (np.arange(width / 2, _NUM_TYPES, width), w.reshape(-1, width).sum(axis=1) / width)
        for name, w in sources.items()
    }
    axes = {"xlabel": "decode length, tokens", "ylabel": "share of requests", "ylim": (0, None)}
    title = "Arrival rates by decode length (WAIT paper, figure 3)"
    draw(job.out / f"{NAME}_lengths.png", title, [[Plot(lines, axes)]])


def _draw(job: Trial, curves: Mapping[str, Curves], sources: Mapping[str, FloatArray]) -> None:
    for source, found in curves.items():
        plots = []
        for case, curve in found.items():
            counts = [len(b.thresholds) for b in curve]
            sums = np.cumsum([terms(b) for b in curve], axis=1).T
            names = ("batch", "and queues", "and tails: the bound")
            lines = {name: (counts, y) for name, y in zip(names, sums, strict=True)}
            fluid = equilibrium(UNIT_STEP, traffic_of(case.rate, sources[source])).kv_tokens
            lines["M*"] = counts, [fluid] * len(counts)
            axes: dict[str, Any] = {"xscale": "log", "title": case.label, "xlabel": "segments L"}
            axes |= {"ylabel": "KV tokens", "ylim": (0, None)}
            plots.append(Plot(lines, axes, "-", {"M*": "k--"}))
        title = f"Nested WAIT's memory bound (WAIT paper, figures 4 to 6), {source} lengths"
        name = NAME if source == "drawn" else f"{NAME}_{source}"
        draw(job.out / f"{name}.png", title, [plots[::2], plots[1::2]])


EXPERIMENT = Experiment(NAME, "WAIT, figures 3 to 6: Nested WAIT's memory bound by segments", run)
