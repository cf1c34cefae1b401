"""Are WAIT's admission and the default's better than vLLM's and Sarathi's on a live engine?

    python -m lab.bench.wait_live [MODEL.gguf] [--classes 64+32,256+128] [--loads 0.5,0.8,0.95]
        [--requests 80] [--stretches 4] [--out FILE] [--result FILE] [--json]

Poisson arrivals at the bundled target or MODEL, in this process, without drafts, under the
admission of `--policy` `vllm`, `sarathi`, `wait` and `auto`: two classes of prompt and output
tokens, half of the requests each. KV memory is a third of M* (WAIT, eq. 5) at 0.95 of the fluid's
bound with all memory, by a profile of this engine's own steps. Capacity is what `vllm` completes of
a stretch that is there at once, which every policy serves, too. The policies take turns with each
stretch; a fifth of it warms up.

Predictions are the simulator's with that profile and the same arrivals, and the fluid's: the most
that any policy serves, and that WAIT's thresholds carry (M* within memory). Where a gain of 15% is
allowed, the bar is half of it. Control: `vllm` once more; oracle: `vllm` with memory for all. Every
cell is a line of FILE (default: wait_live.jsonl), from which the same command goes on. For the
bundled target eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.bench.real_prompts import source_texts
from lab.bench.servers import Prompts
from lab.common.cells import Cells, Figures
from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.live import play_arrivals
from lab.common.results import Results, ResultTable, parser, table, tell
from lab.common.statistics import FloatArray, interval, plus_minus, ratio, rotated
from lab.common.step_recorder import StepRecorder
from penstock.config import EngineConfig, PolicyConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.loop import Loop
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.fluid.capacity import capacity_bound, output_work
from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.fluid.traffic import Traffic, TrafficType, decode_len
from penstock.fluid.wait import fractional_wait_thresholds
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor
from penstock.sim.profiles import fit_steps
from penstock.zoo.registry import DEFAULT_TARGET, model_path

BASE, AGAIN, ALL_MEMORY = "vllm", "vllm, once more", "vllm, all memory"
POLICIES = (BASE, "sarathi", "wait", "auto")
JUDGED = ("wait", "auto")
CONTROLS = (AGAIN, ALL_MEMORY)
"""At once and at the highest load."""
AT_ONCE = 0.0
"""The load of a stretch that is there at once."""
MEMORY = 1 / 3
"""KV memory, as a share of the demand."""
DEMANDING = 0.95
"""Load whose KV tokens are the demand, as a share of the bound with all memory."""
FEW = 4
"""Mean requests for which there is memory while small steps are measured."""
WARM, WORTH, REACHED = 0.2, 0.15, 0.5
"""The share of a stretch that does not count, a gain that can be seen, and the part of it that is
the bar."""
BLOCK_SIZE, _BISECTIONS = 16, 40
LONG_RUN = 2000
"""Requests there at once of a simulation in which their end counts for nothing."""


class Kind(NamedTuple):
    """A class of requests. prompt, output: tokens."""

    prompt: int
    output: int


class Stretches:
    """Requests of two classes. num: of a stretch."""

    def __init__(self, model: Path, kinds: Sequence[Kind], num: int) -> None:
        self.model, self.kinds, self.num = model, kinds, num
        self.mean = sum(map(sum, kinds)) / len(kinds)
        self._prompts = Prompts(load_tokenizer(model), "\n".join(source_texts()))

    def requests(self, stretch: int, rate: float) -> list[Request]:
        """rate: arrivals a second; 0: all are there at once."""
        rng = np.random.default_rng(stretch)
        kinds = [self.kinds[i] for i in rng.permutation(self.num) % len(self.kinds)]
        gaps = rng.exponential(1 / rate, self.num) if rate else np.zeros(self.num)
        numbers = itertools.count(stretch * self.num)
        made = []
        for kind, arrival in zip(kinds, np.cumsum(gaps).tolist(), strict=True):
            (prompt,) = self._prompts.make("code", kind.prompt, numbers, 1)
            made.append(
                Request(
                    id=str(len(made)),
                    prompt_len=len(prompt),
                    max_tokens=kind.output,
                    arrival_time=arrival,
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(temperature=0.0),
                    drafter=NO_DRAFTER,
                )
            )
        return made

    def traffic(self, rate: float) -> Traffic:
        """Return the arrivals as the fluid model takes them."""
        each = rate / len(self.kinds)
        return tuple(TrafficType(each, k.prompt, decode_len(k.output)) for k in self.kinds)

    @property
    def longest(self) -> int:
        """Tokens of a request, some of whose prompts come out longer."""
        return max(math.ceil(1.2 * k.prompt) + k.output for k in self.kinds)


class LiveAdmission:
    """The engine, loaded when it is first used, with memory for a whole stretch."""

    def __init__(self, stretches: Stretches) -> None:
        self._stretches = stretches

    @cached_property
    def engine(self) -> Engine:
        """Behind a first stretch, whose large steps touch new memory."""
        own = self._stretches
        made = load_engine(
            EngineConfig(
                target=own.model,
                drafters={},
                kv_tokens=own.num * own.longest,
                block_size=BLOCK_SIZE,
                max_model_len=own.longest + BLOCK_SIZE,
                prefix_caching=False,
                num_threads=os.cpu_count(),
            )
        )
        play_arrivals(_loop(made, BASE, own.num * own.longest), made.clock, own.requests(0, 0))
        return made

    def steps(self) -> Figures:
        """Time steps of few and of many requests."""
        own, recorder = self._stretches, StepRecorder(self.engine.clock)
        for kv_tokens in (max(own.longest, int(FEW * own.mean)), own.num * own.longest):
            loop = _loop(self.engine, BASE, kv_tokens, recorder)
            play_arrivals(loop, self.engine.clock, own.requests(0, 0))
        return {"steps": [[*work, round(seconds, 7)] for work, seconds in recorder.steps]}

    def serve(self, policy: str, kv_tokens: int, stretch: int, rate: float) -> Figures:
        requests = self._stretches.requests(stretch, rate)
        loop = _loop(self.engine, policy, kv_tokens)
        played = play_arrivals(loop, self.engine.clock, requests)
        return figures_of(requests, played.first, played.finished, played.tokens, rate)


def _loop(engine: Engine, policy: str, kv_tokens: int, *recorders: StepRecorder) -> Loop:
    learn = Estimators()
    learn.times = deepcopy(engine.scheduler.learn.times)
    scheduler = make_scheduler(policy, kv_tokens, learn, counted=False)
    return Loop(scheduler, engine.executor, engine.clock, recorders)


def make_scheduler(policy: str, kv_tokens: int, learn: Estimators, counted: bool) -> Scheduler:
    """A new one, of the live engine or, `counted`, of a simulated one."""
    admission = PolicyConfig.from_bundle("admission", policy.partition(",")[0])
    return Scheduler(
        BlockPool(kv_tokens // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=False),
        [],
        admission=admission.make("admission"),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "priced"),
        max_model_len=kv_tokens,
        learn=learn,
        groups_decodes=counted,
    )


def figures_of(
    requests: Sequence[Request],
    first: FloatArray,
    finished: FloatArray,
    tokens: FloatArray,
    rate: float,
) -> Figures:
    """Return a stretch's figures, without its first requests where there are arrivals."""
    counted = slice(round(WARM * len(requests)) if rate else 0, None)
    arrived = np.array([r.arrival_time for r in requests])
    return {
        "requests_per_s": float(len(requests) / finished.max()),
        "tokens_per_s": float(tokens.sum() / finished.max()),
        "latency_s": float((finished - arrived)[counted].mean()),
        "ttft_p99_s": float(np.quantile((first - arrived)[counted], 0.99)),
    }


