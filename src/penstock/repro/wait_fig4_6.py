"""WAIT paper, figures 4 to 6: the memory bound of eq. 12 against the number of segments.

The paper gives no times of a step. Its bound takes the logarithm of T + 1, iterations, and appendix
C has arrivals by time step; so a rate is read as requests an iteration and T as iterations: an
iteration that takes one unit of time whatever is in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.nested import NestedThresholds, nested_thresholds, segments_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, TrafficType
from penstock.repro import Entry, Run, Verdict, judge
from penstock.repro.output import pyplot, save_figure, write_table

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


@dataclass(frozen=True)
class Panel:
    """One panel: total rate in requests an iteration, T in iterations, δ."""

    figure: int
    rate: float
    horizon: int
    delta: float

    @property
    def label(self) -> str:
        return f"figure {self.figure}: rate {self.rate:g}, T {self.horizon}, δ {self.delta:g}"


PANELS = (
    Panel(4, 50, 200, 0.1),
    Panel(4, 50, 200, 1e-5),
    Panel(5, 500, 200, 0.1),
    Panel(5, 500, 200, 1e-5),
    Panel(6, 50, 20, 1e-3),
    Panel(6, 50, 2000, 1e-3),
)


def run(job: Run) -> list[Verdict]:
    curves: dict[Panel, list[NestedThresholds]] = {}
    for panel in PANELS:
        job.tell(f"{NAME}: {panel.label}")
        curves[panel] = bounds(panel, _SEGMENTS)
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


def bounds(panel: Panel, segments: tuple[int, ...]) -> list[NestedThresholds]:
    """The bound of the thresholds that make it smallest, for each number of segments."""
    traffic = traffic_of(panel.rate)
    return [
        nested_thresholds(
            UNIT_STEP, segments_of(traffic, count), _UNLIMITED, panel.delta, panel.horizon
        )
        for count in segments
    ]


def terms(bound: NestedThresholds) -> tuple[float, float, float]:
    """Peak batch, queues and their tails, in KV tokens."""
    return bound.batch_kv_tokens, bound.queue_kv_tokens, bound.tail_kv_tokens


def verdicts(curves: dict[Panel, list[NestedThresholds]]) -> list[Verdict]:
    """What the curves, each by rising number of segments, say about the paper's claims."""
    best = {p: min(c, key=lambda b: b.kv_bound_tokens) for p, c in curves.items()}
    u_shaped, at_best, first, over, practical = [], [], [], [], []
    for panel, curve in curves.items():
        least = best[panel].kv_bound_tokens
        u_shaped.append(least < min(curve[0].kv_bound_tokens, curve[-1].kv_bound_tokens))
        at_best.append(best[panel].batch_kv_tokens / least)
        first.append(min(b.batch_kv_tokens / b.kv_bound_tokens for b in curve))
        fluid = equilibrium(UNIT_STEP, traffic_of(panel.rate)).kv_tokens
        over.append(least / fluid - 1)
        practical.append(
            next(b.kv_bound_tokens for b in curve if len(b.thresholds) >= _PRACTICAL) / least - 1
        )
    at = ", ".join(f"{p.figure}: L = {len(b.thresholds)}" for p, b in best.items())
    return [
        Verdict("the bound is U-shaped in L", f"smallest at (figure) {at}", judge(*u_shaped)),
        Verdict(
            "the first term, the batch's memory, is most of the bound",
            f"its share at the best L is {_percents(at_best)}, the least over all L "
            + _percents(first),
            judge(*(share > _FIRST_SHARE for share in (*at_best, *first))),
        ),
        Verdict(
            f"only marginally more than the fluid's M* (at most {_MARGINAL:.0%} at the best L)",
            "the bound exceeds it by " + _percents(over),
            judge(*(excess <= _MARGINAL for excess in over)),
        ),
        Verdict(
            f"L = {_PRACTICAL} is sufficient (within {_MARGINAL:.0%} of the best L)",
            "its bound is higher by " + _percents(practical),
            judge(*(excess <= _MARGINAL for excess in practical)),
        ),
    ]


def _percents(values: list[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def _seconds_verdict() -> Verdict:
    """The same rates as requests a second of the machine that section 6 names."""
    parts, found = [], []
    for rate in sorted({panel.rate for panel in PANELS}):
        try:
            fluid = equilibrium(PAPER_LINEAR, traffic_of(rate)).kv_tokens
        except ValueError:
            found.append(False)
            parts.append(f"{rate:g}/s has no equilibrium, whatever the memory")
        else:
            found.append(fluid <= PAPER_LINEAR.kv_tokens)
            parts.append(f"{rate:g}/s needs {fluid:,.0f} of {PAPER_LINEAR.kv_tokens:,} KV tokens")
    return Verdict(
        "the rates, 50 and 500, can be requests a second of paper-linear",
        "; ".join(parts) + "; taken as requests an iteration",
        judge(*found),
    )


def _draw(job: Run, curves: dict[Panel, list[NestedThresholds]]) -> None:
    figure, grid = pyplot().subplots(2, 3, figsize=(13, 7), layout="constrained", sharex=True)
    for axes, (panel, curve) in zip(grid.T.flat, curves.items(), strict=True):
        counts = [len(b.thresholds) for b in curve]
        rows = list(zip(*(terms(b) for b in curve), strict=True))
        axes.stackplot(counts, *rows, labels=("batch", "queues", "tails"), alpha=0.8)
        axes.set(xscale="log", title=panel.label, ylabel="KV tokens")
    grid[0, 0].legend(fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("segments L")
    figure.suptitle("Nested WAIT's memory bound (WAIT paper, figures 4 to 6)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Nested WAIT's memory bound against the number of segments", run)
