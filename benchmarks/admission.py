"""Admission policies side by side on the virtual clock.

    python -m benchmarks.admission [NAME...] [--data DIR] [--out FILE] [--seeds N] [--scale X]

Parts: capacity, order, memory, trace, slo, targets, robust, speed, speculation; without a name,
all. A line of JSON for each run goes to FILE (default admission.jsonl); what is there already is
not run again, so that a long comparison can be stopped and continued. `--report` prints tables of
what FILE holds.

Capacity is the largest load, by bisection, at which the backlog of Poisson arrivals does not grow
(`penstock.sim.capacity`). `sarathi*` is Sarathi with token budget and cap tuned in hindsight: the
best of a grid for each workload.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.figures import interval
from benchmarks.targets import Case, cases, share_within

from penstock.fluid.capacity import capacity_bound, output_work
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.capacity import Criterion, capacity
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, concatenate, make_workload

SUSTAINED = Criterion()
OURS = ("fluid_guided", {})
SHIPPED = {
    "vllm_v0": ("vllm_v0", {}),
    "vllm_v1": ("vllm_v1", {}),
    "vllm_v1 8192/1024": ("vllm_v1", {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}),
    "sarathi": ("sarathi", {}),
    "guaranteed_no_evict": ("guaranteed_no_evict", {}),
}
TUNED_A100 = ("sarathi", {"token_budget": 376, "max_num_seqs": 320})
BUDGETS = (256, 376, 384, 512, 768, 1024, 2048)
CAPS = (128, 256, 320, 512)
# Where to begin the search, in requests/s, and how many arrivals one run has.
WORKLOADS = {
    "low": (130.0, 60_000),
    "high": (35.0, 60_000),
    "nested": (65.0, 60_000),
    "ten_bins": (30.0, 60_000),
    "conversation": (5.2, 19_366),
    "sharegpt": (1.6, 12_000),
}
# For the part `order`: what fluid_guided carries in order of arrival, in requests/s, and arrivals.
QUEUES = {
    "conversation": (5.2, 19_366),
    "sharegpt": (1.6, 12_000),
    "long": (0.41, 6_000),
    "high": (37.0, 40_000),
}
FILES = {
    "sharegpt": "etalon_sharegpt_8k_stats.csv.gz",
    "conversation": "azure2023_conv.csv.gz",
    "code": "azure2023_code.csv.gz",
}


@dataclass
class Bench:
    """Where figures come from and go to."""

    data: Path
    out: Path
    seeds: int
    scale: float
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def cell(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures under `key`, measured unless they are known."""
        if key not in self.done:
            started = time.process_time()
            figures = {"key": key, **measure(), "cpu_s": time.process_time() - started}
            self.done[key] = figures
            with self.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")
            print(json.dumps(figures), flush=True)
        return self.done[key]

    def spec(self, name: str) -> str:
        return str(self.data / FILES[name]) if name in FILES else name

    def arrivals(self, name: str, rate: float, seed: int, num: int | None = None) -> Workload:
        """Requests of a trace in random order: a load is judged by the second half of them."""
        num = num or max(2000, int(WORKLOADS[name][1] * self.scale))
        spec = self.spec(name)
        made = make_workload(spec, num_requests=num, rate=rate, arrivals="poisson", seed=seed)
        return made.shuffled(seed)


def setup_of(policy: tuple[str, dict[str, Any]], **changes: Any) -> Setup:
    name, options = policy
    changes.setdefault("profile", load_profile("a100-llama2-7b"))
    return Setup(admission=name, admission_options=options, **changes)


def find_capacity(
    bench: Bench,
    key: str,
    name: str,
    policy: tuple[str, dict[str, Any]],
    seed: int,
    guess: float,
    criterion: Criterion = SUSTAINED,
    **changes: Any,
) -> float:
    """With the arrivals of `seed`; those of seed 0, under `key`, tell where to look: within 3% of
    theirs, within a third of `guess` where they are not known, and on from there where that was
    wrong."""
    setup = setup_of(policy, **changes)
    first = bench.done.get(f"{key}/0", {}).get("capacity", 0.0)

    def search(low: float, high: float) -> float:
        return capacity(
            setup,
            lambda rate: bench.arrivals(name, rate, seed),
            low * (first or guess),
            high * (first or guess),
            criterion=criterion,
            tolerance=0.005,
        ).requests_per_s

    return (first and search(0.97, 1.03)) or search(0.7, 1.1)


