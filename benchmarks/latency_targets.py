"""Requests with latency targets of their own, met by draft length and admission together.

    python -m benchmarks.latency_targets [--data DIR] [--seeds N] [--out FILE.jsonl] [--report]

A recorded conversation (lengths; Poisson arrivals) on the A100 profile, with a drafter whose
acceptance was recorded. A third of the requests ask for a tight TPOT, a third for a loose one, a
third for nothing. `on_time` beside every other allocation policy, whose options are the best ones
in hindsight and which are told of no targets, under the same admission; and with the targets dealt
to other requests, as a placebo. A request meets its target or not, by its own mean time of a token.
Figures go to a file, a line each, and are not measured again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.lab.bench import DATA, Results, ResultTable, parser, tell
from penstock.lab.cells import Cells, Figures
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.statistics import interval, plus_minus
from penstock.sim.acceptance import RecordedAcceptance, read_records
from penstock.sim.parallel import workers
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, load_workload, make_workload

PROFILE = "a100-llama2-7b"
RATES = (5.0, 6.0, 7.0)
"""Requests a second."""
TIGHT, LOOSE_S = 1.2, 0.05
"""Targets, as in AdaServe: over the time of a token alone and without drafts; in seconds."""
_USUAL_CONTEXT = 1024

ADMISSIONS = {
    "sarathi": PolicyConfig.of("sarathi"),
    "fluid_guided": PolicyConfig.of("fluid_guided"),
}
OUR_ADMISSIONS = ("sarathi", "fluid_guided")
"""One that is not told of targets, and the one that is."""
OTHERS = {
    **{f"fixed {k}": PolicyConfig.of("fixed", k=k) for k in (2, 3, 4, 6)},
    "throughput": PolicyConfig.of("throughput"),
    "random": PolicyConfig.of("random"),
    "goodspeed": PolicyConfig.of("goodspeed"),
    "goodspeed_adaptive": PolicyConfig.of("goodspeed_adaptive"),
    "deadline": PolicyConfig.of("deadline"),
}
"""Without drafters that say how sure they are `confident` is `throughput`."""
OURS = "on_time"
PLACEBO = "targets dealt anew"
"""`on_time`, told of other requests' targets."""
ADMISSION_ALONE = "admission alone"
"""`throughput` where the admission policy is told of targets."""


class TargetCase(NamedTuple):
    """One run."""

    admission: str
    rate: float
    policy: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.admission}/{self.rate:g}/{self.policy}/{self.seed}"


def tight_s(profile: StepProfile) -> float:
    """The tight target, in seconds."""
    return TIGHT * profile.seconds(StepWork(num_decodes=1, num_kv_tokens=_USUAL_CONTEXT))


def load(data: Path, rate: float, seed: int, num: int, profile: StepProfile) -> Workload:
    """A part of the conversation for each seed, with targets."""
    recorded = load_workload(data / "azure2023_conv.csv.gz")
    rows = np.arange(seed * num, (seed + 1) * num) % len(recorded)
    lengths = replace(recorded, arrival_time=None).take(rows)
    rng = np.random.default_rng([seed, 27])
    kinds = np.array([tight_s(profile), LOOSE_S, np.nan])
    targets = kinds[rng.permutation(np.arange(num) % len(kinds))]
    return make_workload(replace(lengths, tpot=targets), rate=rate, seed=seed)


def figures(case: TargetCase, data: Path, num: int) -> Figures:
    profile = load_profile(PROFILE)
    rows = read_records(data / "accept_sharegpt.jsonl.gz", ["eagle"])
    told = asked = load(data, case.rate, case.seed, num, profile)
    assert asked.tpot is not None
    if case.policy == PLACEBO:
        order = np.random.default_rng([case.seed, 28]).permutation(num)
        told = replace(asked, tpot=asked.tpot[order])
    elif case.policy in OTHERS:
        told = replace(asked, tpot=None)
    setup = Setup(
        profile,
        admission=ADMISSIONS[case.admission],
        allocation=_allocation(case.policy),
        acceptance=RecordedAcceptance(rows, case.seed),
        drafters=("eagle",),
        seed=case.seed,
    )
    report = replace(run(setup, told), workload=asked)
    found = report.figures()
    tight = asked.tpot < LOOSE_S
    met, has_target = report.met_target, report.has_target
    return {
        "attainment": float(met.sum() / has_target.sum()),
        "tight": float(met[tight].mean()),
        "loose": float(met[has_target & ~tight].mean()),
        "tokens_per_s": found["throughput_tokens_per_s"],
        "tpot_none_s": float(report.token_seconds[~has_target].mean()),
        "ttft_mean_s": found["ttft_s"]["mean"],
        "ttft_p99_s": found["ttft_s"]["p99"],
    }


