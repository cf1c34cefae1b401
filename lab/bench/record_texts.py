"""Records of real texts: what look-up finds behind every token, and what drafters know of the rest.

    python -m lab.bench.record_texts TARGET.gguf --drafter NAME=DRAFTER.gguf [--drafter ...]
        --out FILE.json.gz [--check 15] [--json]

The target's greedy answers to five kinds of prompts (`lab.bench.real_prompts` and
`written_prompts.toml`), as one tenant's in one order. At each position of an output, with the
tokens before it known, the record has

- look-up in the text itself and in the tenant's earlier outputs: the source, the length of the
  match, how many tokens it finds, and how many of these are right up to the first wrong one;
- for each drafter, how many tokens it would guess right, MOST_RIGHT at most.

A drafter with the target's tokens reads each text once: while its guesses are right, its own draft
is the text. One with other tokens drafts at every position. Half of each kind is held out.
What was made is kept in the cache folder, so that a run that was cut goes on.

`--check`: so many texts are also served one by one, with drafts of a fixed length from look-up and
from each drafter; a round of the engine should accept what the record says. A record takes about
ten CPU minutes on Zen 4 for a target of 1.5B.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.bench.real_prompts import PARTS, RealPrompt, real_prompts, token_ids
from lab.common.cells import Cells
from lab.common.live import make_loop
from lab.common.results import Results, ResultTable, parser, table, tell
from penstock.config import SUFFIX, EngineConfig, PolicyConfig
from penstock.core.lookup import TextLookUp
from penstock.core.loop import Loop
from penstock.core.state import RequestState
from penstock.core.types import (
    NO_DRAFTER,
    DraftOrder,
    Match,
    Output,
    Request,
    SamplingParams,
)
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete

KINDS = {
    "code": ("completion", 3),
    "edit": ("edit", 2),
    "chat": ("chat", 2),
    "json": ("structured", 1),
    "summary": ("summary", 3),
}
"""By kind: the kind of `lab.bench.real_prompts`, and how many of each part are taken."""
OF_KIND = 12
MOST_TOKENS, EDIT_TOKENS = 160, 300
MOST_FOUND, MOST_RIGHT = 64, 16
NOTHING, OWN, TENANT = range(3)
"""Sources of a match."""
SOURCE_NAMES = ("none", "own", "tenant")
BINS = ((1, 3), (4, 7), (8, 15), (16, 31), (32, 32))
"""Lengths of matches."""
ORDER = "one tenant, in this order"
CHECKED_LENGTH = 8
_PROMPTS = Path(__file__).with_name("written_prompts.toml")
_AT_ONCE, _CONTEXT = 8, 1024


class Row(NamedTuple):
    """Look-up at a position. found: tokens; right: of these, up to the first wrong one."""

    source: int
    length: int
    found: int
    right: int


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer, in its tokens."""

    prompt: RealPrompt
    prompt_ids: tuple[int, ...]
    output: tuple[int, ...]

    def request(self, name: str, **fields: Any) -> Request:
        return request_of(name, self.prompt_ids, len(self.output), **fields)


def request_of(name: str, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Request:
    return Request(
        id=name,
        prompt_len=len(prompt),
        prompt_token_ids=tuple(prompt),
        max_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0),
        **fields,
    )


def prompts() -> list[RealPrompt]:
    """The kinds in turn, and of each kind the parts in turn."""
    written = tomllib.loads(_PROMPTS.read_text(encoding="utf-8"))
    real, mine = real_prompts(), []
    for made in written["prompt"]:
        text = written["texts"].get(made.pop("about", None), "")
        made["message"] = "\n\n".join(filter(None, (made["message"], text.strip())))
        mine.append(RealPrompt(**made))
    lists = []
    for kind, (theirs, num) in KINDS.items():
        halves = [
            [
                RealPrompt(kind, part, p.origin, p.text, p.message)
                for p in real
                if (p.kind, p.part) == (theirs, part)
            ][:num]
            + [p for p in mine if (p.kind, p.part) == (kind, part)]
            for part in PARTS
        ]
        lists.append([p for pair in zip(*halves, strict=True) for p in pair])
        assert len(lists[-1]) == OF_KIND
    return [p for one_of_each in zip(*lists, strict=True) for p in one_of_each]


