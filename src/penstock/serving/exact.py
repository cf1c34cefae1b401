"""Checks that a request's tokens and logits are its own, whatever else is served.

Each request runs alone and without drafts first. Then all run again in other company, with drafts
and in little memory, through the loop that serves, with NaN in memory that no kernel has written.
Compared are tokens and, of the kernels, the bits of logits. A control changes one row of nine."""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import cycle, groupby, islice
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from penstock.config import ConfigError, EngineConfig, PolicyConfig, PolicyKind
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Output, Request, SamplingParams
from penstock.engine.backends import resolve_placements
from penstock.engine.build import Engine, load_engine, sized_models
from penstock.engine.executor import RunnerExecutor
from penstock.engine.fingerprint import fingerprint
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import ModelRunner, RaggedBatch
from penstock.engine.tokenizer import load_tokenizer
from penstock.engine.verifier import Drafted, Samples, Verifier
from penstock.serving.offline import Completion, complete
from penstock.zoo.registry import DOMAINS, load_prompts

_COMPANY = (2, 3, 4, 6, 9, 33)
"""Requests at once that are compared with one alone."""
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.1),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=40),
)
_CONTROL = "control: a changed row"


class Part(NamedTuple):
    """One way to serve the first `size` requests, `at_once` together. settings: of the engine.

    shows: the count that must not be small, else nothing is tested. drafters: of the requests, in
    turn. predicted: with predictions that are partly wrong."""

    name: str
    settings: dict[str, Any]
    size: int
    at_once: int
    shows: str
    drafters: Sequence[str] = (NO_DRAFTER,)
    predicted: bool = False


_Row = tuple[int, bytes, int]
"""A token, the digest of its logits, and the requests of the step."""


class _Watched(Verifier):
    """Verifier that keeps digests of all logits, and in the control changes the input of a row.

    changed: request of that row, and position of the token that it decides."""

    keeps_logits = True
    changed: tuple[str, int] | None = None

    def __init__(self, runner: ModelRunner, *, is_control: bool) -> None:
        super().__init__(runner)
        self._is_control = is_control
        self._seen: dict[tuple[str, int], tuple[bytes, int]] = {}

    def forward(self, batch: RaggedBatch, drafted: Sequence[Drafted]) -> torch.Tensor | Samples:
        if self._is_control and self.changed is None and len(drafted) == 9:
            row = batch.logits_rows[sum(len(d.token_ids) + 1 for d in drafted[:4])]
            token_ids = batch.token_ids.copy()
            token_ids[row] = (token_ids[row] + 1) % self.runner.vocab_size
            batch = replace(batch, token_ids=token_ids)
            self.changed = drafted[4].text.request.id, drafted[4].position
        scores = super().forward(batch, drafted)
        rows = iter(scores if isinstance(scores, torch.Tensor) else scores.logits)
        for d in drafted:
            # Behind a rejected token a later step counts.
            for position in range(d.position, d.position + len(d.token_ids) + 1):
                digest = blake2b(next(rows).cpu().numpy(), digest_size=16).digest()
                self._seen[d.text.request.id, position] = digest, batch.num_seqs
        return scores

    def rows_of(self, done: Completion) -> list[_Row]:
        """Return the rows that decided an output."""
        places = enumerate(done.token_ids, done.request.prompt_len)
        return [(token, *self._seen[done.request.id, place]) for place, token in places]


