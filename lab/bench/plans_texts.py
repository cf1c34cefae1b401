"""Targets and texts of `lab.bench.plans_live`: what a model answers, and what its drafter knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lab.bench.real_prompts import RealPrompt, token_ids
from lab.bench.record_texts import Text, prompts, request_of, rights_of
from lab.common.cells import Cells, Figures
from lab.common.live import make_loop
from lab.common.played_texts import KnownText
from penstock.config import EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER
from penstock.engine.build import load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.bench import BenchPrompt, cut_prompts
from penstock.serving.offline import complete
from penstock.zoo.registry import DOMAINS, load_prompts

_AT_ONCE, _KV_TOKENS = 8, 16_384


@dataclass(frozen=True)
class Model:
    """A target, its drafter, and the sizes of requests that this machine serves in time.

    prompt, output: median, least and most tokens."""

    target: Path
    drafter: str
    drafter_file: Path
    device: str
    prompt: tuple[int, int, int]
    output: tuple[int, int, int]

    @property
    def name(self) -> str:
        return self.target.stem

    def lengths(self, num: int) -> tuple[list[int], list[int]]:
        """Log-normal; longer draws extend shorter ones."""

        def drawn(stream: int, median: int, low: int, high: int) -> list[int]:
            rng = np.random.default_rng([7, stream])
            values = median * np.exp(0.7 * rng.standard_normal(num))
            return [int(n) for n in np.clip(values.round(), low, high)]

        return drawn(0, *self.prompt), drawn(1, *self.output)

    def prompts(self) -> list[tuple[int, ...]]:
        """The bundled prompts, domains in turn, or real ones."""
        tokenizer = load_tokenizer(self.target)
        if self.target.suffix == ".gguf":
            return [token_ids(p, tokenizer) for p in prompts()]
        by_domain = [load_prompts(d) for d in DOMAINS]
        return [
            tuple(tokenizer.encode(p.prompt))
            for one_of_each in zip(*by_domain, strict=True)
            for p in one_of_each
        ]


def known_texts(model: Model, num: int, kept: Cells) -> list[KnownText]:
    """The target's greedy texts, and how many tokens the drafter has right at each position."""
    rows = kept.measure(f"known/{model.name}/{num}", partial(make_texts, model, num, kept))["texts"]
    return [KnownText(tuple(ids), tuple(out), {model.drafter: right}) for ids, out, right in rows]


def make_texts(model: Model, num: int, kept: Cells) -> Figures:
    engine = load_engine(
        EngineConfig(
            target=model.target,
            drafters={model.drafter: str(model.drafter_file)},
            kv_tokens=_KV_TOKENS,
            num_threads=os.cpu_count(),
            prefix_caching=False,
        ),
        calibrated=False,
    )
    made, lengths = model.prompts(), model.lengths(num)
    texts: list[Text] = []
    for begin in range(0, num, _AT_ONCE):
        asked = []
        for i in range(begin, min(num, begin + _AT_ONCE)):
            prompt_len, output_len = lengths[0][i], lengths[1][i]
            (prompt,) = cut_prompts([BenchPrompt(made[i % len(made)], "")], prompt_len)
            asked.append((prompt.token_ids, output_len))

        def measure(asked: Sequence[tuple[tuple[int, ...], int]] = asked) -> Figures:
            loop = make_loop(engine, PolicyConfig.from_name("auto"))
            requests = [
                request_of(f"text {i}", ids, n, drafter=NO_DRAFTER)
                for i, (ids, n) in enumerate(asked)
            ]
            return {"tokens": [c.token_ids for c in complete(loop, requests, _AT_ONCE)]}

        tokens = kept.measure(f"text/{model.name}/{begin}", measure)["tokens"]
        texts += [
            Text(RealPrompt("text", "held", ""), ids, tuple(made))
            for (ids, _), made in zip(asked, tokens, strict=True)
        ]
    rights = rights_of(engine, model.drafter, texts, kept)
    rows = zip(texts, rights, strict=True)
    return {"texts": [[t.prompt_ids, t.output, right] for t, right in rows]}
