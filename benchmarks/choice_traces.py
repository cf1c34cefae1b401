"""What every bundled drafter would have had accepted along the target's own text, position by
position, under the engine's own noise: the ground that choices between drafters are judged on."""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config import NGRAM, EngineConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.ngram import NgramIndex
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.zoo.evidence import answer_logits, run_lengths
from penstock.zoo.modeling import load_model
from penstock.zoo.registry import DOMAINS, bundled_models, load_prompts, model_path

LONGEST = 8
"""Draft tokens that a trace looks ahead."""


@dataclass(frozen=True)
class Trace:
    """One request and its text by the target alone.

    runs[drafter][t]: how many tokens of a draft that begins at output position t are accepted.
    """

    domain: str
    prompt: tuple[int, ...]
    seed: int
    text: tuple[int, ...]
    runs: dict[str, list[int]]


def load(target: str, batch: int, new_tokens: int, **settings: Any) -> Engine:
    """The engine with every bundled drafter and look-up, float32, room for so many requests;
    `settings` as of `EngineConfig`."""
    drafters = {n: str(c.path) for n, c in bundled_models().items() if c.role == "drafter"}
    return load_engine(
        EngineConfig(
            target=model_path(target),
            drafters={**drafters, NGRAM: NGRAM},
            dtype="float32",
            kv_tokens=batch * (640 + new_tokens),
            prefix_caching=False,
            # A native engine leaves PyTorch with one thread, which the next would take for all.
            num_threads=os.cpu_count(),
            **settings,
        )
    )


def target_names(text: str) -> list[str]:
    """An option's value: targets of the bundled family, with commas between them."""
    known = [name for name, model in bundled_models().items() if model.role == "target"]
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; choose from {', '.join(known)}")
    return text.split(",")


_ids = itertools.count()


def request_of(
    prompt: tuple[int, ...], seed: int, new_tokens: int, temperature: float, **fields: object
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


def make_traces(
    engine: Engine, first: int, per_domain: int, new_tokens: int, temperature: float
) -> list[Trace]:
    """Prompts `first` to `first + per_domain - 1` of every domain, domain by domain."""
    tokenizer = load_tokenizer(engine.tokenizer_path)
    prompts = [
        (domain, tuple(tokenizer.encode(p.prompt)))
        for domain in DOMAINS
        for p in load_prompts(domain)[first : first + per_domain]
    ]
    requests = [
        request_of(ids, seed, new_tokens, temperature, drafter=NO_DRAFTER)
        for seed, (_, ids) in enumerate(prompts, 1000 * first)
    ]
    texts = [tuple(c.token_ids) for c in complete(engine.loop, requests, 16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(engine.num_threads)
    models = {n: load_model(Path(c.path)) for n, c in bundled_models().items()}
    traces = []
    for (domain, prompt), request, text in zip(prompts, requests, texts, strict=True):
        runs = {NGRAM: lookup_runs(prompt, text)}
        for name in engine.executor.drafters:
            if name != NGRAM:
                runs[name] = model_runs(models[name], prompt, text, request.sampling)
        traces.append(Trace(domain, prompt, request.sampling.seed, text, runs))
    torch.set_num_threads(threads)
    return traces


def model_runs(
    model: object, prompt: tuple[int, ...], text: tuple[int, ...], sampling: SamplingParams
) -> list[int]:
    logits = answer_logits(model, list(prompt), list(text))  # type: ignore[arg-type]
    num = len(text)
    rows = SamplingRows(
        np.full(num, sampling.temperature),
        np.ones(num),
        np.zeros(num, np.int64),
        np.full(num, sampling.seed, np.uint64),
    )
    positions = len(prompt) + np.arange(num)
    agrees = sample_coupled(logits, rows, positions).numpy() == np.array(text)
    return np.minimum(run_lengths(agrees), LONGEST).tolist()


def lookup_runs(prompt: tuple[int, ...], text: tuple[int, ...]) -> list[int]:
    index = NgramIndex()
    index.append(list(prompt))
    runs = []
    for t, token in enumerate(text):
        draft = index.propose(LONGEST)
        matched = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(draft, text[t:], strict=False)
        )
        runs.append(sum(1 for _ in matched))
        index.append([token])
    return runs
