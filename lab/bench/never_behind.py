"""Is the default behind any other way to set draft lengths, and where?

    python -m lab.bench.never_behind [--json] [--quick] [--only TEXT] [--data DIR] [--out FILE]

Cells on the virtual clock. Closed loops of 1 to 64 requests, drafts of recorded acceptance (gsm8k,
ShareGPT), a drafter whose step takes 0.05 or 0.33 of the target's (A100 profile): tokens per second
of the second half; the same with prompts of 12,000 tokens in the mean, and with KV memory for a
quarter of 32 requests. Four tenants with drafts of unlike acceptance, and 4 and 16 draft servers a
round trip of 5 to 300 ms away: geometric mean of the tenants' tokens per second. Poisson arrivals,
half of them with latency targets: the share met.

In each cell `priced` is set against no drafts, every fixed length and `goodspeed`; with draft
servers the others have the better of two pipelines, and `priced` has the default one. `behind` is
`priced` over the best of them in hindsight, paired by seed. Control: `priced` with every request's
value given to the next one must lose where values differ.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lab.common.cells import Cells
from lab.common.claims import ClaimVerdict, bar
from lab.common.families import closed_loop
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, interval
from penstock.config import PolicyConfig
from penstock.core.policies.registry import policies, register
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import (
    AcceptanceModel,
    DomainAcceptance,
    GeometricAcceptance,
    RecordedAcceptance,
    read_records,
)
from penstock.sim.domains import AcceptanceFit, DomainFit
from penstock.sim.links import DraftServer, Link
from penstock.sim.parallel import Workers, workers
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, WorkloadError, make_workload

OURS, TURNED = "priced", "priced, values turned"
LENGTHS = (1, 2, 3, 4, 6, 8)
RIVALS = ("none", *(f"fixed {k}" for k in LENGTHS), "goodspeed")
HINDSIGHT, LOWEST = 0.98, 0.95
_SECONDS = 20.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_RATES = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}


@dataclass(frozen=True)
class Cell:
    """A load and a server but for its draft lengths. has_values: its requests' tokens are of
    unlike value. with_servers: draft servers make the drafts."""

    name: str
    measure: Callable[[str, str, int], float]
    has_values: bool = False
    with_servers: bool = False


# --- systems --------------------------------------------------------------------------------------


def allocation_of(system: str) -> PolicyConfig:
    """Draft lengths by a system's name; `none` has no drafter."""
    name, _, length = system.partition(" ")
    if name in ("fixed", "none"):
        return PolicyConfig.from_name("fixed", k=int(length or 1))
    return PolicyConfig.from_name(_turned() if system == TURNED else name)


def _turned() -> str:
    """The name of `priced` with every request's value given to the next one."""
    priced = policies("allocation")["priced"]

    class Turned(priced):  # type: ignore[misc, valid-type]
        name: ClassVar[str] = "turned"

        def __init__(self, options: Any) -> None:
            super().__init__(options)
            right = self._values.of_tokens
            self._values.of_tokens = lambda *args: np.roll(right(*args), 1)

    if Turned.name not in policies("allocation"):
        register("allocation", Turned)
    return Turned.name


# --- scenes ---------------------------------------------------------------------------------------


def one_drafter(
    share: float, admission: PolicyConfig, system: str, acceptance: AcceptanceModel, seed: int
) -> Setup:
    """An A100, and a drafter whose steps and reading take `share` of the target's."""
    target = load_profile("a100-llama2-7b")
    seconds = tuple(share * target.linear(n) for n in _BATCHES)
    reading = share * (target.linear(1024) - target.linear(512)) / 512
    profile = replace(target, drafters=(DrafterProfile("eagle", _BATCHES, seconds, reading),))
    names = () if system == "none" else ("eagle",)
    policies = admission, allocation_of(system)
    return Setup(
        profile, *policies, block_size=16, acceptance=acceptance, drafters=names, seed=seed
    )


def second_half(report: Report, until: float) -> FloatArray:
    """Tokens of each request in the second half of a run, evenly spread over its decoding."""
    ends = np.where(np.isnan(report.finished_at), until, report.finished_at)
    first = np.where(np.isnan(report.first_token_at), ends, report.first_token_at)
    late = np.clip(ends - np.maximum(first, until / 2), 0, None)
    return np.asarray(report.num_tokens * late / np.maximum(ends - first, 1e-9))


