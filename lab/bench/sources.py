"""What makes a real target fastest: look-up alone, a small model behind it, or `auto` between two?

    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf [--prompts 4] [--new-tokens 128] [--json]
    python -m lab.bench.sources TARGET.gguf DRAFTER.gguf --other OTHER.gguf [--turns 5]
                                [--clients 4]: `auto` between both, and with each of them

Requests are greedy, from `lab.bench.real_prompts`, one at a time or as many as there are clients.
All settings but `none` have look-up and take turns on each prompt, after `--warm` prompts of each
kind to learn from. Each has a scheduler of its own, new in each turn, and is a tenant: suffixes are
found only in what it has put out itself. Tokens per second are from the first token on: the small
model's reading of the prompt is in them, the target's is not.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.real_prompts import PARTS, RealPrompt, real_prompts, token_ids
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, count, parser, table, tell
from lab.common.statistics import FloatArray, ratio, rotated
from penstock.config import SUFFIX, EngineConfig, TenantConfig
from penstock.core.loop import Loop
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Output, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.serving.usage import Usage

KINDS = {"completion": "code", "edit": "edit", "chat": "chat", "structured": "JSON"}
"""Kinds of prompts, and what they are called here."""
MODEL, OTHER = "model", "other"
MODELS = (MODEL, OTHER)
AUTOS = {AUTO_DRAFTER: MODELS} | {f"{AUTO_DRAFTER}-{name}": (name,) for name in MODELS}
"""Settings that choose, and the models that they choose from."""
ALL = "all"
CONTEXT = 768
BEST_SINGLE_BAR, AUTO_BAR, KIND_BAR = 1.0, 0.97, 0.93
EDIT_BAR, OTHER_BAR, LATE_BAR = 2.5, 1.4, 1.0
EARLY, LATE = 8, 24
"""Requests of a server that knows nothing yet, and those after which it should know enough."""
_SPANS = ((0, EARLY), (LATE, math.inf))


@dataclass(frozen=True)
class Decoded:
    """One request's tokens after its first. number: of the request, in its turn."""

    prompt: RealPrompt
    source: str
    turn: int
    number: int
    text: tuple[int, ...]
    seconds: float
    rounds: int
    proposed: int
    accepted: int


def sources_of(args: argparse.Namespace) -> tuple[str, ...]:
    between = () if args.other is None else (OTHER, *AUTOS)
    return (NO_DRAFTER, SUFFIX, MODEL, *between)


