"""The whole loop at once: admission, allocation and selection on one workload, each switched on by
itself and all together.

A machine sees a calm, in which requests are few, and then a rush, in which they come three times as
fast as it could serve them without drafts; both are judged by the mean latency of their requests.
The base is `vllm_v1`, four draft tokens from one drafter for everybody. Switched on are
`fluid_guided` after WAIT, `priced` after GoodSpeed's question of lengths, and `auto` after
Spin's of drafters.

Two machines. `a100` has the measured step times of Llama-2-7B with memory for 20,000 tokens, long
prompts, and four specialists with a device each (`lab.common.families`): drafters differ by text,
and work beside the target. `cpu` is a processor with the bundled family's copies of 507 M and less
(`zoo-grown`): everything shares the same cores, and a verified row costs nearly a step's worth.

The placebo is the base itself with other luck in its drafts: the same requests, accepted anew. The
oracle is the best of all systems in hindsight in each run and phase; for all together it is the
product of the parts' gains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import specialists_acceptances, specialists_profile
from lab.common.report import draw_intervals, rows_of, write_table
from lab.common.statistics import SEEDS, FloatArray, Interval, interval, ratio
from penstock.config import PolicyConfig
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.domains import AcceptanceFit, load_acceptance
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload, make_workload

NAME = "whole_loop"

_ADMISSION, _ALLOCATION, _SELECTION = (
    {"admission": PolicyConfig.from_name("fluid_guided")},
    {"allocation": PolicyConfig.from_name("priced")},
    {"selection": PolicyConfig.from_name("auto")},
)
BASE, ALL, PLACEBO = "base", "all", "placebo"
PARTS: Mapping[str, Mapping[str, PolicyConfig]] = {
    "admission": _ADMISSION,
    "allocation": _ALLOCATION,
    "selection": _SELECTION,
}
SYSTEMS: Mapping[str, Mapping[str, PolicyConfig]] = {
    BASE: {},
    **PARTS,
    ALL: {**_ADMISSION, **_ALLOCATION, **_SELECTION},
    PLACEBO: {},
}
PHASES = ("calm", "rush")
_CALM, _RUSH = 0.05, 3.0
"""Requests a second over the bound of the fluid without drafts."""
_SHARES = (0.25, 0.75)
"""Of the requests, by phase."""
_CLOSE = 0.05
_OTHER_LUCK = 1000


@dataclass(frozen=True)
class Machine:
    """prompt: median tokens, and σ of their logarithm; output likewise."""

    profile: StepProfile
    fit: AcceptanceFit
    pipeline: str
    prompt: tuple[float, float]
    output: tuple[float, float] = (100, 0.7)

    def lengths(self, num: int, seed: int) -> Workload:
        """Requests of all domains, each of which is a tenant's."""
        rng = np.random.default_rng((26, seed))
        prompts, outputs = (
            rng.lognormal(math.log(median), spread, num).astype(np.int64).clip(8, 4000)
            for median, spread in (self.prompt, self.output)
        )
        tenants = rng.choice(np.array(list(self.fit.domains)), num)
        return Workload("calm and rush", prompts, outputs, tenants=tenants)

    def day(self, num: int, seed: int) -> Workload:
        """So many requests of both phases, one after the other."""
        bound = load_bound(self.profile, self.lengths(500, 0), self.profile.kv_tokens)
        lengths, calm = self.lengths(num, seed), round(_SHARES[0] * num)
        phases = (lengths.select(slice(calm)), lengths.select(slice(calm, None)))
        times: list[Any] = [
            make_workload(phase, rate=share * bound, seed=2 * seed + i).arrival_time
            for i, (phase, share) in enumerate(zip(phases, (_CALM, _RUSH), strict=True))
        ]
        times[1] += times[0][-1] * calm / max(calm - 1, 1)  # one mean gap of the first behind it
        return replace(lengths, arrival_time=np.concatenate(times))


def machine(name: str) -> Machine:
    """`a100` or `cpu`."""
    if name == "cpu":
        return Machine(load_profile("zoo-grown"), load_acceptance(), "off", (60, 0.8))
    profile = replace(specialists_profile(0.1), kv_tokens=20_000)
    return Machine(profile, specialists_acceptances(0.2), "async", (800, 0.8))


MACHINES = ("a100", "cpu")
Latencies = dict[tuple[str, str], FloatArray]
"""By machine and system: seconds, [seeds, phases]."""