def log_normal(rng: np.random.Generator, num: int, mean: float, spread: float) -> Any:
    return np.exp(rng.normal(math.log(mean), spread, num)).astype(np.int64)


def closed(
    data: Path,
    batch: int,
    share: float,
    records: str,
    prompt: int,
    memory: float | None,
    system: str,
    pipeline: str,
    seed: int,
) -> float:
    """Tokens per second of so many requests at a time. memory: share of what they need at most."""
    rng = np.random.default_rng(seed)
    prompts = log_normal(rng, 40 * batch, prompt, 0.8).clip(16, 4 * prompt)
    load = closed_loop(prompts, log_normal(rng, 40 * batch, 200, 0.5).clip(32, 600))
    rows = read_records(data / f"accept_{records}.jsonl.gz", ("eagle",))
    needed = int(batch * (prompts.mean() + load.output_len.mean()))
    admission = PolicyConfig.from_name("vllm_v1", max_num_seqs=batch)
    setup = one_drafter(share, admission, system, RecordedAcceptance(rows, seed), seed)
    if memory is not None:
        setup = replace(setup, kv_tokens=int(memory * needed))
    return float(second_half(run(setup, load, until=_SECONDS), _SECONDS).sum() / (_SECONDS / 2))


def tenants(system: str, pipeline: str, seed: int) -> float:
    """Four tenants, of whose drafts more or fewer are accepted, 32 requests at a time."""
    names = np.array(list(_RATES))[np.arange(600) % len(_RATES)]
    fits = {
        name: DomainFit(mean=(math.log(p / (1 - p)),), covariance=((0.0,),))
        for name, p in _RATES.items()
    }
    acceptance = DomainAcceptance(AcceptanceFit(drafters=("eagle",), domains=fits), seed)
    admission = PolicyConfig.from_name("vllm_v1", max_num_seqs=32)
    setup = one_drafter(0.1, admission, system, acceptance, seed)
    load = closed_loop(np.full(600, 100), 300, names)
    made = second_half(run(setup, load, until=_SECONDS), _SECONDS)
    each = [max(1.0, float(made[names[: len(made)] == name].sum())) for name in _RATES]
    return float(np.exp(np.log(each).mean()) / (_SECONDS / 2))


def servers(
    num: int, round_trip: float, verify: float, system: str, pipeline: str, seed: int
) -> float:
    """A request without end at each draft server; devices and links are log-normal."""
    rng = np.random.default_rng(seed)
    rates = {f"s{i}": float(p) for i, p in enumerate(rng.uniform(0.3, 0.9, num))}
    apart = [
        DraftServer(
            name,
            float(0.012 * np.exp(rng.normal(0, 0.5))),
            Link(float(round_trip / 2 * np.exp(rng.normal(0, 0.5)))),
            tenant=name,
        )
        for name in rates
    ]
    setup = Setup(
        StepProfile("p", 10**9, (0, 1000), (verify, verify + 0.2)),
        allocation=allocation_of(system),
        draft_servers=() if system == "none" else tuple(apart),
        acceptance=GeometricAcceptance(rates, seed),
        kv_tokens=4096 * 300 * num,
        block_size=4096,
        pipeline=pipeline,
        counted=False,
    )
    load = Workload("w", np.full(num, 8), np.full(num, 10**6), np.zeros(num), np.array(list(rates)))
    made = run(setup, load, until=_SECONDS).num_tokens / _SECONDS
    return float(np.exp(np.log(np.maximum(made, 1e-3)).mean()))


