"""Fairness between tenants: 27 of them in the simulator, and a quiet one beside a greedy one live.

    python -m lab.bench.tenants [simulated] [greedy] [live] [--seeds N] [--out FILE.jsonl]
        [--report]

`simulated`: tenants with Zipf loads at 0.9 and 1.5 times the capacity. `greedy`: one of them sends
20 times what each of the others sends, or all of them together. `live`: four clients beside
80 and 400 on `penstock serve`, weights 1:1 and 10:1. Figures go to a file, a line each, and are not
measured again; the report has means over the seeds with 95% intervals (medians for `live`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.bench.tenants_live import CASES, Seconds, measure, serving
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, bar
from lab.common.statistics import interval, plus_minus
from penstock.config import PolicyConfig
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.slowdown import seconds_alone
from penstock.sim.workloads import Workload, make_workload

NUM_TENANTS = 27
LOADS = (0.9, 1.5)
"""Of the capacity of the policy without fairness."""
CAPACITY = {"vllm_v1": 4.7, "sarathi": 4.7, "fluid_guided": 5.4}
"""Requests a second of this trace: at 1.5 times so many each policy ends so many."""
_PROMPT, _OUTPUT = (6.63, 0.985, 16, 14_000), (5.02, 0.859, 4, 1_000)
"""Mean and deviation of the logarithm, least and most tokens: as in the Azure conversation trace of
2023 (Patel et al., ISCA'24)."""
NAMES = [f"t{k + 1:02d}" for k in range(NUM_TENANTS)]
ZIPF = 1 / np.arange(1, NUM_TENANTS + 1)
SHARES = ZIPF / ZIPF.sum()
"""Of the load: the k-th tenant asks for 1/k of what the first does."""

# --- 27 tenants, simulated ------------------------------------------------------------------------


def trace(
    num_requests: int, rate: float, seed: int, shares: npt.NDArray[np.float64] = SHARES
) -> Workload:
    """Conversation lengths, Poisson arrivals, tenants `t01` to `t27` with such shares of them."""
    rng = np.random.default_rng([seed, NUM_TENANTS])
    owner = rng.choice(NUM_TENANTS, size=num_requests, p=shares)
    prompt_len, output_len = (
        np.clip(np.exp(rng.normal(mean, deviation, num_requests)), least, most).astype(np.int64)
        for mean, deviation, least, most in (_PROMPT, _OUTPUT)
    )
    lengths = Workload("27 tenants", prompt_len, output_len, tenants=np.array(NAMES)[owner])
    return make_workload(lengths, rate=rate, seed=seed)


def ttft_p99(report: Report, chosen: npt.NDArray[np.bool_]) -> float:
    return float(np.percentile((report.first_token_at - report.arrived_at)[chosen], 99))


def delivered(report: Report) -> float:
    """Seconds of ordinary work a second, of the requests that ended while others still came: a
    prompt's token counts for a seventh of a decoded one, as on this profile."""
    done = report.completed & (report.finished_at <= report.arrived_at[-1])
    workload = report.workload
    work = workload.prompt_len[done].sum() / 7 + workload.output_len[done].sum()
    return float(work / report.arrived_at[-1])


def alone(setup: Setup, workload: Workload, name: str) -> float:
    """p99 of TTFT of a tenant's own requests on a server with its share of the speed."""
    rows, times = np.flatnonzero(workload.tenants == name), workload.arrival_time
    assert times is not None
    lengths = replace(workload, arrival_time=None).take(rows)
    own = replace(lengths, arrival_time=times[rows] - times[rows[0]])
    profile = setup.profile
    scaled = ("decode_fixed", "per_decode", "per_kv_token", "per_prefill_token")
    slow = replace(
        profile,
        token_seconds=tuple(NUM_TENANTS * s for s in profile.token_seconds),
        **{k: NUM_TENANTS * getattr(profile, k) for k in (*scaled, "per_prefill_context")},
    )
    report = run(replace(setup, profile=slow, fairness=False), own)
    return ttft_p99(report, report.completed)


def figures(admission: str, load: float, seed: int, num_requests: int) -> Figures:
    """Of tenants that ask for less than their share: their p99 of TTFT over 1.5 times what it is on
    a server of their share and two steps, at the worst; and what all are served."""
    setup = Setup(load_profile("a100-llama2-7b"), PolicyConfig.of(admission))
    workload = trace(num_requests, load * CAPACITY[admission], seed)
    fair, unfair = run(replace(setup, fairness=True), workload), run(setup, workload)
    step_s = fair.result.finished_at / fair.result.num_steps
    quiet = [n for n, share in zip(NAMES, SHARES, strict=True) if load * share < 1 / NUM_TENANTS]
    over: dict[str, list[float]] = {"fair": [], "unfair": []}
    for name in quiet:
        most = 1.5 * alone(setup, workload, name) + 2 * step_s
        for key, report in (("fair", fair), ("unfair", unfair)):
            over[key].append(ttft_p99(report, workload.tenants == name) / most)
    return {
        "tenants_below_share": len(quiet),
        "worst_ttft_over_bar": max(over["fair"]),
        "median_ttft_over_bar": float(np.median(over["fair"])),
        "worst_ttft_over_bar_without": max(over["unfair"]),
        "throughput_over_without": delivered(fair) / delivered(unfair),
        "makespan_over_without": fair.result.finished_at / unfair.result.finished_at,
        "jain": fair.figures()["jain"],
        "jain_without": unfair.figures()["jain"],
        "preemptions": fair.result.num_preemptions,
        "preemptions_without": unfair.result.num_preemptions,
    }


# --- one that sends 20 times as much --------------------------------------------------------------

GREEDY = {"each": 20.0, "all": 20.0 * (NUM_TENANTS - 1)}
"""What the first sends, over what each of the others does."""


def light_shares(report: Report) -> npt.NDArray[np.float64]:
    """Of the tenants but the first: output tokens until the last arrival over what was due, which
    is what they asked for, or their share of what all were given if that is less. A request asks
    for what could have been done by then on a server of its own."""
    workload, end = report.workload, report.arrived_at[-1]
    assert workload.tenants is not None
    owner = np.unique(workload.tenants, return_inverse=True)[1]
    soonest = report.arrived_at + seconds_alone(
        report.profile, workload.prompt_len, workload.output_len
    )
    asked = np.bincount(owner, np.where(soonest <= end, workload.output_len, 0))
    is_done = report.completed & (report.finished_at <= end)
    given = np.bincount(owner, np.where(is_done, report.num_tokens, 0))
    return np.asarray((given / np.minimum(asked, given.sum() / NUM_TENANTS))[1:])


def greedy_figures(admission: str, beside: str, load: float, seed: int, num: int) -> Figures:
    setup = Setup(load_profile("a100-llama2-7b"), PolicyConfig.of(admission))
    shares = np.ones(NUM_TENANTS)
    shares[0] = GREEDY[beside]
    workload = trace(num, load * CAPACITY[admission], seed, shares / shares.sum())
    fair, unfair = (run(replace(setup, fairness=rule), workload) for rule in (True, False))
    return {
        "light_rate": float(light_shares(fair).mean()),
        "worst_light_rate": float(light_shares(fair).min()),
        "light_rate_without": float(light_shares(unfair).mean()),
        "worst_light_rate_without": float(light_shares(unfair).min()),
        "throughput_over_without": delivered(fair) / delivered(unfair),
    }


# --- the parts ------------------------------------------------------------------------------------


def simulated(cells: Cells, seeds: int, num_requests: int) -> None:
    for case in itertools.product(CAPACITY, LOADS, range(seeds)):
        key = "simulated/{}/{}/{}".format(*case)
        cells.measure(key, lambda c=case: figures(*c, num_requests))


def greedy(cells: Cells, seeds: int, num_requests: int) -> None:
    for case in itertools.product(CAPACITY, GREEDY, LOADS, range(seeds)):
        key = "greedy/{}/{}/{}/{}".format(*case)
        cells.measure(key, lambda c=case: greedy_figures(*c, num_requests))


def live(cells: Cells, seeds: int, seconds: Seconds) -> None:
    for seed in range(seeds):
        for weight in sorted({w for _, w in CASES}):
            keys = {g: f"live/{g}/{weight:g}:1/{seed}" for g, w in CASES if w == weight}
            if all(key in cells.done for key in keys.values()):
                continue
            with serving(weight) as server:
                for greedy, key in keys.items():
                    job = (server, greedy, weight, seconds, seed)
                    cells.measure(key, lambda j=job: measure(*j))


def report(cells: Cells) -> None:
    for name in sorted({key.rpartition("/")[0] for key in cells.done}):
        first = next(f for key, f in cells.done.items() if key.rpartition("/")[0] == name)
        values = {f: cells.values(name, f) for f in first if f not in ("key", "cpu_s")}
        for figure, found in values.items():
            median = statistics.median(found)
            print(f"{name} {figure}: {plus_minus(interval(found))}, median {median:.4g}")
        for verdict in verdicts(name, values):
            print(verdict.line())


def verdicts(name: str, values: dict[str, list[float]]) -> list[ClaimVerdict]:
    if name.startswith("simulated"):
        worst = interval(values["worst_ttft_over_bar"]).mean
        kept = interval(values["throughput_over_without"]).mean
        return [
            bar(name, f"the worst TTFT is {worst:.2f} of its bar", worst <= 1),
            bar(name, f"{kept:.3f} of the throughput", kept >= 0.98),
        ]
    if name.startswith("greedy"):
        rate, worst = (interval(values[f]).mean for f in ("light_rate", "worst_light_rate"))
        text = f"light tenants get {rate:.3f} of what is due, the worst of them {worst:.3f}"
        return [bar(name, text, rate >= 0.95)]
    due, ttft = (statistics.median(values[f]) for f in ("of_what_is_due", "ttft_over_bar"))
    return [
        bar(name, f"{due:.2f} of what is due", due >= 0.9),
        bar(name, f"TTFT is {ttft:.2f} of its bar", ttft <= 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["simulated", "greedy", "live", []])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000, help="of a simulated run")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a live measurement")
    parser.add_argument("--out", type=Path, default=Path("tenants.jsonl"))
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    cells = Cells(given.out)
    if not given.report:
        parts = given.parts or ["simulated", "greedy", "live"]
        if "simulated" in parts:
            simulated(cells, given.seeds, given.requests)
        if "greedy" in parts:
            greedy(cells, given.seeds, given.requests)
        if "live" in parts:
            live(cells, given.seeds, Seconds(0.8 * given.seconds, given.seconds))
    report(cells)


if __name__ == "__main__":
    main()
