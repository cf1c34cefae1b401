"""Distillation: the target's distributions, kept as their largest tokens, and the loss on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from lab.zoo.data import Ids, answer_mask
from lab.zoo.modeling import hidden_states

KEPT = 64
"""Tokens kept of each distribution; the rest of the mass is one more outcome."""

Probs = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The teacher's distributions at the answer positions of some rows.

    `ids` is [rows, ROW]; `tokens` and `probs` are [positions, KEPT], row after row; the positions
    of row r are `starts[r]` to `starts[r + 1]`.
    """

    ids: Ids
    tokens: Ids
    probs: Probs
    starts: npt.NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write to `path`; an interrupted write leaves nothing behind under that name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, ids=self.ids, tokens=self.tokens, probs=self.probs, starts=self.starts)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> TeacherRows:
        """Read what :meth:`save` wrote."""
        with np.load(path) as file:
            return cls(file["ids"], file["tokens"], file["probs"], file["starts"])

    def batch(self, rows: list[int]) -> tuple[Ids, Tensor, Tensor]:
        """Ids [len(rows), ROW], tokens and probabilities [positions, KEPT] of `rows`."""
        rows = [r % len(self.ids) for r in rows]
        index = np.concatenate([np.arange(self.starts[r], self.starts[r + 1]) for r in rows])
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64))
        return self.ids[rows], tokens, torch.from_numpy(self.probs[index]).float()


def as_tensor(ids: Ids) -> Tensor:
    """Token ids as torch wants them."""
    return torch.from_numpy(ids.astype(np.int64))


@torch.no_grad()
def teach(model: LlamaForCausalLM, ids: Ids, rows_at_once: int = 8) -> TeacherRows:
    """Run the teacher over `ids` [rows, ROW]."""
    model.train(False)
    tokens, probs, counts = [], [], [0]
    for start in range(0, len(ids), rows_at_once):
        part = ids[start : start + rows_at_once]
        mask = answer_mask(part)
        hidden = hidden_states(model, as_tensor(part))
        logits = functional.linear(hidden[torch.from_numpy(mask)], model.lm_head.weight)
        top = logits.softmax(-1).topk(KEPT, dim=-1)
        tokens.append(top.indices.numpy().astype(np.uint16))
        probs.append(top.values.numpy().astype(np.float16))
        counts += [int(n) for n in mask.sum(axis=1)]
    return TeacherRows(
        ids, np.concatenate(tokens), np.concatenate(probs), np.cumsum(counts, dtype=np.int64)
    )


def divergences(logits: Tensor, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean KL(target, draft) and mean total variation, with the unkept tokens as one outcome.

    `logits` is [positions, vocabulary]; `tokens` and `probs` are [positions, KEPT].
    """
    log_draft = logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
    draft = log_draft.exp()
    rest = (1 - probs.sum(-1)).clamp_min(0)
    draft_rest = (1 - draft.sum(-1)).clamp_min(1e-6)
    entropy = (probs * probs.clamp_min(1e-8).log()).sum(-1) + rest * rest.clamp_min(1e-8).log()
    cross = (probs * log_draft).sum(-1) + rest * draft_rest.log()
    variation = 0.5 * ((probs - draft).abs().sum(-1) + (rest - draft_rest).abs())
    return (entropy - cross).mean(), variation.mean()


def distil_loss(logits: Tensor, tokens: Tensor, probs: Tensor, variation_share: float) -> Tensor:
    """Divergence that turns into total variation, acceptance itself, as the share grows."""
    kl, variation = divergences(logits, tokens, probs)
    return (1 - variation_share) * kl + variation_share * 2 * variation


def student_logits(model: LlamaForCausalLM, ids: Tensor, keep: Tensor) -> Tensor:
    """[positions, vocabulary] logits at the positions of `keep`; both are [rows, length]."""
    return functional.linear(hidden_states(model, ids)[keep], model.lm_head.weight)


@torch.no_grad()
def overlap(model: LlamaForCausalLM, rows: TeacherRows) -> float:
    """Mean of the sum of min(target, draft) over the answers of `rows`."""
    model.train(False)
    ids, tokens, probs = rows.batch(list(range(len(rows.ids))))
    keep = torch.from_numpy(answer_mask(ids))
    logits = student_logits(model, as_tensor(ids), keep)
    model.train()
    return 1 - float(divergences(logits, tokens, probs)[1])