def load(args: argparse.Namespace) -> Engine:
    """The target, the drafters without look-up before them, and look-up."""
    drafters: dict[str, Any] = {**args.drafters, SUFFIX: SUFFIX}
    return load_engine(
        EngineConfig(
            target=args.target,
            drafters=drafters,
            kv_tokens=_AT_ONCE * (_CONTEXT + EDIT_TOKENS),
            max_model_len=_CONTEXT + EDIT_TOKENS,
            num_threads=args.threads,
            prefix_caching=False,
        ),
        calibrated=False,
    )


def texts_of(engine: Engine, asked: Sequence[RealPrompt], kept: Cells) -> list[Text]:
    """The target's greedy answers, several requests at once."""
    tokenizer = load_tokenizer(engine.tokenizer_path)
    ends = frozenset(engine.eos_token_ids)
    ids = [token_ids(p, tokenizer)[-_CONTEXT:] for p in asked]
    limits = [EDIT_TOKENS if p.kind == "edit" else MOST_TOKENS for p in asked]
    keys = [_key("output", engine, i, n) for i, n in zip(ids, limits, strict=True)]
    missing = [
        request_of(key, i, n, drafter=NO_DRAFTER, stop_token_ids=ends)
        for key, i, n in zip(keys, ids, limits, strict=True)
        if key not in kept.done
    ]
    made: dict[str, list[int]] = {request.id: [] for request in missing}
    ended = len(keys) - len(missing)

    def watch(output: Output) -> None:
        nonlocal ended
        if output.error is not None:
            raise RuntimeError(output.error)
        made[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            kept.measure(output.request_id, lambda: {"tokens": made[output.request_id]})
            ended += 1
            _progress(f"output {ended} of {len(keys)}")

    loop = make_loop(engine, PolicyConfig.from_name("auto"))
    complete(loop, missing, _AT_ONCE, watch)
    outputs = [tuple(kept.done[key]["tokens"]) for key in keys]
    return [Text(*one) for one in zip(asked, ids, outputs, strict=True)]


def look_up(texts: Sequence[Text]) -> list[list[Row]]:
    """What look-up finds at each position of each text, which become the tenant's memory in turn.

    An output is remembered to its end."""
    texts_known = TextLookUp(SUFFIX)
    found = []
    for text in texts:
        state = RequestState(text.request("text"), 0)
        rows = []
        for position, token in enumerate(text.output):
            match = texts_known.match(state, MOST_FOUND)
            rows.append(_row(match, text.output[position:]))
            state.append([token])
        texts_known.release_request(state)
        found.append(rows)
    return found


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    most = min(len(tokens), len(others))
    return next((i for i in range(most) if tokens[i] != others[i]), most)


def _row(match: Match | None, truth: Sequence[int]) -> Row:
    if match is None:
        return Row(NOTHING, 0, 0, 0)
    right = num_equal(match.token_ids, truth)
    source = OWN if match.source == "own" else TENANT
    return Row(source, match.length, len(match.token_ids), right)


def rights_by_reading(drafter: ModelDrafter, text: Text) -> list[int]:
    """How many tokens the drafter guesses right from each position on, by one pass of the text."""
    tokens = len(text.prompt_ids) + len(text.output)
    buffer = TokenBuffer(text.request("text"))
    buffer.append(text.output)
    blocks = tuple(range(drafter.runner.blocks_for(tokens)))
    order = DraftOrder("text", 0, 0, drafter.name, 0, tokens - 1, 0, blocks)
    with torch.inference_mode():
        logits = drafter.read([order], [buffer], [len(text.output)])
        guesses = logits.argmax(dim=-1).cpu().numpy()
    drafter.release_request("text")
    return runs(np.equal(guesses, text.output).tolist())


def runs(right: Sequence[bool]) -> list[int]:
    """The number of right guesses in a row from each position on, MOST_RIGHT at most."""
    back = accumulate(reversed(right), lambda run, is_right: (run + 1) * is_right, initial=0)
    return [min(run, MOST_RIGHT) for run in list(back)[:0:-1]]


def rights_by_drafting(drafter: LocalDrafter, texts: Sequence[Text]) -> list[list[int]]:
    """How many tokens of a draft are right at each position, the texts side by side."""
    buffers = [TokenBuffer(text.request(f"text {i}")) for i, text in enumerate(texts)]
    rights: list[list[int]] = [[] for _ in texts]
    for position in range(max(len(text.output) for text in texts)):
        alive = [i for i, text in enumerate(texts) if position < len(text.output)]
        orders = [
            DraftOrder(f"text {i}", 0, position, drafter.name, 0, buffers[i].length, MOST_RIGHT)
            for i in alive
        ]
        with torch.inference_mode():
            made = drafter.draft(orders, [buffers[i] for i in alive])
        for i, draft in zip(alive, made.drafts, strict=True):
            rights[i].append(num_equal(draft.token_ids, texts[i].output[position:]))
            buffers[i].append(texts[i].output[position : position + 1])
    for buffer in buffers:
        drafter.release_request(buffer.request.id)
    return rights


def rights_of(engine: Engine, name: str, texts: Sequence[Text], kept: Cells) -> list[list[int]]:
    """Of a drafter, by text."""
    drafter = engine.executor.drafters[name]
    rights = []
    for begin in range(0, len(texts), _AT_ONCE):
        group = texts[begin : begin + _AT_ONCE]
        read = (t for text in group for t in (*text.prompt_ids, *text.output))

        def measure(group: Sequence[Text] = group) -> dict[str, Any]:
            if isinstance(drafter, ModelDrafter):
                return {"right": [rights_by_reading(drafter, text) for text in group]}
            return {"right": rights_by_drafting(drafter, group)}

        key = _key(f"right/{name}", engine, list(read), MOST_RIGHT)
        rights += kept.measure(key, measure)["right"]
        _progress(f"{name}: {begin + len(group)} of {len(texts)} texts")
    return rights


def _key(what: str, engine: Engine, ids: Sequence[int], num: int) -> str:
    digest = hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()
    return f"{what}/{engine.target}/{num}/{digest[:16]}"


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# --- the record -----------------------------------------------------------------------------------


def record_of(
    target: str,
    texts: Sequence[Text],
    rows: Sequence[Sequence[Row]],
    rights: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Any]:
    made = [
        {
            "kind": text.prompt.kind,
            "held_out": text.prompt.part == PARTS[1],
            "prompt_len": len(text.prompt_ids),
            "output_len": len(text.output),
            "lookup": found,
            "right": {name: of_texts[i] for name, of_texts in rights.items()},
        }
        for i, (text, found) in enumerate(zip(texts, rows, strict=True))
    ]
    return {"target": target, "drafters": list(rights), "order": ORDER, "texts": made}


def write(record: Mapping[str, Any], path: Path) -> None:
    """The same bytes for the same record. Raises: OSError."""
    text = json.dumps(record, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


class Position(NamedTuple):
    """One position of a text in a record."""

    kind: str
    row: Row
    right: Mapping[str, int]


def positions_of(record: Mapping[str, Any]) -> list[Position]:
    return [
        Position(text["kind"], Row(*row), {n: right[i] for n, right in text["right"].items()})
        for text in record["texts"]
        for i, row in enumerate(text["lookup"])
    ]


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of each kind, and of all."""
    everything = positions_of(record)
    rows = []
    for kind in (*KINDS, "all"):
        mine = [p for p in everything if kind in (p.kind, "all")]
        if not mine:
            continue
        sources = Counter(p.row.source for p in mine)
        row: dict[str, Any] = {"kind": kind, "positions": len(mine)}
        row |= {name: sources[i] / len(mine) for i, name in enumerate(SOURCE_NAMES)}
        for low, high in BINS:
            row[_bin(low, high)] = _mean([p.row.right for p in mine if low <= p.row.length <= high])
        for number, name in enumerate(record["drafters"]):
            for with_match, what in ((True, "with"), (False, "without")):
                chosen = [p.right[name] for p in mine if bool(p.row.length) is with_match]
                row[_guessed(number, what)] = _mean(chosen)
        rows.append(row)
    return rows


def _bin(low: int, high: int) -> str:
    return f"match of {low}" if low == high else f"match of {low} to {high}"


def _guessed(number: int, what: str) -> str:
    """By number: names of models may have dots, which a format string takes for attributes."""
    return f"drafter {number} {what}"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def tables_of(rows: Sequence[Mapping[str, Any]], drafters: Sequence[str]) -> Iterator[ResultTable]:
    first = {"kind": "{kind}", "positions": "{positions:,}"}
    shares = {name: f"{{{name}:.0%}}" for name in SOURCE_NAMES}
    yield table("source of the match, share of positions", rows, first | shares)
    bins = {_bin(*ends): f"{{{_bin(*ends)}:.2f}}" for ends in BINS}
    yield table("looked-up tokens that are right, mean", rows, first | bins)
    guessed = {
        f"{name} {what}": f"{{{_guessed(number, what)}:.2f}}"
        for number, name in enumerate(drafters)
        for what in ("with", "without")
    }
    yield table("drafters' tokens that are right, with and without a match", rows, first | guessed)


# --- the engine beside the record -----------------------------------------------------------------


def check(
    engine: Engine, texts: Sequence[Text], known: Mapping[str, Sequence[Sequence[int]]]
) -> list[dict[str, Any]]:
    """How many rounds of the engine accept what the record says, by source of drafts. known: how
    many tokens are right at each position of each text."""
    found = []
    fixed = PolicyConfig.from_name("fixed", k=CHECKED_LENGTH)
    for name, rights in known.items():
        found_in = TextLookUp(SUFFIX) if name == SUFFIX else None
        loop = make_loop(engine, PolicyConfig.from_name("auto"), fixed, look_up=found_in)
        rounds: list[tuple[int, int]] = []
        for i, text in enumerate(texts):
            seen = _served(loop, text, text.request(f"check {name} {i}", drafter=name))
            rounds += rounds_of(seen, rights[i])
            _progress(f"check of {name}: {i + 1} of {len(texts)} texts")
        live, recorded = np.array(rounds).T
        found.append(
            {
                "drafts of": name,
                "rounds": len(rounds),
                "equal": float((live == recorded).mean()),
                "live": float(live.mean()),
                "recorded": float(recorded.mean()),
            }
        )
    return found


def _served(loop: Loop, text: Text, request: Request) -> list[int]:
    """Tokens by round. Raises: RuntimeError for another text than the recorded one."""
    seen: list[int] = []
    (done,) = complete(loop, [request], 1, lambda output: seen.append(len(output.token_ids)))
    if done.error or tuple(done.token_ids) != text.output:
        raise RuntimeError(f"{request.id}: {done.error or 'another text than was recorded'}")
    return seen


def rounds_of(seen: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens of each round after the first, and those that a record expects. seen: by round."""
    starts, end = list(accumulate(seen)), sum(seen)
    return [
        (num, min(min(right[at], CHECKED_LENGTH) + 1, end - at))
        for at, num in zip(starts, seen[1:], strict=False)
        if num
    ]


def checked_table(found: Sequence[Mapping[str, Any]]) -> ResultTable:
    columns = {
        "drafts of": "{drafts of}",
        "rounds": "{rounds:,}",
        "as recorded": "{equal:.1%}",
        "tokens a round, live": "{live:.3f}",
        "recorded": "{recorded:.3f}",
    }
    return table(f"rounds of the engine, drafts of {CHECKED_LENGTH}", found, columns)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("--drafter", action="append", default=[], metavar="NAME=FILE")
    cache = Path.home() / ".cache" / "penstock" / "records"
    options.add_argument("--folder", type=Path, default=cache, help="of what was made so far")
    options.add_argument("--out", type=Path, required=True, help="the record, .json.gz")
    options.add_argument("--check", type=int, default=0, metavar="TEXTS")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    args.drafters = dict(text.split("=", 1) for text in args.drafter)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = Cells(args.folder / f"{args.target.stem}.jsonl", silent=True)
    engine = load(args)
    texts = texts_of(engine, prompts(), kept)
    rows = look_up(texts)
    rights = {name: rights_of(engine, name, texts, kept) for name in args.drafters}
    record = record_of(engine.target, texts, rows, rights)
    write(record, args.out)
    figures = rows_of(record)
    tables = list(tables_of(figures, list(rights)))
    told: dict[str, Any] = {"kinds": figures}
    if args.check:
        looked_up = {SUFFIX: [[row.right for row in own] for own in rows]}
        told["check"] = check(engine, texts[: args.check], looked_up | rights)
        tables.append(checked_table(told["check"]))
    return tell(args, Results(told, (), tables))


if __name__ == "__main__":
    raise SystemExit(main())