class ExactCheck:
    """Requests with bundled prompts, the longest output first, and what each of them gives alone.

    tokens: of the longest output; num_tokens: of all parts. Raises: CheckpointError, ConfigError.
    """

    def __init__(self, config: EngineConfig, tokens: int) -> None:
        if config.vllm is not None:
            raise ConfigError("--exact checks Penstock's own engine, not vLLM")
        models = sized_models(config, resolve_placements(config))
        room = models.max_model_len - tokens
        if room < 16:
            raise ConfigError(f"--tokens {tokens} leaves no room in the model's context")
        tokenizer, rng = load_tokenizer(config.target), np.random.default_rng(0)
        texts = ["\n".join(p.prompt for p in load_prompts(d)[:9]) for d in DOMAINS]
        encoded = [tokenizer.encode(text) for text in texts]
        requests = []
        for i in range(max(_COMPANY)):
            size, most = int(rng.integers(8, min(160, room))), max(4, tokens // max(1, i))
            sampling = replace(_SAMPLINGS[i % len(_SAMPLINGS)], seed=i)
            text = tuple(islice(cycle(encoded[i % len(encoded)]), size))
            requests.append(Request(str(i), size, most, prompt_token_ids=text, sampling=sampling))
        # As much KV as they need: all of it is filled anew for each part.
        lengths = [r.prompt_len + r.max_tokens + 4 * config.block_size for r in requests]
        # PyTorch tells the number of threads only once: the first placement takes its own.
        update = {"kv_tokens": sum(lengths), "num_threads": models.place.num_threads, "state": None}
        self._config = config.model_copy(update=update)
        self._requests, self._fingerprint = requests, fingerprint(config, models)
        self._parts = _parts(config, max(lengths))
        self.num_tokens = sum(r.max_tokens for p in self._parts for r in requests[: p.size])
        self._alone: list[list[_Row]] = []

    def run(self, on_output: Callable[[Output], None]) -> dict[str, Any]:
        """Carry out all parts; return a receipt. Raises: CheckpointError, ConfigError."""
        results = []
        logging.disable(logging.WARNING)  # of each engine the same; once they were said
        for settings, parts in groupby(self._parts, lambda part: part.settings):
            engine = load_engine(self._config.model_copy(update=settings), calibrated=not settings)
            results += [self._run(engine, part, on_output) for part in parts]
            facts = engine.describe()
            del engine
            gc.collect()  # before the next one is loaded
        logging.disable(logging.NOTSET)
        return {
            "verdict": "differs" if any(r["differing"] for r in results) else "same",
            "parts": results,
            "requests": [[r.prompt_len, r.max_tokens, r.sampling.seed] for r in self._requests],
            "engine": facts,
            "fingerprint": self._fingerprint,
            "versions": [platform.python_version(), torch.__version__, platform.platform()],
        }

    def _run(
        self, engine: Engine, part: Part, on_output: Callable[[Output], None]
    ) -> dict[str, Any]:
        executor, loop = engine.executor, engine.loop
        assert isinstance(executor, RunnerExecutor)
        verifier = _Watched(executor.verifier.runner, is_control=part.name == _CONTROL)
        executor.verifier = verifier
        runners = [verifier.runner, *(d.runner for d in executor.drafters.values())]
        native = [runner for runner in runners if isinstance(runner, NativeRunner)]
        for runner in native:
            runner.poison(bool(self._alone))
        done = complete(loop, self._requests_of(part), part.at_once, on_output)
        while loop.turn(()).submitted or loop.num_plans_in_flight:
            loop.wait(0.01)  # until the executor has heard of the last ends
        for runner in native:
            runner.poison(False)
        rows = [verifier.rows_of(one) for one in done]
        self._alone = self._alone or rows
        # PyTorch's operations round by the batch, the kernels do not.
        counted = 2 if engine.backend == "native" else 1
        pairs = zip(done, rows, self._alone, strict=False)
        differing = dict(filter(None, (_difference(*pair, counted) for pair in pairs)))
        counts = {
            "tokens": sum(one.usage.num_tokens for one in done),
            "at_once": max(row[2] for own in rows for row in own),
            "drafted": sum(one.usage.num_draft_tokens for one in done),
            "accepted": sum(one.usage.num_accepted_tokens for one in done),
            "preemptions": engine.scheduler.table.counters.preemptions,
        }
        is_tested = counts[part.shows] >= (part.at_once if part.shows == "at_once" else 1)
        verdict = "differs" if differing else "same" if is_tested else "not tested"
        told = [*differing.values()]
        if part.name == _CONTROL:
            is_found = [*differing] == [verifier.changed]
            verdict, told = ("found", []) if is_found else ("missed", [f"{part.name}: missed"])
        return {"part": part.name, "verdict": verdict, **counts, "differing": told}

    def _requests_of(self, part: Part) -> Iterator[Request]:
        for i, request in enumerate(self._requests[: part.size]):
            told = self._alone[i] if part.predicted else ()
            prediction = tuple(0 if n % 7 == 6 else token for n, (token, *_) in enumerate(told))
            drafter = part.drafters[i % len(part.drafters)]
            yield replace(request, id=f"{part.name}/{i}", drafter=drafter, prediction=prediction)


def _difference(
    done: Completion, rows: Sequence[_Row], alone: Sequence[_Row], counted: int
) -> tuple[tuple[str, int], str] | None:
    """Return place and description of the first difference. counted: 1, tokens; 2, logits, too."""
    name, first = done.request.id, done.request.prompt_len
    for n, (row, expected) in enumerate(zip(rows, alone, strict=False)):
        if row[:counted] != expected[:counted]:
            is_other = row[0] != expected[0]
            what = f"is {row[0]}, not {expected[0]}" if is_other else "has other logits"
            return (name, first + n), f"{name}: token {n} {what}, in a step of {row[2]} requests"
    return None if done.error is None else ((name, -1), f"{name}: {done.error}")


def _parts(config: EngineConfig, kv_tokens: int) -> list[Part]:
    """Return all parts, the requests alone first; parts with one engine follow each other.

    kv_tokens: too few for all requests."""
    plain: dict[str, Any] = {k: PolicyConfig.from_bundle(k, "vllm") for k in get_args(PolicyKind)}
    plain |= {"pipeline": "off", "prefix_caching": False}
    few = PolicyConfig.from_name("vllm_v1", max_num_batched_tokens=40, max_num_seqs=33)
    cut = {**plain, "admission": few, "prefix_caching": True}
    beside, little = {**cut, "pipeline": "async"}, {**cut, "kv_tokens": kv_tokens}
    models, auto, most = tuple(config.drafter_models), (AUTO_DRAFTER,), max(_COMPANY)
    head = () if config.head is None else config.head[:1]
    own = () if config.text_look_up is None else config.text_look_up[:1]
    return [
        Part("alone", plain, most, 1, "at_once"),
        *(Part(f"{n} at once", plain, min(most, max(4 * n, 9)), n, "at_once") for n in _COMPANY),
        *(Part(f"drafter {d}", plain, 16, 4, "drafted", (d,)) for d in (*own, *head, *models)),
        Part("predictions", plain, 16, 4, "drafted", auto, True),
        Part(_CONTROL, plain, 9, 9, "drafted", auto, True),
        Part("prompts in chunks", cut, most, 6, "at_once"),
        *(Part("drafters beside", beside, 16, 6, "drafted", models) for _ in models[:1]),
        Part("little memory", little, 16, 9, "preemptions", (*models, *head, *own, *auto), True),
        Part("auto, as served", {}, most, 6, "tokens", auto),
    ]
