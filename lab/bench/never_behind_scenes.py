"""Loads and servers of `lab.bench.never_behind` with one drafter, or with one at each draft server.

Every function returns the figures of a system with a seed."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.admission import FILES
from lab.bench.never_behind_systems import decisions, has_drafts
from lab.common.cells import Figures
from lab.common.clients import log_normal, second_half
from lab.common.families import closed_loop
from lab.common.statistics import FloatArray
from penstock.core.policies.bundles import BUNDLES
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
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, make_workload

A100 = "a100-llama2-7b"
NUM_REQUESTS = {"conversation": 240, "code": 400, "summaries": 200, "gsm8k": 400}
_FILES = FILES | {
    "code": "azure2023_code.csv.gz",
    "summaries": "vidur_arxiv_summarization.csv.gz",
}
_SECONDS = 20.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_RATES = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
_STRANGER, _NEVER = "stranger", 1e-3  # and the acceptance of its drafts
KNOWING = ", the stranger asking for none"
_UNFINISHED = 1e-9  # of a system that leaves requests waiting for ever


def geometric(values: Iterable[float] | FloatArray) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


@cache
def recorded(data: Path, records: str, seed: int) -> RecordedAcceptance:
    return RecordedAcceptance(read_records(data / f"accept_{records}.jsonl.gz", ("eagle",)), seed)


def drafter_like(
    target: StepProfile, name: str, share: float, reading: float | None = None
) -> DrafterProfile:
    """A drafter whose steps take `share` of the target's, and its reading of a token, too, or so
    many seconds."""
    seconds = np.maximum.accumulate([share * target.linear(n) for n in _BATCHES])
    if reading is None:
        reading = share * (target.linear(1024) - target.linear(512)) / 512
    return DrafterProfile(name, _BATCHES, tuple(seconds.tolist()), reading)


def one_drafter(
    share: float,
    system: str,
    acceptance: AcceptanceModel | None,
    profile: str = A100,
    **more: Any,
) -> Setup:
    """A target, and a drafter whose steps and reading take `share` of the target's."""
    target = load_profile(profile)
    target = replace(target, drafters=(drafter_like(target, "eagle", share),))
    names = ("eagle",) if acceptance is not None and has_drafts(system) else ()
    made = Setup(target, block_size=16, acceptance=acceptance, drafters=names, **more)
    return replace(made, **decisions(system))


# --- clients --------------------------------------------------------------------------------------


def clients(
    data: Path,
    batch: int,
    share: float,
    records: str,
    system: str,
    seed: int,
    *,
    prompt: int = 200,
    memory: float | None = None,
    profile: str = A100,
) -> Figures:
    """Tokens per second. memory: share of what the clients need at most."""
    steps = [load_profile(name).decoding(batch)[0] for name in (profile, A100)]
    seconds = _SECONDS * (8 if prompt > 1000 else 1) * steps[0] / steps[1]
    rng = np.random.default_rng(seed)
    prompts = log_normal(rng, 40 * batch, prompt, 0.8).clip(16, 4 * prompt)
    load = closed_loop(prompts, log_normal(rng, 40 * batch, 200, 0.5).clip(32, 600))
    needed = int(batch * (prompts.mean() + load.output_len.mean()))
    kv = None if memory is None else int(memory * needed)
    acceptance = recorded(data, records, seed)
    setup = one_drafter(share, system, acceptance, profile, seed=seed, kv_tokens=kv)
    return {"value": sum(second_half(setup, load, batch, seconds).values()) / (seconds / 2)}


def four_tenants(system: str, seed: int) -> Figures:
    """Four tenants with eight clients each, of whose drafts more or fewer are accepted."""
    made = _by_tenant(_RATES, system, seed)
    return {"value": geometric(max(1, made[name]) / (_SECONDS / 2) for name in _RATES)}


def beside_a_stranger(share: float, system: str, seed: int) -> Figures:
    """Three tenants beside one of whose drafts nothing is accepted: what these three make.

    share: of a step, that a draft token takes. `KNOWING` at a system's end: the fourth asks for no
    drafts."""
    name = system.removesuffix(KNOWING)
    plain = (_STRANGER,) if name != system else ()
    rates = {"a": 0.8, "b": 0.7, "c": 0.6, _STRANGER: _NEVER}
    made = _by_tenant(rates, name, seed, share, plain)
    others = rates.keys() - {_STRANGER}
    return {"value": geometric(max(1, made[name]) / (_SECONDS / 2) for name in others)}


