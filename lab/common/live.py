"""Figures that are measured on this machine: the engine with a family of models and all its
drafters, and systems that serve the same requests in turn.

The family is the bundled one, or a larger copy of it (`penstock zoo grow`), whose models make the
same tokens: the same acceptance at another cost.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.common.cells import Cells
from lab.common.experiment import LabError, Trial
from lab.common.statistics import FloatArray, rotated
from penstock.config import EngineConfig, PolicyConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp
from penstock.core.loop import Clock, Loop
from penstock.core.policies.registry import make_pipeline
from penstock.core.scheduler import Scheduler
from penstock.core.types import AUTO_DRAFTER, Arrive, Output, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import Completion, complete
from penstock.zoo.registry import (
    DEFAULT_TARGET,
    DOMAINS,
    WEIGHTS,
    bundled_models,
    load_prompts,
    model_path,
)

Prompt = tuple[int, ...]
PRICED = PolicyConfig.from_name("priced")
VLLM_V1 = PolicyConfig.from_name("vllm_v1")
_TOKENS = (8, 64)
_TURNS = (2, 5)
_ids = itertools.count()


def load(
    target: str,
    batch: int,
    new_tokens: int,
    *,
    family: Path = WEIGHTS,
    calibrated: bool = True,
    **settings: Any,
) -> Engine:
    """The engine with every drafter of a family, float32 where nothing else is said, room for so
    many requests. calibrated: as of `load_engine`; `settings` as of `EngineConfig`."""
    cards = bundled_models(family).items()
    drafters: dict[str, Any] = {n: str(c.path) for n, c in cards if c.role == "drafter"}
    chosen: dict[str, Any] = {"dtype": "float32", **settings}
    return load_engine(
        EngineConfig(
            target=model_path(target, family),
            drafters=drafters,
            kv_tokens=batch * (640 + new_tokens),
            prefix_caching=False,
            # A native engine leaves PyTorch with one thread, which the next would take for all.
            num_threads=os.cpu_count(),
            **chosen,
        ),
        calibrated=calibrated,
    )


def request_of(
    prompt: Prompt, seed: int, new_tokens: int, temperature: float, **fields: object
) -> Request:
    """A new request; `fields` as of `Request`."""
    return Request(
        id=f"t{next(_ids)}",
        prompt_len=len(prompt),
        prompt_token_ids=prompt,
        max_tokens=new_tokens,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        **fields,  # type: ignore[arg-type]
    )


def make_loop(
    engine: Engine,
    selection: PolicyConfig,
    allocation: PolicyConfig = PRICED,
    pipeline: str = "off",
    admission: PolicyConfig = VLLM_V1,
    look_up: LookUp | None = None,
    drafters: Collection[str] | None = None,
) -> Loop:
    """A scheduler of its own over the engine's executor, with what the engine has measured, and
    without prefix caching. drafters: that it has; None: all."""

    def like(pool: BlockPool) -> BlockPool:
        return BlockPool(pool.num_blocks, pool.block_size, prefix_caching=False)

    measured, learn = deepcopy(engine.scheduler.learn), Estimators()
    learn.times, learn.links = measured.times, measured.links
    known = engine.scheduler.table.drafters.values()
    scheduler = Scheduler(
        like(engine.scheduler.pool),
        [
            replace(d, pool=None if d.pool is None else like(d.pool), has_lane=pipeline != "off")
            for d in known
            if drafters is None or d.name in drafters
        ],
        admission=admission.make("admission"),
        selection=selection.make("selection"),
        allocation=allocation.make("allocation"),
        pipeline=make_pipeline(pipeline),
        max_model_len=engine.max_model_len,
        learn=learn,
        look_up=look_up,
    )
    return Loop(scheduler, engine.executor, engine.clock)


class Played(NamedTuple):
    """By request: seconds until its first token and its end, from when the first could come, and
    its tokens."""

    first: FloatArray
    finished: FloatArray
    tokens: FloatArray


def play_arrivals(loop: Loop, clock: Clock, requests: Sequence[Request]) -> Played:
    """Let requests arrive at their times, which are relative, and wait for the last of them.
    Raises: LabError for a request that fails."""
    rows = {r.id: row for row, r in enumerate(requests)}
    first, finished = np.full((2, len(requests)), np.nan)
    tokens = np.zeros(len(requests))
    pending = deque(requests)
    origin = clock.now()
    while pending or loop.scheduler.num_unfinished:
        turn = loop.turn(list(_due(pending, clock.now() - origin, origin)))
        now = clock.now() - origin
        for output in turn.outputs:
            row = rows[output.request_id]
            if output.error is not None:
                raise LabError(f"request {output.request_id} failed: {output.error}")
            if not tokens[row]:
                first[row] = now
            tokens[row] += len(output.token_ids)
            if output.finish_reason is not None:
                finished[row] = now
        if not turn.submitted and (pending or turn.wake_at is not None):
            coming = pending[0].arrival_time + origin if pending else math.inf
            wanted = min(coming, math.inf if turn.wake_at is None else turn.wake_at)
            while clock.now() < wanted:
                pass
    loop.turn(())  # the executor hears of the last ends
    return Played(first, finished, tokens)


def _due(pending: deque[Request], now: float, origin: float) -> Iterator[Arrive]:
    """Take the requests that have come, with times of the engine's clock."""
    while pending and pending[0].arrival_time <= now:
        request = pending.popleft()
        yield Arrive(replace(request, arrival_time=request.arrival_time + origin))


