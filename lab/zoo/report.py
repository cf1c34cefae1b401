"""How well every drafter suits every domain, and what choosing among them is worth."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lab.zoo.evidence import NGRAM, AcceptanceTrace, collect
from lab.zoo.heads import load_head
from lab.zoo.manifest import heads_of
from lab.zoo.modeling import load_model
from lab.zoo.tokenizer import load_tokenizer
from penstock.config import NGRAM as LOOKUP
from penstock.config import EngineConfig
from penstock.core.learn.times import Times
from penstock.engine.build import load_engine
from penstock.zoo.registry import DEFAULT_TARGET, DOMAINS, WEIGHTS, bundled_models, load_prompts

MAX_DRAFT = 12
KV_TOKENS = 16_384
NO_DRAFTER = "none"
_SHOWN = 4
"""Drafts in a row whose acceptance is told."""


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds at batch 1: a verification of `1 + draft length` positions, and a draft token."""

    verify: Callable[[int], float]
    draft: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChoiceCell:
    """One drafter in one domain (or over all, domain ``all``)."""

    domain: str
    drafter: str
    overlap: float
    coupled_acceptance: float
    acceptance_length_at_4: float
    best_draft_length: int
    draft_seconds: float
    tokens_per_s: float
    accepted_drafts: list[float]
    """Of a draft's first tokens, begun everywhere: the shares right with all before them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What choosing is worth, in tokens per second over all requests."""

    best_drafter: str
    best_draft_length: int
    single: float
    """The best single drafter at its best single draft length."""
    length_by_request: float
    """That drafter, its draft length chosen per request with hindsight."""
    drafter_by_request: float
    """The drafter chosen per request, all at the best single drafter's draft length."""
    both_by_request: float
    """Drafter and draft length chosen per request: the clairvoyant."""

    @property
    def gain(self) -> float:
        """Clairvoyant choice over the best single drafter, 0.15 for 15%."""
        return self.both_by_request / self.single - 1


def rounds(trace: AcceptanceTrace, drafter: str, length: int) -> int:
    """Verification steps that `trace` takes with drafts of `length`."""
    if drafter == NO_DRAFTER or length == 0:
        return trace.length
    runs, t, count = trace.runs[drafter], 0, 0
    while t < trace.length:
        t += min(length, int(runs[t])) + 1
        count += 1
    return count


def request_seconds(trace: AcceptanceTrace, drafter: str, length: int, times: DecodeTimes) -> float:
    """Seconds that `trace` takes alone with that drafter and draft length."""
    if drafter == NO_DRAFTER:
        return trace.length * times.verify(1)
    each = times.verify(1 + length) + length * times.draft.get(drafter, 0.0)
    return rounds(trace, drafter, length) * each


class _Costs:
    """Seconds of every trace under every (drafter, length), computed once."""

    def __init__(self, traces: list[AcceptanceTrace], times: DecodeTimes) -> None:
        self.traces = traces
        lengths = range(1, MAX_DRAFT + 1)
        self.options = [(NO_DRAFTER, 0)] + [(n, s) for n in traces[0].runs for s in lengths]
        self.seconds = [
            {option: request_seconds(trace, *option, times) for option in self.options}
            for trace in traces
        ]

    def speed(self, option: tuple[str, int], domain: str | None = None) -> float:
        """Tokens per second of one fixed option over a domain, or over all."""
        tokens = seconds = 0.0
        for trace, cost in zip(self.traces, self.seconds, strict=True):
            if domain in (None, trace.domain):
                tokens, seconds = tokens + trace.length, seconds + cost[option]
        return tokens / seconds

    def best(self, drafter: str | None = None, domain: str | None = None) -> tuple[str, int]:
        """The fastest fixed option, of one drafter or of all."""
        among = [o for o in self.options if drafter in (None, o[0])]
        return max(among, key=lambda option: self.speed(option, domain))

    def hindsight(self, among: list[tuple[str, int]]) -> float:
        """Tokens per second when each request takes its own fastest option of `among`."""
        tokens = sum(trace.length for trace in self.traces)
        return tokens / sum(min(cost[o] for o in among) for cost in self.seconds)


def choice(costs: _Costs) -> Choice:
    """The worth of choosing, over all the traces of `costs`."""
    name, length = costs.best()
    return Choice(
        best_drafter=name,
        best_draft_length=length,
        single=costs.speed((name, length)),
        length_by_request=costs.hindsight([o for o in costs.options if o[0] == name]),
        drafter_by_request=costs.hindsight([o for o in costs.options if o[1] in (0, length)]),
        both_by_request=costs.hindsight(costs.options),
    )


def _share_right(traces: list[AcceptanceTrace], name: str, place: int) -> float:
    # A text's last tokens have no room for a whole draft.
    runs = [t.runs[name][: t.length - place] for t in traces]
    return float((np.concatenate(runs) > place).mean())


