"""Each paper's method inside the others' settings, and where it loses.

Three settings. In each all requests are there from the beginning, more than are ever served, and
memory holds so many of them; the first half of a run is to learn in. `WAIT's`: the paper's linear
machine and its workload `low`, with drafters, about eighty requests. `GoodSpeed's`: one drafter
whose tokens are accepted often for one of four clients and seldom for the others, about ten.
`Spin's`: LLaMA-7B with five drafters on a device each, all texts, about ten
(`lab.common.families`).

The base is `vllm_v1`, four draft tokens, one drafter for everybody; then one of its parts is
replaced: by the paper's own method to the letter, or by what this project has in its place. What
counts is tokens per second; in GoodSpeed's setting their geometric mean over the clients, which is
its utility. GoodSpeed shares out four tokens for each request that memory holds. Literal WAIT is
told the true lengths in its own setting; elsewhere all requests are of one type, since one prompt a
stage of several would need more memory still.

The placebo is the base with other luck in its drafts. The oracle is the best of all systems in each
run and setting, in hindsight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import (
    SPECIALISTS,
    SPIN_TEXTS,
    closed_loop,
    prompt_lengths,
    specialists_acceptances,
    specialists_profile,
    spin_acceptances,
    spin_profile,
)
from lab.common.report import draw_intervals, rows_of, write_table
from lab.common.statistics import SEEDS, FloatArray, ratio
from penstock.config import PolicyConfig
from penstock.fluid.step_profile import PAPER_LINEAR, DrafterProfile, StepProfile
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.domains import AcceptanceFit
from penstock.sim.run import Report, Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import MIXES, Workload, synthetic

NAME = "crossed"

_OUTPUT, _SPREAD = 128, 0.5
_LONGEST = 512
"""Tokens, of prompts and of outputs."""
_OTHER_LUCK = 1000
_ALIKE, _LITTLE = 0.01, 1.1
BASE, PLACEBO = "base", "placebo"
WAIT, NO_DRAFTS, WAIT_ALONE = "literal WAIT", "base, no drafters", "literal WAIT, no drafters"
GOODSPEED, LBSS = "GoodSpeed", "LBSS"
SETTINGS = ("WAIT's", "GoodSpeed's", "Spin's")
_MOST_PER_S = dict(zip(SETTINGS, (1500.0, 60.0, 20.0), strict=True))
"""Requests; none of these machines serves so many."""


@dataclass(frozen=True)
class Scene:
    """kv_tokens: of memory. single: the drafter of the base. wait: options of literal WAIT.
    budget: draft tokens a round, of GoodSpeed. seconds: of a run. lengths: of so many requests, by
    seed."""

    profile: StepProfile
    kv_tokens: int
    fit: AcceptanceFit
    single: str
    pipeline: str
    wait: Mapping[str, Any]
    budget: int
    seconds: float
    lengths: Callable[[int, int], Workload]


def _texts(num: int, seed: int) -> Workload:
    rng = np.random.default_rng((9, seed))
    outputs = rng.lognormal(math.log(_OUTPUT), _SPREAD, num).astype(np.int64).clip(16, _LONGEST)
    return closed_loop(prompt_lengths(rng, num).clip(8, _LONGEST), outputs)


def _clients(num: int, seed: int) -> Workload:
    """Of four clients, who are called like the domain that their requests are of."""
    tenants = np.random.default_rng((10, seed)).permutation(num) % len(SPECIALISTS)
    return replace(_texts(num, seed), tenants=np.array(SPECIALISTS)[tenants])


def _low(num: int, seed: int) -> Workload:
    drawn = synthetic("low", num, seed)
    return closed_loop(drawn.prompt_len, drawn.output_len)


def scene(name: str) -> Scene:
    """One of `SETTINGS`."""
    one_type = {"output_lens": (_LONGEST,), "thresholds": (1,)}
    if name == "WAIT's":
        lens = tuple(n + 1 for n in MIXES["low"].decode_lens)
        types = {"output_lens": lens, "thresholds": (2, 2)}
        drafters = tuple(
            DrafterProfile(n, (1,), (PAPER_LINEAR.linear(1) / 20,)) for n in SPECIALISTS
        )
        profile = replace(PAPER_LINEAR, drafters=drafters)
        fit = specialists_acceptances(0.2)
        return Scene(profile, 6000, fit, "north", "off", types, 320, 2.0, _low)
    if name == "GoodSpeed's":
        profile, fit = specialists_profile(0.05), specialists_acceptances(0.4)
        return Scene(profile, 2000, fit, "north", "async", one_type, 40, 6.0, _clients)
    fit = spin_acceptances(tuple(SPIN_TEXTS))
    return Scene(spin_profile("7B"), 2000, fit, "1.1B", "async", one_type, 40, 10.0, _texts)


METHODS = {WAIT: "fluid_guided", GOODSPEED: "priced", LBSS: "auto"}
"""The papers' own, and what stands in its place here."""
OWN = dict(zip(METHODS, SETTINGS, strict=True))
SYSTEMS = (BASE, *METHODS, *METHODS.values(), PLACEBO)


def parts(system: str, where: Scene, seed: int) -> dict[str, Any]:
    """What a system changes of the base."""
    changed: Mapping[str, dict[str, PolicyConfig]] = {
        WAIT: {"admission": PolicyConfig.from_name("wait", **where.wait)},
        GOODSPEED: {"allocation": PolicyConfig.from_name("goodspeed", total=where.budget)},
        LBSS: {"selection": PolicyConfig.from_name("lbss", seed=seed)},
        "fluid_guided": {"admission": PolicyConfig.from_name("fluid_guided")},
        "priced": {"allocation": PolicyConfig.from_name("priced")},
        "auto": {"selection": PolicyConfig.from_name("auto")},
    }
    drafterless: dict[str, Any] = {"drafters": (), "pipeline": "off"}
    if system in (NO_DRAFTS, WAIT_ALONE):
        return drafterless | (changed[WAIT] if system == WAIT_ALONE else {})
    return dict(changed.get(system, {}))


