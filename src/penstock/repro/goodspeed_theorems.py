"""GoodSpeed, theorems 1, 3 and 4: fluid paths and the scheduler go to x* as β → 0.

Theorem 3 on fluid sample paths (x' = v − x, Lemma 2) from far starts. Theorems 1 and 4 on the
scheduler itself, with steady acceptance and η = β^1.5, so that η/β → 0. The theorems wait for T/β
rounds; but by then α̂ has moved from its start by 1 − exp(−T η/β) of the way only, which goes to 0
as well. So the wait here is T/β and another time for α̂, in proportion to 1/η. Evidence is
min(1, target/draft) over all positions as eq. 3 has it; again as 0/1 outcomes over all positions,
which is what a `coupled` verification shows; and up to the first rejection only, whose mean over a
round is no unbiased estimate. Controls: the optimum of other clients, and β that does not fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed
from penstock.fluid.fair_path import FluidPath, fair_optimum, fluid_path
from penstock.repro import Entry, Finding, Run, Verdict, check
from penstock.repro.goodspeed_rounds import FloatArray, GeometricClients, play
from penstock.repro.output import pyplot, save_figure, write_table

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
}
"""Whether evidence is min(1, target / draft), else 0 or 1, and options of the policy."""
_STUCK = "β stays at 0.5"


@dataclass(frozen=True)
class Sample:
    """At one β, worst of the starts: how often ‖X − x*‖ exceeds ε ‖x*‖, and the distance of the
    mean realised goodput from x*, over ‖x*‖."""

    beta: float
    exceeded: float
    average_error: float


def rates() -> FloatArray:
    """Acceptance of the clients."""
    return np.linspace(0.35, 0.88, _CLIENTS)


def run(job: Run) -> list[Verdict]:
    best = fair_optimum(rates(), _BUDGET).goodput
    job.tell(f"{NAME}: fluid paths")
    paths = {start: path_from(start) for start in _STARTS}
    betas = _BETAS[: 3 + min(job.effort.seeds // 4, 3)]
    samples: dict[str, list[Sample]] = {}
    for kind in _KINDS:
        samples[kind] = []
        for beta in betas:
            job.tell(f"{NAME}: β = {beta:g}, {kind}")
            samples[kind].append(sample(beta, best, kind, range(min(job.effort.seeds, 2))))
    write_table(
        job.out / f"{NAME}.csv",
        ("evidence", "beta", "exceeded", "average_error"),
        ((k, s.beta, s.exceeded, s.average_error) for k, found in samples.items() for s in found),
    )
    _draw(job, paths, best, samples)
    return [
        attraction(paths, best),
        concentration(samples["overlaps"]),
        averages(samples["overlaps"]),
        *(from_outcomes(where, samples[kind]) for kind, where in _OUTCOMES.items()),
    ]


_OUTCOMES = {"outcomes": "over all positions", "decided": "up to the first rejection"}


def path_from(start: float) -> FluidPath:
    return fluid_path(np.full(_CLIENTS, start), rates(), _BUDGET, _DURATION, _STEP)


def sample(beta: float, best: FloatArray, kind: str, seeds: Sequence[int]) -> Sample:
    """The scheduler at one β, from every start, over several seeds."""
    overlaps, options = _KINDS[kind]
    eta = beta**1.5
    skip = round(_BURN_IN / beta + _LEARNING / eta)
    rounds = skip + round(_LENGTH / beta)
    norm = float(np.linalg.norm(best))
    exceeded, errors = [], []
    for start in _STARTS:
        far, means = [], []
        for seed in seeds:
            steady = np.tile(rates(), (rounds, 1))
            world = GeometricClients(steady, seed, most=_BUDGET, overlaps=overlaps)
            steps = {"beta": beta, "eta": eta, "initial_goodput": start}
            policy = GoodSpeed(GoodSpeed.Options(**steps, **options))
            estimates: list[list[float]] = []

            def watch(policy: GoodSpeed = policy, seen: list[list[float]] = estimates) -> None:
                seen.append([policy.goodput(f"c{i}") for i in range(_CLIENTS)])

            played = play(policy, world.clients(), _BUDGET, rounds, watch=watch)
            distance = np.linalg.norm(np.array(estimates[skip:]) - best, axis=1)
            far.append((distance > _EPSILON * norm).mean())
            means.append(played.tokens[skip:].mean(axis=0))
        exceeded.append(float(np.mean(far)))
        errors.append(float(np.linalg.norm(np.mean(means, axis=0) - best)) / norm)
    return Sample(beta, max(exceeded), max(errors))


def attraction(paths: dict[float, FluidPath], best: FloatArray) -> Verdict:
    return check(
        "fluid sample paths go to x* from anywhere, uniformly (theorem 3)",
        attracted,
        (paths, best),
        "x* of the same clients in reverse order",
        (paths, best[::-1]),
    )


def attracted(found: tuple[dict[float, FluidPath], FloatArray]) -> Finding:
    paths, best = found
    ends, risen = [], []
    for path in paths.values():
        distance = np.linalg.norm(path.goodput - best, axis=1)
        ends.append(float(distance[-1]))
        utility = np.log(path.goodput).sum(axis=1)
        # Where a path comes from above, x falls to the region first; from then on U may not fall.
        inside = utility <= np.log(best).sum()
        risen.append(bool((np.diff(utility[inside]) >= -5 * _STEP).all()))
    return Finding(
        f"largest distance after t = {_DURATION:g} from starts of "
        f"{', '.join(f'{s:g}' for s in paths)} tokens a round: {max(ends):.4f}; "
        f"utility never falls below x*'s level: {'yes' if all(risen) else 'no'}",
        (max(ends) <= 0.01, all(risen)),
    )


def concentration(samples: Sequence[Sample]) -> Verdict:
    return check(
        f"Pr(‖X − x*‖ > {_EPSILON:g} ‖x*‖) goes to 0 with β (theorem 1)",
        concentrated,
        samples,
        _STUCK,
        [samples[0]] * len(samples),
    )


def concentrated(samples: Sequence[Sample]) -> Finding:
    return Finding(
        ", ".join(f"β {s.beta:g}: {s.exceeded:.1%}" for s in samples),
        (
            all(b.exceeded <= a.exceeded + 0.01 for a, b in pairwise(samples)),
            samples[-1].exceeded <= _RARE,
        ),
    )


def averages(samples: Sequence[Sample]) -> Verdict:
    return check(
        "mean realised goodput goes to x* with β (theorem 4)",
        average,
        samples,
        _STUCK,
        [samples[0]] * len(samples),
    )


def average(samples: Sequence[Sample]) -> Finding:
    last = samples[-1]
    return Finding(
        ", ".join(f"β {s.beta:g}: {s.average_error:.1%} off" for s in samples),
        (last.average_error <= _NEAR, last.average_error < samples[0].average_error),
    )


def from_outcomes(where: str, samples: Sequence[Sample]) -> Verdict:
    return check(
        f"the same from 0/1 outcomes {where} (not claimed by the paper)",
        average,
        samples,
        _STUCK,
        [samples[0]] * len(samples),
    )


def _draw(
    job: Run,
    paths: dict[float, FluidPath],
    best: FloatArray,
    samples: dict[str, list[Sample]],
) -> None:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for start, path in paths.items():
        left.plot(path.times, np.linalg.norm(path.goodput - best, axis=1), label=f"from {start:g}")
    left.set(yscale="log", xlabel="t = β · rounds", ylabel="distance to x*", title="fluid paths")
    for kind, found in samples.items():
        right.plot([s.beta for s in found], [s.exceeded for s in found], "o-", label=f"{kind}, X")
        right.plot(
            [s.beta for s in found], [s.average_error for s in found], "s--", label=f"{kind}, mean"
        )
    right.set(xscale="log", xlabel="β", ylabel="share of rounds far off; error of the mean")
    left.legend()
    right.legend()
    figure.suptitle("Convergence to x* (GoodSpeed, theorems 1, 3 and 4)")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Theorems 1, 3 and 4: fluid paths and the scheduler converge to x*", run)
