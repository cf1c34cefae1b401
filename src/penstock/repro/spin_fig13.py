"""Spin, figure 13: throughput against the number of micro-batches, and what is chosen.

The paper has LLaMA-7B on one V100 and five drafters on a V100 each, and gives no step times, so
both extremes are shown. `streaming`: the target's are the measured ones of `a100-llama2-7b`, where
a step reads the weights and further rows cost little. `rows`: every row of a step costs time of its
own, 2 ms, beside 20 ms; the goodput of about 62 tokens a second for 8 requests in the paper's
section VI-B1 means rounds of some tenths of a second, which no reading of weights explains. Either
way a drafter's step is the target's for as many rows, by layers (for its fixed part) and by
parameters or layers (for its rows). Layers and parameters are of LLaMA-68M and of its larger
relatives as far as they are public (2, 8, 16, 22 and 24 layers); that is an assumption.
`hard` has most requests on the larger drafters, as the paper says of Alpaca, `easy` on the smaller
ones, as it says of CP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.core.pipeline_planner import (
    Setting,
    best_setting,
    cycle_seconds,
    spin_setting,
)
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.repro import Entry, Run, Verdict, judge
from penstock.repro.output import pyplot, save_figure, write_table
from penstock.repro.spin_pipeline import Batch, play
from penstock.sim.profiles import load_profile

NAME = "spin_fig13"

_MODELS = {
    "68M": (2, 0.068),
    "265M": (8, 0.265),
    "616M": (16, 0.616),
    "1.1B": (22, 1.1),
    "1.4B": (24, 1.4),
}
"""Layers, and parameters in billions."""
_TARGET_LAYERS, _TARGET_PARAMETERS = 32, 6.74
_ACCEPTANCE = {"68M": 0.5, "265M": 0.58, "616M": 0.65, "1.1B": 0.72, "1.4B": 0.75}
_WORKLOADS = {
    "hard": {"68M": 4, "265M": 6, "616M": 8, "1.1B": 14, "1.4B": 16},
    "easy": {"68M": 16, "265M": 14, "616M": 8, "1.1B": 6, "1.4B": 4},
}
_LENGTH = 4
_MOST = 9
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_CLOSE = 0.01


@dataclass(frozen=True)
class Curve:
    """Tokens a second by number of micro-batches (1: all drafters at once, then the target), what
    `auto` came to, and the numbers that the planners choose from step times."""

    rates: dict[int, float]
    auto: float
    spin: int
    planned: int

    @property
    def best(self) -> int:
        return max(self.rates, key=self.rates.__getitem__)

    def gain(self, num: int) -> float:
        """Over no micro-batches."""
        return self.rates[num] / self.rates[1]


_ROWS = StepProfile("rows", 100_000, (0, 1000), (0.020, 2.020))


def run(job: Run) -> list[Verdict]:
    curves = {}
    for target in (_ROWS, replace(load_profile("a100-llama2-7b"), name="streaming")):
        for workload, requests in _WORKLOADS.items():
            name = f"{target.name}, {workload}"
            job.tell(f"{NAME}: {name}")
            curves[name] = curve(target, requests)
    write_table(
        job.out / f"{NAME}.csv",
        ("step times, workload", "micro_batches", "tokens_per_s"),
        ((name, num, rate) for name, c in curves.items() for num, rate in c.rates.items()),
    )
    _draw(job, curves)
    return verdicts(curves)


def curve(target: StepProfile, requests: Mapping[str, int]) -> Curve:
    """Every number of micro-batches on the virtual clock."""
    profile = replace(target, drafters=tuple(drafter(name, target) for name in _MODELS))
    batch = Batch(profile, requests, _LENGTH, _ACCEPTANCE)
    rates = {1: play(batch, "off", beside=True).tokens_per_s}
    for num in range(2, _MOST + 1):
        rates[num] = play(batch, str(num)).tokens_per_s
    work = batch.round()

    def seconds(setting: Setting) -> float:
        return cycle_seconds(work, setting)

    return Curve(
        rates,
        play(batch, "auto").tokens_per_s,
        spin_setting(seconds, _MOST).num,
        best_setting(seconds, _MOST).num,
    )


def drafter(name: str, target: StepProfile) -> DrafterProfile:
    """Scaled from the target, by layers and by parameters."""
    layers, parameters = _MODELS[name]
    launch = layers / _TARGET_LAYERS * target.linear(1)
    share = parameters / _TARGET_PARAMETERS
    if target is _ROWS:
        share = layers / _TARGET_LAYERS
    seconds = (launch + share * (target.linear(n) - target.linear(1)) for n in _COUNTS)
    return DrafterProfile(name, _COUNTS, tuple(seconds))


def verdicts(curves: Mapping[str, Curve]) -> list[Verdict]:
    rises = [c.best > 1 and c.rates[_MOST] < 0.99 * c.rates[c.best] for c in curves.values()]
    hard, easy = curves["rows, hard"], curves["rows, easy"]
    found = [
        Verdict(
            "throughput rises with micro-batches up to a point, then falls",
            "; ".join(
                f"{name}: best {c.best} ({c.gain(c.best):.2f}x), {_MOST} give {c.gain(_MOST):.2f}x"
                for name, c in curves.items()
            ),
            judge(*rises),
        ),
        Verdict(
            "4 micro-batches gain 1.29x where larger drafters do most, and 9 lose",
            "; ".join(
                f"{name}: {c.gain(4):.2f}x with 4, {c.gain(_MOST):.2f}x with {_MOST}"
                for name, c in curves.items()
                if name.endswith("hard")
            ),
            judge(hard.gain(4) >= 1.1, hard.gain(_MOST) < 1),
        ),
        Verdict(
            "harder workloads want more micro-batches (5 against 3)",
            f"rows: {hard.best} where hard, {easy.best} where easy",
            judge(hard.best > easy.best),
        ),
    ]
    for title, chosen in (
        ("the heuristic approximates the best", {n: c.spin for n, c in curves.items()}),
        ("returning the best seen is within 1% of it", {n: c.planned for n, c in curves.items()}),
    ):
        shares = {n: c.rates[max(1, chosen[n])] / c.rates[c.best] for n, c in curves.items()}
        found.append(
            Verdict(
                title,
                "; ".join(
                    f"{n}: {chosen[n]}, {share:.1%} of the best" for n, share in shares.items()
                ),
                judge(*(share >= 1 - _CLOSE for share in shares.values())),
            )
        )
    return found


def _draw(job: Run, curves: Mapping[str, Curve]) -> None:
    figure, axes = pyplot().subplots(2, 2, figsize=(9, 6), layout="constrained")
    for axis, (name, found) in zip(axes.flat, curves.items(), strict=True):
        axis.plot(list(found.rates), list(found.rates.values()), marker=".")
        axis.plot(found.spin, found.rates[found.spin], "o", color="tab:red", label="heuristic")
        best = found.best
        axis.plot(best, found.rates[best], "s", color="tab:green", fillstyle="none", label="best")
        axis.set(title=name, xlabel="micro-batches", ylabel="tokens/s", ylim=(0, None))
        axis.legend()
    figure.suptitle("Throughput by number of micro-batches (Spin, figure 13)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Figure 13: number of micro-batches", run)
