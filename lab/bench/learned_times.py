"""What learned step times cost `fluid_guided`, and what the constants of that learning matter.

    python -m lab.bench.learned_times [--constants] [--seeds N] [--json] [--result FILE]

On the virtual clock: machines whose steps scatter by 12%, whose speed swings by 15% either way
within 4,000 steps, and of whose steps one in 500 takes ten times as long. `line`: a step costs what
is in it, as of a Llama of 28 million parameters on two cores; `stairs`: 256 positions at once;
`a100`: as measured for Llama-2-7B. Lengths are log-normal with the means of the Azure conversation
trace, an eighth of them on the small machines, with memory for a quarter of what would be in use.
Loads are shares of what `vllm_v1` serves of all requests at once.

`--constants`: each constant at half and at twice its value, over the same run as it is. The error
is that of the learned time of a step, in the mean over the second half of a run.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from unittest import mock

import numpy as np

from lab.common.results import Results, ResultTable, parser, tell
from lab.common.statistics import FloatArray, ratio
from lab.papers import crossed
from penstock.config import PolicyConfig
from penstock.core.kv.blocks import BlockPool
from penstock.core.learn import Estimators, lengths, profile
from penstock.core.learn.times import Times
from penstock.core.policies.allocation import throughput
from penstock.core.scheduler import Scheduler
from penstock.core.types import NO_DRAFTER, Request
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import load_profile

LINE = StepProfile("line", 5440, (1, 2048), (0.0026, 0.127), 1, 0.0, 1.25e-4, 5.7e-7, 0.0, 3.6e-8)
STAIRS = StepProfile("stairs", 5440, (256, 2560), (0.012, 0.084), 256)
MACHINES = {"line": (LINE, 8), "stairs": (STAIRS, 8), "a100": (load_profile("a100-llama2-7b"), 1)}
"""And by what the trace's lengths are divided there."""
LOADS = (0.8, 0.95)
_PROMPT, _OUTPUT = 1155, 211
_NUM_REQUESTS = 1500
_SCATTER, _SWING, _PERIOD, _STALL_EVERY, _STALL = 0.12, 0.15, 4000, 500, 10.0

CONSTANTS = {
    "_MEMORY": (500.0, 2000.0),
    "_STALL": (2.0, 8.0),
    "_CELL": (1.04, 1.16),
    "_CLEAR": (1.5, 6.0),
}
"""Of `penstock.core.learn.profile`."""


class UnsteadyTimes(ProfiledStepTimes):
    """Steps that scatter. errors: of what is known about them."""

    def __init__(self, truth: StepProfile, known: Times, seed: int) -> None:
        super().__init__(truth)
        self._truth, self._known = truth, known
        self._rng = np.random.default_rng((31, seed))
        self.errors: list[float] = []
        self.verify = self._verify

    def _verify(self, work: StepWork) -> float:
        swing = 1 + _SWING * math.sin(2 * math.pi * len(self.errors) / _PERIOD)
        seconds = swing * self._truth.seconds(work)
        self.errors.append(abs(self._known.step_seconds(work) / seconds - 1))
        stall = _STALL if self._rng.integers(_STALL_EVERY) == 0 else 1.0
        return seconds * stall * math.exp(self._rng.normal(0, _SCATTER))


