"""Is structured output valid, and the same with drafters as without?

    python -m lab.bench.structured [--quick] [--json] [--schemas 200]
        [--target MODEL --drafter MODEL]

For each of many JSON schemas a greedy, a seeded and (by rejection sampling) an unseeded text, by
the target alone without any draft, and with forced tokens and every drafter: the first two must not
differ, and all that end must be valid by the package `jsonschema`. In float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from lab.bench.structured_schemas import schemas
from lab.common.claims import bar
from lab.common.results import Results, parser, table, tell
from penstock.config import NGRAM, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Arrive, Request, SamplingParams
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


class Models(NamedTuple):
    """A target, its drafters by name, and their tokenizer."""

    target: Path
    drafters: dict[str, str]
    tokenizer: Tokenizer

    def load(self) -> Engine:
        config = EngineConfig(
            target=self.target,
            drafters=self.drafters,
            dtype="float32",
            kv_tokens=16384,
            num_threads=None,
            allocation=PolicyConfig.of("fixed", k=4),
        )
        return load_engine(config, calibrated=False)


class Made(NamedTuple):
    """What became of requests. num_forced: tokens that were verified undrafted and kept."""

    texts: list[tuple[int, ...]]
    num_forced: int


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
    num_ended = num_forced = 0
    events = [Arrive(r) for r in requests]
    while num_ended < len(requests):
        for output in engine.loop.turn(events).outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            texts[output.request_id] += output.token_ids
            num_forced += output.num_accepted if output.drafter is None else 0
            num_ended += output.finish_reason is not None
        events = []
    engine.loop.turn([])
    return Made([tuple(t) for t in texts.values()], num_forced)


# --- validity and equality ------------------------------------------------------------------------


def check_schemas(models: Models, num: int, progress: bool) -> list[dict[str, Any]]:
    """A row for each schema."""
    engine = models.load()
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


# --- the command ----------------------------------------------------------------------------------


def models_of(args: argparse.Namespace) -> Models:
    target = args.target or model_path("target-large")
    drafter = args.drafter or (None if args.target else model_path("draft-base"))
    drafters = {"ngram": NGRAM} | ({} if drafter is None else {"model": str(drafter)})
    return Models(target, drafters, load_tokenizer(target))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="24 schemas")
    options.add_argument("--schemas", type=int, default=200)
    options.add_argument("--target", type=Path)
    options.add_argument("--drafter", type=Path)
    args = options.parse_args(arguments)
    rows = check_schemas(models_of(args), 24 if args.quick else args.schemas, not args.json)
    columns = {
        "sort": "{sort}", "schemas": "{num}", "texts": "{num_texts}", "tokens": "{num_tokens}",
        "forced": "{num_forced}", "valid": "{num_valid}", "invalid": "{num_invalid}",
        "cut by max_tokens": "{num_cut}", "differ": "{num_different}",
    }  # fmt: skip
    wrong = sum(r["num_invalid"] + r["num_different"] for r in rows)
    verdict = bar("valid, and alike with drafters", f"{wrong} texts wrong", not wrong)
    return tell(args, Results(rows, [verdict], [table("schemas", by_sort(rows), columns)]))


if __name__ == "__main__":
    sys.exit(main())