def long_prompts(seed: int, num: int) -> Workload:
    """Log-normal lengths: prompts of 12,000 tokens in the mean, outputs of 200."""
    rng = np.random.default_rng([seed, 7])
    prompts = np.clip(rng.lognormal(math.log(12_000) - 0.5, 1.0, num), 16, 100_000)
    outputs = np.clip(rng.lognormal(math.log(200) - 0.5, 1.0, num), 1, 2000)
    return Workload("long", prompts.astype(np.int64), outputs.astype(np.int64))


def latency(report: Report) -> dict[str, Any]:
    """Means, and beside them what the last requests and the longest prompts pay."""
    figures = report.figures()
    longest = figures["by_prompt_len"][-1]
    return {
        "latency": figures["latency_s"]["mean"],
        "ttft": figures["ttft_s"]["mean"],
        "ttft_p99": figures["ttft_s"]["p99"],
        "ttft_p999": figures["ttft_s"]["p999"],
        "ttft_max": figures["ttft_s"]["max"],
        "slowdown": figures["slowdown"]["mean"],
        "slowdown_longest": longest["slowdown"],
        "ttft_longest": longest["ttft_s"],
        "by_prompt_len": figures["by_prompt_len"],
        "tpot_p99": figures["tpot_s"]["p99"],
        "preemptions": figures["preemptions"],
        "requests_per_s": figures["throughput_requests_per_s"],
    }


def tuned(bench: Bench, name: str) -> tuple[str, dict[str, Any]]:
    """Sarathi with the budget and cap that are best in hindsight: at the load that
    `fluid_guided` sustains, the lowest mean latency of a grid."""
    rate = bench.done[f"capacity/{name}/fluid_guided/0"]["capacity"]

    def search() -> dict[str, Any]:
        best: tuple[float, dict[str, Any]] | None = None
        workload = bench.arrivals(name, 0.97 * rate, 1000)
        for budget, cap in itertools.product(BUDGETS, CAPS):
            if cap > budget:
                continue
            options = {"token_budget": budget, "max_num_seqs": cap}
            mean = float(run(setup_of(("sarathi", options)), workload).latency.mean())
            if best is None or mean < best[0]:
                best = (mean, options)
        assert best is not None
        return {"options": best[1], "latency": best[0]}

    return "sarathi", bench.cell(f"tuned/{name}", search)["options"]


def sustained(
    bench: Bench, name: str, label: str, policy: tuple[str, dict[str, Any]], seed: int, guess: float
) -> float:
    key = f"capacity/{name}/{label}"

    def measure() -> dict[str, Any]:
        return {"capacity": find_capacity(bench, key, name, policy, seed, guess)}

    return float(bench.cell(f"{key}/{seed}", measure)["capacity"])


def part_capacity(bench: Bench) -> None:
    """Capacity, and mean latency at 0.5, 0.8 and 0.95 of the tuned rival's capacity."""
    for seed, name in itertools.product(range(bench.seeds), WORKLOADS):
        if name in FILES and not (bench.data / FILES[name]).exists():
            continue
        ours = sustained(bench, name, "fluid_guided", OURS, seed, WORKLOADS[name][0])
        policies = {"sarathi*": tuned(bench, name), **SHIPPED}
        del policies["vllm_v1 8192/1024"], policies["guaranteed_no_evict"]
        for label, policy in policies.items():
            sustained(bench, name, label, policy, seed, ours)
        rival = bench.done[f"capacity/{name}/sarathi*/{seed}"]["capacity"]
        everybody = {"fluid_guided": OURS, "sarathi*": policies["sarathi*"], **SHIPPED}
        for share in (0.5, 0.8, 0.95):
            workload = bench.arrivals(name, share * rival, seed)
            for label, policy in everybody.items():
                bench.cell(
                    f"latency/{name}/{share}/{label}/{seed}",
                    lambda p=policy, w=workload: latency(run(setup_of(p), w)),
                )