def cells(costs: _Costs, times: DecodeTimes) -> list[ChoiceCell]:
    """A cell for every domain and drafter, then for all domains together."""
    result = []
    domains: list[str | None] = [*dict.fromkeys(t.domain for t in costs.traces), None]
    for domain in domains:
        group = [t for t in costs.traces if domain in (None, t.domain)]
        tokens = sum(t.length for t in group)
        for name in [NO_DRAFTER, *costs.traces[0].runs]:
            best = costs.best(name, domain)
            overlap = matched = 0.0
            shares: list[float] = []
            if name != NO_DRAFTER:
                shares = [_share_right(group, name, place) for place in range(_SHOWN)]
                overlap = sum(t.overlaps[name] * t.length for t in group) / tokens
                matched = sum(t.matches[name] * t.length for t in group) / tokens
            result.append(
                ChoiceCell(
                    domain or "all",
                    name,
                    overlap,
                    matched,
                    tokens / sum(rounds(t, name, 4) for t in group),
                    best[1],
                    times.draft.get(name, 0.0),
                    costs.speed(best, domain),
                    shares,
                )
            )
    return result


def measured_times(weights: Path, target: str, drafters: list[str]) -> DecodeTimes:
    """Step times that the engine measures here and now when it loads the models."""

    def loaded(paths: dict[str, Any]) -> Times:
        config = EngineConfig(target=weights / target, drafters=paths, kv_tokens=KV_TOKENS)
        return load_engine(config).scheduler.learn.times

    times = loaded({name: str(weights / name) for name in drafters} | {NGRAM: LOOKUP})
    draft = {name: times.curve_of(name)(1) for name in (*drafters, NGRAM)}
    for head in heads_of(target, weights):  # an engine has one at most
        kind = head.name.removeprefix(f"{target}-")
        draft[head.name] = loaded({kind: str(head.path)}).curve_of(kind)(1)
    return DecodeTimes(times.target, draft)


def _traces(
    weights: Path,
    target: str,
    drafters: list[str],
    domains: tuple[str, ...],
    per_domain: int,
    limit: int,
    greedy: bool,
    seed: int,
) -> list[AcceptanceTrace]:
    models = {name: load_model(weights / name) for name in drafters}
    tokenizer = load_tokenizer(weights / target)
    prompts = {d: load_prompts(d)[:per_domain] for d in domains}
    return collect(
        load_model(weights / target),
        models,
        tokenizer,
        prompts,
        limit=limit,
        greedy=greedy,
        seed=seed,
        heads={card.name: load_head(card.path) for card in heads_of(target, weights)},
    )


def report(
    *,
    target: str = DEFAULT_TARGET,
    domains: tuple[str, ...] = DOMAINS,
    per_domain: int = 8,
    limit: int = 128,
    seed: int = 0,
    times: DecodeTimes | None = None,
    weights: Path = WEIGHTS,
    as_json: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Print the report of ``penstock zoo info`` and return it as plain data.

    `per_domain` prompts of each of `domains` are continued by `target` for at most `limit` tokens,
    sampled at temperature 1 and greedily, and every drafter is compared along that text. `times`
    are the engine's step times; without them the engine measures.
    """
    console = console or Console()
    cards = bundled_models(weights)
    drafters = [card.name for card in cards.values() if card.role == "drafter"]
    times = times or measured_times(weights, target, drafters)
    result: dict[str, Any] = {
        "target": target,
        "models": [{**asdict(c), "path": str(c.path)} for c in cards.values()],
        "verify_seconds": {str(n): times.verify(n) for n in (1, 2, 5, 9, 13)},
    }
    for mode in ("sampled", "greedy"):
        traces = _traces(
            weights, target, drafters, domains, per_domain, limit, mode == "greedy", seed
        )
        costs = _Costs(traces, times)
        chosen = choice(costs)
        table = cells(costs, times)
        result[mode] = {
            "cells": [asdict(c) for c in table],
            "choice": {**asdict(chosen), "gain": chosen.gain},
        }
        if not as_json:
            _print(console, mode, table, chosen)
    if as_json:
        console.print_json(json.dumps(result))
    return result


def _print(console: Console, mode: str, table: list[ChoiceCell], chosen: Choice) -> None:
    names = ("domain", "drafter")
    figures = ("Σ min", "accepted", "length at 4", "best draft length", "ms / draft token")
    shown = Table(*names, title=f"{mode} text of the target")
    for column in (*figures, "tokens/s", "right in a row"):
        shown.add_column(column, justify="right")
    for domain, group in itertools.groupby(table, key=lambda c: c.domain):
        own = list(group)
        fastest = max(own, key=lambda c: c.tokens_per_s)
        for c in own:
            shown.add_row(
                *(domain, c.drafter, f"{c.overlap:.2f}", f"{c.coupled_acceptance:.2f}"),
                *(f"{c.acceptance_length_at_4:.2f}", str(c.best_draft_length)),
                *(f"{c.draft_seconds * 1e3:.2f}", f"{c.tokens_per_s:.0f}"),
                " ".join(f"{share:.2f}" for share in c.accepted_drafts),
                end_section=c is own[-1],
                style="bold" if c is fastest else None,
            )
    console.print(shown)
    base = chosen.single
    console.print(
        f"best single drafter: {chosen.best_drafter} at draft length "
        f"{chosen.best_draft_length}, {base:.0f} tokens/s; the best for each request: its length "
        f"{chosen.length_by_request / base - 1:+.1%}, the drafter "
        f"{chosen.drafter_by_request / base - 1:+.1%}, both {chosen.gain:+.1%}"
    )
