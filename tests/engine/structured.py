"""Structured texts of many schemas: the same with and without drafts, and valid."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from tests.engine.schemas import schemas

from penstock.config import NGRAM, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Arrive, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.grammar import grammar_of
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

_MODES = {"greedy": (0.0, None), "seeded": (1.0, None), "ratio": (1.0, "ratio")}
"""Temperature and verification."""
_MOST_TOKENS = 400
_ids = map(str, itertools.count())


def count_texts(target: Path, drafter: Path, num: int) -> Counter[str]:
    """For each of `num` schemas a greedy, a seeded and a `ratio` text, by the target alone and
    with forced tokens and every drafter. Counts: texts, forced (tokens), valid, invalid, cut (by
    their length), different (from the target's own, `ratio` left out)."""
    drafters = {"ngram": NGRAM, "model": str(drafter)}
    config = EngineConfig(
        target=target,
        drafters=drafters,
        dtype="float32",
        kv_tokens=16384,
        num_threads=None,
        allocation=PolicyConfig.from_name("fixed", k=4),
    )
    engine, tokenizer = load_engine(config, calibrated=False), load_tokenizer(target)
    counts: Counter[str] = Counter()
    for (seed, schema), mode in itertools.product(enumerate(schemas(num)), _MODES):
        prompt = tuple(tokenizer.encode(f"Example {seed}, as JSON: "))
        temperature, verification = _MODES[mode]
        params = SamplingParams(
            temperature, seed=seed, verification=verification, grammar=grammar_of("json", schema)
        )
        alone = _request(engine, prompt, params, drafter=NO_DRAFTER, max_draft_tokens=0)
        drafted = [_request(engine, prompt, params, drafter=d) for d in (NO_DRAFTER, *drafters)]
        texts = [*_run(engine, [alone], Counter()), *_run(engine, drafted, counts)]
        counts["texts"] += len(texts)
        counts.update(_judged(tokenizer, engine, schema, text) for text in texts)
        counts["different"] += mode != "ratio" and sum(t != texts[0] for t in texts)
    return counts


def _request(
    engine: Engine, prompt: tuple[int, ...], params: SamplingParams, **fields: Any
) -> Request:
    stops = frozenset(engine.eos_token_ids)
    return Request(
        next(_ids),
        len(prompt),
        _MOST_TOKENS,
        prompt_token_ids=prompt,
        stop_token_ids=stops,
        sampling=params,
        **fields,
    )


def _run(engine: Engine, requests: Sequence[Request], counts: Counter[str]) -> list[list[int]]:
    """All at once; counts "forced": tokens that were verified undrafted and kept."""
    texts: dict[str, list[int]] = {r.id: [] for r in requests}
    num_ended, events = 0, [Arrive(r) for r in requests]
    while num_ended < len(requests):
        for output in engine.loop.turn(events).outputs:
            assert output.error is None
            texts[output.request_id] += output.token_ids
            counts["forced"] += output.num_accepted if output.drafter is None else 0
            num_ended += output.finish_reason is not None
        events = []
    engine.loop.turn([])
    return list(texts.values())


def _judged(tokenizer: Tokenizer, engine: Engine, schema: Any, text: Sequence[int]) -> str:
    if text[-1] not in engine.eos_token_ids:
        return "cut"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(text)))
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"