# --- predictions ----------------------------------------------------------------------------------


class Model:
    """Predictions of the fluid and of the simulator. steps: rows of work and seconds."""

    def __init__(self, stretches: Stretches, steps: Sequence[Sequence[float]]) -> None:
        self._stretches = stretches
        work = [(StepWork._make(row[:-1]), row[-1]) for row in steps]
        self.all_memory = stretches.num * stretches.longest
        fitted = fit_steps(work, name="live", kv_tokens=self.all_memory, origin="")
        self.profile: StepProfile = fitted.profile
        demand = equilibrium(
            self.profile, stretches.traffic(DEMANDING * self.bound(self.all_memory))
        ).kv_tokens
        blocks = math.ceil(max(MEMORY * demand, stretches.longest) / BLOCK_SIZE)
        self.kv_tokens = blocks * BLOCK_SIZE
        self.demand = demand

    def memory(self, policy: str) -> int:
        return self.all_memory if policy == ALL_MEMORY else self.kv_tokens

    def bound(self, kv_tokens: int) -> float:
        """Requests a second that no policy exceeds."""
        kinds = self._stretches.kinds
        prompts, outputs = np.array(kinds).T
        return capacity_bound(self.profile, output_work(prompts, outputs), kv_tokens)

    def wait_bound(self) -> float:
        """Requests a second up to which M* fits into memory: WAIT's thresholds in the fluid."""
        low, high = 0.0, self.bound(self.kv_tokens)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            try:
                traffic = self._stretches.traffic(middle)
                fractional_wait_thresholds(self.profile, traffic, self.kv_tokens)
                low = middle
            except ValueError:
                high = middle
        return low

    def served(self, policy: str, stretch: int, rate: float) -> Figures:
        """The same requests on the virtual clock."""
        return self._simulated(policy, self._stretches.requests(stretch, rate), rate)

    @cached_property
    def sustained(self) -> dict[str, float]:
        """Requests a second of each policy, of so many there at once that their end counts
        little."""
        one = self._stretches.requests(0, 0)
        many = (replace(r, id=f"{turn}-{r.id}") for turn in itertools.count() for r in one)
        requests = list(itertools.islice(many, LONG_RUN))
        return {p: self._simulated(p, requests, 0)["requests_per_s"] for p in POLICIES}

    def _simulated(self, policy: str, requests: Sequence[Request], rate: float) -> Figures:
        learn = Estimators(self.profile)
        scheduler = make_scheduler(policy, self.memory(policy), learn, counted=True)
        clock = VirtualClock()
        executor = SimulatedExecutor(clock, ProfiledStepTimes(self.profile))
        given = [replace(r, prompt_token_ids=None) for r in requests]
        records = list(simulate(scheduler, executor, clock, given).records.values())
        first, finished, tokens = (
            np.array([getattr(r, name) for r in records], dtype=np.float64)
            for name in ("first_token_time", "finish_time", "num_tokens")
        )
        return figures_of(requests, first, finished, tokens, rate)


