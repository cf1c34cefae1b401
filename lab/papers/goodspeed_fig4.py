"""GoodSpeed, figure 4: utility of the average goodput over 600 rounds, against its baselines.

U(x̄(T)) = Σ log of realised tokens a round since the first. Acceptance jumps by 0.3 every hundred
rounds, each client in its own time, in place of the paper's changing prompts; with recorded data
(`--data`) eight clients play the acceptance of look-up and EAGLE on two data sets back, too. Drawn
beside is x*, the optimum for known acceptance. Utilities are totals over the clients, in nats;
bands are intervals of 95% over the seeds.

Three controls. That a mean over 400 rounds and more hardly moves is true of Random-S as well.
`goodspeed` that is told of every client what another one did must lose what it gains by learning.
And what is as close to x* as Fixed-S is not close. The oracle is `goodspeed` that knows acceptance
(of recorded clients, that of the round that comes), for the least goodput with a utility that is
nearly max-min fair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.fair_path import fair_optimum_of_rounds
from lab.common.oracles import Misled, Told
from lab.common.report import Plot, draw, write_table
from lab.common.rounds import (
    Client,
    FloatArray,
    GeometricClients,
    RecordedClient,
    jumping_rates,
    play,
)
from lab.common.statistics import interval, ratio
from lab.rivals import policy_named
from penstock.core.policies.base import AllocationPolicy
from penstock.sim.acceptance import read_records

NAME = "goodspeed_fig4"

_ROUNDS = 600
_DWELL = 100
_SETTLED = 400
_STEADY = 0.02
_FIRST = 50
_NEAR = 0.02
_BASELINES = ("fixed", "random")
_MISLED = "goodspeed, misled"
_SHOWN = (*_BASELINES, "goodspeed", _MISLED)
_TOLD = {"goodspeed, told": 1.0, "max-min, told": 8.0}
"""Exponents of the oracles' utilities."""
_AVERAGING = {"beta": 1.0, "beta_decay": 0.9, "eta_decay": 1.0}
"""Of goodput, since the first round."""
_POLICIES = (*_SHOWN, *_TOLD)
OPTIMUM = "x*"


class Setting(NamedTuple):
    """records: of acceptance, which the clients play back; else it jumps."""

    clients: int
    budget: int
    records: tuple[tuple[str, Path], ...] = ()

    def __str__(self) -> str:
        what = f"{self.clients} clients, C = {self.budget}"
        return f"{what}, recorded acceptance" if self.records else what


_JUMPING = tuple(itertools.starmap(Setting, ((4, 24), (4, 28), (8, 16), (8, 20))))
_RECORDS = ("accept_gsm8k.jsonl.gz", "accept_sharegpt.jsonl.gz")
_RECORDED_BUDGET = 20

Curves = Mapping[Setting, Mapping[str, FloatArray]]
"""By policy U(x̄(T)), shape [seeds, rounds], and U(x*), shape [seeds, 1]."""
Means = Mapping[Setting, Mapping[str, FloatArray]]
"""By policy x̄ after the last round, shape [seeds, clients]."""


def run(job: Trial) -> list[ClaimVerdict]:
    seeds = range(job.effort.repetitions)
    settings = settings_of(job)
    cells = [(name, where) for where in settings for name in _POLICIES]
    drawn = job.by_cell(mean_goodput, cells, seeds, what=lambda _, where, __: f"{NAME}: {where}")
    means = {w: {p: np.stack([m[-1] for m in drawn[p, w]]) for p in _POLICIES} for w in settings}
    curves: dict[Setting, dict[str, FloatArray]] = {
        where: {p: np.log(drawn[p, where]).sum(axis=2) for p in _POLICIES} for where in settings
    }
    for where, found in curves.items():
        if not where.records:
            found[OPTIMUM] = np.array([[optimum(where, seed)] for seed in seeds])
    write_table(
        job.out / f"{NAME}.csv",
        ("clients", "C", "acceptance", "round", *_POLICIES, OPTIMUM),
        (
            (
                *where[:2],
                "recorded" if where.records else "jumping",
                t + 1,
                *(float(found[name][:, t].mean()) for name in _POLICIES),
                float(found[OPTIMUM].mean()) if OPTIMUM in found else "",
            )
            for where, found in curves.items()
            for t in range(_ROUNDS)
        ),
    )
    _draw(job, curves)
    return verdicts(curves, means)


def settings_of(job: Trial) -> list[Setting]:
    """With recorded acceptance where it is there."""
    settings = list(_JUMPING)
    paths = [job.data / name for name in _RECORDS] if job.data else []
    if paths and all(path.is_file() for path in paths):
        records = tuple((drafter, path) for drafter in ("ngram", "eagle") for path in paths)
        settings.append(Setting(2 * len(records), _RECORDED_BUDGET, records))
    else:
        job.tell(f"{NAME}: recorded acceptance left out, for want of {' and '.join(_RECORDS)}")
    return settings


def mean_goodput(name: str, where: Setting, seed: int) -> FloatArray:
    """x̄(T) for T = 1, 2, … in one run, shape [rounds, clients]."""
    clients = clients_of(where, seed)
    policy = policy_of(name, where, seed, clients)
    tokens = play(policy, clients, where.budget, _ROUNDS).tokens
    return np.asarray(tokens.cumsum(axis=0) / np.arange(1, _ROUNDS + 1)[:, None])