def served(machine: str, policy: str, learns: bool, rate: float, seed: int) -> tuple[float, ...]:
    """Mean latency in seconds, seconds until all had been served, and error of the step times.
    rate: requests per second; infinite for all at once."""
    truth, divisor = MACHINES[machine]
    learn = Estimators(StepProfile("unknown", truth.kv_tokens, (0,), (0.01,)) if learns else truth)
    learn.times.learns_profile = learns
    scheduler = Scheduler(
        BlockPool(truth.kv_tokens, 1),
        [],
        admission=PolicyConfig.of(policy).make("admission"),
        selection=PolicyConfig.of("single").make("selection"),
        allocation=PolicyConfig.of("fixed").make("allocation"),
        max_model_len=truth.kv_tokens,
        learn=learn,
    )
    clock, times = VirtualClock(), UnsteadyTimes(truth, learn.times, seed)
    rng = np.random.default_rng((30, seed))
    arrivals = np.cumsum(rng.exponential(1 / rate, _NUM_REQUESTS))
    prompts, outputs = (
        np.clip(rng.lognormal(math.log(mean / divisor) - 0.32, 0.8, _NUM_REQUESTS), 4, 4000)
        for mean in (_PROMPT, _OUTPUT)
    )
    requests = [
        Request(str(i), int(prompt), int(output), float(at), drafter=NO_DRAFTER)
        for i, (at, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]
    result = simulate(scheduler, SimulatedExecutor(clock, times), clock, requests)
    records = result.records.values()
    latency = np.mean([r.finish_time - r.request.arrival_time for r in records if r.finish_time])
    late = times.errors[len(times.errors) // 2 :]
    return float(latency), result.finished_at, float(np.mean(late))


def rate_of(machine: str, load: float, seed: int) -> float:
    """Requests per second of a load."""
    return load * _NUM_REQUESTS / served(machine, "vllm_v1", False, math.inf, seed)[1]


def times_table(seeds: Sequence[int]) -> ResultTable:
    rows = []
    for machine, load in itertools.product(MACHINES, LOADS):
        rates = [rate_of(machine, load, seed) for seed in seeds]
        found = {
            (policy, learns): [
                served(machine, policy, learns, rate, seed)
                for rate, seed in zip(rates, seeds, strict=True)
            ]
            for policy, learns in (
                ("vllm_v1", False),
                ("fluid_guided", False),
                ("fluid_guided", True),
            )
        }
        base = [x[0] for x in found["vllm_v1", False]]
        told, learned = (
            ratio([x[0] for x in found["fluid_guided", how]], base) for how in (False, True)
        )
        error = np.mean([x[2] for x in found["fluid_guided", True]])
        rows.append([f"{machine}, {load}", str(told), str(learned), f"{error:.1%}"])
    header = ("machine, load", "told the step times", "learns them", "error of a step's time")
    return ResultTable("`fluid_guided`: mean latency over that of `vllm_v1`", header, rows)


def constants_table(seeds: Sequence[int]) -> ResultTable:
    rates = {m: [rate_of(m, LOADS[0], seed) for seed in seeds] for m in MACHINES}

    def runs(machine: str) -> FloatArray:
        """Latency and error, [seeds, 2]."""
        pairs = zip(rates[machine], seeds, strict=True)
        found = [served(machine, "fluid_guided", True, rate, seed) for rate, seed in pairs]
        return np.array(found)[:, [0, 2]]

    before = {machine: runs(machine) for machine in MACHINES}
    rows = [["as they are", *(f"1, {found[:, 1].mean():.1%}" for found in before.values())]]
    for name, values in CONSTANTS.items():
        for value in values:
            with mock.patch.object(profile, name, value):
                after = {machine: runs(machine) for machine in MACHINES}
            told = [
                f"{ratio(found[:, 0], before[m][:, 0])}, {found[:, 1].mean():.1%}"
                for m, found in after.items()
            ]
            rows.append([f"`{name}` = {value:g}", *told])
    header = ("mean latency over that as they are, error of a step's time", *MACHINES)
    return ResultTable("Constants of learned step times, load 0.8", header, rows)


def drafts_table(seeds: Sequence[int]) -> ResultTable:
    """Constants about drafts, by the tokens per second of `reproduce crossed`."""
    rows = []
    for module, name, system in (
        (lengths, "_STEPS_WEIGHT", "fluid_guided"),
        (throughput, "_SAME_PRICE", "throughput"),
    ):
        known = getattr(module, name)
        before = [_speeds(setting, system, seeds) for setting in crossed.SETTINGS]
        for value in (known / 2, 2 * known):
            with mock.patch.object(module, name, value):
                after = [_speeds(setting, system, seeds) for setting in crossed.SETTINGS]
            told = [str(ratio(a, b)) for a, b in zip(after, before, strict=True)]
            rows.append([f"`{name}` = {value:g}, `{system}`", *told])
    header = ("", *(f"in {setting} setting" for setting in crossed.SETTINGS))
    return ResultTable(
        "Constants about drafts: tokens per second over those as they are", header, rows
    )


def _speeds(setting: str, system: str, seeds: Sequence[int]) -> list[float]:
    return [crossed.speed(setting, system, 1.0, seed) for seed in seeds]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--constants", action="store_true", help="vary the learner's constants")
    options.add_argument("--seeds", type=int, default=3)
    args = options.parse_args()
    seeds = range(args.seeds)
    makes = (constants_table, drafts_table) if args.constants else (times_table,)
    tables = [make(seeds) for make in makes]
    return tell(args, Results({t.title: t.rows for t in tables}, tables=tables))


if __name__ == "__main__":
    sys.exit(main())
