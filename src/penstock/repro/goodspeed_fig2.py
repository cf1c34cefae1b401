"""GoodSpeed, figure 2: the smoothed goodput estimate (eq. 4) against what is realised.

Sums over eight clients, moving averages of ten rounds as in the paper. The paper's prompts change
their domain; here acceptance jumps by 0.3 every hundred rounds, each client in its own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.allocation.goodspeed import GoodSpeed
from penstock.repro import Entry, Run, Verdict, judge
from penstock.repro.goodspeed_rounds import FloatArray, GeometricClients, jumping_rates, play
from penstock.repro.output import pyplot, save_figure, write_table

NAME = "goodspeed_fig2"

_CLIENTS = 8
_BUDGETS = (16, 20)
_ROUNDS = 2000
_DWELL = 100
_WINDOW = 10
_CLOSE = 0.05
_MOST = 0.9


@dataclass(frozen=True)
class Curve:
    """Tokens a round of all clients together, shape [rounds], realised and estimated."""

    real: FloatArray
    estimate: FloatArray


def run(job: Run) -> list[Verdict]:
    rounds = min(_ROUNDS, job.effort.curve_arrivals)
    curves = {}
    for budget in _BUDGETS:
        job.tell(f"{NAME}: C = {budget}")
        curves[budget] = curve(budget, rounds)
    write_table(
        job.out / f"{NAME}.csv",
        ("C", "round", "real_tokens", "estimated_tokens"),
        (
            (budget, t, float(c.real[t]), float(c.estimate[t]))
            for budget, c in curves.items()
            for t in range(rounds)
        ),
    )
    _draw(job, curves)
    return [verdict(budget, c) for budget, c in curves.items()]


def curve(budget: int, rounds: int) -> Curve:
    """A run of `goodspeed` as the paper sets it (β = 0.5)."""
    policy = GoodSpeed(GoodSpeed.Options())
    world = GeometricClients(jumping_rates(rounds, _CLIENTS, _DWELL, seed=0), seed=0)
    estimates: list[float] = []

    def watch() -> None:
        estimates.append(sum(policy.goodput(f"c{i}") for i in range(_CLIENTS)))

    played = play(policy, world.clients(), budget, rounds, watch=watch)
    return Curve(played.tokens.sum(axis=1).astype(np.float64), np.array(estimates))


def moving(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation over the window that ends in each round."""
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)
    return windows.mean(axis=1), windows.std(axis=1)


def verdict(budget: int, found: Curve) -> Verdict:
    real, band = moving(found.real)
    estimate, own_band = moving(found.estimate)
    bias = abs(float(estimate.mean() / real.mean()) - 1)
    together = float(np.corrcoef(real, estimate)[0, 1])
    inside = float((np.abs(real - estimate) <= np.maximum(band, own_band)).mean())
    return Verdict(
        f"estimated goodput follows the real one (8 clients, C = {budget})",
        f"means differ by {bias:.1%}, correlation of the moving averages {together:.2f}; within a "
        f"standard deviation in {inside:.0%} of the rounds",
        judge(bias <= _CLOSE, together >= _MOST, inside >= _MOST),
    )


def _draw(job: Run, curves: dict[int, Curve]) -> None:
    figure, axes = pyplot().subplots(len(curves), 1, figsize=(8, 6), layout="constrained")
    for axis, (budget, found) in zip(axes, curves.items(), strict=True):
        for name, values in (("real", found.real), ("estimated", found.estimate)):
            mean, band = moving(values)
            rounds = np.arange(len(mean)) + _WINDOW
            axis.plot(rounds, mean, linewidth=0.8, label=name)
            axis.fill_between(rounds, mean - band, mean + band, alpha=0.2)
        axis.set(title=f"C = {budget}", xlabel="round", ylabel="tokens a round", ylim=(0, None))
        axis.legend()
    figure.suptitle("Estimated and real goodput (GoodSpeed, figure 2)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Figure 2: estimated goodput against real goodput", run)