Speeds = dict[tuple[str, str], FloatArray]
"""Tokens per second of a request by setting and system: [seeds]."""


def run(job: Trial) -> list[ClaimVerdict]:
    share = min(3.0, max(0.05, job.effort.curve_arrivals / 4000))
    seeds = SEEDS[: job.effort.repetitions]
    cells = [*itertools.product(SETTINGS, SYSTEMS)]
    cells += [(SETTINGS[0], NO_DRAFTS), (SETTINGS[0], WAIT_ALONE)]
    played = job.by_cell(
        speed, cells, seeds, share, what=lambda where, system, *_: f"{NAME}: {system} in {where}"
    )
    found = {cell: np.array(rates) for cell, rates in played.items()}
    header = ("setting", "system", "seed", "tokens_per_s")
    write_table(job.out / f"{NAME}.csv", header, rows_of(found))
    _draw(job, found)
    return verdicts(found)


def speed(setting: str, system: str, share: float, seed: int) -> float:
    """Of one run, which takes so much of the scene's time. Raises: PolicyError."""
    where = scene(setting)
    seconds = share * where.seconds
    load = where.lengths(math.ceil(_MOST_PER_S[setting] * seconds), seed)
    luck = seed + _OTHER_LUCK * (system == PLACEBO)
    base: dict[str, Any] = {
        "admission": PolicyConfig.from_name("vllm_v1"),
        "allocation": PolicyConfig.from_name("fixed", k=4),
        "selection": PolicyConfig.from_name("single", drafter=where.single),
        "drafters": tuple(d.name for d in where.profile.drafters),
        "pipeline": where.pipeline,
    }
    setup = Setup(
        where.profile,
        **{**base, **parts(system, where, seed)},
        kv_tokens=where.kv_tokens,
        acceptance=DomainAcceptance(where.fit, luck),
        seed=seed,
    )
    made = _second_half(simulate(setup, load, until=seconds), seconds)
    if load.tenants is None:
        return float(made.sum()) / (seconds / 2)
    own = load.tenants[: len(made)]
    each = [max(1.0, float(made[own == name].sum())) for name in SPECIALISTS]
    return float(np.exp(np.mean(np.log(each)))) / (seconds / 2)


def _second_half(report: Report, seconds: float) -> FloatArray:
    """Tokens of each request in the second half of a run, evenly spread over its decoding."""
    ends = np.where(np.isnan(report.finished_at), seconds, report.finished_at)
    first = np.where(np.isnan(report.first_token_at), ends, report.first_token_at)
    late = np.clip(ends - np.maximum(first, seconds / 2), 0, None)
    return np.asarray(report.num_tokens * late / np.maximum(ends - first, 1e-9))


def verdicts(found: Speeds) -> list[ClaimVerdict]:
    told = []
    placebos = {where: (found[where, BASE], found[where, PLACEBO]) for where in SETTINGS}
    hindsight = {
        w: (found[w, BASE], np.max([found[w, s] for s in SYSTEMS], axis=0)) for w in SETTINGS
    }
    for method, ours in METHODS.items():
        for system, claim in (
            (
                method,
                f"{method} makes more tokens per second, in {OWN[method]} setting and the others",
            ),
            (ours, f"{ours}, in its place, does"),
        ):
            pairs = {where: (found[where, BASE], found[where, system]) for where in SETTINGS}
            oracle = "the best system in hindsight", hindsight
            told.append(check(claim, gains, pairs, "the base with other luck", placebos, oracle))
    own = SETTINGS[0]
    told.append(
        check(
            "literal WAIT, which knows no drafts, gains less than a tenth by drafters",
            unchanged,
            (found[own, WAIT_ALONE], found[own, WAIT]),
            "vllm_v1 in its place",
            (found[own, NO_DRAFTS], found[own, BASE]),
            ("the same without drafters", (found[own, WAIT_ALONE], found[own, WAIT_ALONE])),
        )
    )
    return told


def gains(pairs: Mapping[str, tuple[FloatArray, FloatArray]]) -> Measurement:
    """In each setting, over the base, by more than a hundredth."""
    found = {where: ratio(after, before) for where, (before, after) in pairs.items()}
    return Measurement(
        ", ".join(f"{where} {gain} times" for where, gain in found.items()),
        tuple(gain.low > 1 + _ALIKE for gain in found.values()),
    )


def unchanged(given: tuple[FloatArray, FloatArray]) -> Measurement:
    """With drafters, over without."""
    found = ratio(given[1], given[0])
    return Measurement(f"{found} times", (found.high <= _LITTLE,))


def _draw(job: Trial, found: Speeds) -> None:
    names = [system for system in SYSTEMS if system != BASE]
    over = {
        f"in {where} setting": {n: ratio(found[where, n], found[where, BASE]) for n in names}
        for where in SETTINGS
    }
    title = "Each paper's method, and ours, in each paper's setting (95% intervals)"
    draw_intervals(job.out / f"{NAME}.png", title, {"": over}, "tokens/s over the base's", "log")


EXPERIMENT = Experiment(NAME, "Each paper's method in the others' settings, simulated", run)
