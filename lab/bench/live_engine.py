"""The engine on the bundled family in this process: its step times, and what every drafter would
have had accepted along the target's own text."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence

import numpy as np
import torch

from lab.common.hindsight import LONGEST, Costs, KnownText
from lab.common.live import request_of
from lab.zoo.evidence import answer_logits, run_lengths
from lab.zoo.modeling import load_model
from penstock.core.types import NO_DRAFTER
from penstock.engine.build import Engine
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, bundled_models, load_prompts

MIXED = "mixed"
FIRST_OVERHEAD = 1.5e-4
"""Seconds of host work in a step, before it was measured."""


def measured_costs(engine: Engine) -> Costs:
    """Step times as the engine has measured them."""
    times, drafters = engine.scheduler.learn.times, engine.executor.drafters
    return Costs(
        times.target,
        {n: times.curve_of(n) for n in drafters},
        {n: times.catch_up_of(n) for n in drafters},
        times.overhead or FIRST_OVERHEAD,
    )


# --- texts, and what drafters make of them --------------------------------------------------------


def texts_of(engine: Engine, target: str, args: argparse.Namespace) -> list[KnownText]:
    """Texts of as many prompts as are served, from the folder `--out` where they were made
    before."""
    total = args.requests + args.warm
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{target}-{total}-{args.new_tokens}-{args.temperature}.texts"
    if path.exists():
        found: list[KnownText] = pickle.loads(path.read_bytes())  # a file of this program's own
        return found
    texts = make_texts(engine, total, args.new_tokens, args.temperature)
    path.write_bytes(pickle.dumps(texts))
    return texts


def make_texts(
    engine: Engine, per_domain: int, new_tokens: int, temperature: float
) -> list[KnownText]:
    """What the target answers to the first prompts of every domain, domain by domain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(engine.num_threads)
    cards = bundled_models().values()
    models = {c.name: load_model(c.path) for c in cards if c.role != "head"}
    tokenizer = load_tokenizer(engine.tokenizer_path)
    prompts = [
        (domain, tuple(tokenizer.encode(p.prompt)))
        for domain in DOMAINS
        for p in load_prompts(domain)[:per_domain]
    ]
    requests = [
        request_of(ids, seed, new_tokens, temperature, drafter=NO_DRAFTER)
        for seed, (_, ids) in enumerate(prompts)
    ]
    texts = [tuple(c.token_ids) for c in complete(engine.loop, requests, 16)]
    found = []
    for seed, ((domain, prompt), text) in enumerate(zip(prompts, texts, strict=True)):
        runs = {
            name: _model_runs(models[name], prompt, text, seed, temperature)
            for name in engine.executor.drafters
        }
        found.append(KnownText(domain, prompt, seed, text, runs))
    torch.set_num_threads(threads)
    return found


def _model_runs(
    model: object, prompt: tuple[int, ...], text: tuple[int, ...], seed: int, temperature: float
) -> list[int]:
    """Under the engine's own noise."""
    logits = answer_logits(model, list(prompt), list(text))  # type: ignore[arg-type]
    num = len(text)
    rows = SamplingRows(
        np.full(num, temperature),
        np.ones(num),
        np.zeros(num, np.int64),
        np.full(num, seed, np.uint64),
    )
    positions = len(prompt) + np.arange(num)
    agrees = sample_coupled(logits, rows, positions).numpy() == np.array(text)
    return np.minimum(run_lengths(agrees), LONGEST).tolist()


def by_domain(texts: Sequence[KnownText]) -> dict[str, list[KnownText]]:
    return {d: [t for t in texts if t.domain == d] for d in DOMAINS}


def texts_of_cell(texts: Sequence[KnownText], cell: str, per_cell: int) -> list[KnownText]:
    """The requests of a domain, or of all in turn."""
    found = by_domain(texts)
    if cell != MIXED:
        return found[cell][:per_cell]
    return [found[d][i] for i in range(max(1, per_cell // 2)) for d in DOMAINS]