# --- the comparison -------------------------------------------------------------------------------


class Found(NamedTuple):
    """Measured and predicted figure of each stretch, by load and policy."""

    model: Model
    live: Mapping[tuple[float, str], Mapping[str, list[float]]]
    predicted: Mapping[tuple[float, str], Mapping[str, list[float]]]
    capacity: float

    @property
    def loads(self) -> list[float]:
        return sorted({load for load, _ in self.live})


def systems_at(load: float, loads: Sequence[float]) -> tuple[str, ...]:
    return (*POLICIES, *CONTROLS) if load in (AT_ONCE, max(loads)) else POLICIES


def measure(args: argparse.Namespace) -> Found:
    cells, kinds = Cells(args.out), [Kind(*map(int, k.split("+"))) for k in args.classes]
    stretches = Stretches(args.model, kinds, args.requests)
    live = LiveAdmission(stretches)
    name = f"{args.model.stem}/{','.join(args.classes)}/{args.requests}"
    model = Model(stretches, cells.measure(f"{name}/steps", live.steps)["steps"])
    turns, loads = range(1, args.stretches + 1), (AT_ONCE, *args.loads)
    predicted: dict[tuple[float, str], dict[str, list[float]]] = {}
    capacity = 0.0
    for turn, load in itertools.product(turns, loads):
        rate = load * capacity
        for policy in rotated(systems_at(load, loads), turn if capacity else 0):
            serve = partial(live.serve, policy, model.memory(policy), turn, rate)
            found = cells.measure(f"{name}/{load:g}/{policy}/{turn}", serve)
            capacity = capacity or found["requests_per_s"]
            for figure, value in model.served(policy, turn, rate).items():
                predicted.setdefault((load, policy), {}).setdefault(figure, []).append(value)
    measured = {
        (load, policy): {
            figure: cells.values(f"{name}/{load:g}/{policy}", figure)[: len(turns)]
            for figure in predicted[load, policy]
        }
        for load, policy in predicted
    }
    return Found(model, measured, predicted, capacity)


Gain = tuple[list[float], float]
"""Over `vllm`: measured in each stretch, and what the model allows."""


def verdicts(found: Found) -> list[ClaimVerdict]:
    return [judge(found, policy) for policy in JUDGED for judge in (throughput, latency)]


