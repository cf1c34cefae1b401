"""Which admission policy sustains the largest load, and at what latency, on the virtual clock?

    python -m lab.bench.admission [capacity] [order] [--data DIR] [--out FILE] [--seeds N]
    python -m lab.bench.admission --report [--results DIR]

Hours. A line of JSON for each run goes to FILE (default admission.jsonl); a run that is there is
not repeated. `--report` prints tables of FILE and writes them as result files. Capacity is the
largest load at which the backlog of Poisson arrivals does not grow (`penstock.sim.capacity`).
`sarathi*` has the token budget and cap that are best in hindsight for each workload.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lab.bench.admission_report import report
from lab.common.cells import Cells, Figures
from lab.common.results import DATA
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.sim.capacity import capacity
from penstock.sim.parallel import Workers, workers
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload

OURS = PolicyConfig.from_name("fluid_guided")
SHIPPED = {
    "vllm_v0": policy_named("vllm_v0"),
    "vllm_v1": PolicyConfig.from_name("vllm_v1"),
    "vllm_v1 8192/1024": PolicyConfig.from_name(
        "vllm_v1", max_num_batched_tokens=8192, max_num_seqs=1024
    ),
    "sarathi": PolicyConfig.from_name("sarathi"),
}
TUNED_A100 = PolicyConfig.from_name("sarathi", token_budget=376, max_num_seqs=320)
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
FILES = {"sharegpt": "etalon_sharegpt_8k_stats.csv.gz", "conversation": "azure2023_conv.csv.gz"}


@dataclass(frozen=True)
class WorkloadSource:
    """Where workloads come from. scale: of the number of arrivals."""

    data: Path
    scale: float

    def is_there(self, name: str) -> bool:
        return name not in FILES or (self.data / FILES[name]).exists()

    def poisson(self, lengths: str | Workload, num: int, rate: float, seed: int) -> Workload:
        """So many requests of a workload with Poisson arrivals."""
        if isinstance(lengths, str) and lengths in FILES:
            lengths = str(self.data / FILES[lengths])
        return make_workload(lengths, num_requests=num, rate=rate, seed=seed, arrivals="poisson")

    def arrivals(self, name: str, rate: float, seed: int) -> Workload:
        """Requests of a trace in random order: a load is judged by the second half of them."""
        num = max(2000, int(WORKLOADS[name][1] * self.scale))
        return self.poisson(name, num, rate, seed).shuffled(seed)


Batch = dict[str, Callable[[], Figures]]
"""Cells that do not depend on each other, by key."""


@dataclass(frozen=True)
class Bench:
    """Where figures come from and go to."""

    cells: Cells
    loads: WorkloadSource
    seeds: range
    workers: Workers

    def measure(self, batch: Batch) -> list[Figures]:
        return self.cells.measure_all(batch, self.workers)

    def first(self, key: str) -> float:
        """The capacity with the arrivals of seed 0; 0 where it is not known."""
        return float(self.cells.done.get(f"{key}/0", {}).get("capacity", 0.0))

    def turns(self) -> tuple[range, range]:
        """Seed 0 comes first: the others' searches begin where its own ended."""
        return self.seeds[:1], self.seeds[1:]


def capacity_of(
    loads: WorkloadSource, name: str, policy: PolicyConfig, seed: int, guess: float, first: float
) -> Figures:
    """With the arrivals of `seed`: within 3% of `first`, which is what those of seed 0 came to,
    within a third of `guess` where that is 0, and on from there where it was wrong."""
    setup = setup_of(policy)

    def search(low: float, high: float) -> float:
        return capacity(
            setup,
            lambda rate: loads.arrivals(name, rate, seed),
            low * (first or guess),
            high * (first or guess),
            tolerance=0.005,
        ).requests_per_s

    return {"capacity": (first and search(0.97, 1.03)) or search(0.7, 1.1)}


def setup_of(policy: PolicyConfig) -> Setup:
    return Setup(load_profile("a100-llama2-7b"), policy)


def latency(policy: PolicyConfig, load: Workload) -> Figures:
    """Means of a run, and beside them what the last requests and the longest prompts pay."""
    figures = run(setup_of(policy), load).figures()
    ttft = figures["ttft_s"]
    return {
        "latency": figures["latency_s"]["mean"],
        "ttft": ttft["mean"],
        "ttft_p99": ttft["p99"],
        "ttft_p999": ttft["p999"],
        "ttft_max": ttft["max"],
        "slowdown_longest": figures["by_prompt_len"][-1]["slowdown"],
    }


# --- capacity -------------------------------------------------------------------------------------


def tuned(loads: WorkloadSource, name: str, rate: float) -> Figures:
    """Sarathi with the budget and cap that are best in hindsight: near the load that
    `fluid_guided` sustains, the lowest mean latency of a grid."""
    workload = loads.arrivals(name, 0.97 * rate, 1000)
    means = [
        (float(run(setup_of(policy), workload).latency.mean()), policy.options)
        for budget, cap in itertools.product(BUDGETS, CAPS)
        if cap <= budget
        for policy in [PolicyConfig.from_name("sarathi", token_budget=budget, max_num_seqs=cap)]
    ]
    mean, options = min(means, key=lambda pair: pair[0])
    return {"options": options, "latency": mean}


