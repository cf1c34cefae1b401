"""Structured output: valid, the same with drafters as without, and what it costs.

    python -m lab.bench.structured [--quick] [--json] [--schemas 200]
        [--target MODEL --drafter MODEL] [--parts schemas,overhead,jump]

schemas   for each of many JSON schemas a greedy, a seeded and (by rejection sampling) an unseeded
          text, by the target alone without any draft, and with forced tokens and every drafter: the
          first two must not differ, and all that end must be valid by the package `jsonschema`. In
          float32.
overhead  tokens a second of 1 and 8 requests, without a grammar and under one that never ends, in
          turns; no drafts, so that every step makes one token for each. As the server runs.
jump      tokens a second under a grammar that forces about half the tokens, with and without the
          forced ones drafted, beside the same number of tokens without a grammar; no drafter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from lab.bench.structured_schemas import schemas
from lab.common.results import Results, parser, table, tell
from penstock.config import NGRAM, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Arrive, FinishReason, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.grammar import grammar_of
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.zoo.registry import model_path

MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0),
    "ratio": SamplingParams(temperature=1.0, verification="ratio"),
}
MOST_TOKENS = 400
SIZES = (1, 8)

_LABELS = {"enum": ["accepted_without_change", "rejected_without_change"]}
HALF_FORCED = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "measurement": {"type": "integer", "minimum": 0, "maximum": 10**9},
            "description": {"type": "string", "minLength": 12, "maxLength": 20},
            "decision": _LABELS,
        },
        "required": ["measurement", "description", "decision"],
        "additionalProperties": False,
    },
}
NEVER_ENDING = {
    "type": "array",
    "minItems": 1000,
    "items": {"type": "string", "minLength": 40, "maxLength": 80},
}


class Models(NamedTuple):
    """dtype: of speed; validity and equality are in float32."""

    target: Path
    drafters: dict[str, str]
    tokenizer: Tokenizer

    def load(self, dtype: str, drafters: bool = True) -> Engine:
        config = EngineConfig(
            target=self.target,
            drafters=self.drafters if drafters else {},
            dtype=dtype,
            kv_tokens=16384,
            num_threads=None,
            allocation=PolicyConfig.of("fixed", k=4),
        )
        return load_engine(config, calibrated=False)


class Made(NamedTuple):
    """What became of requests. num_forced: tokens that were verified undrafted and kept."""

    texts: list[tuple[int, ...]]
    ends: list[FinishReason]
    num_forced: int
    seconds: float


_num_requests = iter(range(10**9))


def request_of(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, num_tokens: int, **fields: Any
) -> Request:
    stops = frozenset(engine.eos_token_ids) if params.grammar else frozenset()
    return Request(
        id=f"s{next(_num_requests)}",
        prompt_len=len(prompt),
        prompt_token_ids=tuple(prompt),
        max_tokens=num_tokens,
        stop_token_ids=stops,
        sampling=params,
        **fields,
    )


def run(engine: Engine, requests: Sequence[Request]) -> Made:
    """All at once. Raises: RuntimeError where one fails."""
    texts: dict[str, list[int]] = {r.id: [] for r in requests}
    ends: dict[str, FinishReason] = {}
    num_forced = 0
    began = time.perf_counter()
    events = [Arrive(r) for r in requests]
    while len(ends) < len(requests):
        for output in engine.loop.turn(events).outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            texts[output.request_id] += output.token_ids
            num_forced += output.num_accepted if output.drafter is None else 0
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        events = []
    seconds = time.perf_counter() - began
    engine.loop.turn([])
    return Made([tuple(t) for t in texts.values()], list(ends.values()), num_forced, seconds)


# --- validity and equality ------------------------------------------------------------------------


def check_schemas(models: Models, num: int, progress: bool) -> list[dict[str, Any]]:
    """A row for each schema."""
    engine = models.load("float32")
    rows = []
    for i, (sort, schema) in enumerate(schemas(num)):
        rows.append({"sort": sort, **check_schema(models, engine, schema, i)})
        if progress and (i + 1) % 10 == 0:
            wrong = sum(r["num_different"] + r["num_invalid"] for r in rows)
            print(f"{i + 1}/{num} schemas, {wrong} texts wrong", file=sys.stderr)
    return rows


def check_schema(models: Models, engine: Engine, schema: Any, seed: int) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    prompt = models.tokenizer.encode(f"Example {seed}, as JSON: ")
    grammar = grammar_of("json", schema)
    for mode, params in MODES.items():
        asked = SamplingParams(
            params.temperature, seed=seed, verification=params.verification, grammar=grammar
        )
        alone = request_of(
            engine, prompt, asked, MOST_TOKENS, drafter=NO_DRAFTER, max_draft_tokens=0
        )
        drafted = [
            request_of(engine, prompt, asked, MOST_TOKENS, drafter=drafter)
            for drafter in (NO_DRAFTER, *models.drafters)
        ]
        made = run(engine, [alone])
        others = run(engine, drafted)
        counts["forced"] += others.num_forced
        for text in (*made.texts, *others.texts):
            counts["texts"] += 1
            counts["tokens"] += len(text)
            counts[judged(models.tokenizer, engine, schema, text)] += 1
        if mode != "ratio":
            counts["different"] += sum(t != made.texts[0] for t in others.texts)
    return {
        "num_texts": counts["texts"],
        "num_tokens": counts["tokens"],
        "num_forced": counts["forced"],
        "num_valid": counts["valid"],
        "num_invalid": counts["invalid"],
        "num_cut": counts["cut"],
        "num_different": counts["different"],
    }


def judged(tokenizer: Tokenizer, engine: Engine, schema: Any, text: Sequence[int]) -> str:
    if text[-1] not in engine.eos_token_ids:
        return "cut"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(text)))
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"


def by_sort(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for sort in [*dict.fromkeys(r["sort"] for r in rows), "all"]:
        own = [r for r in rows if sort in (r["sort"], "all")]
        sums = {k: sum(r[k] for r in own) for k in own[0] if k != "sort"}
        yield {"sort": sort, "num": len(own), **sums}


# --- speed ----------------------------------------------------------------------------------------


def rates(
    models: Models,
    engine: Engine,
    size: int,
    ways: dict[str, tuple[str | None, int | None]],
    num_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Tokens a second of each way, in turns: medians. ways: grammar, most draft tokens."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    share = 0.0
    for repeat in range(repeats + 1):
        for way, (grammar, most) in ways.items():
            requests = [
                request_of(
                    engine,
                    models.tokenizer.encode(f"Example {i}, as JSON: "),
                    SamplingParams(1.0, seed=i, grammar=grammar),
                    num_tokens,
                    drafter=NO_DRAFTER,
                    max_draft_tokens=most,
                )
                for i in range(size)
            ]
            made = run(engine, requests)
            num = sum(map(len, made.texts))
            if repeat:  # the first warms up, and compiles
                found[way].append(num / made.seconds)
            share = max(share, made.num_forced / num)
    return {
        "size": size,
        "share_forced": share,
        "rates": found,
        **{way: statistics.median(own) for way, own in found.items()},
    }


def overhead(models: Models, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    engine = models.load("auto", drafters=False)
    ways = {"plain": (None, 0), "grammar": (grammar_of("json", NEVER_ENDING), 0)}
    rows = [rates(models, engine, size, ways, num_tokens, repeats) for size in SIZES]
    return [{**r, "overhead": r["plain"] / r["grammar"] - 1} for r in rows]


def jump(models: Models, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    engine = models.load("auto", drafters=False)
    grammar = grammar_of("json", HALF_FORCED)
    ways = {"plain": (None, 0), "one by one": (grammar, 0), "jump": (grammar, None)}
    rows = [rates(models, engine, size, ways, num_tokens, repeats) for size in SIZES]
    return [{**r, "gain": r["jump"] / r["plain"]} for r in rows]


# --- the command ----------------------------------------------------------------------------------


def models_of(args: argparse.Namespace) -> Models:
    target = args.target or model_path("target-large")
    drafter = args.drafter or (None if args.target else model_path("draft-base"))
    drafters = {"ngram": NGRAM} | ({} if drafter is None else {"model": str(drafter)})
    return Models(target, drafters, load_tokenizer(target))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="24 schemas, two repeats of 64 tokens")
    options.add_argument("--schemas", type=int, default=200)
    options.add_argument("--parts", default="schemas,overhead,jump")
    options.add_argument("--target", type=Path)
    options.add_argument("--drafter", type=Path)
    args = options.parse_args(arguments)
    num, num_tokens, repeats = (24, 64, 2) if args.quick else (args.schemas, 256, 5)
    models, parts = models_of(args), args.parts.split(",")
    runs: dict[str, Any] = {}
    tables = []
    if "schemas" in parts:
        runs["schemas"] = check_schemas(models, num, not args.json)
        columns = {
            "sort": "{sort}", "schemas": "{num}", "texts": "{num_texts}", "tokens": "{num_tokens}",
            "forced": "{num_forced}", "valid": "{num_valid}", "invalid": "{num_invalid}",
            "cut by max_tokens": "{num_cut}", "differ": "{num_different}",
        }  # fmt: skip
        tables.append(table("schemas", by_sort(runs["schemas"]), columns))
    if "overhead" in parts:
        runs["overhead"] = overhead(models, num_tokens, repeats)
        columns = {
            "requests": "{size}", "plain, tokens/s": "{plain:.1f}",
            "under a grammar": "{grammar:.1f}", "overhead": "{overhead:.1%}",
        }  # fmt: skip
        tables.append(table("overhead, no drafts", runs["overhead"], columns))
    if "jump" in parts:
        runs["jump"] = jump(models, num_tokens, repeats)
        columns = {
            "requests": "{size}", "forced": "{share_forced:.0%}", "plain, tokens/s": "{plain:.1f}",
            "grammar, one by one": "{one by one:.1f}", "with jumps": "{jump:.1f}",
            "gain over plain": "{gain:.2f}",
        }  # fmt: skip
        tables.append(table("half of the tokens forced, no drafter", runs["jump"], columns))
    return tell(args, Results(runs, tables=tables))


if __name__ == "__main__":
    sys.exit(main())
