"""GoodSpeed, figure 4: utility of the average goodput over 600 rounds, against its baselines.

U(x̄(T)) = Σ log of realised tokens a round since the first. Acceptance jumps by 0.3 every hundred
rounds, each client in its own time, in place of the paper's changing prompts. `goodspeed_adaptive`
is drawn beside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.registry import make_policy
from penstock.repro import Entry, Run, Verdict, judge
from penstock.repro.goodspeed_rounds import FloatArray, GeometricClients, jumping_rates, play
from penstock.repro.output import pyplot, save_figure, write_table

NAME = "goodspeed_fig4"

_SETTINGS = ((4, 24), (4, 28), (8, 16), (8, 20))
_ROUNDS = 600
_DWELL = 100
_SETTLED = 400
_STEADY = 0.02
_FIRST = 50
_BASELINES = ("fixed", "random")
_POLICIES = (*_BASELINES, "goodspeed", "goodspeed_adaptive")

Curves = dict[tuple[int, int], dict[str, FloatArray]]


def run(job: Run) -> list[Verdict]:
    curves: Curves = {}
    for clients, budget in _SETTINGS:
        job.tell(f"{NAME}: {clients} clients, C = {budget}")
        curves[clients, budget] = {
            name: np.stack(
                [utility(name, clients, budget, seed) for seed in range(job.effort.seeds)]
            )
            for name in _POLICIES
        }
    write_table(
        job.out / f"{NAME}.csv",
        ("clients", "C", "round", *_POLICIES),
        (
            (clients, budget, t + 1, *(float(found[name][:, t].mean()) for name in _POLICIES))
            for (clients, budget), found in curves.items()
            for t in range(_ROUNDS)
        ),
    )
    _draw(job, curves)
    return verdicts(curves)


def utility(name: str, clients: int, budget: int, seed: int) -> FloatArray:
    """U(x̄(T)) for T = 1, 2, … in one run, shape [rounds]."""
    options: dict[str, Any] = {"total": budget}
    world = GeometricClients(jumping_rates(_ROUNDS, clients, _DWELL, seed), seed)
    policy = make_policy("allocation", name, options)
    tokens = play(policy, world.clients(), budget, _ROUNDS).tokens
    means = tokens.cumsum(axis=0) / np.arange(1, _ROUNDS + 1)[:, None]
    return np.asarray(np.log(means).sum(axis=1))


def verdicts(curves: Curves) -> list[Verdict]:
    found = []
    for (clients, budget), by_policy in curves.items():
        mean = {name: values.mean(axis=0) for name, values in by_policy.items()}
        ours = mean["goodspeed"]
        moved = float(np.ptp(ours[_SETTLED:])) / clients
        ahead = {name: ours[_FIRST:] - mean[name][_FIRST:] for name in _BASELINES}
        text = ", ".join(
            f"{values[-1]:+.2f} against {name} after {_ROUNDS} (smallest {values.min():+.2f})"
            for name, values in ahead.items()
        )
        found.append(
            Verdict(
                f"utility is steady from round {_SETTLED} on, and from round {_FIRST} on above "
                f"Fixed-S and Random-S ({clients} clients, C = {budget})",
                f"moves by {moved:.3f} nats a client; {text}",
                judge(moved <= _STEADY, *((values > 0).all() for values in ahead.values())),
            )
        )
    return found


def _draw(job: Run, curves: Curves) -> None:
    figure, axes = pyplot().subplots(2, 2, figsize=(10, 7), layout="constrained")
    rounds = np.arange(1, _ROUNDS + 1)
    for axis, ((clients, budget), found) in zip(axes.flat, curves.items(), strict=True):
        for name, values in found.items():
            axis.plot(rounds, values.mean(axis=0), label=name)
        axis.set(title=f"{clients} clients, C = {budget}", xlabel="round", ylabel="U(x̄)")
        axis.legend()
    figure.suptitle("Utility of the average goodput (GoodSpeed, figure 4)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Figure 4: utility over rounds, against Fixed-S and Random-S", run)
