"""GoodSpeed, figure 2: the smoothed goodput estimate (eq. 4) as a forecast of what is realised.

Sums over eight clients. The estimate that a round is compared with is the one before it: one that
contains the round follows it whatever happens, also where goodput is drawn anew in every round. As
a control the same rounds in random order are smoothed again, of which no forecast can know
anything; the oracle expects what known acceptance says of the granted drafts. The paper's prompts
change their domain; here acceptance jumps by 0.3 every hundred rounds, each client in its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.fair_path import expected_goodput
from lab.common.report import Plot, draw, write_table
from lab.common.rounds import FloatArray, GeometricClients, jumping_rates, play
from lab.common.statistics import interval
from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed

NAME = "goodspeed_fig2"

_CLIENTS = 8
_BUDGETS = (16, 20)
_ROUNDS = 2000
_DWELL = 100
_WINDOW = 10
_CLOSE = 0.05


@dataclass(frozen=True)
class Forecast:
    """Tokens a round of all clients together, shape [rounds]: realised, forecast by the estimate
    before the round, and expected from acceptance."""

    real: FloatArray
    forecast: FloatArray
    expected: FloatArray

    @property
    def correlation(self) -> float:
        return float(np.corrcoef(self.real, self.forecast)[0, 1])

    def shuffled(self, seed: int) -> Forecast:
        """The same rounds in another order, smoothed by eq. 4 from the same start."""
        real = np.random.default_rng((2, seed)).permutation(self.real)
        beta, estimate, forecast = GoodSpeed.Options().beta, float(self.forecast[0]), []
        for tokens in real.tolist():
            forecast.append(estimate)
            estimate += beta * (tokens - estimate)
        return Forecast(real, np.array(forecast), self.expected)


def run(job: Trial) -> list[ClaimVerdict]:
    rounds = min(_ROUNDS, job.effort.curve_arrivals)
    seeds = range(job.effort.repetitions)
    cells = [(budget,) for budget in _BUDGETS]
    drawn = job.by_cell(curve, cells, seeds, rounds, what=lambda c, *_: f"{NAME}: C = {c}")
    curves = {budget: found for (budget,), found in drawn.items()}
    write_table(
        job.out / f"{NAME}.csv",
        ("C", "seed", "round", "real_tokens", "forecast_tokens"),
        (
            (budget, seed, t, float(c.real[t]), float(c.forecast[t]))
            for budget, found in curves.items()
            for seed, c in enumerate(found)
            for t in range(rounds)
        ),
    )
    _draw(job, {budget: found[0] for budget, found in curves.items()})
    return [verdict(budget, found) for budget, found in curves.items()]


def curve(budget: int, rounds: int, seed: int) -> Forecast:
    """A run of `goodspeed` as the paper sets it (β = 0.5)."""
    policy = GoodSpeed(GoodSpeed.Options())
    rates = jumping_rates(rounds, _CLIENTS, _DWELL, seed)
    world = GeometricClients(rates, seed)
    estimates: list[float] = []

    def watch() -> None:
        estimates.append(sum(policy.goodput(f"c{i}") for i in range(_CLIENTS)))

    watch()
    played = play(policy, world.clients(), budget, rounds, watch=watch)
    expected = expected_goodput(rates, played.lengths).sum(axis=1)
    real = played.tokens.sum(axis=1).astype(np.float64)
    return Forecast(real, np.array(estimates[:-1]), expected)


def verdict(budget: int, found: Sequence[Forecast]) -> ClaimVerdict:
    return check(
        f"estimated goodput foretells the real one (8 clients, C = {budget})",
        forecasts,
        found,
        "the same rounds in random order, smoothed again",
        [c.shuffled(seed) for seed, c in enumerate(found)],
        ("known acceptance", [replace(c, forecast=c.expected) for c in found]),
    )


def forecasts(found: Sequence[Forecast]) -> Measurement:
    """A forecast has the right mean, goes with what follows, and errs less than the mean of all
    rounds so far, which knows of no change."""
    bias = max(abs(float(c.forecast.mean() / c.real.mean()) - 1) for c in found)
    together = interval([c.correlation for c in found])
    error = float(np.mean([_error(c.forecast, c.real) for c in found]))
    constant = float(np.mean([_error(_mean_so_far(c), c.real) for c in found]))
    return Measurement(
        f"means differ by at most {bias:.1%}, correlation with the next round {together}; root "
        f"mean square error {error:.2f} tokens, that of the mean so far {constant:.2f}",
        (bias <= _CLOSE, together.low > 0, error < constant),
    )


def _error(forecast: FloatArray, real: FloatArray) -> float:
    return float(np.sqrt(np.mean((forecast - real) ** 2)))


def _mean_so_far(found: Forecast) -> FloatArray:
    before = np.append(found.forecast[0], found.real[:-1]).cumsum()
    return np.asarray(before / np.arange(1, len(before) + 1))


def _draw(job: Trial, curves: dict[int, Forecast]) -> None:
    plots = []
    for budget, found in curves.items():
        rounds = np.arange(_WINDOW, len(found.real) + 1)
        moving = {
            name: np.lib.stride_tricks.sliding_window_view(values, _WINDOW).mean(axis=1)
            for name, values in (("real", found.real), ("forecast", found.forecast))
        }
        axes = {"title": f"C = {budget}", "xlabel": "round", "ylabel": "tokens a round"}
        plots.append(
            [Plot({n: (rounds, y) for n, y in moving.items()}, {**axes, "ylim": (0, None)})]
        )
    title = "Goodput, and its estimate one round before (GoodSpeed, figure 2)"
    draw(job.out / f"{NAME}.png", title, plots)


EXPERIMENT = Experiment(NAME, "Figure 2: estimated goodput against real goodput", run)