def policy_of(name: str, where: Setting, seed: int, clients: Sequence[Client]) -> AllocationPolicy:
    if name in _TOLD:
        rates: Iterable[Any] = rates_of(where, seed)
        if where.records:
            rates = ([1 - 1 / (c.most_accepted() + 1) for c in clients] for _ in range(_ROUNDS))  # type: ignore[attr-defined]
        options = {"total": where.budget, "fairness": _TOLD[name], **_AVERAGING}
        return Told(rates, **options)
    policy = policy_named(name.partition(",")[0], total=where.budget).make("allocation")
    return Misled(policy) if name == _MISLED else policy


def rates_of(where: Setting, seed: int) -> FloatArray:
    """[rounds, clients], where they jump."""
    return jumping_rates(_ROUNDS, where.clients, _DWELL, seed)


def clients_of(where: Setting, seed: int) -> list[Client]:
    """Recorded ones are each drafter on each data set, twice."""
    if not where.records:
        return GeometricClients(rates_of(where, seed), seed).clients()
    rows = [read_records(path, [drafter])[drafter] for drafter, path in where.records]
    return [RecordedClient(rows[i // 2], (seed, i)) for i in range(where.clients)]


def optimum(where: Setting, seed: int) -> float:
    """U(x*) of the acceptance that jumps, known to its holder."""
    return float(np.log(fair_optimum_of_rounds(rates_of(where, seed), where.budget)).sum())


def verdicts(curves: Curves, means: Means) -> list[ClaimVerdict]:
    """Over all settings; each test is of a policy, by name."""
    told, even = _TOLD
    misled = "told of every client what another one did", _MISLED
    tests = [
        (
            f"utility is steady from round {_SETTLED} on",
            partial(steadiness, curves),
            ("Random-S, which learns nothing", "random"),
            told,
        ),
        (
            f"utility is above Fixed-S's and Random-S's from round {_FIRST} on",
            partial(advantage, curves),
            misled,
            told,
        ),
        (
            "utility levels off at U(x*)",
            partial(nearness, curves),
            ("Fixed-S in its place", "fixed"),
            told,
        ),
        (
            "system-wide goodput is above Fixed-S's and Random-S's (abstract)",
            partial(
                above, {w: {p: m.sum(axis=1) for p, m in by.items()} for w, by in means.items()}
            ),
            misled,
            told,
        ),
        (
            "the least client's goodput is above theirs (abstract: fairness)",
            partial(
                above, {w: {p: m.min(axis=1) for p, m in by.items()} for w, by in means.items()}
            ),
            misled,
            even,
        ),
    ]
    return [
        check(claim, test, "goodspeed", *control, ("known acceptance", oracle))
        for claim, test, control, oracle in tests
    ]


def steadiness(curves: Curves, policy: str) -> Measurement:
    moved = [
        float(np.ptp(by[policy].mean(axis=0)[_SETTLED:])) / w.clients for w, by in curves.items()
    ]
    told = ", ".join(f"{m:.3f}" for m in moved)
    return Measurement(f"moves by {told} nats a client", tuple(m <= _STEADY for m in moved))


def advantage(curves: Curves, policy: str) -> Measurement:
    """With certainty at the end, and in the mean at all times."""
    shown, parts = [], []
    for name in _BASELINES:
        ahead = [by[policy] - by[name] for by in curves.values()]
        last = [interval(a[:, -1]) for a in ahead]
        least = [float(a.mean(axis=0)[_FIRST:].min()) for a in ahead]
        shown.append(f"{'; '.join(map(str, last))} against {name}")
        parts.append(all(x.low > 0 for x in last) and min(least) > 0)
    return Measurement(
        f"nats, all clients together, after {_ROUNDS}: " + ", ".join(shown), tuple(parts)
    )


def nearness(curves: Curves, policy: str) -> Measurement:
    """Where x* is known."""
    short = [
        interval((by[OPTIMUM][:, 0] - by[policy][:, -1]) / w.clients)
        for w, by in curves.items()
        if OPTIMUM in by
    ]
    return Measurement(
        f"{'; '.join(map(str, short))} nats a client below after {_ROUNDS} rounds (near: {_NEAR})",
        tuple(x.mean <= _NEAR for x in short),
    )


def above(figures: Mapping[Setting, Mapping[str, FloatArray]], policy: str) -> Measurement:
    """[seeds] by setting and policy."""
    shown, parts = [], []
    for name in _BASELINES:
        gains = [ratio(by[policy], by[name]) for by in figures.values()]
        shown.append(f"{', '.join(f'{g.mean:.3f}' for g in gains)} times {name}'s")
        parts.append(all(g.low > 1 for g in gains))
    return Measurement("; ".join(shown), tuple(parts))


def _draw(job: Trial, curves: Curves) -> None:
    rounds = np.arange(1, _ROUNDS + 1)
    plots = []
    for where, found in curves.items():
        shown = {p: [interval(u) for u in found[p].T] for p in _SHOWN if p != _MISLED}
        lines: dict[str, Any] = {p: (rounds, [u.mean for u in of]) for p, of in shown.items()}
        if OPTIMUM in found:
            lines[OPTIMUM] = [1, _ROUNDS], 2 * [found[OPTIMUM].mean()]
        bands = {p: ([u.low for u in of], [u.high for u in of]) for p, of in shown.items()}
        axes = {"title": str(where), "xlabel": "round", "ylabel": "U(x̄), nats"}
        plots.append(Plot(lines, axes, styles={OPTIMUM: "k--"}, bands=bands))
    title = "Utility of the average goodput (GoodSpeed, figure 4)"
    rows = [plots[:2], plots[2:4]]
    draw(job.out / f"{NAME}.png", title, rows)
    if plots[4:]:
        draw(job.out / f"{NAME}_recorded.png", title, [plots[4:]])


EXPERIMENT = Experiment(NAME, "Figure 4: utility over rounds, against Fixed-S and Random-S", run)