def run(job: Trial) -> list[ClaimVerdict]:
    num = max(16, min(400, job.effort.curve_arrivals // 40))
    seeds = SEEDS[: job.effort.repetitions]
    cells = [*itertools.product(MACHINES, SYSTEMS)]
    played = job.by_cell(
        latency, cells, seeds, num, what=lambda name, system, *_: f"{NAME}: {name}, {system}"
    )
    found = {cell: np.array(seconds) for cell, seconds in played.items()}
    header = ("machine", "system", "seed", *(f"{phase}_latency_s" for phase in PHASES))
    write_table(job.out / f"{NAME}.csv", header, rows_of(found))
    title = "Admission, allocation and selection, alone and together (95% intervals)"
    draw_gains(job.out / f"{NAME}.png", title, found)
    return [verdict for name in MACHINES for verdict in verdicts(name, found)]


def latency(name: str, system: str, num: int, seed: int) -> list[float]:
    """Mean seconds of the requests of each phase. Raises: PolicyError."""
    scene = machine(name)
    load = scene.day(num, seed)
    luck = seed + _OTHER_LUCK * (system == PLACEBO)
    base: dict[str, Any] = {
        "admission": PolicyConfig.from_name("vllm_v1"),
        "allocation": PolicyConfig.from_name("fixed", k=4),
        "selection": PolicyConfig.from_name("single"),
    }
    setup = Setup(
        scene.profile,
        **{**base, **SYSTEMS[system]},
        block_size=16,
        acceptance=DomainAcceptance(scene.fit, luck),
        drafters=tuple(d.name for d in scene.profile.drafters),
        pipeline=scene.pipeline,
        seed=seed,
    )
    report = simulate(setup, load)
    seconds = report.finished_at - report.arrived_at
    calm = round(_SHARES[0] * num)
    return [float(seconds[:calm].mean()), float(seconds[calm:].mean())]


def verdicts(name: str, found: Latencies) -> list[ClaimVerdict]:
    base, all_ = found[name, BASE], found[name, ALL]
    alone = {part: found[name, part] for part in PARTS}
    best = min(alone, key=lambda part: float(np.log(alone[part]).mean()))
    known = np.min([*alone.values(), all_], axis=0)
    hindsight = "the best system of each run and phase"
    product = base * np.prod([part / base for part in alone.values()], axis=0)
    told = [
        check(
            f"{name}: {what} makes requests faster",
            faster,
            (base, found[name, system]),
            "the base with other luck",
            (base, found[name, PLACEBO]),
            (hindsight, (base, known)),
        )
        for system, what in (
            *((part, f"{next(iter(PARTS[part].values())).name} alone") for part in PARTS),
            (ALL, "all three together"),
        )
    ]
    return [
        *told,
        check(
            f"{name}: together they gain more than the best of them alone ({best})",
            faster,
            (alone[best], all_),
            "that one in place of all",
            (alone[best], alone[best]),
            ("the product of the parts' gains", (alone[best], product)),
        ),
        check(
            f"{name}: gains multiply, to {_CLOSE:.0%}",
            multiply,
            (base, all_, *alone.values()),
            "only the best part counted",
            (base, all_, alone[best], base, base),
            ("the product of the parts' gains", (base, product, *alone.values())),
        ),
    ]


def faster(given: tuple[FloatArray, FloatArray]) -> Measurement:
    """Before and after, [seeds, phases] each: in the calm, and in the rush."""
    before, after = given
    gains = [ratio(before[:, i], after[:, i]) for i in range(len(PHASES))]
    return Measurement(_by_phase(gains), tuple(gain.low > 1 for gain in gains))


def multiply(given: tuple[FloatArray, ...]) -> Measurement:
    """The gain of all, over the product of the others' gains, with certainty."""
    base, all_, *alone = given
    rest = np.log(base / all_) - sum(np.log(base / part) for part in alone)
    left = [interval(rest[:, i]) for i in range(len(PHASES))]
    told = [Interval(*(math.exp(x) for x in (i.mean, i.low, i.high))) for i in left]
    return Measurement(
        f"over the product of the parts' gains {_by_phase(told)}",
        tuple(i.low >= -_CLOSE and i.high <= _CLOSE for i in left),
    )


def _by_phase(gains: list[Interval]) -> str:
    return ", ".join(f"{p} {g} times" for p, g in zip(PHASES, gains, strict=True))


def draw_gains(path: Path, title: str, found: Latencies) -> None:
    """The gain of every system over the base, by machine and phase. Raises: LabError, OSError."""
    names = [system for system in SYSTEMS if system != BASE]
    gains = {
        scene: {
            phase: {n: ratio(found[scene, BASE][:, i], found[scene, n][:, i]) for n in names}
            for i, phase in enumerate(PHASES)
        }
        for scene in dict.fromkeys(name for name, _ in found)
    }
    draw_intervals(path, title, gains, "base's mean latency over this one's")


EXPERIMENT = Experiment(NAME, "All three papers' parts in one loop, simulated", run)