def _by_tenant(
    rates: Mapping[str, float],
    system: str,
    seed: int,
    share: float = 0.1,
    plain: Container[str] = (),
) -> dict[str, int]:
    """Tokens of tenants with eight clients each, by the acceptance of their drafts."""
    names = np.array(list(rates))[np.arange(1200) % len(rates)]
    fits = {
        name: DomainFit(mean=(math.log(p / (1 - p)),), covariance=((0.0,),))
        for name, p in rates.items()
    }
    acceptance = DomainAcceptance(AcceptanceFit(drafters=("eagle",), domains=fits), seed)
    setup = one_drafter(share, system, acceptance, seed=seed)
    load = closed_loop(np.full(1200, 100), 300, names)
    return second_half(setup, load, 8 * len(rates), _SECONDS, plain=plain)


# --- draft servers --------------------------------------------------------------------------------


def servers(num: int, round_trip: float, verify: float, system: str, seed: int) -> Figures:
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
        draft_servers=tuple(apart) if has_drafts(system) else (),
        acceptance=GeometricAcceptance(rates, seed),
        kv_tokens=4096 * 300 * num,
        block_size=4096,
        counted=False,
    )
    chosen = decisions(system, remote=True)
    pipelines = (chosen["pipeline"],) if system in BUNDLES else ("off", "async")
    load = Workload("w", np.full(num, 8), np.full(num, 10**6), np.zeros(num), np.array(list(rates)))
    tried = [replace(setup, **chosen | {"pipeline": p}) for p in pipelines]
    made = [run(one, load, until=_SECONDS).num_tokens / _SECONDS for one in tried]
    return {"value": max(geometric(np.maximum(rates, 1e-3)) for rates in made)}


# --- arrivals -------------------------------------------------------------------------------------


@cache
def lengths(data: Path, name: str) -> Workload:
    """Of a trace, or of the records of `gsm8k`."""
    if name != "gsm8k":
        return replace(make_workload(data / _FILES[name], rate=1.0), arrival_time=None)
    with gzip.open(data / f"accept_{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    prompts, outputs = (np.array([r[f"{x}_len"] for r in rows]) for x in ("prompt", "output"))
    return Workload(name, np.tile(prompts, 2), np.tile(outputs, 2))


def _records(name: str) -> str:
    return name if name == "gsm8k" else "sharegpt"


@cache
def bound(data: Path, name: str, with_drafts: bool, profile: str = A100) -> float:
    """Requests/s; with drafts, drafting takes no time in it."""
    target, load = load_profile(profile), lengths(data, name)
    if not with_drafts:
        return load_bound(target, load, target.kv_tokens)
    acceptance = recorded(data, _records(name), 0)
    return load_bound(target, load, target.kv_tokens, acceptance, ("eagle",))


def arrivals(
    data: Path,
    with_drafts: bool,
    name: str,
    share: float,
    system: str,
    seed: int,
    *,
    drafter: float = 0.05,
    memory: float | None = None,
    tight: float | None = None,
    num_tenants: int = 0,
    profile: str = A100,
) -> Figures:
    """One over mean latency; with `tight` the share of these TPOT targets met, with tenants the
    geometric mean of their tokens/s until the last arrival."""
    num, rng = NUM_REQUESTS[name], np.random.default_rng(seed)
    load = lengths(data, name).shuffled(seed).select(slice(num))
    if tight is not None:
        load = replace(load, tpot=np.where(np.arange(num) % 3, np.nan, tight))
    if num_tenants:
        shares = np.array([20.0] + [1.0] * (num_tenants - 1))
        owners = rng.choice(num_tenants, 2 * num, p=shares / shares.sum())
        load = lengths(data, name).shuffled(seed).select(slice(2 * num))
        load = replace(load, tenants=owners.astype(str))
    load = make_workload(load, rate=share * bound(data, name, with_drafts, profile), seed=seed)
    acceptance = recorded(data, _records(name), seed) if with_drafts else None
    fairness = bool(num_tenants)
    setup = one_drafter(drafter, system, acceptance, profile, seed=seed, fairness=fairness)
    if memory is not None:
        demand = run(one_drafter(0.05, "vllm", None, profile), load).result.kv_peak_tokens
        setup = replace(setup, kv_tokens=int(memory * demand))
    report = run(setup, load)
    is_done = bool((report.completed | report.refused).all())
    latency, ttft = float(report.latency.mean()), report.ttft
    figures = {
        "value": 1 / latency if is_done else _UNFINISHED,
        "latency": latency,
        "ttft": float(ttft.mean()),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "refused": int(report.refused.sum()),
    }
    if tight is not None:
        figures["value"] = max(1e-2, float(report.met_target.sum() / report.has_target.sum()))
    if num_tenants:
        until = float(report.arrived_at[-1])
        made = np.where(report.finished_at <= until, report.num_tokens, 0)
        rates = np.bincount(owners, made, num_tenants)[np.unique(owners)] / until
        figures["value"] = geometric(np.maximum(rates, 1 / until))
    return figures