def in_time(data: Path, rate: float, system: str, pipeline: str, seed: int) -> float:
    """Share of latency targets met: TPOT of 12 ms for a quarter, 50 ms for another quarter."""
    rng, num = np.random.default_rng(seed), 160
    asked = np.array([0.012, 0.05, np.nan, np.nan] * (num // 4))
    lengths = Workload("m", rng.integers(50, 1500, num), rng.integers(30, 300, num), tpot=asked)
    rows = read_records(data / "accept_sharegpt.jsonl.gz", ("eagle",))
    admission = PolicyConfig.from_name("fluid_guided")
    setup = one_drafter(0.05, admission, system, RecordedAcceptance(rows, seed), seed)
    load = make_workload(lengths, rate=rate, seed=seed, arrivals="poisson")
    report = run(setup, load)
    return float(report.met_target.sum() / report.has_target.sum())


def cells(data: Path) -> list[Cell]:
    """The grid."""
    found = []
    for batch, share, records in itertools.product(
        (1, 8, 32, 64), (0.05, 0.33), ("gsm8k", "sharegpt")
    ):
        scene = partial(closed, data, batch, share, records, 200, None)
        found.append(Cell(f"batch {batch}, drafter {share}, {records}", scene))
    scene = partial(closed, data, 8, 0.05, "sharegpt", 12_000, None)
    found.append(Cell("batch 8, prompts of 12,000", scene))
    scene = partial(closed, data, 32, 0.05, "sharegpt", 200, 0.25)
    found.append(Cell("batch 32, KV for a quarter", scene))
    found.append(Cell("four tenants", tenants, has_values=True))
    for rate in (5.0, 7.0):
        name = f"latency targets, {rate:g} requests/s"
        found.append(Cell(name, partial(in_time, data, rate), has_values=True))
    for num, trip, verify in itertools.product((4, 16), (0.005, 0.03, 0.1, 0.3), (0.03, 0.1)):
        name = f"{num} draft servers, {1000 * trip:g} ms, step {1000 * verify:g} ms"
        found.append(Cell(name, partial(servers, num, trip, verify), with_servers=True))
    return found


# --- the comparison -------------------------------------------------------------------------------


def compare(grid: Sequence[Cell], seeds: Sequence[int], done: Cells, workers: Workers) -> Results:
    """`priced` over the best of the others in every cell."""
    wanted: dict[str, Callable[[], dict[str, Any]]] = {}
    for cell in grid:
        for system in (OURS, *RIVALS, *[TURNED] * cell.has_values):
            pipelines = ("off", "async") if cell.with_servers and system != OURS else ("async",)
            for pipeline, seed in itertools.product(pipelines, seeds):
                job = partial(_figures, cell.measure, system, pipeline, seed)
                wanted[f"{cell.name}/{system}/{pipeline}/{seed}"] = job
    done.measure_all(wanted, workers)
    rows, verdicts = [], []
    for cell in grid:
        row = _row(cell, done)
        rows.append(row)
        verdicts.append(_verdict(cell, row))
    columns = {
        "cell": "{cell}",
        "`priced`": "{ours:.4g}",
        "best other": "{best}",
        "over it": "{mean:.3f}",
        "low": "{low:.3f}",
        "over no drafts": "{plain}",
        "values turned": "{turned}",
    }
    geometric = math.exp(np.mean([math.log(row["mean"]) for row in rows]))
    title = f"`priced` over the best of the others in hindsight; geometric mean {geometric:.3f}"
    return Results(rows, verdicts, [table(title, rows, columns)])


def _figures(
    measure: Callable[[str, str, int], float], system: str, pipeline: str, seed: int
) -> dict[str, Any]:
    return {"value": measure(system, pipeline, seed)}


def _row(cell: Cell, done: Cells) -> dict[str, Any]:
    def values(system: str) -> FloatArray:
        own = [done.values(f"{cell.name}/{system}/{p}", "value") for p in ("off", "async")]
        return np.array(max([v for v in own if v], key=sum, default=[]))

    ours = values(OURS)
    rivals = {name: values(name) for name in RIVALS if len(values(name))}
    best = max(rivals, key=lambda name: float(rivals[name].mean()))
    share = interval(np.log(ours / rivals[best]))
    plain = rivals.get("none")
    turned = values(TURNED)
    return {
        "cell": cell.name,
        "ours": float(ours.mean()),
        "best": best,
        "mean": math.exp(share.mean),
        "low": math.exp(share.low),
        "plain": "" if plain is None else f"{float((ours / plain).mean()):.2f}",
        "turned": f"{float((turned / ours).mean()):.3f}" if len(turned) else "",
    }


def _verdict(cell: Cell, row: dict[str, Any]) -> ClaimVerdict:
    told = f"{HINDSIGHT} of the best in hindsight, {LOWEST} at the lower end"
    return bar(cell.name, told, row["mean"] >= HINDSIGHT and row["low"] >= LOWEST)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="two seeds")
    options.add_argument("--only", default="", help="cells whose names contain this")
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--out", type=Path, default=Path("never_behind.jsonl"))
    args = options.parse_args(arguments)
    grid = [cell for cell in cells(args.data) if args.only in cell.name]
    try:
        seeds = SEEDS[:2] if args.quick else SEEDS
        with workers() as some:
            return tell(args, compare(grid, seeds, Cells(args.out), some))
    except (WorkloadError, OSError) as error:
        print(f"never_behind: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