# --- one request's speed --------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A request's tokens after its first output, the seconds and outputs that they took, and when
    they ended, in seconds."""

    completion: Completion
    token_ids: tuple[int, ...]
    seconds: float
    rounds: int
    ended: float


def decode(loop: Loop, requests: Sequence[Request], batch: int) -> list[Timed]:
    """Run requests to their ends, so many at a time. Raises: RuntimeError for one that fails."""
    seen: dict[str, list[tuple[float, int]]] = {request.id: [] for request in requests}
    start = time.perf_counter()

    def watch(output: Output) -> None:
        seen[output.request_id].append((time.perf_counter() - start, len(output.token_ids)))

    found = []
    for done in complete(loop, requests, batch, watch):
        if done.error:
            raise RuntimeError(done.error)
        outputs = seen[done.request.id]
        (began, num_first), (ended, _) = outputs[0], outputs[-1]
        after_first = tuple(done.token_ids[num_first:])
        found.append(Timed(done, after_first, ended - began, len(outputs) - 1, ended))
    return found


# --- systems that take turns ----------------------------------------------------------------------


class Served(NamedTuple):
    """tokens_per_s: prompts included."""

    completions: list[Completion]
    tokens_per_s: float


@dataclass(frozen=True)
class LiveSystem:
    """A way to serve. drafter: what every request asks for."""

    name: str
    engine: Engine
    loop: Loop
    drafter: str = AUTO_DRAFTER

    def serve(self, requests: Sequence[Request], batch: int) -> Served:
        """To their ends, so many at a time. Raises: LabError for a request that fails."""
        torch.set_num_threads(self.engine.num_threads if self.engine.backend == "eager" else 1)
        begun = time.perf_counter()
        completions = complete(self.loop, requests, batch)
        seconds = time.perf_counter() - begun
        if failed := next((c for c in completions if c.error), None):
            raise LabError(f"{self.name}: {failed.error}")
        return Served(completions, sum(len(c.token_ids) for c in completions) / seconds)


@dataclass(frozen=True)
class LiveScene:
    """What an experiment serves: so many turns of requests of all domains, new ones in each.

    prompts: by domain. num_turns: those that count; one before them warms up, and is to learn in.
    kept: what was measured so far.
    """

    family: Path
    prompts: Mapping[str, Sequence[Prompt]]
    num_turns: int
    new_tokens: int
    kept: Cells
    device: str = "cpu"

    @classmethod
    def from_trial(cls, job: Trial, name: str) -> LiveScene:
        """Raises: LabError where there is no such family."""
        family = job.family or WEIGHTS
        try:
            target = model_path(DEFAULT_TARGET, family)
        except (FileNotFoundError, KeyError) as error:
            raise LabError(str(error.args[0])) from error
        tokenizer = load_tokenizer(target)
        prompts = {d: [tuple(tokenizer.encode(p.prompt)) for p in load_prompts(d)] for d in DOMAINS}
        turns = max(_TURNS[0], min(_TURNS[1], job.effort.seeds - 1))
        tokens = max(_TOKENS[0], min(_TOKENS[1], job.effort.curve_arrivals // 125))
        kept = Cells(job.kept(name), silent=True)
        return cls(family, prompts, turns, tokens, kept, job.device)

    def load(self, batch: int, **settings: Any) -> Engine:
        """The family's target with all drafters, in the number format that it is served in."""
        chosen = {"dtype": "auto", "device": self.device, **settings}
        return load(DEFAULT_TARGET, batch, self.new_tokens, family=self.family, **chosen)

    def requests(self, numbers: Iterable[int], drafter: str) -> list[Request]:
        """So many of each domain, one after the other, so that they mix; sampled at temperature 1
        with seeds."""
        made = []
        for i in numbers:
            for own in self.prompts.values():
                prompt = own[i % len(own)]
                made.append(request_of(prompt, i + len(own), self.new_tokens, 1.0, drafter=drafter))
        return made

    def rates(
        self,
        systems: Sequence[LiveSystem],
        batch: int,
        tell: Callable[[str], None],
        per_domain: int = 1,
        to_learn: int | None = None,
        first: int = 0,
    ) -> dict[str, FloatArray]:
        """[turns] tokens per second of each system, all of which serve the same requests, in
        another order in each turn. per_domain: requests of a turn; to_learn: of the one before
        those that count, if that is another number; first: the number of the first that counts.
        Turns that are kept are not served again."""

        def key(system: LiveSystem, turn: int) -> str:
            models = f"{self.family.name}, {self.device}, {self.new_tokens} tokens"
            scene = f"{models}, batch {batch}, from {first}"
            return f"{scene}/{system.name}/{turn}"

        def serve(system: LiveSystem, numbers: Iterable[int]) -> dict[str, float]:
            served = system.serve(self.requests(numbers, system.drafter), batch)
            return {"tokens_per_s": served.tokens_per_s}

        turns = range(1, self.num_turns + 1)
        missing = any(key(s, turn) not in self.kept.done for s in systems for turn in turns)
        found: dict[str, list[float]] = {s.name: [] for s in systems}
        for turn in range(0 if missing else 1, self.num_turns + 1):
            tell(f"batch {batch}, turn {turn} of {self.num_turns}")
            # To learn from are the last ones of each domain, so that they do not come again.
            begin = first + (turn - 1) * per_domain if turn else -(to_learn or per_domain)
            numbers = range(begin, begin + per_domain if turn else 0)
            for system in rotated(systems, turn):
                if not turn:
                    serve(system, numbers)
                    continue
                figures = self.kept.measure(key(system, turn), partial(serve, system, numbers))
                found[system.name].append(figures["tokens_per_s"])
        return {name: np.array(rates) for name, rates in found.items()}
