"""Which source of draft tokens is fastest on a real pair: look-up, suffixes, a small model, or a
chain that chooses between them in every round?

    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf [--prompts 4] [--new-tokens 128] [--json]
    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf --other OTHER.gguf: `auto` between them

One request at a time, greedy, from `lab.bench.real_prompts`. All sources are drafters of one engine
and take turns on each prompt, after `--warm` prompts of each kind to learn from. Each source is a
tenant, so suffixes are found only in what it has put out itself. Tokens per second are from the
first token on: the small model's reading of the prompt is in them, the target's is not.

With `--other` the sources are look-up, each small model behind it, and `auto` with both and with
all three. Each source has a scheduler of its own then, which learns by its own requests alone.
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
from penstock.config import NGRAM, SUFFIX, EngineConfig, PolicyConfig, TenantConfig
from penstock.core.loop import Loop
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Output, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete

KINDS = {"completion": "code", "edit": "edit", "chat": "chat", "structured": "JSON"}
"""Kinds of prompts, and what they are called here."""
MODEL = "model"
SINGLE = (NGRAM, SUFFIX, MODEL)
CHAINED = (f"{NGRAM}+{MODEL}", f"{SUFFIX}+{MODEL}")
SOURCES = (NO_DRAFTER, *SINGLE, *CHAINED)
OTHER = "other"
BETWEEN = (SUFFIX, f"{SUFFIX}+{MODEL}", f"{SUFFIX}+{OTHER}")
CHOOSING = {f"auto {MODEL}, {OTHER}": BETWEEN[1:], f"auto {SUFFIX}, {MODEL}, {OTHER}": BETWEEN}
"""Drafters that `auto` chooses between."""
ALL = "all"
CONTEXT, MOST_DRAFTED = 768, 16
BEST_SINGLE_BAR, AUTO_BAR = 1.15, 0.97
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
    return SOURCES if args.other is None else (NO_DRAFTER, *BETWEEN, *CHOOSING)


def load(args: argparse.Namespace) -> Engine:
    names = [s for s in (SOURCES if args.other is None else BETWEEN) if s != NO_DRAFTER]
    files = {MODEL: str(args.drafter), OTHER: str(args.other)}
    drafters: dict[str, Any] = {
        n: "+".join(files.get(part, part) for part in n.split("+")) for n in names
    }
    room = CONTEXT + args.new_tokens + 32
    config = EngineConfig(
        target=args.target,
        drafters=drafters,
        kv_tokens=2 * room,
        max_model_len=room,
        num_threads=args.threads,
        prefix_caching=False,
        tenants=dict.fromkeys(sources_of(args), TenantConfig()),
        allocation=PolicyConfig.from_name("priced", k_max=MOST_DRAFTED),
    )
    return load_engine(config)


def loops_of(engine: Engine, args: argparse.Namespace) -> dict[str, Loop]:
    """By source. With `--other` each has its own drafters, of which `auto` may choose."""
    if args.other is None:
        return dict.fromkeys(SOURCES, engine.loop)
    loops = {}
    for source in sources_of(args):
        scheduler = deepcopy(engine.scheduler)
        for name in {*BETWEEN} - {*CHOOSING.get(source, (source,))}:
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
                drafter=AUTO_DRAFTER if source in CHOOSING else source,
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
    """Of the better chain, which is chosen by all kinds together."""

    def best(sources: Sequence[str], kind: str = ALL) -> dict[str, Any]:
        return max((cells[kind, s] for s in sources), key=lambda cell: cell["tokens_per_s"])

    if (ALL, BETWEEN[-1]) in cells:
        return [_auto_verdict(cells, source, best(CHOOSING[source])) for source in CHOOSING]
    chain, single = best(CHAINED), best(SINGLE)
    gain = chain["tokens_per_s"] / single["tokens_per_s"]
    text = f"{chain['source']} {gain:.2f} times {single['source']} (bar {BEST_SINGLE_BAR})"
    claim = "the chain against the best single source, all kinds together"
    claims = [bar(claim, text, gain >= BEST_SINGLE_BAR)]
    for kind, name in KINDS.items():
        own, wanted = cells[kind, chain["source"]], EDIT_BAR if kind == "edit" else OTHER_BAR
        rival = best(SINGLE, kind)
        beside = f"{own['tokens_per_s'] / rival['tokens_per_s']:.2f} times {rival['source']}"
        text = f"{own['times']:.2f} times (bar {wanted}), {beside}"
        claims.append(bar(f"{name}: the chain against the target", text, own["times"] >= wanted))
    texts: dict[RealPrompt, set[tuple[int, ...]]] = {}
    for d in done:
        texts.setdefault(d.prompt, set()).add(d.text)
    same = sum(len(found) == 1 for found in texts.values())
    text = f"for {same} of {len(texts)} prompts"
    return [*claims, bar("every source gives the same text", text, same == len(texts))]


def _auto_verdict(cells: Cells, source: str, single: dict[str, Any]) -> ClaimVerdict:
    shares = {
        name: cells[kind, source]["tokens_per_s"] / cells[kind, single["source"]]["tokens_per_s"]
        for kind, name in {**KINDS, ALL: "all kinds"}.items()
    }
    text = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    text = f"{text} of {single['source']} alone (bar {AUTO_BAR} over all)"
    return bar(source, text, shares["all kinds"] >= AUTO_BAR)


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
