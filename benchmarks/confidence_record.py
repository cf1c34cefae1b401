"""What drafters make of the target's own texts: recorded once, for `benchmarks.confidence`."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.live_engine import TargetText, target_texts
from rich.progress import Progress

from penstock.core.learn.confidence import EDGES, Stop
from penstock.engine.batch import RaggedBatch
from penstock.engine.native.runner import NativeRunner
from penstock.lab.hindsight import LONGEST
from penstock.lab.live import load

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

AT_ONCE = 32
"""Texts that a drafter reads at the same time."""


@dataclass(frozen=True)
class DraftedText:
    """What a drafter makes of each token's place in a text, told all tokens before it.

    accepted:   [tokens] how many of its draft's tokens are
    confidence: [tokens, LONGEST] in each, as `NativeDraft` has it
    margin:     [tokens, LONGEST] of the likeliest token's log-odds over the second
    entropy:    [tokens, LONGEST] of its distribution, nats
    """

    accepted: IntArray
    confidence: FloatArray
    margin: FloatArray
    entropy: FloatArray


def record(
    runner: NativeRunner, texts: Sequence[TargetText], temperature: float
) -> list[DraftedText]:
    """Of one drafter, whose cache is free."""
    found = []
    for first in range(0, len(texts), AT_ONCE):
        found += _record_some(runner, texts[first : first + AT_ONCE], temperature)
    return found


def _record_some(
    runner: NativeRunner, texts: Sequence[TargetText], temperature: float
) -> list[DraftedText]:
    whole = [[*t.prompt, *t.text] for t in texts]
    starts = np.array([len(t.prompt) for t in texts])
    width = runner.blocks_for(max(map(len, whole)) + LONGEST)
    tables = np.arange(len(texts) * width, dtype=np.int32).reshape(len(texts), width)
    drafts: list[list[tuple[int, FloatArray]]] = [[] for _ in texts]
    for step in range(max(len(t.text) for t in texts)):
        live = [i for i, t in enumerate(texts) if step < len(t.text)]
        ends = starts[live] + step
        # The prompt is read before the first draft, one token before every other.
        parts = [
            whole[i][0 if not step else end - 1 : end] for i, end in zip(live, ends, strict=True)
        ]
        drafted = _drafts(runner, parts, ends, tables[live], [texts[i] for i in live], temperature)
        for (token_ids, known), i, end in zip(drafted, live, ends, strict=True):
            right = np.array(whole[i][end : end + LONGEST])
            agrees = token_ids[: len(right)] == right
            drafts[i].append((int(np.cumprod(agrees).sum()), known))
    return [
        DraftedText(np.array([a for a, _ in d]), *np.array([k for _, k in d]).transpose(1, 0, 2))
        for d in drafts
    ]


def _drafts(
    runner: NativeRunner,
    parts: Sequence[Sequence[int]],
    ends: IntArray,
    tables: npt.NDArray[np.int32],
    texts: Sequence[TargetText],
    temperature: float,
) -> Iterator[tuple[npt.NDArray[np.int32], FloatArray]]:
    """Token ids [LONGEST], and confidence, margin and entropy [3, LONGEST], of drafts behind
    `parts`, which end before `ends`."""
    num, sizes = len(parts), np.array([len(p) for p in parts])
    rows = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    positions = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)])
    batch = RaggedBatch(
        np.concatenate(parts).astype(np.int32),
        positions.astype(np.int32),
        rows,
        ends.astype(np.int32),
        tables,
        rows[1:] - 1,
    )
    never = Stop(np.zeros(num, np.float32), np.ones((num, len(EDGES) + 1), np.float32))
    drafted = runner.draft(
        batch,
        np.full(num, LONGEST, np.int32),
        np.full(num, temperature),
        np.array([t.seed for t in texts], np.uint64),
        np.zeros(num, np.int32),
        stop=never,
        return_logits=True,
    )
    assert drafted.logits is not None
    assert drafted.confidences is not None
    log_probs = (drafted.logits / (temperature or 1.0)).log_softmax(-1)
    best = log_probs.topk(2, -1).values
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    known = torch.stack([best[..., 0] - best[..., 1], entropy], 1).double().numpy()
    confidence = drafted.confidences[:, None].astype(np.float64)
    yield from zip(drafted.token_ids, np.concatenate([confidence, known], 1), strict=True)


def recorded(
    args: argparse.Namespace, temperature: float, progress: Progress
) -> dict[str, list[DraftedText]]:
    """By drafter, from the folder `--out` where it was recorded before."""
    args.out.mkdir(parents=True, exist_ok=True)
    shape = f"{args.target}-{args.prompts}-{args.new_tokens}-{temperature}"
    path = args.out / f"{args.family.name}-{shape}.drafts"
    found: dict[str, list[DraftedText]] = {}
    if path.exists():
        found = pickle.loads(path.read_bytes())  # a file of this program's own
    missing = [d for d in args.drafters if d not in found]
    if missing:
        task = progress.add_task(f"recording at {temperature:g}", total=1 + len(missing))
        engine = load(args.target, AT_ONCE, args.new_tokens, family=args.family)
        texts = target_texts(engine, args.prompts, args.new_tokens, temperature)
        progress.advance(task)
        for drafter in missing:
            runner = engine.executor.drafters[drafter].runner
            assert isinstance(runner, NativeRunner)
            found[drafter] = record(runner, texts, temperature)
            progress.advance(task)
        path.write_bytes(pickle.dumps(found))
    return {d: found[d] for d in args.drafters}
