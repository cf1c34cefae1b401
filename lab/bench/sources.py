"""What makes a real target fastest: look-up alone, a small model behind it, or `auto` between two?

    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf [--prompts 4] [--new-tokens 128] [--json]
    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf --other OTHER.gguf: `auto` between them

One request at a time, greedy, from `lab.bench.real_prompts`. All settings
have look-up and take turns on each prompt, after `--warm` prompts of each kind to learn from. Each
has a scheduler of its own, and is a tenant: suffixes are found only in what it has put out itself.
Tokens per second are from the first token on: the small model's reading of the prompt is in them,
the target's is not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.real_prompts import PARTS, RealPrompt, real_prompts, token_ids
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import rotated
from penstock.config import SUFFIX, EngineConfig, TenantConfig
from penstock.core.loop import Loop
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Output, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete

KINDS = {"completion": "code", "edit": "edit", "chat": "chat", "structured": "JSON"}
"""Kinds of prompts, and what they are called here."""
MODEL, OTHER = "model", "other"
MODELS = (MODEL, OTHER)
ALL = "all"
CONTEXT = 768
BEST_SINGLE_BAR, AUTO_BAR, KIND_BAR = 1.0, 0.97, 0.93
EDIT_BAR, OTHER_BAR = 2.5, 1.4


@dataclass(frozen=True)
class Decoded:
    """One request's tokens after its first."""

    prompt: RealPrompt
    source: str
    text: tuple[int, ...]
    seconds: float
    rounds: int
    proposed: int
    accepted: int


def sources_of(args: argparse.Namespace) -> tuple[str, ...]:
    between = () if args.other is None else (OTHER, AUTO_DRAFTER)
    return (NO_DRAFTER, SUFFIX, MODEL, *between)


def load(args: argparse.Namespace) -> Engine:
    drafters: dict[str, Any] = {SUFFIX: SUFFIX, MODEL: str(args.drafter)}
    if args.other is not None:
        drafters[OTHER] = str(args.other)
    room = CONTEXT + args.new_tokens + 32
    config = EngineConfig(
        target=args.target,
        drafters=drafters,
        kv_tokens=2 * room,
        max_model_len=room,
        num_threads=args.threads,
        prefix_caching=False,
        tenants=dict.fromkeys(sources_of(args), TenantConfig()),
    )
    return load_engine(config)


def loops_of(engine: Engine, args: argparse.Namespace) -> dict[str, Loop]:
    """By source, each with the drafters that it may use."""
    loops = {}
    for source in sources_of(args):
        scheduler = deepcopy(engine.scheduler)
        for name in [n for n in scheduler.table.drafters if source not in (n, AUTO_DRAFTER)]:
            del scheduler.table.drafters[name]
        loops[source] = Loop(scheduler, engine.executor, engine.clock)
    return loops


def decode(loop: Loop, request: Request, prompt: RealPrompt) -> Decoded:
    """Run a request to its end. Raises: RuntimeError."""
    seen: list[tuple[float, int]] = []

    def watch(output: Output) -> None:
        seen.append((time.perf_counter(), len(output.token_ids)))

    (done,) = complete(loop, [request], 1, watch)
    if done.error:
        raise RuntimeError(done.error)
    (began, num_first), *rest = seen
    seconds = rest[-1][0] - began if rest else 0.0
    text = tuple(done.token_ids[num_first:])
    usage = done.usage
    counts = len(rest), usage.num_draft_tokens, usage.num_accepted_tokens
    return Decoded(prompt, request.tenant, text, seconds, *counts)


def chosen(part: str, num: int) -> list[RealPrompt]:
    """So many of each kind, kind by kind in turn."""
    mine = [p for p in real_prompts() if p.part == part]
    by_kind = [[p for p in mine if p.kind == kind][:num] for kind in KINDS]
    return [p for one_of_each in zip(*by_kind, strict=True) for p in one_of_each]


def passes(engine: Engine, args: argparse.Namespace) -> Iterator[Decoded]:
    """Of the prompts that count, the sources in another order for each."""
    tokenizer = load_tokenizer(engine.tokenizer_path)
    names = (f"request-{i}" for i in itertools.count())
    prompts = [*chosen(PARTS[0], args.warm), *chosen(PARTS[1], args.prompts)]
    loops = loops_of(engine, args)
    for number, prompt in enumerate(prompts):
        tokens = token_ids(prompt, tokenizer)[-CONTEXT:]
        for source in rotated(sources_of(args), number):
            request = Request(
                id=next(names),
                prompt_len=len(tokens),
                prompt_token_ids=tokens,
                max_tokens=args.new_tokens,
                stop_token_ids=frozenset(engine.eos_token_ids),
                sampling=SamplingParams(temperature=0.0),
                tenant=source,
                drafter=source,
            )
            done = decode(loops[source], request, prompt)
            rate = len(done.text) / max(done.seconds, 1e-9)
            what = f"{prompt.part}, {prompt.kind} {prompt.origin}, {source}: {rate:.1f} tokens/s"
            print(what, file=sys.stderr, flush=True)
            if prompt.part == PARTS[1] and done.text:
                yield done