def bound(loads: WorkloadSource, name: str) -> Figures:
    """The fluid bound, as `penstock capacity` has it."""
    profile = load_profile("a100-llama2-7b")
    return {"requests_per_s": load_bound(profile, loads.arrivals(name, 1.0, 0), profile.kv_tokens)}


def part_capacity(bench: Bench) -> None:
    """Capacity, and mean latency at 0.5, 0.8 and 0.95 of the tuned rival's capacity."""
    loads = bench.loads
    names = [name for name in WORKLOADS if loads.is_there(name)]
    bench.measure({f"bound/{name}": partial(bound, loads, name) for name in names})
    rivals = {n: p for n, p in SHIPPED.items() if n in ("vllm_v0", "vllm_v1", "sarathi")}
    for seeds in bench.turns():
        where = [*itertools.product(seeds, names)]

        def search(label: str, policy: PolicyConfig, name: str, seed: int, guess: float) -> Batch:
            key = f"capacity/{name}/{label}"
            first = bench.first(key)
            job = partial(capacity_of, bench.loads, name, policy, seed, guess, first)
            return {f"{key}/{seed}": job}

        ours: Batch = {}
        for seed, name in where:
            ours |= search("fluid_guided", OURS, name, seed, WORKLOADS[name][0])
        bench.measure(ours)
        found = {
            name: bench.cells.done[f"capacity/{name}/fluid_guided/0"]["capacity"] for name in names
        }
        grid = bench.measure({f"tuned/{n}": partial(tuned, loads, n, found[n]) for n in names})
        best = {
            n: PolicyConfig.from_name("sarathi", **g["options"])
            for n, g in zip(names, grid, strict=True)
        }
        theirs: Batch = {}
        for seed, name in where:
            guess = bench.cells.done[f"capacity/{name}/fluid_guided/{seed}"]["capacity"]
            for label, policy in {"sarathi*": best[name], **rivals}.items():
                theirs |= search(label, policy, name, seed, guess)
        bench.measure(theirs)
        latencies: Batch = {}
        for (seed, name), share in itertools.product(where, (0.5, 0.8, 0.95)):
            rate = bench.cells.done[f"capacity/{name}/sarathi*/{seed}"]["capacity"]
            workload = loads.arrivals(name, share * rate, seed)
            policies = {"fluid_guided": OURS, "sarathi*": best[name], **SHIPPED}
            for label, policy in policies.items():
                key = f"latency/{name}/{share}/{label}/{seed}"
                latencies[key] = partial(latency, policy, workload)
        bench.measure(latencies)


# --- latency --------------------------------------------------------------------------------------


def long_prompts(seed: int, num: int) -> Workload:
    """Log-normal lengths: prompts of 12,000 tokens in the mean, outputs of 200."""
    rng = np.random.default_rng([seed, 7])
    prompts = np.clip(rng.lognormal(math.log(12_000) - 0.5, 1.0, num), 16, 100_000)
    outputs = np.clip(rng.lognormal(math.log(200) - 0.5, 1.0, num), 1, 2000)
    return Workload("long", prompts.astype(np.int64), outputs.astype(np.int64))


def part_order(bench: Bench) -> None:
    """What the order of the waiting requests is worth, and what the rest of a policy: each policy
    in both orders, at 0.8 and 0.95 of what fluid_guided carries in order of arrival."""
    rivals = {n: SHIPPED[n] for n in ("sarathi", "vllm_v1", "vllm_v0")}
    policies = {"fluid_guided": OURS, "sarathi 376/320": TUNED_A100, **rivals}
    in_order = {
        f"{label}, {order}": PolicyConfig.from_name(
            policy.name, **{**policy.options, "order": order}
        )
        for order in ("arrival", "size_aware")
        for label, policy in policies.items()
    }
    batch: Batch = {}
    for share, seed, name in itertools.product((0.95, 0.8), bench.seeds, QUEUES):
        if not bench.loads.is_there(name):
            continue
        rate, full = QUEUES[name]
        num = max(2000, int(full * bench.loads.scale))
        lengths = long_prompts(seed, num) if name == "long" else name
        workload = bench.loads.poisson(lengths, num, share * rate, seed)
        for label, policy in in_order.items():
            batch[f"order/{name}/{share}/{label}/{seed}"] = partial(latency, policy, workload)
    bench.measure(batch)


PARTS = {"order": part_order, "capacity": part_capacity}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("admission.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of arrivals")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    parser.add_argument("--ray", metavar="ADDRESS", help="work on a Ray cluster instead")
    parser.add_argument("--report", action="store_true", help="tables of what is known")
    parser.add_argument("--results", type=Path, help="folder of result files, for --report")
    given = parser.parse_args()
    cells = Cells(given.out)
    if given.report:
        report(cells, given.results)
        return
    loads = WorkloadSource(given.data, given.scale)
    with workers(given.workers, given.ray) as pool:
        bench = Bench(cells, loads, range(given.seeds), pool)
        for name in given.parts or PARTS:
            PARTS[name](bench)


if __name__ == "__main__":
    main()
