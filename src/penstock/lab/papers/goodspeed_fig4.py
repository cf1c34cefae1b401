"""GoodSpeed, figure 4: utility of the average goodput over 600 rounds, against its baselines.

U(x̄(T)) = Σ log of realised tokens a round since the first. Acceptance jumps by 0.3 every hundred
rounds, each client in its own time, in place of the paper's changing prompts. `goodspeed_adaptive`
is drawn beside. Utilities are totals over the clients, in nats.

Two controls. That a mean over 400 rounds and more hardly moves is true of Random-S as well. And
`goodspeed` that is told of every client what another one did must lose what it gains by learning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.policies.registry import make_policy
from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Experiment, Trial
from penstock.lab.oracles import Misled
from penstock.lab.report import Plot, draw, write_table
from penstock.lab.rounds import FloatArray, GeometricClients, jumping_rates, play
from penstock.lab.statistics import interval

NAME = "goodspeed_fig4"

_SETTINGS = ((4, 24), (4, 28), (8, 16), (8, 20))
_ROUNDS = 600
_DWELL = 100
_SETTLED = 400
_STEADY = 0.02
_FIRST = 50
_BASELINES = ("fixed", "random")
_MISLED = "goodspeed, misled"
_POLICIES = (*_BASELINES, "goodspeed", "goodspeed_adaptive", _MISLED)

Curves = dict[tuple[int, int], dict[str, FloatArray]]


def run(job: Trial) -> list[ClaimVerdict]:
    seeds = range(job.effort.repetitions)
    drawn = job.each(
        utility,
        ((name, *where, seed) for where in _SETTINGS for name in _POLICIES for seed in seeds),
        lambda _, clients, budget, *__: f"{NAME}: {clients} clients, C = {budget}",
    )
    curves: Curves = {
        where: {name: np.stack([next(drawn) for _ in seeds]) for name in _POLICIES}
        for where in _SETTINGS
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
    policy = make_policy("allocation", name.partition(",")[0], options)
    if name == _MISLED:
        policy = Misled(policy)
    tokens = play(policy, world.clients(), budget, _ROUNDS).tokens
    means = tokens.cumsum(axis=0) / np.arange(1, _ROUNDS + 1)[:, None]
    return np.asarray(np.log(means).sum(axis=1))


def verdicts(curves: Curves) -> list[ClaimVerdict]:
    found = []
    for (clients, budget), by_policy in curves.items():
        where = f"({clients} clients, C = {budget})"
        ours, misled = by_policy["goodspeed"], by_policy[_MISLED]
        baselines = {name: by_policy[name] for name in _BASELINES}
        found += [
            check(
                f"utility is steady from round {_SETTLED} on {where}",
                steadiness,
                ours / clients,
                "Random-S, which learns nothing",
                by_policy["random"] / clients,
            ),
            check(
                f"utility is above Fixed-S and Random-S from round {_FIRST} on {where}",
                advantage,
                (ours, baselines),
                "told of every client what another one did",
                (misled, baselines),
            ),
        ]
    return found


def steadiness(utilities: FloatArray) -> Measurement:
    """utilities: [seeds, rounds], in nats a client."""
    moved = float(np.ptp(utilities.mean(axis=0)[_SETTLED:]))
    return Measurement(f"moves by {moved:.3f} nats a client", (moved <= _STEADY,))


def advantage(found: tuple[FloatArray, dict[str, FloatArray]]) -> Measurement:
    """Utilities of a policy and of its baselines, [seeds, rounds] each."""
    ours, baselines = found
    shown, parts = [], []
    for name, theirs in baselines.items():
        ahead = ours - theirs
        last = interval(ahead[:, -1].tolist())
        least = float(ahead.mean(axis=0)[_FIRST:].min())
        shown.append(f"{last} against {name} after {_ROUNDS} (smallest mean {least:+.2f})")
        parts.append(last.low > 0 and least > 0)
    return Measurement("nats, all clients together: " + ", ".join(shown), tuple(parts))


def _draw(job: Trial, curves: Curves) -> None:
    rounds = np.arange(1, _ROUNDS + 1)
    plots = [
        Plot(
            {p: (rounds, found[p].mean(axis=0)) for p in _POLICIES if p != _MISLED},
            {"title": f"{clients} clients, C = {budget}", "xlabel": "round", "ylabel": "U(x̄)"},
        )
        for (clients, budget), found in curves.items()
    ]
    title = "Utility of the average goodput (GoodSpeed, figure 4)"
    draw(job.out / f"{NAME}.png", title, [plots[:2], plots[2:]])


EXPERIMENT = Experiment(NAME, "Figure 4: utility over rounds, against Fixed-S and Random-S", run)
