"""Audits of draft servers: a sample of drafts is recomputed by the same model.

`ratio` verification is exact only if a draft token was sampled from the reported distribution. Both
the distribution and the draw are recomputed, since all noise is a function of (seed, position).
Other drafts are only compared with the model's guess: a false one costs acceptance only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from penstock.core.types import AuditFinding, SamplingParams
from penstock.engine.eager import EagerRunner
from penstock.engine.kv_cache import BLOCK_SIZE
from penstock.engine.runner import BatchWriter
from penstock.engine.sampling import SamplingRows, draw_draft, sample_coupled
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import Weights

MAX_TOKENS = 4096
"""Longer texts are not audited: it would take seconds."""
_MAX_WAITING = 8


class Audit(NamedTuple):
    """Draft to be recomputed by the drafter `model`, behind `text`."""

    drafter: str
    model: str
    text: tuple[int, ...]
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    weights: Sequence[Weights] | None


class Auditor:
    """Recomputes drafts in its own thread; drops some when it falls behind."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = dict(models)
        self._runners: dict[str, EagerRunner] = {}
        self._waiting: queue.Queue[Audit] = queue.Queue(_MAX_WAITING)
        self._found: queue.Queue[AuditFinding] = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        drafter: str,
        model: str,
        text: TokenBuffer,
        token_ids: tuple[int, ...],
        weights: Sequence[Weights] | None,
    ) -> None:
        """Queue a draft behind `text`, if it can be recomputed."""
        is_long = text.length + len(token_ids) > MAX_TOKENS
        if model not in self._models or not token_ids or is_long:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audits", daemon=True)
            self._thread.start()
        if not self._waiting.full():
            known = tuple(text.tokens(0, text.length))
            # Draft servers are not sent min_p.
            sampling = replace(text.request.sampling, min_p=0.0)
            self._waiting.put_nowait(Audit(drafter, model, known, sampling, token_ids, weights))

    def findings(self) -> list[AuditFinding]:
        """Return the results since the last call."""
        found = []
        while not self._found.empty():
            found.append(self._found.get_nowait())
        return found

    def _run(self) -> None:
        while True:
            audit = self._waiting.get()
            self._found.put(self.check(audit))

    @torch.inference_mode()
    def check(self, audit: Audit) -> AuditFinding:
        """Recompute one draft now."""
        num_tokens = len(audit.token_ids)
        logits = self._logits(audit)
        beyond = [ids for ids, _ in audit.weights or () if max(ids) >= logits.shape[1]]
        if beyond:
            return AuditFinding(audit.drafter, True, num_tokens, num_tokens, 1.0)
        rows = SamplingRows.from_params([audit.sampling] * num_tokens)
        positions = np.arange(len(audit.text), len(audit.text) + num_tokens)
        tokens = torch.tensor(audit.token_ids)
        distance = 0.0
        if audit.weights is None:
            expected = sample_coupled(logits, rows, positions)
        else:
            reported = torch.zeros_like(logits)
            for row, (ids, values) in zip(reported, audit.weights, strict=True):
                row[list(ids)] = torch.tensor(values, dtype=torch.float32)
            starts = np.full(num_tokens, len(audit.text))
            expected = draw_draft(reported.log(), rows, positions, starts)
            reported /= reported.sum(dim=-1, keepdim=True)
            own = _cut(filtered_probs(logits, rows), [len(ids) for ids, _ in audit.weights])
            distance = float((own - reported).abs().sum(dim=-1).mean()) / 2
        num_false = int((expected != tokens).sum())
        return AuditFinding(
            audit.drafter, audit.weights is not None, num_tokens, num_false, distance
        )

    def _logits(self, audit: Audit) -> torch.Tensor:
        runner = self._runner(audit.model)
        known = (*audit.text, *audit.token_ids[:-1])
        writer = BatchWriter()
        writer.add(0, known, len(audit.token_ids))
        blocks = np.arange(runner.blocks_for(len(known)), dtype=np.int32)
        return runner.forward(writer.batch(blocks[None]))

    def _runner(self, model: str) -> EagerRunner:
        runner = self._runners.get(model)
        if runner is None:
            blocks = MAX_TOKENS // BLOCK_SIZE
            device = torch.device("cpu")
            path = self._models[model]
            runner = EagerRunner.load(path, torch.float32, device, blocks, BLOCK_SIZE)
            self._runners[model] = runner
        return runner


def _cut(probs: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return rows [n, V] reduced to their likeliest tokens and normalised."""
    kept = torch.zeros_like(probs)
    for row, out, size in zip(probs, kept, sizes, strict=True):
        top = row.topk(size)
        out[top.indices] = top.values / top.values.sum()
    return kept
