"""Spin, figure 10 on a simulated A100: the whole system against one drafter for everybody.

No batch on this project's processors has what the paper presumes: that a verification takes about
as long as a step, and that requests are many enough for decomposition and micro-batches to act.
Here a target takes the measured times of `a100-llama2-7b`. Acceptance and sizes of five drafters
are the bundled family's (`spin_fig11`: easy and hard text together), each on a device like the
target's. Requests are ShareGPT's (`--data`; else log-normal), in the middle of their outputs.

All wait for all (section V-B), or the batch is split into micro-batches: as printed while the
target's throughput is within 5% of the unsplit one's (the bundle `spin`), with additions, and for
rivals, into the number that makes the shortest cycle. Padding multiplies the tokens that attention
reads by what the longest context has over the mean; decomposition and merging cost nothing, and
every rival that has all parts but one has them, too. The oracle knows acceptance, and uses the set
of drafters and the number of micro-batches that together are best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lab.common.claims import ClaimVerdict
from lab.common.experiment import Experiment, Trial
from lab.common.families import FAMILY, SPIN, SPIN_DRAFTERS, prompt_lengths
from lab.common.hindsight import best_subset
from lab.common.oracles import assigned
from lab.common.recorded import RECORDED
from lab.common.report import write_rates
from lab.common.slots import Slots
from lab.common.statistics import SEEDS
from lab.papers.spin_fig10 import (
    ALL_ELSE,
    CHOICE,
    FAST,
    NONE,
    RANDOM,
    UNPACKED,
    VANILLA,
    WHOLE,
    Batch,
    draw_systems,
    verdicts,
)
from lab.papers.spin_fig11 import EASY, HARD, acceptance, seeded
from lab.papers.spin_fig13 import drafter
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.policies.pipeline.parts.planner import (
    MOST_MICRO_BATCHES,
    Lane,
    Round,
    best_num,
    cycle_seconds,
    spin_num,
)
from penstock.core.types import NO_DRAFTER
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.profiles import load_profile
from penstock.sim.workloads import load_workload

NAME = "spin_fig10_simulated"

_BATCHES = (8, 32, 64)
_DRAFTED = 4
_SLOTS, _FEW_SLOTS = 512, 128
_LIKE = [
    (name, next(n for n, s in SPIN_DRAFTERS.items() if s.billions == size), size / 6.74)
    for name, size in FAMILY.items()
]
"""Drafters, whose times they take, and their share of the target's parameters."""
_DROP = 0.05
IDEAL = "in hindsight"
IntArray = npt.NDArray[np.int64]


def _best_num(work: Round) -> int:
    return max(1, best_num(lambda n: cycle_seconds(work, n or 1), MOST_MICRO_BATCHES))


def _spin_num(work: Round) -> int:
    return spin_num(work, MOST_MICRO_BATCHES, _DROP)


def _unsplit(work: Round) -> int:
    return 1


class System(NamedTuple):
    """selection: None for the drafters that are best in hindsight."""

    selection: PolicyConfig | None
    padded: bool = False
    number: Callable[[Round], int] = _best_num


SYSTEMS: Mapping[str, System] = {
    **{
        kind + name: System(PolicyConfig.from_name("single", drafter=name), *parts)
        for kind, parts in ((VANILLA, (True, _unsplit)), (ALL_ELSE, ()))
        for name in FAMILY
    },
    **{
        f"{spin}: {part}": System(selection, padded, number if split else _unsplit)
        for (spin, selection), number in zip(SPIN.items(), (_spin_num, _best_num), strict=True)
        for part, padded, split in (
            (CHOICE, True, False),
            (FAST, False, False),
            (UNPACKED, True, True),
            (WHOLE, False, True),
        )
    },
    RANDOM: System(policy_named("epsilon_greedy", explore=1.0)),
    IDEAL: System(None),
}


def profile() -> StepProfile:
    target = replace(load_profile("a100-llama2-7b"), name="streaming")
    reading = (target.linear(1024) - target.linear(512)) / 512
    return replace(
        target,
        drafters=tuple(
            replace(drafter(like, target), name=n, per_catch_up_token=share * reading)
            for n, like, share in _LIKE
        ),
    )


