"""WAIT paper, lemmas C.2, C.6, D.1 and D.2: does a simpler process stay above the queue on every
path?

C.2 and D.1 are about recursions, which are drawn as they are printed. C.6 is about Algorithm 1
itself, whose batches begin and end at other times than those of the process that shall dominate it.
It is looked at where that process has just been served: in between both get the same arrivals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import FloatArray
from lab.common.thresholds import unit_traffic
from lab.common.wait_paths import IntArray, gathered, lindley, wait_runs
from penstock.fluid.queues import tail_exponent
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.fluid.traffic import scaled
from penstock.fluid.wait import WaitThresholds, wait_thresholds

NAME = "wait_lemmas"

_STEPS = 400
_LAMBDAS = (2, 10, 50)
_TRANSITIONS = ((8, 7, 0.75), (7, 5, 2 / 3), (40, 23, 0.5))
"""n_{k−1}, n_k and p_k."""
_RATE = 200.0
_HORIZON_S = 10.0
_FLOORS = (1, 2, 3)
"""Of lemma C.6's process, in thresholds; the paper has 2."""
_COUNTED = ("ends", "begins")
"""Until when a prompt counts as waiting: until its prefill ends, as the recursion has it, or until
it begins."""


@dataclass(frozen=True)
class Dominance:
    """Of paths that were compared: on how many the queue was above, and by how much at most."""

    paths: int
    violated: int
    most: float

    @classmethod
    def from_queue(cls, queue: IntArray, dominating: FloatArray) -> Dominance:
        """Both [paths, times]."""
        above = (queue - dominating).max(axis=1)
        return cls(len(above), int((above > 0).sum()), float(max(above.max(), 0)))

    def __add__(self, other: Dominance) -> Dominance:
        return Dominance(
            self.paths + other.paths, self.violated + other.violated, max(self.most, other.most)
        )


_NONE = Dominance(0, 0, 0)
ByFloor = dict[int, Dominance]