def part_order(bench: Bench) -> None:
    """What the order of the waiting requests is worth, and what the rest of a policy: each policy
    in both orders, at 0.8 and 0.95 of what fluid_guided carries in order of arrival."""
    policies = {
        "fluid_guided": OURS,
        "sarathi 376/320": TUNED_A100,
        **{n: SHIPPED[n] for n in ("sarathi", "vllm_v1", "vllm_v0", "guaranteed_no_evict")},
    }
    in_order = [
        (f"{label}, {order}", (name, {**options, "order": order}))
        for order in ("arrival", "size_aware")
        for label, (name, options) in policies.items()
    ]
    cases = itertools.product((0.95, 0.8), range(bench.seeds), QUEUES)
    for share, seed, name in cases:
        if name in FILES and not (bench.data / FILES[name]).exists():
            continue
        rate, full = QUEUES[name]
        num = max(2000, int(full * bench.scale))
        lengths = long_prompts(seed, num) if name == "long" else bench.spec(name)
        workload = make_workload(
            lengths, num_requests=num, rate=share * rate, arrivals="poisson", seed=seed
        )
        for label, policy in (*in_order, ("sjf", ("sjf", {}))):
            bench.cell(
                f"order/{name}/{share}/{label}/{seed}",
                lambda p=policy, w=workload: latency(run(setup_of(p), w)),
            )


def part_memory(bench: Bench) -> None:
    """25,000 KV tokens: capacity against the bound, and preemptions at 0.99 of it."""
    few, profile = 25_000, load_profile("a100-llama2-7b")
    for seed, name in itertools.product(range(bench.seeds), ("high", "ten_bins")):
        lengths = bench.arrivals(name, 1.0, seed)
        work = output_work(lengths.prompt_len, lengths.output_len)
        mean_context = work.kv_token_steps / work.decode_steps
        together = replace(work, min_context=mean_context, max_context=mean_context)
        bounds = [capacity_bound(profile, w, few).requests_per_s for w in (work, together)]
        for label in ("fluid_guided", "vllm_v1", "sarathi"):
            policy = OURS if label == "fluid_guided" else SHIPPED[label]
            key = f"memory/{name}/{label}"

            def measure(
                k: str = key, n: str = name, p: Any = policy, s: int = seed, b: Any = bounds
            ) -> dict[str, Any]:
                found = find_capacity(bench, k, n, p, s, 0.9 * b[0], kv_tokens=few)
                at = run(setup_of(p, kv_tokens=few), bench.arrivals(n, 0.99 * found, s, 30_000))
                return {
                    "capacity": found,
                    "over_bound": found / b[0],
                    "over_bound_at_mean_context": found / b[1],
                    "preemptions": at.result.num_preemptions,
                }

            bench.cell(f"{key}/{seed}", measure)


def part_trace(bench: Bench) -> None:
    """The conversation trace with its own arrivals: as recorded, a fifth faster, and with times
    stretched by a fifth."""
    policies = {"fluid_guided": OURS, "sarathi 376/320": TUNED_A100, **SHIPPED}
    for name, scale in (("stretched", 1 / 1.2), ("recorded", 1.0), ("faster", 1.2)):
        workload = make_workload(bench.spec("conversation"), time_scale=scale)
        for label, policy in policies.items():
            bench.cell(
                f"trace/{name}/{label}", lambda p=policy, w=workload: latency(run(setup_of(p), w))
            )


