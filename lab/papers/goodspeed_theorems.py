"""GoodSpeed, theorems 1, 3 and 4: fluid paths and the scheduler go to x* as β → 0.

Theorem 3 on fluid sample paths (x' = v − x, Lemma 2) from far starts. Theorems 1 and 4 on the
scheduler itself, with steady acceptance and η = β^1.5, so that η/β → 0. The theorems wait for T/β
rounds; but by then α̂ has moved from its start by 1 − exp(−T η/β) of the way only, which goes to 0
as well. So the wait here is T/β and another time for α̂, in proportion to 1/η. Evidence is
min(1, target/draft) over all positions as eq. 3 has it; again as 0/1 outcomes over all positions,
which is what a `coupled` verification shows; and up to the first rejection only, whose mean over a
round is no unbiased estimate. Controls: the optimum of other clients, and β that does not fall.
Oracles: a path straight to x*, and known acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.fair_path import FluidPath, fair_optimum, fluid_path
from lab.common.oracles import Told
from lab.common.report import Plot, draw, write_table
from lab.common.rounds import FloatArray, GeometricClients, play
from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed

NAME = "goodspeed_theorems"

_CLIENTS = 8
_BUDGET = 16
_BETAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_STARTS = (0.2, 1.0, 5.0)
_BURN_IN, _LENGTH = 20.0, 40.0
_LEARNING = 6.0
_DURATION, _STEP = 12.0, 2e-3
_EPSILON = 0.1
_RARE = 0.05
_NEAR = 0.02
_KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "overlaps": (True, {}),
    "outcomes": (False, {}),
    "decided": (False, {"evidence": "decided"}),
    "known": (True, {}),
}
"""Whether evidence is min(1, target / draft), else 0 or 1, and options of the policy."""
_STUCK = "β stays at 0.5"


@dataclass(frozen=True)
class AtBeta:
    """At one β, worst of the starts: how often ‖X − x*‖ exceeds ε ‖x*‖, and the distance of the
    mean realised goodput from x*, over ‖x*‖."""

    beta: float
    exceeded: float
    average_error: float


def rates() -> FloatArray:
    """Acceptance of the clients."""
    return np.linspace(0.35, 0.88, _CLIENTS)


def run(job: Trial) -> list[ClaimVerdict]:
    best = fair_optimum(rates(), _BUDGET).goodput
    job.tell(f"{NAME}: fluid paths")
    paths = {start: path_from(start) for start in _STARTS}
    betas = _BETAS[: 3 + min(job.effort.seeds // 4, 3)]
    seeds = range(min(job.effort.seeds, 2))
    found = job.each(
        sample,
        ((beta, best, kind, seeds) for kind in _KINDS for beta in betas),
        lambda beta, _, kind, __: f"{NAME}: β = {beta:g}, {kind}",
    )
    samples = {kind: [next(found) for _ in betas] for kind in _KINDS}
    write_table(
        job.out / f"{NAME}.csv",
        ("evidence", "beta", "exceeded", "average_error"),
        ((k, s.beta, s.exceeded, s.average_error) for k, found in samples.items() for s in found),
    )
    _draw(job, paths, best, samples)
    return [
        attraction(paths, best),
        concentration(samples["overlaps"], samples["known"]),
        averages(samples["overlaps"], samples["known"]),
        *(
            averages(
                samples[kind],
                samples["known"],
                f"the same from 0/1 outcomes {where} (not claimed by the paper)",
            )
            for kind, where in _OUTCOMES.items()
        ),
    ]


_OUTCOMES = {"outcomes": "over all positions", "decided": "up to the first rejection"}


def path_from(start: float) -> FluidPath:
    return fluid_path(np.full(_CLIENTS, start), rates(), _BUDGET, _DURATION, _STEP)


def sample(beta: float, best: FloatArray, kind: str, seeds: Sequence[int]) -> AtBeta:
    """The scheduler at one β, from every start, over several seeds."""
    overlaps, options = _KINDS[kind]
    eta = beta**1.5
    skip = round(_BURN_IN / beta + (0 if kind == "known" else _LEARNING / eta))
    rounds = skip + round(_LENGTH / beta)
    norm = float(np.linalg.norm(best))
    exceeded, errors = [], []
    for start in _STARTS:
        far, means = [], []
        for seed in seeds:
            steady = np.tile(rates(), (rounds, 1))
            world = GeometricClients(steady, seed, most=_BUDGET, overlaps=overlaps)
            steps = {"beta": beta, "eta": eta, "initial_goodput": start}
            made = partial(Told, steady) if kind == "known" else _estimating
            policy = made(**steps, **options)
            estimates: list[list[float]] = []

            def watch(policy: GoodSpeed = policy, seen: list[list[float]] = estimates) -> None:
                seen.append([policy.goodput(f"c{i}") for i in range(_CLIENTS)])

            played = play(policy, world.clients(), _BUDGET, rounds, watch=watch)
            distance = np.linalg.norm(np.array(estimates[skip:]) - best, axis=1)
            far.append((distance > _EPSILON * norm).mean())
            means.append(played.tokens[skip:].mean(axis=0))
        exceeded.append(float(np.mean(far)))
        errors.append(float(np.linalg.norm(np.mean(means, axis=0) - best)) / norm)
    return AtBeta(beta, max(exceeded), max(errors))


def _estimating(**options: Any) -> GoodSpeed:
    return GoodSpeed(GoodSpeed.Options(**options))


def attraction(paths: dict[float, FluidPath], best: FloatArray) -> ClaimVerdict:
    return check(
        "fluid sample paths go to x* from anywhere, uniformly (theorem 3)",
        attracted,
        (paths, best),
        "x* of the same clients in reverse order",
        (paths, best[::-1]),
        ("paths straight to x*", ({start: _straight(p, best) for start, p in paths.items()}, best)),
    )


def _straight(path: FluidPath, best: FloatArray) -> FluidPath:
    left = np.exp(-path.times)[:, None]
    return FluidPath(path.times, best + (path.goodput[0] - best) * left)


def attracted(found: tuple[dict[float, FluidPath], FloatArray]) -> Measurement:
    paths, best = found
    ends, risen = [], []
    for path in paths.values():
        distance = np.linalg.norm(path.goodput - best, axis=1)
        ends.append(float(distance[-1]))
        utility = np.log(path.goodput).sum(axis=1)
        # Where a path comes from above, x falls to the region first; from then on U may not fall.
        inside = utility <= np.log(best).sum()
        risen.append(bool((np.diff(utility[inside]) >= -5 * _STEP).all()))
    return Measurement(
        f"largest distance after t = {_DURATION:g} from starts of "
        f"{', '.join(f'{s:g}' for s in paths)} tokens a round: {max(ends):.4f}; "
        f"utility never falls below x*'s level: {'yes' if all(risen) else 'no'}",
        (max(ends) <= 0.01, all(risen)),
    )


def concentration(samples: Sequence[AtBeta], known: Sequence[AtBeta]) -> ClaimVerdict:
    claim = f"Pr(‖X − x*‖ > {_EPSILON:g} ‖x*‖) goes to 0 with β (theorem 1)"
    stuck = [samples[0]] * len(samples)
    return check(claim, concentrated, samples, _STUCK, stuck, ("known acceptance", known))


def concentrated(samples: Sequence[AtBeta]) -> Measurement:
    return Measurement(
        ", ".join(f"β {s.beta:g}: {s.exceeded:.1%}" for s in samples),
        (
            all(b.exceeded <= a.exceeded + 0.01 for a, b in pairwise(samples)),
            samples[-1].exceeded <= _RARE,
        ),
    )


def averages(
    samples: Sequence[AtBeta],
    known: Sequence[AtBeta],
    claim: str = "mean realised goodput goes to x* with β (theorem 4)",
) -> ClaimVerdict:
    stuck = [samples[0]] * len(samples)
    return check(claim, average, samples, _STUCK, stuck, ("known acceptance", known))


def average(samples: Sequence[AtBeta]) -> Measurement:
    last = samples[-1]
    return Measurement(
        ", ".join(f"β {s.beta:g}: {s.average_error:.1%} off" for s in samples),
        (last.average_error <= _NEAR, last.average_error < samples[0].average_error),
    )


def _draw(
    job: Trial, paths: dict[float, FluidPath], best: FloatArray, samples: dict[str, list[AtBeta]]
) -> None:
    distances = {
        f"from {start:g}": (path.times, np.linalg.norm(path.goodput - best, axis=1))
        for start, path in paths.items()
    }
    errors = {}
    for kind, found in samples.items():
        betas = [s.beta for s in found]
        errors[f"{kind}, X"] = betas, [s.exceeded for s in found]
        errors[f"{kind}, mean"] = betas, [s.average_error for s in found]
    left = {"yscale": "log", "xlabel": "t = β · rounds", "ylabel": "distance to x*"}
    right = {"xscale": "log", "xlabel": "β", "ylabel": "share of rounds far off; error of the mean"}
    plots = [Plot(distances, left | {"title": "fluid paths"}), Plot(errors, right, "o-")]
    draw(job.out / f"{NAME}.png", "Convergence to x* (GoodSpeed, theorems 1, 3, 4)", [plots])


EXPERIMENT = Experiment(
    NAME, "Theorems 1, 3 and 4: fluid paths and the scheduler converge to x*", run
)
