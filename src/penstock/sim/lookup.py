"""Look-up and drafters of recorded texts, played together.

A record has real outputs of a model: for each position what look-up had found there, and how many
tokens each drafter had right."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.state import RequestState
from penstock.core.types import Match
from penstock.sim.acceptance import (
    AcceptanceModel,
    RecordedAcceptance,
    digest,
    parse_drafters,
)
from penstock.sim.domains import load_acceptance
from penstock.sim.traces import WorkloadError

RECORDED = Path(__file__).with_name("acceptance_data") / "texts-qwen2.5-coder-1.5b.json.gz"
"""Texts of a model of 1.5 B parameters: code, edits, chat, JSON and summaries."""

_SUFFIX = "suffix"
_TEXTS = "texts"
_SOURCES = ("", "own", "tenant")
_WRONG = -1
"""Token that is never right: simulated tokens are their positions."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One output. found: by position: source, length of match, tokens found, and right ones.

    right: by drafter and position, the tokens that it would have right."""

    kind: str
    prompt_len: int
    found: Sequence[tuple[int, int, int, int]]
    right: Mapping[str, Sequence[int]]
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class RecordedLookUp:
    """Look-up that finds what was found in recorded texts.

    A request plays a text chosen by its id and `seed`, from its start, again and again."""

    texts: Sequence[RecordedText]
    seed: int = 0
    name: str = _SUFFIX

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        text = self.texts[row_of(self.seed, state.request.id, len(self.texts))]
        return match_at(text, state, num_tokens)

    def release_request(self, state: RequestState) -> None:
        """Keep nothing."""

    def acceptance(self, drafters: Sequence[str]) -> RecordedAcceptance:
        """Return the recorded acceptance of drafters, with the same texts."""
        rows = {name: [[1 + n for n in t.right[name]] for t in self.texts] for name in drafters}
        return RecordedAcceptance(rows, self.seed)


def match_at(text: RecordedText, state: RequestState, num_tokens: int) -> Match | None:
    """Return what was found at a request's place in a text, which it plays again and again."""
    source, length, num_found, num_right = text.found[state.num_output_tokens % len(text.found)]
    if not source or not num_found:
        return None
    first = state.num_known_tokens
    right = range(first, first + min(num_right, num_tokens))
    wrong = max(0, min(num_found, num_tokens) - num_right)
    return Match((*right, *[_WRONG] * wrong), length, _SOURCES[source])


def parse_proposers(
    texts: Sequence[str], seed: int, acceptance: str | None
) -> tuple[RecordedLookUp | None, dict[str, AcceptanceModel]]:
    """Parse `--drafter` and `--acceptance`: look-up, and models by drafter. Raises: WorkloadError.

    `suffix` and `suffix+DRAFTER` add look-up, and so do recorded texts, of which a bare NAME is a
    drafter; none at all means all of these. The rest is as in `parse_drafters`."""
    parts = [text.partition("+") if text.startswith(f"{_SUFFIX}+") else None for text in texts]
    drafters = [
        text if part is None else part[2]
        for text, part in zip(texts, parts, strict=True)
        if text != _SUFFIX
    ]
    for text in drafters:
        if "+" in text.partition("=")[0]:
            raise WorkloadError(f"look-up before a drafter is {_SUFFIX}+DRAFTER, not {text!r}")
    is_recorded = acceptance == _TEXTS
    has_look_up = is_recorded or _SUFFIX in texts or any(parts)
    look_up = RecordedLookUp(read_texts(), seed) if has_look_up else None
    if not is_recorded:
        fit = None if acceptance is None else load_acceptance(acceptance)
        return look_up, dict(parse_drafters(drafters, seed, fit).models)
    assert look_up is not None
    known = list(look_up.texts[0].right)
    bare = [text for text in drafters if "=" not in text]
    for name in bare:
        if name not in known:
            raise WorkloadError(
                f"no texts were recorded with {name!r}; there are {', '.join(known)}"
            )
    others = parse_drafters([text for text in drafters if "=" in text], seed).models
    chosen = bare if texts else known
    recorded = look_up.acceptance(chosen)
    return look_up, {**dict.fromkeys(chosen, recorded), **others}


def row_of(seed: int, request_id: str, num: int) -> int:
    """Return the row of a record that a request plays, of so many."""
    return digest(f"{seed}/{request_id}") % num


def read_texts(path: Path = RECORDED, kinds: Sequence[str] = ()) -> list[RecordedText]:
    """Read recorded texts, of some kinds only if named. Raises: WorkloadError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts = [_text(row) for row in json.load(file)["texts"]]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path} has no recorded texts: {error}") from error
    chosen = [t for t in texts if not kinds or t.kind in kinds]
    if not chosen:
        known = ", ".join(sorted({t.kind for t in texts}))
        raise WorkloadError(f"{path} has no texts of {', '.join(kinds)}; it has {known}")
    return chosen


def _text(row: dict[str, Any]) -> RecordedText:
    found = [(int(s), int(m), int(n), int(k)) for s, m, n, k in row["lookup"]]
    right = {name: [int(n) for n in values] for name, values in row["right"].items()}
    return RecordedText(
        row["kind"], int(row["prompt_len"]), found, right, bool(row.get("held_out"))
    )
