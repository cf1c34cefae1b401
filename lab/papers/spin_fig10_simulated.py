"""Spin, figure 10 on a simulated A100: the whole system against one drafter for everybody.

No batch on this project's processors has what the paper presumes: that a verification takes about
as long as a step, and that requests are many enough for decomposition and micro-batches to act.
Here a target takes the measured times of `a100-llama2-7b`. Acceptance and sizes of five drafters
are the bundled family's (`spin_fig11`: easy and hard text together), each on a device like the
target's. Requests are ShareGPT's (`--data`; else log-normal), in the middle of their outputs.

All wait for all (section V-B), or the batch is split into micro-batches while the target's
throughput is within a tenth of the unsplit one's. Padding multiplies the tokens that attention
reads by what the longest context has over the mean; decomposition and merging cost nothing. The
oracle knows what each request's drafts are worth, and the best number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.common.claims import ClaimVerdict
from lab.common.experiment import Experiment, Trial
from lab.common.families import SPIN_DRAFTERS, prompt_lengths
from lab.common.recorded import RECORDED
from lab.common.report import write_rates
from lab.common.slots import Slots
from lab.common.statistics import SEEDS
from lab.papers.spin_fig10 import CHOICE, FAST, NONE, RANDOM, WHOLE, Batch, draw_systems, verdicts
from lab.papers.spin_fig11 import EASY, FAMILY, HARD, acceptance
from lab.papers.spin_fig13 import drafter
from lab.papers.spin_theorem1 import Knowing
from penstock.config import PolicyConfig
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.pipeline.parts.planner import (
    MOST_MICRO_BATCHES,
    Lane,
    Round,
    best_num,
    cycle_seconds,
    spin_num,
)
from penstock.core.policies.selection.papers.lbss import Lbss
from penstock.core.state import RequestState
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
_DROP = 0.1
IDEAL = ("in hindsight", "in hindsight, decomposed", "in hindsight, all")
IntArray = npt.NDArray[np.int64]


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
    systems = (*(f"Vanilla {n}" for n in FAMILY), CHOICE, FAST, WHOLE, RANDOM, NONE, *IDEAL)
    texts = {b: [contexts_of(job, b, seed) for seed in seeds] for b in _BATCHES}
    cells = [(s, b, texts[b][i], slots, i) for b in _BATCHES for s in systems for i in seeds]
    drawn = iter([*job.each(rate, cells, lambda _, batch, *__: f"{NAME}: batch {batch}")])
    found = {b: {s: np.array([next(drawn) for _ in seeds]) for s in systems} for b in _BATCHES}
    write_rates(job.out / f"{NAME}.csv", "batch", found)
    draw_systems(job.out / f"{NAME}.png", found)
    told = []
    for batch, rates in found.items():
        times = [seconds_of(c, n, True)(batch) for n in (_DRAFTED, 0) for c in texts[batch]]
        padded, plain = np.sum(np.split(np.array(times), 2), axis=1)
        oracle = "each request's best drafter, the best number", [rates[name] for name in IDEAL]
        shown = {name: own for name, own in rates.items() if name not in IDEAL}
        told += verdicts(batch, Batch(shown, padded / plain, oracle))
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


def seconds_of(contexts: IntArray, drafted: int, padded: bool) -> Callable[[int], float]:
    """Time of a verification by number of requests. contexts: of the whole batch."""
    each = int(contexts.max() if padded else contexts.mean())
    target = load_profile("a100-llama2-7b")
    return lambda n: target.seconds(StepWork(0, 0.0, n, n * each, n * drafted))


def rate(system: str, batch: int, contexts: IntArray, slots: int, seed: int) -> float:
    """Tokens per second of a system, with requests of a seed."""
    if system == NONE:
        return batch / seconds_of(contexts, 0, False)(batch)
    requests = range(batch)
    drawn: list[Any] = [acceptance(text, None, seed) for text in (EASY, HARD)]
    rates = [[drawn[i % 2].rates(str(i))[name] for name in FAMILY] for i in requests]
    drafters = {d.name: d for d in profile().drafters}
    padded = system in (CHOICE, IDEAL[0]) or system.startswith("Vanilla")
    verify = seconds_of(contexts, _DRAFTED, padded)
    number: Callable[[Round], int] = _NUMBERS.get(system, lambda _: 1)

    def seconds(loads: Mapping[str, int]) -> float:
        lanes = [
            Lane(n, partial(drafters[name].seconds, num_steps=_DRAFTED))
            for name, n in loads.items()
        ]
        work = Round(tuple(lanes), lambda group: verify(sum(group)))
        return cycle_seconds(work, number(work))

    policy = policy_of(system, seed)
    played = Slots(policy, profile(), np.array(rates), contexts, _DRAFTED, seed)
    if isinstance(policy, Knowing):
        policy.goodput = {str(i): own for i, own in enumerate(played.goodput)}
    return played.tokens_per_s(slots, seconds)


class Best(Knowing):
    """Each request's best drafter, or none."""

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        ids = [s.request.id for s in states]
        return {i: max(self.goodput[i], key=self.goodput[i].__getitem__) for i in ids}


def policy_of(system: str, seed: int) -> SelectionPolicy:
    if system in IDEAL:
        return Best(Lbss.Options(seed=seed))
    if system.startswith("Vanilla"):
        single = PolicyConfig.from_name("single", drafter=system.removeprefix("Vanilla "))
        chosen: SelectionPolicy = single.make("selection")
        return chosen
    name, options = ("epsilon_greedy", {"explore": 1.0}) if system == RANDOM else ("lbss", {})
    made: SelectionPolicy = PolicyConfig.from_name(name, seed=seed, **options).make("selection")
    return made


def _spin_num(work: Round) -> int:
    return spin_num(work, MOST_MICRO_BATCHES, _DROP)


def _best_num(work: Round) -> int:
    return max(1, best_num(lambda n: cycle_seconds(work, n or 1), MOST_MICRO_BATCHES))


_NUMBERS: Mapping[str, Callable[[Round], int]] = {
    WHOLE: _spin_num,
    RANDOM: _spin_num,
    IDEAL[-1]: _best_num,
}

EXPERIMENT = Experiment(NAME, "Figure 10: the whole system, simulated", run)
