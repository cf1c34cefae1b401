"""Which source of draft tokens is fastest on a real pair: look-up, suffixes, a small model, or a
chain that chooses between them in every round?

    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf [--prompts 4] [--new-tokens 128] [--json]

One request at a time, greedy, from `lab.bench.real_prompts`: code to complete, edits, questions,
and JSON, SQL or YAML. All sources are drafters of one engine with the default allocation, and take
turns on each prompt. `--warm` prompts of each kind, from the part `learn`, come first and count
nothing: every source learns on them. Each source is a tenant, so that suffixes are found only in
what the same source has put out before.

Tokens per second are of decoding, from the first token on: the reading of the prompt by the small
model is in them, the target's is not. Beside them stands the processor's time of the process for a
token, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.real_prompts import RealPrompt, real_prompts, token_ids
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, parser, table, tell
from penstock.config import NGRAM, SUFFIX, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Arrive, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.usage import Usage

KINDS = {"completion": "code", "edit": "edit", "chat": "chat", "structured": "JSON"}
"""Kinds of prompts, and what they are called here."""
MODEL = "model"
SINGLE = (NGRAM, SUFFIX, MODEL)
CHAINED = (f"{NGRAM}+{MODEL}", f"{SUFFIX}+{MODEL}")
SOURCES = (NO_DRAFTER, *SINGLE, *CHAINED)
ALL = "all"

BEST_SINGLE_BAR = 1.15
EDIT_BAR, OTHER_BAR = 2.5, 1.4


@dataclass(frozen=True)
class Decoded:
    """One request's tokens after its first. cpu_s: of all threads of the process"""

    kind: str
    source: str
    origin: str
    num_tokens: int
    seconds: float
    cpu_s: float
    rounds: int
    proposed: int
    accepted: int
    text: tuple[int, ...]


def load(target: Path, drafter: Path, args: argparse.Namespace) -> Engine:
    return load_engine(
        EngineConfig(
            target=target,
            drafters={
                source: source.replace(MODEL, str(drafter))
                for source in args.sources
                if source != NO_DRAFTER
            },
            dtype=args.dtype,
            drafter_weights=args.drafter_weights,
            kv_tokens=2 * (args.context + args.new_tokens + 32),
            max_model_len=args.context + args.new_tokens + 32,
            num_threads=args.threads,
            prefix_caching=False,
            allocation=PolicyConfig.of("throughput", k_max=args.k_max),
        )
    )


def decode(engine: Engine, request: Request, kind: str, origin: str) -> Decoded:
    """Run a request to its end. Raises: RuntimeError."""
    loop, clock, usage = engine.loop, time.perf_counter, Usage()
    text: list[int] = []
    events = [Arrive(request)]
    rounds, began, cpu_began, num_first = -1, 0.0, 0.0, 0
    is_over = False
    while not is_over:
        for output in loop.turn(events).outputs:
            if output.error:
                raise RuntimeError(output.error)
            usage.observe(output)
            text += output.token_ids
            rounds += 1
            is_over = output.finish_reason is not None
            if not rounds:
                began, cpu_began, num_first = clock(), time.process_time(), len(text)
        events = []
    source = request.tenant
    return Decoded(
        kind,
        source,
        origin,
        len(text) - num_first,
        clock() - began,
        time.process_time() - cpu_began,
        rounds,
        usage.num_draft_tokens,
        usage.num_accepted_tokens,
        tuple(text),
    )


def chosen(args: argparse.Namespace) -> tuple[list[RealPrompt], list[RealPrompt]]:
    """To learn from and to measure, kind by kind in turn."""
    parts = []
    for part, num in (("learn", args.warm), ("held", args.prompts)):
        mine = [p for p in real_prompts() if p.part == part]
        by_kind = [[p for p in mine if p.kind == kind][:num] for kind in KINDS]
        parts.append([p for one_of_each in zip(*by_kind, strict=True) for p in one_of_each])
    return parts[0], parts[1]


def passes(engine: Engine, args: argparse.Namespace) -> Iterator[Decoded]:
    """Of the prompts that count, the sources in another order for each."""
    tokenizer = load_tokenizer(engine.tokenizer_path)
    to_learn, to_measure = chosen(args)
    names = (f"request-{i}" for i in itertools.count())
    for number, prompt in enumerate([*to_learn, *to_measure]):
        tokens = token_ids(prompt, tokenizer)[-args.context :]
        first = number % len(args.sources)
        for source in (*args.sources[first:], *args.sources[:first]):
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
            done = decode(engine, request, prompt.kind, prompt.origin)
            counts = number >= len(to_learn)
            show(done, "measured" if counts else "learnt from")
            if counts and done.num_tokens > 0:
                yield done


def show(done: Decoded, what: str) -> None:
    rate = done.num_tokens / max(done.seconds, 1e-9)
    print(
        f"{what}: {KINDS[done.kind]} {done.origin}, {done.source}: {done.num_tokens} tokens in "
        f"{done.rounds} rounds, {rate:.1f}/s",
        file=sys.stderr,
        flush=True,
    )


