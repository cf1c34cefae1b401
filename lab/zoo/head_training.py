"""Training of heads along text, over several chained drafts, on the target's distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.zoo.data import Ids, Mask, Mixture, answer_mask, batch_of
from lab.zoo.distil import KEPT, as_tensor, distil_loss, divergences
from lab.zoo.heads import Head, Reader, States, save_head
from lab.zoo.recipe import HeadSpec
from lab.zoo.run import Run

Masked = Callable[[Ids], Mask]
"""[rows, ROW] whether the next token is one that is drafted: an answer's, or any."""


@dataclass(frozen=True, slots=True)
class HeadText:
    """Rows of text by source, and which of their tokens are drafted."""

    train: Mapping[str, Ids]
    held: Mapping[str, Ids]
    masked: Masked = answer_mask


def commonest(text: HeadText, num: int) -> Tensor:
    """The numbers of the `num` commonest drafted tokens, ascending."""
    counts = np.zeros(np.iinfo(np.uint16).max + 1, dtype=np.int64)
    for ids in text.train.values():
        drafted = ids[:, 1:][text.masked(ids)[:, :-1]]
        counts += np.bincount(drafted, minlength=len(counts))
    # Of those that never come, the first.
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:num]))


def build_head(spec: HeadSpec, target: Reader, tokens: Tensor) -> Head:
    """A fresh head, which begins with what the target's last layer knows.

    tokens: the numbers of those that an EAGLE-3 head can tell, ascending."""
    ffn = spec.ffn or target.config.intermediate_size
    config = replace(target.config, intermediate_size=ffn)
    head = Head(config, spec.reads, tokens if spec.reads else None)
    head.begin_like(target)
    return head


@dataclass(frozen=True, slots=True)
class Lesson:
    """Some rows of text, read by the target: what a head sees of them, and what it should tell.

    starts:   [rows, ROW] where chains start
    follows:  for each chained step, [chains] which of the target's distributions it should tell
    is_there: for each step, [chains] whether it and all before it are of drafted tokens
    tokens, probs: [positions, KEPT], of the target's distributions, numbered as the head's
    """

    embedded: Tensor
    states: States
    starts: Tensor
    follows: list[Tensor]
    is_there: list[Tensor]
    tokens: Tensor
    probs: Tensor


def lesson_of(target: Reader, ids: Ids, keep: Tensor, lm_head: Tensor, steps: int) -> Lesson:
    """Read `ids`, [rows, ROW]. lm_head: [hidden, tokens] of those that are compared."""
    tokens = as_tensor(ids)
    states = target.read(tokens)
    top = (states.final[keep] @ lm_head).softmax(-1).topk(KEPT, dim=-1)
    number = torch.zeros(keep.shape, dtype=torch.int64)
    number[keep] = torch.arange(len(top.indices))
    # The token before a draft is the target's own, too.
    starts = keep & keep.roll(1, dims=1)
    starts[:, 0] = False
    starts[:, -steps:] = False
    row, place = starts.nonzero(as_tuple=True)
    follows = [number[row, place + step] for step in range(steps)]
    is_there = [keep[row, place + step] for step in range(steps)]
    for step in range(1, steps):
        is_there[step] = is_there[step] & is_there[step - 1]
    embedded = target.embed(tokens)
    return Lesson(embedded, states, starts, follows, is_there, top.indices, top.values)


class HeadRun(Run):
    """The training of a head beside its target, which stays as it is."""

    model: Head

    def __init__(
        self, spec: HeadSpec, target: Reader, text: HeadText, folder: Path, seed: int
    ) -> None:
        self.spec, self.target, self.text = spec, target, text
        vocabulary = target.config.vocab_size
        tokens = commonest(text, spec.tokens or vocabulary)
        self._lm_head = target.lm_head[:, tokens].float()
        super().__init__(spec, build_head(spec, target, tokens), folder)
        mixture = Mixture({name: float(len(ids)) for name, ids in text.train.items()})
        self.plan = mixture.plan(spec.steps, spec.rows_per_step, seed)

    def _lesson(self, ids: Ids) -> Lesson:
        keep = torch.from_numpy(self.text.masked(ids))
        return lesson_of(self.target, ids, keep, self._lm_head, self.spec.chained)

    def _told(self, lesson: Lesson) -> list[Tensor]:
        """Logits of each chained step, of the compared tokens."""
        own = self.model.lm_head.weight.t() if self.model.reads else self._lm_head
        steps, dtype = self.spec.chained, self.target.dtype
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            chain = self.model.chain(lesson.embedded, lesson.states, lesson.starts, steps)
            told = [final @ own for final in chain]
        return [logits.float() for logits in told]

    def loss(self) -> Tensor:
        """Of all drafts, each less than the one before it."""
        lesson = self._lesson(batch_of(dict(self.text.train), self.plan[self.step]))
        share = min(0.8, 1.6 * self.step / self.steps)
        total, weights = torch.zeros(()), 0.0
        for step, logits in enumerate(self._told(lesson)):
            there, weight = lesson.is_there[step], self.spec.fading**step
            at = lesson.follows[step][there]
            loss = distil_loss(logits[there], lesson.tokens[at], lesson.probs[at], share)
            total, weights = total + weight * loss, weights + weight
        return total / weights

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """On held-back text, by source and chained draft: the share of drafts that are the
        target's likeliest token, all before them too, and the overlap with its distribution."""
        accepted: dict[str, list[float]] = {}
        overlaps: dict[str, list[float]] = {}
        for source, ids in self.text.held.items():
            lesson = self._lesson(ids)
            right = torch.ones(int(lesson.starts.sum()), dtype=torch.bool)
            accepted[source], overlaps[source] = [], []
            for step, logits in enumerate(self._told(lesson)):
                there = lesson.is_there[step]
                at = lesson.follows[step]
                right &= logits.argmax(-1) == lesson.tokens[at][:, 0]
                accepted[source].append(round(float(right[there].float().mean()), 4))
                at = at[there]
                apart = divergences(logits[there], lesson.tokens[at], lesson.probs[at])[1]
                overlaps[source].append(round(1 - float(apart), 4))
        return {"accepted": accepted, "overlap": overlaps}

    def finish(self, folder: Path) -> None:
        """Write the trained head."""
        save_head(folder, self.model.checkpoint(), self.model.description(self.target.content))
        self.tell_done()