Cells = Mapping[tuple[str, str], dict[str, Any]]
"""Figures by kind and source."""


def cells_of(done: Sequence[Decoded]) -> Cells:
    """Of the prompts of each kind, and of all kinds."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    sources = dict.fromkeys(sorted((d.source for d in done), key=NO_DRAFTER.__ne__))
    for kind, source in itertools.product((*KINDS, ALL), sources):
        mine = [d for d in done if d.source == source and kind in (d.prompt.kind, ALL)]
        num, rounds = sum(len(d.text) for d in mine), sum(d.rounds for d in mine)
        rate = num / sum(d.seconds for d in mine)
        plain = cells[kind, NO_DRAFTER]["tokens_per_s"] if source != NO_DRAFTER else rate
        cells[kind, source] = {
            "kind": KINDS.get(kind, ALL),
            "source": source,
            "tokens_per_s": rate,
            "times": rate / plain,
            "tokens_per_round": num / rounds,
            "accepted": sum(d.accepted for d in mine) / rounds,
            "proposed": sum(d.proposed for d in mine) / rounds,
        }
    return cells


def verdicts_of(cells: Cells, done: Sequence[Decoded]) -> list[ClaimVerdict]:
    """Of the better model, which is chosen by all kinds together."""

    def best(sources: Sequence[str], kind: str = ALL) -> dict[str, Any]:
        return max((cells[kind, s] for s in sources), key=lambda cell: cell["tokens_per_s"])

    fixed = [s for s in (SUFFIX, *MODELS) if (ALL, s) in cells]
    model = best([s for s in MODELS if s in fixed])
    gain = model["tokens_per_s"] / cells[ALL, SUFFIX]["tokens_per_s"]
    text = f"{gain:.2f} times look-up alone (bar {BEST_SINGLE_BAR})"
    claims = [bar("a model behind look-up, all kinds together", text, gain >= BEST_SINGLE_BAR)]
    for kind, name in KINDS.items():
        own, wanted = cells[kind, model["source"]], EDIT_BAR if kind == "edit" else OTHER_BAR
        text = f"{own['times']:.2f} times (bar {wanted})"
        claims.append(bar(f"{name}: a model against the target", text, own["times"] >= wanted))
    if (ALL, AUTO_DRAFTER) in cells:
        claims.append(_auto_verdict(cells, best(fixed)))
    texts: dict[RealPrompt, set[tuple[int, ...]]] = {}
    for d in done:
        texts.setdefault(d.prompt, set()).add(d.text)
    same = sum(len(found) == 1 for found in texts.values())
    text = f"for {same} of {len(texts)} prompts"
    return [*claims, bar("every source gives the same text", text, same == len(texts))]


def _auto_verdict(cells: Cells, single: dict[str, Any]) -> ClaimVerdict:
    shares = {
        name: cells[kind, AUTO_DRAFTER]["tokens_per_s"]
        / cells[kind, single["source"]]["tokens_per_s"]
        for kind, name in {**KINDS, ALL: "all kinds"}.items()
    }
    text = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    text = f"{text} of {single['source']} (bars {AUTO_BAR} over all, {KIND_BAR} in each kind)"
    holds = shares["all kinds"] >= AUTO_BAR and min(shares.values()) >= KIND_BAR
    return bar("auto against the best fixed setting", text, holds)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("drafter", type=Path)
    options.add_argument("--other", type=Path, help="a second small model")
    options.add_argument("--prompts", type=int, default=4, help="measured, of each kind, at most 8")
    options.add_argument("--warm", type=int, default=2, help="to learn from, of each kind")
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    done = list(passes(load(args), args))
    cells = cells_of(done)
    columns = {
        "kind": "{kind}",
        "source": "{source}",
        "tokens/s": "{tokens_per_s:.1f}",
        "times target-only": "{times:.2f}",
        "tokens a round": "{tokens_per_round:.2f}",
        "accepted": "{accepted:.2f}",
        "drafted": "{proposed:.2f}",
    }
    title = f"{args.target.name} with {args.drafter.name}, {args.prompts} prompts of each kind"
    rows = list(cells.values())
    return tell(args, Results(rows, verdicts_of(cells, done), [table(title, rows, columns)]))


if __name__ == "__main__":
    raise SystemExit(main())