def part_slo(bench: Bench) -> None:
    """The largest load at which p99 of TTFT is at most 1 s and of TPOT 80 ms."""
    targets = {"ttft_p99": 1.0, "tpot_p99": 0.08}
    criterion = Criterion(**targets)
    for seed, (name, guess) in itertools.product(
        range(bench.seeds), (("conversation", 3.8), ("sharegpt", 0.7))
    ):
        for label, policy in {"fluid_guided": ("fluid_guided", targets), **SHIPPED}.items():
            key = f"slo/{name}/{label}"
            bench.cell(
                f"{key}/{seed}",
                lambda k=key, n=name, p=policy, s=seed, g=guess: {
                    "capacity": find_capacity(bench, k, n, p, s, g, criterion)
                },
            )


def part_targets(bench: Bench) -> None:
    """Share of the requests within both targets: `fluid_guided` told of them and not told, and
    Sarathi with the budget and cap of a grid that are best for each load in hindsight."""
    profile = load_profile("a100-llama2-7b")
    for seed in range(bench.seeds):
        for case in cases(bench.data / FILES["conversation"], profile, seed):
            told = {"ttft_p99": case.ttft_p99, "tpot_p99": case.tpot_p99}
            policies = {"fluid_guided, told": ("fluid_guided", told), "fluid_guided": OURS}
            for label, policy in policies.items():
                bench.cell(
                    f"targets/{case.name}/{label}/{seed}",
                    lambda p=policy, c=case: {"within": _within(p, c)},
                )
            bench.cell(f"targets/{case.name}/sarathi*/{seed}", lambda c=case: _best_sarathi(c))


def _within(policy: tuple[str, dict[str, Any]], case: Case) -> float:
    report = run(setup_of(policy, kv_tokens=case.kv_tokens), case.workload)
    return share_within(report, case.ttft_p99, case.tpot_p99)


def _best_sarathi(case: Case) -> dict[str, Any]:
    best: dict[str, Any] = {"within": -1.0}
    for budget, cap in itertools.product((128, *BUDGETS), (8, 32, 128)):
        options = {"token_budget": budget, "max_num_seqs": cap}
        within = _within(("sarathi", options), case)
        if within > best["within"]:
            best = {"within": within, "options": options}
    return best


def robust_workloads(bench: Bench, seed: int) -> Iterator[tuple[str, Workload, dict[str, Any]]]:
    num = max(2000, int(20_000 * bench.scale))
    for rate in (2.5, 4.5):
        code = make_workload(
            bench.spec("code"), num_requests=8819, rate=rate, arrivals="poisson", seed=seed
        )
        yield f"code {rate}", code, {}
    linear = load_profile("paper-linear")
    for rate in (8.0, 24.0):
        code = make_workload(
            bench.spec("code"), num_requests=8819, rate=rate, arrivals="poisson", seed=seed
        )
        yield f"code {rate} paper-linear", code, {"profile": linear}
    slow = load_profile("a100-llama2-7b").slower(0.04)
    for rate in (12.0, 20.0):
        yield f"high {rate} +40 ms", bench.arrivals("high", rate, seed, num), {"profile": slow}
    doubled = make_workload(
        "high", num_requests=num, rate=18.0, arrivals="poisson@200-800x2", seed=seed
    )
    yield "high 18, doubled for ten minutes", doubled, {}
    half = num // 2
    lengths = concatenate(
        make_workload("low", num_requests=half, rate=1.0, seed=seed),
        make_workload("high", num_requests=half, rate=1.0, seed=seed + 100),
    )
    shifted = make_workload(lengths, num_requests=num, rate=30.0, arrivals="poisson", seed=seed)
    yield "low, then high, 30", shifted, {}


def part_robust(bench: Bench) -> None:
    """Mean latency where nothing is as it was: other profiles, bursts, shifting lengths."""
    for seed in range(bench.seeds):
        for name, workload, changes in robust_workloads(bench, seed):
            for label, policy in {"fluid_guided": OURS, **SHIPPED}.items():
                bench.cell(
                    f"robust/{name}/{label}/{seed}",
                    lambda p=policy, w=workload, c=changes: latency(run(setup_of(p, **c), w)),
                )