@dataclass(frozen=True)
class Cell:
    """One source on the prompts of one kind, or of all kinds."""

    kind: str
    source: str
    tokens_per_s: float
    cpu_ms: float
    tokens_per_round: float
    accepted: float
    proposed: float


def cells_of(done: Sequence[Decoded]) -> dict[tuple[str, str], Cell]:
    """By kind and source."""
    cells = {}
    for kind in (*dict.fromkeys(d.kind for d in done), ALL):
        for source in dict.fromkeys(d.source for d in done):
            mine = [d for d in done if d.source == source and kind in (d.kind, ALL)]
            num, rounds = sum(d.num_tokens for d in mine), sum(d.rounds for d in mine)
            cells[kind, source] = Cell(
                KINDS.get(kind, ALL),
                source,
                num / sum(d.seconds for d in mine),
                1e3 * sum(d.cpu_s for d in mine) / num,
                num / rounds,
                sum(d.accepted for d in mine) / rounds,
                sum(d.proposed for d in mine) / rounds,
            )
    return cells


def verdicts_of(
    cells: Mapping[tuple[str, str], Cell], done: Sequence[Decoded]
) -> list[ClaimVerdict]:
    """Of the better chain, which is chosen by all kinds together."""

    def best(sources: Sequence[str], kind: str = ALL) -> Cell:
        return max((cells[kind, s] for s in sources if (kind, s) in cells), key=_rate)

    chain, single = best(CHAINED), best(SINGLE)
    gain = chain.tokens_per_s / single.tokens_per_s
    claims = [
        bar(
            "the chain against the best single source, all kinds together",
            f"{chain.source} {gain:.2f} times {single.source} (bar {BEST_SINGLE_BAR})",
            gain >= BEST_SINGLE_BAR,
        )
    ]
    for kind, name in KINDS.items():
        own, wanted = cells[kind, chain.source], EDIT_BAR if kind == "edit" else OTHER_BAR
        plain, rival = cells[kind, NO_DRAFTER], best(SINGLE, kind)
        times = own.tokens_per_s / plain.tokens_per_s
        beside = own.tokens_per_s / rival.tokens_per_s
        claims.append(
            bar(
                f"{name}: the chain against the target alone",
                f"{times:.2f} times (bar {wanted}), {beside:.2f} times {rival.source}",
                times >= wanted,
            )
        )
    texts: dict[str, set[tuple[int, ...]]] = {}
    for d in done:
        texts.setdefault(d.origin + d.kind, set()).add(d.text)
    same = sum(len(found) == 1 for found in texts.values())
    claims.append(
        bar(
            "every source gives the same text",
            f"for {same} of {len(texts)} prompts",
            same == len(texts),
        )
    )
    return claims


def _rate(cell: Cell) -> float:
    return cell.tokens_per_s


def main() -> int:
    made = parser(__doc__)
    made.add_argument("target", type=Path)
    made.add_argument("drafter", type=Path)
    made.add_argument("--prompts", type=int, default=4, help="measured, of each kind (at most 8)")
    made.add_argument("--warm", type=int, default=2, help="to learn from, of each kind")
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--context", type=int, default=768, help="most tokens of a prompt")
    made.add_argument("--k-max", type=int, default=16, help="most draft tokens of a round")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--dtype", default="auto")
    made.add_argument("--drafter-weights", default="stored", help="stored or int4")
    made.add_argument("--sources", default=",".join(SOURCES), help="with commas between them")
    args = made.parse_args()
    args.sources = args.sources.split(",")
    if unknown := [s for s in args.sources if s not in SOURCES]:
        made.error(f"{unknown[0]!r} is no source; choose from {', '.join(SOURCES)}")
    engine = load(args.target, args.drafter, args)
    done = list(passes(engine, args))
    cells = cells_of(done)
    rows: list[dict[str, Any]] = []
    for (kind, _), cell in cells.items():
        plain = cells.get((kind, NO_DRAFTER))
        gain = "" if plain is None else f"{cell.tokens_per_s / plain.tokens_per_s:.2f}"
        by_cpu = "" if plain is None else f"{plain.cpu_ms / cell.cpu_ms:.2f}"
        rows.append({**asdict(cell), "gain": gain, "by_cpu": by_cpu})
    shown = table(
        f"{args.target.name} with {args.drafter.name}, {args.prompts} prompts of each kind",
        rows,
        {
            "kind": "{kind}",
            "source": "{source}",
            "tokens/s": "{tokens_per_s:.1f}",
            "times target-only": "{gain}",
            "CPU ms a token": "{cpu_ms:.1f}",
            "times by CPU": "{by_cpu}",
            "tokens a round": "{tokens_per_round:.2f}",
            "accepted": "{accepted:.2f}",
            "drafted": "{proposed:.2f}",
        },
    )
    verdicts = verdicts_of(cells, done) if set(args.sources) == set(SOURCES) else []
    return tell(args, Results([asdict(cell) for cell in cells.values()], verdicts, [shown]))


if __name__ == "__main__":
    raise SystemExit(main())