def load(args: argparse.Namespace) -> Engine:
    drafters: dict[str, Any] = {SUFFIX: SUFFIX, MODEL: str(args.drafter)}
    if args.other is not None:
        drafters[OTHER] = str(args.other)
    room = CONTEXT + args.new_tokens + 32
    config = EngineConfig(
        target=args.target,
        drafters=drafters,
        kv_tokens=(1 + args.clients) * room,
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
        for name in set(scheduler.table.drafters) - {*AUTOS.get(source, (source,))}:
            del scheduler.table.drafters[name]
        loops[source] = Loop(scheduler, engine.executor, engine.clock)
    return loops


@dataclass(frozen=True)
class Timed:
    """A request's tokens after its first output, and what they took."""

    token_ids: tuple[int, ...]
    seconds: float
    rounds: int
    usage: Usage


def decode(loop: Loop, requests: Sequence[Request]) -> list[Timed]:
    """Run requests together to their ends. Raises: RuntimeError."""
    seen: dict[str, list[tuple[float, int]]] = {request.id: [] for request in requests}

    def watch(output: Output) -> None:
        seen[output.request_id].append((time.perf_counter(), len(output.token_ids)))

    found = []
    for done in complete(loop, requests, len(requests), watch):
        if done.error:
            raise RuntimeError(done.error)
        outputs = seen[done.request.id]
        (began, num_first), (ended, _) = outputs[0], outputs[-1]
        text = tuple(done.token_ids[num_first:])
        found.append(Timed(text, ended - began, len(outputs) - 1, done.usage))
    return found


def chosen(part: str, num: int) -> list[RealPrompt]:
    """So many of each kind, kind by kind in turn."""
    mine = [p for p in real_prompts() if p.part == part]
    by_kind = [[p for p in mine if p.kind == kind][:num] for kind in KINDS]
    return [p for one_of_each in zip(*by_kind, strict=True) for p in one_of_each]


def passes(engine: Engine, args: argparse.Namespace) -> Iterator[Decoded]:
    """Decode the prompts, with the sources in another order each time."""
    prompts = [*chosen(PARTS[0], args.warm), *chosen(PARTS[1], args.prompts)]
    for turn in range(args.turns):
        loops = loops_of(engine, args)
        for first in range(0, len(prompts), args.clients):
            together = prompts[first : first + args.clients]
            for source in rotated(sources_of(args), turn + first // args.clients):
                for done in _pass(engine, args, loops[source], together, (source, turn, first)):
                    rate = len(done.text) / max(done.seconds, 1e-9)
                    what = f"{done.prompt.part}, {done.prompt.kind} {done.prompt.origin}, {source}"
                    print(f"{turn}, {what}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
                    if done.prompt.part == PARTS[1] and done.text:
                        yield done


def _pass(
    engine: Engine,
    args: argparse.Namespace,
    loop: Loop,
    prompts: Sequence[RealPrompt],
    told: tuple[str, int, int],
) -> Iterator[Decoded]:
    """Prompts that are sent together. told: source, turn, number of the first one."""
    (source, turn, first), tokenizer = told, load_tokenizer(engine.tokenizer_path)
    requests = []
    for number, prompt in enumerate(prompts, first):
        tokens = token_ids(prompt, tokenizer)[-CONTEXT:]
        request = Request(
            id=f"{source} {turn} {number}",
            prompt_len=len(tokens),
            prompt_token_ids=tokens,
            max_tokens=args.new_tokens,
            stop_token_ids=frozenset(engine.eos_token_ids),
            sampling=SamplingParams(temperature=0.0),
            tenant=source,
            drafter=AUTO_DRAFTER if source in AUTOS else source,
        )
        requests.append(request)
    for number, (prompt, done) in enumerate(
        zip(prompts, decode(loop, requests), strict=True), first
    ):
        counts = done.rounds, done.usage.num_draft_tokens, done.usage.num_accepted_tokens
        yield Decoded(prompt, source, turn, number, done.token_ids, done.seconds, *counts)


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
    for name, models in AUTOS.items():
        spans = [s for s in _SPANS if any(s[0] <= d.number < s[1] for d in done)]
        if (ALL, name) in cells:
            claims += [_auto_verdict(done, name, (SUFFIX, *models), span) for span in spans]
    texts: dict[RealPrompt, set[tuple[int, ...]]] = {}
    for d in done:
        texts.setdefault(d.prompt, set()).add(d.text)
    same = sum(len(found) == 1 for found in texts.values())
    text = f"for {same} of {len(texts)} prompts"
    return [*claims, bar("every source gives the same text", text, same == len(texts))]


def _auto_verdict(
    done: Sequence[Decoded], name: str, fixed: Sequence[str], span: tuple[int, float]
) -> ClaimVerdict:
    """Against the best fixed setting of its own, of the requests with numbers in a span."""
    mine = [d for d in done if span[0] <= d.number < span[1]]
    turns = sorted({d.turn for d in mine})
    kinds = [kind for kind in KINDS if any(d.prompt.kind == kind for d in mine)]

    def rates(source: str, kind: str = ALL) -> FloatArray:
        """Tokens per second by turn."""
        of = [d for d in mine if d.source == source and kind in (d.prompt.kind, ALL)]
        return np.array([_rate([d for d in of if d.turn == turn]) for turn in turns])

    best = max(fixed, key=lambda source: rates(source).mean())
    share = ratio(rates(name), rates(best))
    each = {KINDS[k]: float((rates(name, k) / rates(best, k)).mean()) for k in kinds}
    is_late = span[0] > 0
    wanted = LATE_BAR if is_late else AUTO_BAR
    holds = share.mean >= wanted and (is_late or min(each.values()) >= KIND_BAR)
    when = f"after {LATE} requests" if is_late else f"the first {EARLY} requests"
    told = ", ".join(f"{kind} {value:.2f}" for kind, value in each.items())
    bars = f"bar {wanted}" if is_late else f"bars {wanted} over all, {KIND_BAR} in each kind"
    text = f"{share.mean:.3f} ± {share.half:.3f} of {best}, {told} ({bars}; turns: {len(turns)})"
    return bar(f"{name} against the best fixed setting, {when}", text, holds)


def _rate(done: Sequence[Decoded]) -> float:
    return sum(len(d.text) for d in done) / sum(d.seconds for d in done)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("drafter", type=Path)
    options.add_argument("--other", type=Path, help="a second small model")
    options.add_argument("--prompts", type=int, default=4, help="measured, of each kind, at most 8")
    options.add_argument("--warm", type=int, default=2, help="to learn from, of each kind")
    options.add_argument("--clients", type=count, default=1, help="prompts sent together")
    options.add_argument("--turns", type=count, default=1, help="of all, each with new schedulers")
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