def part_speed(bench: Bench) -> None:
    """Requests simulated per second of CPU time."""
    for rate in (10.0, 34.0):
        workload = bench.arrivals("high", rate, 0, 20_000)

        def measure(w: Workload = workload) -> dict[str, Any]:
            best = 0.0
            for _ in range(3):
                started = time.process_time()
                run(setup_of(SHIPPED["sarathi"]), w)
                best = max(best, len(w) / (time.process_time() - started))
            return {"requests_per_cpu_s": best}

        bench.cell(f"speed/{rate}", measure)


def part_speculation(bench: Bench) -> None:
    """Draft lengths chosen with the load, against always 4 and never."""
    rates = (2.0, 8.0, 16.0, 24.0, 30.0)
    for seed, rate in itertools.product(range(bench.seeds), rates):
        workload = bench.arrivals("high", rate, seed, max(400, int(2000 * bench.scale)))
        variants = {
            "chosen": ("throughput", {}),
            "always 4": ("fixed", {"k": 4}),
            "never": ("fixed", {"k": 0}),
        }
        for label, (allocation, options) in variants.items():

            def measure(a: str = allocation, o: Any = options, w: Workload = workload) -> Any:
                setup = setup_of(
                    ("vllm_v1", {}),
                    allocation=a,
                    allocation_options=o,
                    drafters=("draft",),
                    acceptance=GeometricAcceptance({"draft": 0.7}, seed=1),
                )
                return latency(run(setup, w))

            bench.cell(f"speculation/{rate}/{label}/{seed}", measure)


PARTS = {
    "speed": part_speed,
    "trace": part_trace,
    "order": part_order,
    "memory": part_memory,
    "slo": part_slo,
    "targets": part_targets,
    "robust": part_robust,
    "speculation": part_speculation,
    "capacity": part_capacity,
}


def _ratio(bench: Bench, key: str, others: list[str], figure: str) -> float:
    """A figure over the least of the others', NaN without any."""
    known = (bench.done.get(other) for other in others)
    least = min((o[figure] for o in known if o is not None), default=math.nan)
    return float(bench.done[key][figure] / least)


def _compare(bench: Bench) -> None:
    """Beside the figures of `robust`: our mean latency over that of the best of the others; of
    `order`: each figure over the same policy's in order of arrival."""
    for key, figures in list(bench.done.items()):
        part, _, rest = key.partition("/")
        name, _, seed = rest.rpartition("/fluid_guided/")
        if part == "robust" and name:
            others = [f"robust/{name}/{label}/{seed}" for label in SHIPPED]
            figures["latency_over_the_best"] = _ratio(bench, key, others, "latency")
        if part == "order" and ", size_aware/" in key:
            arrival = [key.replace(", size_aware/", ", arrival/")]
            for figure in ("latency", "ttft", "ttft_p999", "ttft_max", "slowdown_longest"):
                figures[f"{figure}_over_arrival"] = _ratio(bench, key, arrival, figure)


def report(bench: Bench) -> None:
    """Means over seeds, with half the width of the 95% interval where there are several."""
    _compare(bench)
    groups: dict[str, dict[str, list[float]]] = {}
    for key, figures in bench.done.items():
        name = key if key.rsplit("/", 1)[-1].isdigit() is False else key.rsplit("/", 1)[0]
        for figure, value in figures.items():
            if isinstance(value, int | float) and figure != "cpu_s":
                groups.setdefault(name, {}).setdefault(figure, []).append(value)
    for name, columns in sorted(groups.items()):
        cells = []
        for figure, values in columns.items():
            mean, half = interval(values)
            cells.append(f"{figure} {mean:.4g}" + (f" ± {half:.2g}" if half else ""))
        print(f"{name}: " + ", ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    default = os.environ.get("PENSTOCK_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=Path("admission.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of arrivals")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.data, given.out, given.seeds, given.scale)
    if bench.out.exists():
        for line in bench.out.read_text().splitlines():
            figures = json.loads(line)
            bench.done[figures["key"]] = figures
    if given.report:
        report(bench)
        return
    for name in given.parts or PARTS:
        PARTS[name](bench)


if __name__ == "__main__":
    main()