def run(job: Trial) -> list[ClaimVerdict]:
    paths = 50 * job.effort.seeds
    job.tell(f"{NAME}: recursions")
    c2 = {floor: _lemma_c2(paths, floor) for floor in (1, 2)}
    d1 = {floor: _lemma_d1(paths, floor) for floor in (0, 1)}
    job.tell(f"{NAME}: Algorithm 1")
    slack, tight = policies()
    jobs = [(policy, 5, seed) for policy in (slack, tight) for seed in range(paths // 20)]
    found = [*job.each(_lemma_c6, jobs)]
    c6 = {
        until: {f: sum((x[until][f] for x in found), _NONE) for f in _FLOORS} for until in _COUNTED
    }
    rows = [("C.2", c2), *((f"C.6, until the prefill {u}", c6[u]) for u in c6), ("D.1", d1)]
    write_table(
        job.out / f"{NAME}.csv",
        ("lemma", "floor", "paths", "violated", "most"),
        (
            (lemma, floor, d.paths, d.violated, d.most)
            for lemma, by_floor in rows
            for floor, d in by_floor.items()
        ),
    )
    _draw(job, slack)
    return verdicts(c2, c6, d1)


# --- dominance ------------------------------------------------------------------------------------


def _lemma_c2(paths: int, floor: int) -> Dominance:
    """W^t + λ against W̃ with a floor of so many λ."""
    total = _NONE
    for rate in _LAMBDAS:
        come = np.random.default_rng((1, rate)).poisson(rate, (paths, _STEPS))
        queue = gathered(come, rate)
        total += Dominance.from_queue(queue + rate, lindley(come - rate, floor * rate))
    return total


def _lemma_d1(paths: int, floor: int) -> Dominance:
    """W^s of a later segment against W̃ with a floor of so many n_k."""
    total = _NONE
    for before, here, p in _TRANSITIONS:
        come = np.random.default_rng((2, before)).binomial(before, p, (paths, _STEPS))
        total += Dominance.from_queue(gathered(come, here), lindley(come - here, floor * here))
    return total


def policies() -> tuple[WaitThresholds, WaitThresholds]:
    """Algorithm 1 on the low workload, with slack in eq. 7 and nearly without."""
    unit = unit_traffic("low")
    slack = wait_thresholds(PAPER_LINEAR, scaled(unit, _RATE), PAPER_LINEAR.kv_tokens)
    full = min(
        n / (kind.rate * slack.iteration_s) for n, kind in zip(slack.thresholds, unit, strict=True)
    )
    return slack, replace(slack, traffic=scaled(unit, 0.95 * full))


def ends_of(policy: WaitThresholds) -> FloatArray:
    """When the dominating process is served: every ΔT with all types."""
    count = int(_HORIZON_S / policy.iteration_s)
    return np.arange(1, count, dtype=np.float64) * policy.iteration_s


def _lemma_c6(policy: WaitThresholds, runs: int, seed: int) -> dict[str, ByFloor]:
    """By how prompts are counted and by the floor of W̃ in thresholds, over all types."""
    found = wait_runs(policy, PAPER_LINEAR, _HORIZON_S, runs, seed)
    times = ends_of(policy)
    total = {until: dict.fromkeys(_FLOORS, _NONE) for until in _COUNTED}
    for one, (kind, n) in itertools.product(range(runs), enumerate(policy.thresholds)):
        number = int(n)
        come = np.searchsorted(found.arrived[one, kind], times, side="right")
        steps = np.diff(come, prepend=0)[None] - number
        for until, floor in itertools.product(_COUNTED, _FLOORS):
            queue = found.waiting(one, kind, times, number, until)
            dominating = lindley(steps, floor * number)[:, 1:]
            total[until][floor] += Dominance.from_queue(queue[None], dominating)
    return total


# --- verdicts -------------------------------------------------------------------------------------


def verdicts(c2: ByFloor, c6: dict[str, ByFloor], d1: ByFloor) -> list[ClaimVerdict]:
    """Dominance by the floor of the dominating process, in thresholds."""
    return [
        _dominance("lemma C.2: W̃ ≥ W + λ on every path (floor 2λ)", c2, 2, 1),
        check(
            "lemma C.6: W̃ ≥ W at all times for Algorithm 1 (floor 2n)",
            both_counts,
            [by_floor[2] for by_floor in c6.values()],
            "a floor of 1 of them",
            [by_floor[1] for by_floor in c6.values()],
            ("a floor of 3n", [by_floor[3] for by_floor in c6.values()]),
        ),
        _dominance("lemma D.1: W̃ ≥ W on every path (floor n_k)", d1, 1, 0),
        check(
            "lemma D.2: θ rises with D = n_k − n_{k−1} p_k, and θ ≥ 8 D / n_{k−1}",
            root_bound,
            lambda before, here: before,
            "over n_k, as theorem B.2 prints it",
            lambda before, here: here,
        ),
    ]


def _dominance(claim: str, found: ByFloor, floor: int, lower: int) -> ClaimVerdict:
    return check(claim, dominates, found[floor], f"a floor of {lower} of them", found[lower])


def dominates(found: Dominance) -> Measurement:
    return Measurement(
        f"violated on {found.violated:,} of {found.paths:,} paths, by at most {found.most:g}",
        (found.violated == 0,),
    )


def both_counts(found: Sequence[Dominance]) -> Measurement:
    """By `_COUNTED`."""
    parts = [dominates(one) for one in found]
    told = (f"until it {u}, {p.measured}" for u, p in zip(_COUNTED, parts, strict=True))
    return Measurement(
        f"prompts counted by their prefill: {'; '.join(told)}",
        tuple(itertools.chain(*(p.parts for p in parts))),
    )


def root_bound(below_the_line: Callable[[int, int], int]) -> Measurement:
    """8 D over what `below_the_line(n_{k−1}, n_k)` says against the root of eq. 13, on a grid."""
    worst, rises = np.inf, True
    for before, p in itertools.product((5, 20, 100, 500), (0.1, 0.3, 0.5, 0.7, 0.9)):
        heres = _between(before, p)
        roots = [tail_exponent(before, here, p) for here in heres]
        rises &= all(a < b for a, b in itertools.pairwise(roots))
        ratios = (
            root * below_the_line(before, here) / (8 * (here - before * p))
            for here, root in zip(heres, roots, strict=True)
        )
        worst = min([worst, *ratios])
    return Measurement(
        f"θ is {'' if rises else 'not '}rising, and at least {worst:.3f} times that bound",
        (worst >= 1 - 1e-9 and rises,),
    )


def _between(before: int, p: float) -> Sequence[int]:
    """Thresholds with a root: above n_{k−1} p_k, below n_{k−1}."""
    return range(int(before * p + 1e-9) + 1, before)


# --- picture --------------------------------------------------------------------------------------


def _draw(job: Trial, policy: WaitThresholds) -> None:
    """A path of each kind: of D.1, and of C.6 around the largest violation."""
    before, here, p = _TRANSITIONS[0]
    come = np.random.default_rng(0).binomial(before, p, (1, 60))
    batches = np.arange(61)
    left = Plot(
        {
            "W, the queue": (batches, gathered(come, here)[0]),
            "W̃, the paper's": (batches, lindley(come - here, here)[0]),
        },
        {"title": "D.1", "xlabel": "batch", "ylabel": "requests waiting", "ylim": (0, None)},
        "o-",
    )
    found = wait_runs(policy, PAPER_LINEAR, _HORIZON_S, 1, 0)
    n = int(policy.thresholds[0])
    times = ends_of(policy)
    come = np.searchsorted(found.arrived[0, 0], times, side="right")
    process = partial(lindley, np.diff(come, prepend=0)[None] - n)
    queue, paper, mended = (
        found.waiting(0, 0, times, n, "ends"),
        process(2 * n)[0, 1:],
        process(3 * n)[0, 1:],
    )
    centre = int(np.clip(np.argmax(queue - paper), 20, len(times) - 20))
    part = slice(centre - 20, centre + 20)
    lines = {"W, the queue": queue, "W̃, the paper's": paper, "W̃ from 3n": mended}
    right = Plot(
        {name: (times[part], y[part]) for name, y in lines.items()},
        {"title": "C.6", "xlabel": "time, s", "ylabel": "requests waiting", "ylim": (0, None)},
        "o-",
    )
    title = "Queues and what shall dominate them (WAIT paper)"
    draw(job.out / f"{NAME}.png", title, [[left, right]])


EXPERIMENT = Experiment(NAME, "WAIT, lemmas C.2, C.6, D.1, D.2: dominance on every path", run)
