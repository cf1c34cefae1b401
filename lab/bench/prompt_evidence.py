"""How much a prompt tells of the drafts that will be accepted: what to expect of evidence before
the first token.

    python -m lab.bench.prompt_evidence [--json] [--out DIR] [--targets target-large,target-small]

For every request of `drafter_choice` and every model that drafts: the share of its tokens that the
target accepts from output token 24 on, and what could have foretold it. `overlap` is the sum of
min(target, drafter) over the vocabulary, averaged over the positions of the prompt: it takes a row
of the drafter's LM head for each. `first 24` is what the drafter had accepted of the first 24
output tokens: what a replay knows. Words are compared as `adaptive` does. Shown is the share
of the variance between requests that a ridge regression explains of requests that it has not seen
(R², five folds).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from lab.bench.live_engine import by_domain, target_names, texts_of
from lab.common.hindsight import KnownText
from lab.common.live import load
from lab.common.results import Results, ResultTable, parser, table, tell
from lab.zoo.evidence import answer_logits
from lab.zoo.modeling import load_model
from penstock.zoo.registry import DOMAINS, bundled_models

FloatArray = npt.NDArray[np.float64]

KNOWN = 24
"""Output tokens after which a drafter replays a request."""
FOLDS = 5
RIDGES = (0.01, 0.1, 1.0, 10.0)


def logit(share: FloatArray, count: float) -> FloatArray:
    """Of shares of `count` tokens, with half a token of either kind added."""
    accepted = share * count
    return np.log((accepted + 0.5) / (count - accepted + 0.5))


@torch.inference_mode()
def overlaps(text: KnownText, models: dict[str, Any], target: str) -> dict[str, float]:
    """Mean over the prompt's positions of the sum of min(target, drafter)."""
    tokens = list(text.prompt)
    logits = {n: answer_logits(m, tokens[:1], tokens[1:]) for n, m in models.items()}
    chances = {n: torch.softmax(rows.float(), -1) for n, rows in logits.items()}
    aims = chances.pop(target)
    return {n: float(torch.minimum(aims, q).sum(-1).mean()) for n, q in chances.items()}


def words_of(texts: Sequence[KnownText]) -> FloatArray:
    """[texts, texts] coordinates whose products are the cosines of the prompts' words."""
    has = np.zeros((len(texts), 1 + max(max(t.prompt) for t in texts)))
    for row, text in zip(has, texts, strict=True):
        row[list(text.prompt)] = 1.0
    left, sizes, _ = np.linalg.svd(has / np.sqrt(has.sum(1, keepdims=True)), full_matrices=False)
    coordinates: FloatArray = left * sizes
    return coordinates


def explained(features: FloatArray, wanted: FloatArray, folds: npt.NDArray[np.int64]) -> float:
    """R² of `wanted` for requests that the regression has not seen, with the best ridge."""
    best = 0.0
    for ridge in RIDGES:
        errors = np.zeros_like(wanted)
        for fold in range(FOLDS):
            seen, held = folds != fold, folds == fold
            centre, mean = features[seen].mean(0), wanted[seen].mean()
            x = features[seen] - centre
            w = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ (wanted[seen] - mean))
            errors[held] = wanted[held] - mean - (features[held] - centre) @ w
        best = max(best, 1 - float((errors**2).mean() / wanted.var()))
    return best


def evidence(texts: Sequence[KnownText], target: str) -> dict[str, dict[str, float]]:
    """R² by drafter and kind of evidence."""
    models = {
        n: load_model(Path(c.path))
        for n, c in bundled_models().items()
        if c.role == "drafter" or n == target
    }
    drafters = [n for n in models if n != target]
    shown = Console(file=sys.stderr)
    read = [overlaps(t, models, target) for t in track(texts, "prompts", console=shown)]
    overlap = np.array([[logit(np.float64(r[n]), 50) for n in drafters] for r in read])
    domain = np.array([[float(t.domain == d) for d in DOMAINS] for t in texts])
    words = words_of(texts)
    folds = np.arange(len(texts)) // len(DOMAINS) % FOLDS
    found = {}
    for j, name in enumerate(drafters):
        hits = [np.array(t.runs[name]) > 0 for t in texts]
        later = np.array([logit(h[KNOWN:].mean(), len(h) - KNOWN) for h in hits])
        first = np.array([[logit(h[:KNOWN].mean(), KNOWN)] for h in hits])
        own = overlap[:, j : j + 1]
        kinds = {
            "domain": domain,
            "words": words,
            "overlap": own,
            "overlaps of all": overlap,
            f"first {KNOWN}": first,
            f"words, first {KNOWN}": np.hstack([words, first]),
            "words, overlaps": np.hstack([words, overlap]),
            f"words, overlaps, first {KNOWN}": np.hstack([words, overlap, first]),
        }
        found[name] = {kind: explained(x, later, folds) for kind, x in kinds.items()}
    return found


def shown(found: dict[str, dict[str, float]], target: str, num: int) -> ResultTable:
    """A row for each kind of evidence."""
    rows = []
    for kind in next(iter(found.values())):
        values = {name: kinds[kind] for name, kinds in found.items()}
        rows.append({"evidence": kind, **values, "mean": float(np.mean(list(values.values())))})
    columns = {name: f"{{{name}:.2f}}" for name in (*found, "mean")}
    title = f"{target}: share of variance explained, {num} requests"
    return table(title, rows, {"evidence": "{evidence}", **columns})


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--targets", type=target_names, default="target-large,target-small")
    options.add_argument("--requests", type=int, default=8, help="of a domain")
    options.add_argument("--warm", type=int, default=32, help="others, of a domain")
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--out", type=Path, default=Path("choice"), help="folder for texts")
    args = options.parse_args()
    rows: dict[str, Any] = {}
    tables = []
    for target in args.targets:
        texts = texts_of(load(target, 16, args.new_tokens), target, args)
        own = by_domain([t for t in texts if len(t.text) >= 2 * KNOWN])
        depth = max(map(len, own.values()))
        mixed = [own[d][i] for i in range(depth) for d in DOMAINS if i < len(own[d])]
        rows[target] = evidence(mixed, target)
        tables.append(shown(rows[target], target, len(mixed)))
    return tell(args, Results(rows, tables=tables))


if __name__ == "__main__":
    sys.exit(main())
