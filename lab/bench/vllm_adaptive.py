"""Is the default behind vLLM's adaptive verification, on the virtual clock?

    python -m lab.bench.vllm_adaptive [--json] [--seeds N] [--only TEXT] [--data DIR] [--out FILE]

Closed loops of 1 to 256 clients on the A100 profile, recorded acceptance; tokens per second of the
second half. `auto` is the default bundle with drafters that end their drafts early. `adaptive` is
the rival (`lab.common.vllm_adaptive`), the best in hindsight of 1, 2, 4 and 8 draft tokens, of its
default context of the first measurement or the load's own, and of one drafter for all.

With one drafter (a head of 0.05 of a step) and with two (look-up as well); confidences that say
nothing, or as much as those of recorded drafters: a correlation with acceptance of 0.56
(SpecKV, 2026), which is a separation of 1.35. Controls: random lengths, and `known`, which drafts
right tokens only; `clairvoyant` has each request's drafter from its record.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.never_behind import closed, decisions, log_normal, one_drafter
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.families import closed_loop
from lab.common.oracles import assigned
from lab.common.results import DATA, Results, parser, table, tell
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from lab.common.vllm_adaptive import (
    LONGEST,
    AdaptiveVerification,
    Cutter,
    CuttingExecutor,
    EndEarly,
    Known,
    Signal,
    Whole,
)
from penstock.config import PolicyConfig
from penstock.core.policies.bundles import AUTO
from penstock.core.state import Drafter
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import RecordedAcceptance, read_records
from penstock.sim.parallel import Workers, workers
from penstock.sim.run import Setup
from penstock.sim.workloads import Workload, WorkloadError

BATCHES = {1: 80.0, 4: 40.0, 16: 20.0, 64: 20.0, 256: 20.0}
"""Clients, and seconds on the virtual clock."""
SEPARATIONS = (0.0, 1.35)
HEAD, LOOK_UP = "eagle", "ngram"
ONE_BAR, SEVERAL_BAR, WORTH_CHOOSING = 1.0, 1.1, 1.15
_LENGTHS = (1, 2, 4, 8)
_DEFAULT_CONTEXT = 4096  # 8192, cut to what Llama-2 can read
_OWN_CONTEXT = 200
_SHARE, _LOOK_UP_S = 0.05, 20e-6
_PROMPT, _OUTPUT = 60, 200
CLAIRVOYANT, KNOWN, RANDOM, PRICED = "clairvoyant", "known", "random", "priced"


@dataclass(frozen=True)
class Cell:
    """Clients, drafters and what confidences say. data: the folder of records."""

    drafters: tuple[str, ...]
    records: str
    batch: int
    separation: float
    data: Path

    @property
    def name(self) -> str:
        told = "confidences" if self.separation else "no confidences"
        return f"{' and '.join(self.drafters)}, {self.records}, {told}, batch {self.batch}"

    @property
    def rivals(self) -> list[str]:
        """Every form of vLLM's, by drafter."""
        contexts = (_DEFAULT_CONTEXT, _OWN_CONTEXT)
        found = itertools.product(self.drafters, _LENGTHS, contexts)
        return [f"adaptive/{d}/{k}/{c}" for d, k, c in found]

    @property
    def fixed(self) -> list[str]:
        return ["none/", *(f"fixed/{d}/{k}" for d, k in itertools.product(self.drafters, _LENGTHS))]

    @property
    def systems(self) -> list[str]:
        found = [AUTO, *self.rivals, *self.fixed, f"{RANDOM}/{HEAD}"]
        if len(self.drafters) == 1:
            return [*found, f"{KNOWN}/{HEAD}", f"{PRICED}/{HEAD}"]
        return [*found, CLAIRVOYANT, *(f"{PRICED}/{d}" for d in self.drafters)]


class _EndingSetup(Setup):
    """A setup whose model drafters can end a draft early."""

    def make_drafters(self) -> list[Drafter]:
        return [replace(d, stops_early=d.name != LOOK_UP) for d in super().make_drafters()]


@cache
def _rows(data: Path, records: str, drafters: tuple[str, ...]) -> dict[str, list[list[int]]]:
    return read_records(data / f"accept_{records}.jsonl.gz", drafters)


def measured(cell: Cell, system: str, seed: int) -> Figures:
    """Tokens per second of a system."""
    name, *told = system.split("/")
    used = (told[0],) if told and told[0] else () if told else cell.drafters
    rows = _rows(cell.data, cell.records, cell.drafters)
    acceptance = RecordedAcceptance(rows, seed)
    rng, num = np.random.default_rng(seed), 60 * cell.batch + 100
    prompts = log_normal(rng, num, _PROMPT, 0.8).clip(16, 4 * _PROMPT)
    load = closed_loop(prompts, log_normal(rng, num, _OUTPUT, 0.5).clip(32, 600))
    base = one_drafter(_SHARE, AUTO, acceptance, seed=seed)
    profile = base.profile
    look_up = DrafterProfile(LOOK_UP, (1,), (_LOOK_UP_S,))
    profile = replace(profile, drafters=(*profile.drafters, look_up))
    setup = replace(base, profile=profile, drafters=used, **decisions(_policies(name, told)))
    cutter: Cutter = Whole()
    if used:
        seconds = {d.name: partial(d.seconds, num_steps=1) for d in profile.drafters}
        one = seconds[used[0]]
        if name == "adaptive":
            k = int(told[1])
            cutter = AdaptiveVerification(profile, lambda n: k * one(n), int(told[2]))
        elif name == KNOWN:
            cutter = Known(profile, one)
        elif cell.separation and name in (AUTO, PRICED, CLAIRVOYANT):
            setup = _EndingSetup(**vars(setup))
            cutter = EndEarly()
    kind = partial(CuttingExecutor, cutter=cutter, signal=Signal(cell.separation, seed))
    choice = nullcontext("")
    if name == CLAIRVOYANT:
        choice = assigned(_best_drafters(setup, acceptance, cell.batch, len(load)))
    with choice as selection:
        if selection:
            setup = replace(setup, selection=PolicyConfig.from_name(selection))
        seconds_ = BATCHES[cell.batch]
        made = closed(setup, load, cell.batch, seconds_, kind)
    return {"value": sum(made.values()) / (seconds_ / 2)}


def _policies(name: str, told: Sequence[str]) -> str:
    """A system's name for `decisions`."""
    if name in (AUTO, CLAIRVOYANT, PRICED):
        return AUTO
    lengths = {"adaptive": "fixed", KNOWN: f"fixed {LONGEST}", "none": "none", RANDOM: "random"}
    found = lengths.get(name, name)
    return f"vllm_v1, {found} {told[1]}" if found == "fixed" else f"vllm_v1, {found}"


def _best_drafters(
    setup: Setup, acceptance: RecordedAcceptance, batch: int, num: int
) -> dict[str, str]:
    """Each request's best drafter with its best length, in a batch of requests like it."""
    times = {d.name: d for d in setup.profile.drafters}

    def seconds(drafter: str, row: Sequence[int], k: int) -> float:
        step = setup.profile.linear(batch * (1 + k)) + times[drafter].seconds(batch, k)
        return step / RecordedAcceptance({drafter: [row]}).tokens_per_step(drafter, k)

    known: dict[int, str] = {}
    found = {}
    for request in map(str, range(num)):
        rows = {d: acceptance._row(d, request) for d in setup.drafters}
        key = id(rows[HEAD])
        if key not in known:
            options = itertools.product(rows, range(1, LONGEST + 1))
            known[key] = min(options, key=lambda o: seconds(o[0], rows[o[0]], o[1]))[0]
        found[request] = known[key]
    return found


