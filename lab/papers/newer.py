"""Newer papers that ask what the fluid model answers.

Nie, Si and Zhou, "A Queueing-Theoretic Framework for Stability Analysis of LLM Inference with KV
Cache Memory Constraints" (arXiv 2605.04595): a server with memory for M KV tokens is unstable above
μ = M / (b̄ E[g]) requests/s, and any work-conserving policy is stable below μ (1 − δ). b̄ is the mean
time of a batch when memory is full, E[g] the KV tokens of a request summed over its steps, δ the
share of memory that the largest request may take. Their server is vLLM's V1 rule with chunked
prefill; it is played here without its cap on requests, which is no memory's.

The paper's text is not at hand: its formula is taken from summaries, b̄ is measured at 1.3 times the
fluid capacity bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.loads import PROFILES, SEED, Scene, setup_of
from lab.common.report import Plot, draw, write_table
from lab.common.thresholds import unit_traffic, work_of
from penstock.core.loop import Instrument
from penstock.core.types import StepPlan, StepResult
from penstock.sim.capacity import Criterion, LoadVerdict
from penstock.sim.run import Setup
from penstock.sim.run import run as simulate

NAME = "newer"

_WORKLOADS = ("high", "ten_bins")
_OVERLOAD = 1.3
"""Times the fluid bound: where b̄ is measured."""
_CLAIMED = 0.1
_FAR_BELOW, _BELOW, _ABOVE, _FAR_ABOVE = 0.5, 1 - _CLAIMED, 1 + _CLAIMED, 1.5
"""Times the threshold. The paper finds it within a tenth."""
_LEAST_ARRIVALS = 4_000
"""With fewer memory has not filled."""
_ALL = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096}


class _Steps(Instrument):
    """Counts target steps that are planned after a time."""

    def __init__(self, after: float) -> None:
        self.num = 0
        self._after = after

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        if plan.created_at > self._after:
            self.num += result.repeats


@dataclass(frozen=True)
class Threshold:
    """requests_per_s: μ. slack: δ. batch_s: b̄. loads: by times μ (with slack below it), judged."""

    requests_per_s: float
    slack: float
    batch_s: float
    loads: Mapping[float, LoadVerdict]


def run(job: Trial) -> list[ClaimVerdict]:
    scenes = [Scene(load(), name) for load in PROFILES.values() for name in _WORKLOADS]
    jobs = [(scene, max(job.effort.arrivals // 2, _LEAST_ARRIVALS)) for scene in scenes]
    found = dict(zip(scenes, job.each(threshold, jobs, _told), strict=True))
    write_table(
        job.out / f"{NAME}.csv",
        ("scene", "batch_s", "threshold_per_s", "bound_per_s", "load", "completed_per_s"),
        (
            (s.name, t.batch_s, t.requests_per_s, s.bound, load, judged.completed.mean)
            for s, t in found.items()
            for load, judged in t.loads.items()
        ),
    )
    lines = {
        s.name: (list(t.loads), [v.completed.mean / t.requests_per_s for v in t.loads.values()])
        for s, t in found.items()
    }
    loads = next(iter(found.values())).loads
    axes = {"xlabel": "load over the threshold", "ylabel": "completed over the threshold"}
    plot = Plot(lines | {"load": (list(loads), list(loads))}, axes, "o-", {"load": "k--"})
    draw(job.out / f"{NAME}.png", "Stability under KV memory (arXiv 2605.04595)", [[plot]])
    return verdicts(found)


def _told(scene: Scene, num: int) -> str:
    return f"{NAME}: {scene.name}"


def threshold(scene: Scene, num: int) -> Threshold:
    """μ from an overloaded run, and whether loads around it are sustained. num: arrivals."""
    setup = setup_of("vllm_v1", scene.profile, **_ALL)
    overload = _OVERLOAD * scene.bound
    _, batch_s = _judged(setup, scene, num, overload)
    traffic = unit_traffic(str(scene.lengths))
    summed = sum(t.rate * held for t, held in zip(traffic, work_of(traffic), strict=True))
    memory = scene.profile.kv_tokens
    rate = memory / (batch_s * summed)
    slack = max(t.prompt_len + t.output_len for t in traffic) / memory
    loads = {}
    for share in (_FAR_BELOW, _BELOW, _ABOVE, _FAR_ABOVE):
        kept = share * (1 - slack) if share < 1 else share
        loads[share], _ = _judged(setup, scene, num, kept * rate)
    return Threshold(rate, slack, batch_s, loads)


def _judged(setup: Setup, scene: Scene, num: int, rate: float) -> tuple[LoadVerdict, float]:
    """The verdict on a load, and the mean seconds of a step in the run's second half."""
    workload = scene.requests(num, rate, SEED)
    assert workload.arrival_time is not None
    end = float(workload.arrival_time[-1])
    steps = _Steps(end / 2)
    report = simulate(setup, workload, instruments=(steps,), until=end)
    return Criterion().judge(report), end / 2 / max(steps.num, 1)


def verdicts(found: Mapping[Scene, Threshold]) -> list[ClaimVerdict]:
    def test(*, stable: bool) -> Callable[[float], Measurement]:
        def sustained(share: float) -> Measurement:
            growth = [t.loads[share].growth.mean for t in found.values()]
            told = ", ".join(f"{x:.0%}" for x in growth)
            return Measurement(
                f"with {share:g} times that {told} of the work is left",
                tuple((x <= _CLAIMED / 2) == stable for x in growth),
            )

        return sustained

    def near(share: float) -> Measurement:
        apart, bound = [], []
        for scene, t in found.items():
            predicted = share * t.requests_per_s
            apart.append(t.loads[_FAR_ABOVE].completed.mean / predicted - 1)
            bound.append(scene.bound / predicted - 1)
        told = (", ".join(f"{x:+.0%}" for x in values) for values in (apart, bound))
        return Measurement(
            "; the fluid bound ".join(told), tuple(abs(x) <= _CLAIMED for x in apart)
        )

    below, above = f"{_FAR_BELOW:g} times μ", f"{_FAR_ABOVE:g} times μ"
    return [
        check(
            "above μ the queue grows",
            test(stable=False),
            _ABOVE,
            below,
            _FAR_BELOW,
            (above, _FAR_ABOVE),
        ),
        check(
            "below μ (1 − δ) a work-conserving policy is stable",
            test(stable=True),
            _BELOW,
            above,
            _FAR_ABOVE,
            (below, _FAR_BELOW),
        ),
        check(f"throughput is within {_CLAIMED:.0%} of μ", near, 1.0, "half the memory", 0.5),
    ]


EXPERIMENT = Experiment(NAME, "Newer papers: stability under KV memory (arXiv 2605.04595)", run)
