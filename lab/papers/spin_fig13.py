"""Spin, figure 13: throughput against the number of micro-batches, and what is chosen.

The paper has LLaMA-7B on one V100 and five drafters on a V100 each, and gives no step times, so
both extremes are shown. `streaming`: the target's are the measured ones of `a100-llama2-7b`, where
a step reads the weights and further rows cost little. `rows`: every row of a step costs time of its
own, 2 ms, beside 20 ms; the goodput of about 62 tokens a second for 8 requests in the paper's
section VI-B1 means rounds of some tenths of a second, which no reading of weights explains. Either
way a drafter's step is the target's for as many rows, by layers (for its fixed part) and by
parameters or layers (for its rows). Layers and parameters are of LLaMA-68M and of its larger
relatives as far as they are public (`lab.common.families`); that is an assumption.
`hard` has most requests on the larger drafters, as the paper says of Alpaca, `easy` on the smaller
ones, as it says of CP; `between` stands for CIP, and `mix` has a third of each.

The control is the same machine with drafters that take no time: there is nothing to overlap, and no
gain to be seen. Oracles: four micro-batches that overlap drafts and verification wholly at no cost,
requests that are all on the largest drafter or all on the smallest, and the best number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import SPIN_DRAFTERS
from lab.common.report import Plot, draw, write_table
from lab.common.steady_batch import SteadyBatch, play
from penstock.core.policies.pipeline.parts.planner import best_num, cycle_seconds, spin_num
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.profiles import load_profile

NAME = "spin_fig13"

_TARGET_LAYERS, _TARGET_PARAMETERS = 32, 6.74
_ACCEPTANCE = {"68M": 0.5, "265M": 0.58, "616M": 0.65, "1.1B": 0.72, "1.4B": 0.75}
_WORKLOADS = {
    "hard": {"68M": 4, "265M": 6, "616M": 8, "1.1B": 14, "1.4B": 16},
    "between": {"68M": 8, "265M": 10, "616M": 12, "1.1B": 10, "1.4B": 8},
    "easy": {"68M": 16, "265M": 14, "616M": 8, "1.1B": 6, "1.4B": 4},
    "mix": {"68M": 9, "265M": 10, "616M": 10, "1.1B": 10, "1.4B": 9},
}
_HARDEST, _EASIEST = {"1.4B": 48}, {"68M": 48}
_LENGTH = 4
_MOST = 9
_ROUNDS, _QUICK_ROUNDS, _FEW_ROUNDS = 50, 25, 12
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_CLOSE = 0.01
_PAPER_GAIN, _SAME = 1.29, 0.05
_DROPS = (0.05, 0.10)
_WITHOUT = "drafters that take no time"


@dataclass(frozen=True)
class ByMicroBatches:
    """Tokens a second by number of micro-batches (1: all drafters at once, then the target), of
    drafts and verifications that overlap wholly, and the numbers that the planners choose from step
    times: Spin's by the share of the throughput that counts as an obvious drop."""

    rates: dict[int, float]
    overlapped: float
    spin: dict[float, int]
    planned: int

    @property
    def best(self) -> int:
        return max(self.rates, key=self.rates.__getitem__)

    def gain(self, num: int) -> float:
        """Over no micro-batches."""
        return self.rates[num] / self.rates[1]


_NO_TIME = 1e-6
_ROWS = StepProfile("rows", 100_000, (0, 1000), (0.020, 2.020))


def run(job: Trial) -> list[ClaimVerdict]:
    arrivals = job.effort.curve_arrivals
    rounds = _ROUNDS if arrivals >= 10_000 else _QUICK_ROUNDS if arrivals >= 1000 else _FEW_ROUNDS
    cases = {}
    for target in (_ROWS, replace(load_profile("a100-llama2-7b"), name="streaming")):
        for workload, requests in _WORKLOADS.items():
            name = f"{target.name}, {workload}"
            cases[name] = target, requests, rounds
    drawn = job.each(curve, cases.values(), lambda target, *_: f"{NAME}: {target.name}")
    curves = dict(zip(cases, drawn, strict=True))
    drawn = job.each(
        curve,
        ((*case, _FEW_ROUNDS, _NO_TIME) for *case, _ in cases.values()),
        lambda target, *_: f"{NAME}: {target.name}, {_WITHOUT}",
    )
    controls = dict(zip(cases, drawn, strict=True))
    extremes = ((_ROWS, requests, rounds) for requests in (_HARDEST, _EASIEST))
    hardest, easiest = job.each(curve, extremes, lambda target, *_: f"{NAME}: {target.name}")
    write_table(
        job.out / f"{NAME}.csv",
        ("step times, workload", "micro_batches", "tokens_per_s"),
        (
            (f"{name}{suffix}", num, rate)
            for suffix, shown in (("", curves), (f", {_WITHOUT}", controls))
            for name, c in shown.items()
            for num, rate in c.rates.items()
        ),
    )
    _draw(job, curves)
    return verdicts(curves, controls, (hardest, easiest))


def curve(
    target: StepProfile, requests: Mapping[str, int], rounds: int, drafting: float = 1.0
) -> ByMicroBatches:
    """Every number of micro-batches on the virtual clock. drafting: factor of the drafters' own
    times."""
    drafters = tuple(drafter(name, target, drafting) for name in SPIN_DRAFTERS)
    profile = replace(target, drafters=drafters)
    batch = SteadyBatch(profile, requests, _LENGTH, _ACCEPTANCE)
    rates = {1: play(batch, "off", beside=True, rounds=rounds)}
    for num in range(2, _MOST + 1):
        rates[num] = play(batch, str(num), rounds=rounds)
    work = batch.round()

    def seconds(num: int) -> float:
        return cycle_seconds(work, num)

    drafting_s = max(lane.seconds(lane.batch) for lane in work.lanes)
    alone = cycle_seconds(work, 1)
    return ByMicroBatches(
        rates,
        rates[1] * alone / max(drafting_s, alone - drafting_s),
        {drop: spin_num(work, _MOST, drop) for drop in _DROPS},
        best_num(seconds, _MOST),
    )