def throughput(found: Found, policy: str) -> ClaimVerdict:
    """At once, against the fluid's bound over what `vllm` sustains on the same profile."""

    def gain(name: str) -> Gain:
        allowed = found.model.bound(found.model.memory(name)) / found.model.sustained[BASE]
        live = found.live[AT_ONCE, name]["tokens_per_s"], found.live[AT_ONCE, BASE]["tokens_per_s"]
        return [own / base for own, base in zip(*live, strict=True)], allowed

    return _judged(f"`{policy}` serves more than `{BASE}` at once", policy, gain)


def latency(found: Found, policy: str) -> ClaimVerdict:
    """At the highest load, against the simulator's ratio."""
    load = found.loads[-1]

    def gain(name: str) -> Gain:
        live, told = (
            np.divide(of[load, BASE]["latency_s"], of[load, name]["latency_s"])
            for of in (found.live, found.predicted)
        )
        return live.tolist(), float(np.exp(np.log(told).mean()))

    return _judged(f"`{policy}` has a lower mean latency than `{BASE}` at {load:g}", policy, gain)


def _judged(claim: str, policy: str, gain: Callable[[str], Gain]) -> ClaimVerdict:
    allowed = gain(policy)[1]

    def reaches(gained: Gain) -> Measurement:
        live = ratio(gained[0], np.ones(len(gained[0])))
        wanted = 1 + REACHED * (gained[1] - 1)
        told = f"{live.times}, the model allows {gained[1]:.2f}× (bar {wanted:.2f}×)"
        return Measurement(told, (live.low > 1, live.mean >= wanted))

    found = check(
        claim,
        reaches,
        gain(policy),
        f"`{AGAIN}`",
        (gain(AGAIN)[0], allowed),
        (f"`{ALL_MEMORY}`", gain(ALL_MEMORY)),
    )
    return found if allowed >= 1 + WORTH else replace(found, outcome="inconclusive")


def tables(found: Found, stem: str) -> list[ResultTable]:
    model = found.model
    told = [
        {"who": "any policy: the fluid's bound", "rate": model.bound(model.kv_tokens)},
        {"who": "WAIT's thresholds in the fluid", "rate": model.wait_bound()},
        *({"who": f"`{p}`, simulated", "rate": model.sustained[p]} for p in POLICIES),
    ]
    title = (
        f"{stem}: M* at {DEMANDING:g} of the bound is {model.demand:,.0f} tokens, memory "
        f"{model.kv_tokens:,}"
    )
    shown = [table(title, told, {"of the model": "{who}", "requests/s": "{rate:.3g}"})]
    columns = {"load": "{load}", "policy": "{policy}"}
    for figure, header in _FIGURES.items():
        columns |= {header: f"{{{figure}}}", f"{header}, predicted": f"{{{figure} told}}"}
    rows = []
    for (load, policy), live in sorted(found.live.items(), key=lambda item: item[0][0]):
        row: dict[str, Any] = {"load": f"{load:g}" if load else "all at once", "policy": policy}
        for figure in _FIGURES:
            row[figure] = plus_minus(interval(live[figure]))
            row[f"{figure} told"] = f"{np.mean(found.predicted[load, policy][figure]):.3g}"
        rows.append(row)
    return [*shown, table(f"capacity: {found.capacity:.3g} requests/s", rows, columns)]


_FIGURES = {"tokens_per_s": "tokens/s", "latency_s": "mean latency, s", "ttft_p99_s": "p99 TTFT, s"}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("model", type=Path, nargs="?", default=model_path(DEFAULT_TARGET))
    options.add_argument("--classes", type=lambda t: t.split(","), default=["64+32", "256+128"])
    loads = dict(type=lambda t: [float(x) for x in t.split(",")], default=[0.5, 0.8, 0.95])
    options.add_argument("--loads", **loads)
    options.add_argument("--requests", type=int, default=80, help="of a stretch")
    options.add_argument("--stretches", type=int, default=4)
    options.add_argument("--out", type=Path, default=Path("wait_live.jsonl"), help="every cell")
    args = options.parse_args()
    found = measure(args)
    kept = {f"{load:g}/{policy}": of for (load, policy), of in found.live.items()}
    return tell(args, Results(kept, verdicts(found), tables(found, args.model.stem)))


if __name__ == "__main__":
    sys.exit(main())