def _allocation(policy: str) -> PolicyConfig:
    if policy == ADMISSION_ALONE:
        return OTHERS["throughput"]
    return OTHERS.get(policy, PolicyConfig.of(OURS))


def cases(seeds: int) -> Iterator[TargetCase]:
    policies = [(admission, policy) for admission in ADMISSIONS for policy in OTHERS]
    policies += itertools.product(OUR_ADMISSIONS, (OURS, PLACEBO))
    policies.append(("fluid_guided", ADMISSION_ALONE))
    for seed, rate, (admission, policy) in itertools.product(range(seeds), RATES, policies):
        yield TargetCase(admission, rate, policy, seed)


# --- report ---------------------------------------------------------------------------------------


def best_other(cells: Cells, rate: float) -> str:
    """Of the other policies with their options, under either admission, the one that meets most
    targets in the mean: its key without the seed."""
    keys = [f"{admission}/{rate:g}/{policy}" for admission in ADMISSIONS for policy in OTHERS]
    means = {key: cells.values(key, "attainment") for key in keys}
    return max((k for k in keys if means[k]), key=lambda k: float(np.mean(means[k])))


def report(cells: Cells) -> Results:
    rows, verdicts = [], []
    for rate in RATES:
        if not cells.values(f"{OUR_ADMISSIONS[0]}/{rate:g}/{OURS}", "attainment"):
            continue
        best = best_other(cells, rate)
        shown = [best, *(f"{a}/{rate:g}/throughput" for a in ADMISSIONS)]
        shown += [
            f"{admission}/{rate:g}/{policy}"
            for admission in OUR_ADMISSIONS
            for policy in (ADMISSION_ALONE, OURS, PLACEBO)
        ]
        shown = [key for key in dict.fromkeys(shown) if cells.values(key, "attainment")]
        rows += [_row(cells, key, best) for key in shown]
        verdicts += _verdicts(cells, f"fluid_guided/{rate:g}", best)
    header = ["requests/s", "admission", "draft lengths", "met", "tight", "over the best other"]
    header += ["tokens/s over the best other", "mean TTFT, s"]
    return Results(list(cells.done.values()), verdicts, [ResultTable("", header, rows)])


def _row(cells: Cells, key: str, best: str) -> list[str]:
    admission, rate, policy = key.split("/")

    def mean(figure: str) -> str:
        return plus_minus(interval(cells.values(key, figure)))

    over = [cells.ratio(key, best, figure) for figure in ("attainment", "tokens_per_s")]
    name = f"{policy} (best other)" if key == best else policy
    ratios = [plus_minus(one) if one and key != best else "" for one in over]
    met = [mean(figure) for figure in ("attainment", "tight")]
    return [rate, f"`{admission}`", name, *met, *ratios, mean("ttft_mean_s")]


def _verdicts(cells: Cells, where: str, best: str) -> list[ClaimVerdict]:
    ours, placebo = (
        cells.ratio(f"{where}/{policy}", best, "attainment") for policy in (OURS, PLACEBO)
    )
    tokens = cells.ratio(f"{where}/{OURS}", best, "tokens_per_s")
    if ours is None or tokens is None:
        return []
    text = f"targets are met {plus_minus(ours)} times as often as by {best} (bar 1.15), at "
    found = [bar(where, f"{text}{plus_minus(tokens)} of its tokens/s", ours.mean >= 1.15)]
    if placebo is not None:
        text = f"{plus_minus(placebo)} times with the targets of other requests"
        found.append(bar(where, text, placebo.mean < 1 + 0.5 * (ours.mean - 1)))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--requests", type=int, default=160, help="of a run")
    options.add_argument("--out", type=Path, default=Path("latency_targets.jsonl"))
    options.add_argument("--workers", type=int, default=1, help="runs at a time")
    options.add_argument("--report", action="store_true", help="measure nothing")
    given = options.parse_args()
    cells = Cells(given.out)
    if not given.report:
        jobs = {
            case.key: functools.partial(figures, case, given.data, given.requests)
            for case in cases(given.seeds)
        }
        with workers(given.workers, None) as pool:
            cells.measure_all(jobs, pool)
    return tell(given, report(cells))


if __name__ == "__main__":
    raise SystemExit(main())