def drafter(name: str, target: StepProfile, factor: float = 1.0) -> DrafterProfile:
    """Scaled from the target, by layers and by parameters."""
    size = SPIN_DRAFTERS[name]
    launch = size.layers / _TARGET_LAYERS * target.linear(1)
    share = size.billions / _TARGET_PARAMETERS
    if target == _ROWS:
        share = size.layers / _TARGET_LAYERS
    seconds = (launch + share * (target.linear(n) - target.linear(1)) for n in _COUNTS)
    return DrafterProfile(name, _COUNTS, tuple(factor * s for s in seconds))


Curves = Mapping[str, ByMicroBatches]


def verdicts(
    curves: Curves, controls: Curves, extremes: tuple[ByMicroBatches, ByMicroBatches]
) -> list[ClaimVerdict]:
    """`controls`: the same without anything to overlap. extremes: the hardest and easiest
    workload."""
    hard, easy = curves["rows, hard"], curves["rows, easy"]
    planned = {n: c.planned for n, c in curves.items()}
    most = dict.fromkeys(curves, _MOST)
    best = {n: c.best for n, c in curves.items()}
    whole = {n: replace(c, rates={**c.rates, 4: c.overlapped}) for n, c in curves.items()}
    overlap = "drafts and verifications overlap wholly with 4", whole
    return [
        check(
            "throughput rises with micro-batches up to a point, then falls",
            rises_and_falls,
            curves,
            _WITHOUT,
            controls,
            overlap,
        ),
        check(
            f"4 micro-batches gain {_PAPER_GAIN:g}x where larger drafters do most, and {_MOST} "
            "lose",
            gains_of_four,
            curves,
            _WITHOUT,
            controls,
            overlap,
        ),
        check(
            "harder workloads want more micro-batches (5 against 3)",
            wants_more,
            (hard, easy),
            "the easy workload in both places",
            (easy, easy),
            ("all on the largest drafter, and all on the smallest", extremes),
        ),
        *(
            check(
                claim,
                near_the_best,
                (curves, chosen),
                f"always {_MOST}",
                (curves, most),
                ("the best", (curves, best)),
            )
            for claim, chosen in (
                *(
                    (
                        f"the heuristic, with {drop:.0%} as an obvious drop, approximates the best",
                        {n: c.spin[drop] for n, c in curves.items()},
                    )
                    for drop in _DROPS
                ),
                ("returning the best seen is within 1% of it", planned),
            )
        ),
    ]


def rises_and_falls(curves: Curves) -> Measurement:
    return Measurement(
        "; ".join(
            f"{name.replace(', ', '-')} {c.gain(c.best):.2f}x with {c.best}, {c.gain(_MOST):.2f}x "
            f"with {_MOST}"
            for name, c in curves.items()
        ),
        tuple(
            c.gain(c.best) > 1 + _CLOSE and c.rates[_MOST] < (1 - _CLOSE) * c.rates[c.best]
            for c in curves.values()
        ),
    )


def gains_of_four(curves: Curves) -> Measurement:
    """Within 5% of the paper's factor or above, and its loss, with one of the two step times."""
    hard = {name: c for name, c in curves.items() if name.endswith("hard")}
    gains = [(c.gain(4), c.gain(_MOST)) for c in hard.values()]
    return Measurement(
        "; ".join(
            f"{name.replace(', ', '-')} {c.gain(4):.2f}x with 4, {c.gain(_MOST):.2f}x with {_MOST}"
            for name, c in hard.items()
        ),
        (
            any(four >= (1 - _SAME) * _PAPER_GAIN for four, _ in gains),
            any(four > 1 and most < 1 - _CLOSE for four, most in gains),
        ),
    )


def wants_more(found: tuple[ByMicroBatches, ByMicroBatches]) -> Measurement:
    hard, easy = found
    return Measurement(
        f"rows: {hard.best} where hard, {easy.best} where easy", (hard.best > easy.best,)
    )


def near_the_best(found: tuple[Curves, Mapping[str, int]]) -> Measurement:
    curves, chosen = found
    shares = {n: c.rates[max(1, chosen[n])] / c.rates[c.best] for n, c in curves.items()}
    return Measurement(
        ", ".join(f"{n.replace(', ', '-')} {chosen[n]} ({x:.0%})" for n, x in shares.items()),
        tuple(share >= 1 - _CLOSE for share in shares.values()),
    )


def _draw(job: Trial, curves: Curves) -> None:
    plots = []
    for name, found in curves.items():
        chosen = {"heuristic": found.spin[_DROPS[0]], "best": found.best}
        lines: dict[str, Any] = {"tokens/s": (list(found.rates), list(found.rates.values()))}
        lines |= {label: (num, found.rates[num]) for label, num in chosen.items()}
        axes = {"title": name, "xlabel": "micro-batches", "ylabel": "tokens/s", "ylim": (0, None)}
        plots.append(Plot(lines, axes, ".-", {"heuristic": "o", "best": "s"}))
    title = "Throughput by number of micro-batches (Spin, figure 13)"
    draw(job.out / f"{NAME}.png", title, [plots[: len(_WORKLOADS)], plots[len(_WORKLOADS) :]])


EXPERIMENT = Experiment(NAME, "Figure 13: number of micro-batches", run)