def run(job: Trial) -> list[ClaimVerdict]:
    slots = _SLOTS if job.effort.curve_arrivals >= 10_000 else _FEW_SLOTS
    seeds = SEEDS[: job.effort.repetitions]
    systems = (*SYSTEMS, NONE)
    texts = {b: [contexts_of(job, b, seed) for seed in seeds] for b in _BATCHES}
    cells = [(s, b, texts[b][i], slots, i) for b in _BATCHES for s in systems for i in seeds]
    drawn = iter([*job.each(rate, cells, lambda _, batch, *__: f"{NAME}: batch {batch}")])
    found = {b: {s: np.array([next(drawn) for _ in seeds]) for s in systems} for b in _BATCHES}
    write_rates(job.out / f"{NAME}.csv", "batch", found)
    draw_systems(job.out / f"{NAME}.png", found)
    told = []
    for batch, rates in found.items():
        padded, plain = (
            sum(seconds_of(c, True)(batch, batch * drafted) for c in texts[batch])
            for drafted in (_DRAFTED, 0)
        )
        oracle = "hindsight", rates[IDEAL]
        told += verdicts(batch, Batch(rates, padded / plain, oracle))
    return told


def contexts_of(job: Trial, batch: int, seed: int) -> IntArray:
    """[batch] tokens of prompts and of a part of the outputs."""
    rng = np.random.default_rng((10, seed))
    if job.data is not None and (job.data / RECORDED).is_file():
        load = load_workload(job.data / RECORDED)
        drawn = rng.integers(len(load.prompt_len), size=batch)
        prompts, outputs = load.prompt_len[drawn], load.output_len[drawn]
    else:
        prompts, outputs = prompt_lengths(rng, batch), 2 * prompt_lengths(rng, batch)
    return np.asarray(prompts + outputs * rng.random(batch), dtype=np.int64)


def seconds_of(contexts: IntArray, padded: bool) -> Callable[[int, int], float]:
    """Time of a verification, by number of requests and draft tokens. contexts: of the whole
    batch."""
    each = int(contexts.max() if padded else contexts.mean())
    target = load_profile("a100-llama2-7b")
    return lambda n, drafted: target.seconds(StepWork(0, 0.0, n, n * each, drafted))


def rate(system: str, batch: int, contexts: IntArray, slots: int, seed: int) -> float:
    """Tokens per second of a system, with requests of a seed."""
    if system == NONE:
        return batch / seconds_of(contexts, False)(batch, 0)
    selection, padded, number = SYSTEMS[system]
    drawn: list[Any] = [acceptance(text, None, seed) for text in (EASY, HARD)]
    rates = np.array([[drawn[i % 2].rates(str(i))[n] for n in FAMILY] for i in range(batch)])
    profiles = {d.name: d for d in profile().drafters}
    verify = seconds_of(contexts, padded)

    def seconds(loads: Mapping[str, int]) -> float:
        # Who has no drafter waits for the others.
        lengths = [0 if name == NO_DRAFTER else _DRAFTED for name in loads]
        lanes = tuple(
            Lane(n, partial(profiles[name].seconds, num_steps=_DRAFTED) if length else _no_time)
            for (name, n), length in zip(loads.items(), lengths, strict=True)
        )
        work = Round(lanes, lambda group: verify(sum(group), int(np.dot(group, lengths))))
        return cycle_seconds(work, number(work))

    best: dict[str, str] = {}
    if selection is None:
        tokens = (rates[..., None] ** np.arange(_DRAFTED + 1)).sum(axis=-1)
        best = {str(i): d for i, d in enumerate(best_subset([*FAMILY], tokens, seconds))}
    with assigned(best) as name:
        chosen = selection or PolicyConfig.from_name(name)
        policy = seeded(chosen, seed).make("selection")
        played = Slots(policy, profile(), rates, contexts, _DRAFTED, seed)
        return played.tokens_per_s(slots, seconds)


def _no_time(num: int) -> float:
    return 0.0


EXPERIMENT = Experiment(NAME, "Figure 10: the whole system, simulated", run)
