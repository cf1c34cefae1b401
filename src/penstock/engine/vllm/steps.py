"""Plans as steps of vLLM's workers, in plain data.

Workers keep every request's tokens and block table and receive only changes. They sample
(`worker.StepSampler`) and append the decided tokens, as the request's `TokenBuffer` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from penstock.core.types import GroupChange, SamplingParams, VerifyItem
from penstock.engine.sampling import TextSoFar
from penstock.engine.sequences import TokenBuffer
from penstock.engine.vllm.group_rows import GroupRows, StepRows

_RESERVED_BLOCKS = 1
"""vLLM keeps block 0 as its null block, which padding may read."""


class NewSequence(NamedTuple):
    """Request that is new to the workers, with its known tokens."""

    request_id: str
    token_ids: list[int]
    blocks: list[int]
    start: int


class GrownSequence(NamedTuple):
    """Request that the workers know. new_token_ids: decided since the last update.

    anew: `blocks` are all of its blocks, not only new ones."""

    request_id: str
    start: int
    blocks: list[int]
    num_output_tokens: int
    new_token_ids: list[int]
    anew: bool


class Asked(NamedTuple):
    """Request whose next token is sampled, with its draft; see `verifier.Proposal`."""

    request_id: str
    position: int
    sampling: SamplingParams
    token_ids: list[int]
    prob_rows: list[int]
    so_far: TextSoFar | None = None


@dataclass(slots=True)
class TargetStep:
    """One forward pass of the workers.

    num_tokens: by request, drafts included, without those of `rows`. drafts: by request with one.
    draft_probs: [rows, V], indexed by the proposals' `prob_rows`."""

    finished: set[str] = field(default_factory=set)
    new: list[NewSequence] = field(default_factory=list)
    grown: list[GrownSequence] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    rows: StepRows | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.num_tokens.values()) + (len(self.rows.ids) if self.rows else 0)


@dataclass(slots=True)
class _Known:
    """Known to the workers: epoch of the block table, tokens sent first, and all tokens sent."""

    epoch: int
    num_first_tokens: int
    num_tokens: int


class StepWriter:
    """Turns items into steps of limited rows and sequences, and tracks the workers' state."""

    def __init__(self, max_num_rows: int, max_num_seqs: int) -> None:
        self._max_num_rows = max_num_rows
        self._max_num_seqs = max_num_seqs
        self._known: dict[str, _Known] = {}
        self._finished: set[str] = set()
        self.rows = GroupRows()

    def release_request(self, request_id: str) -> None:
        """Note the end of a request. Its id may be used again."""
        self.rows.leave(request_id)
        if self._known.pop(request_id, None) is not None:
            self._finished.add(request_id)

    def write(
        self,
        items: Sequence[VerifyItem],
        texts: Mapping[str, TokenBuffer],
        drafts: Sequence[tuple[list[int], list[int]]],
        draft_probs: torch.Tensor | None,
        change: GroupChange | None = None,
    ) -> list[TargetStep]:
        """Return the steps of some items. drafts: token ids and rows of draft_probs, by item.

        change: None: the decode group is not in the step; else its rows come first."""
        steps: list[TargetStep] = []
        room = 0
        for item in items:
            self.rows.leave(item.request_id)
        if change is not None:
            steps.append(TargetStep(self._finished, draft_probs=draft_probs))
            self._finished = set()
            steps[0].rows = self._write_rows(change, texts)
            room = self._max_num_rows - len(self.rows)
        for item, draft in zip(items, drafts, strict=True):
            end, num_draft = item.start + item.num_scheduled_tokens, len(draft[0])
            for start, until in pairwise([*self._starts(item, num_draft), end]):
                rows = until - start + (num_draft if until == end else 0)
                if room < rows or self._is_full(steps[-1]):
                    steps.append(TargetStep(self._finished, draft_probs=draft_probs))
                    self._finished = set()
                    room = self._max_num_rows
                self._add(steps[-1], item, (start, until), texts[item.request_id], draft)
                room -= rows
        return steps

    def _is_full(self, step: TargetStep) -> bool:
        num_rows = len(step.rows.ids) if step.rows else 0
        return num_rows + len(step.num_tokens) >= self._max_num_seqs

    def _write_rows(self, change: GroupChange, texts: Mapping[str, TokenBuffer]) -> StepRows:
        for request_id in change.left:
            self.rows.leave(request_id)
        for request_id in change.joined:
            text, known = texts[request_id], self._known[request_id]
            self.rows.join(request_id, text, text.length - known.num_first_tokens)
        blocks = {i: [b + _RESERVED_BLOCKS] for i, b in change.new_blocks.items()}
        return self.rows.write(blocks)

    def _starts(self, item: VerifyItem, num_draft_tokens: int) -> list[int]:
        """Split an item; the draft goes with the last piece, which has a known token before it."""
        starts, end = [item.start], item.start + item.num_scheduled_tokens
        while end - starts[-1] + num_draft_tokens > self._max_num_rows:
            starts.append(min(starts[-1] + self._max_num_rows, end - 1))
        return starts

    def _add(
        self,
        step: TargetStep,
        item: VerifyItem,
        positions: tuple[int, int],
        text: TokenBuffer,
        draft: tuple[list[int], list[int]],
    ) -> None:
        request_id, (start, until) = item.request_id, positions
        blocks = [b + _RESERVED_BLOCKS for b in item.new_blocks] if start == item.start else []
        known = self._known.get(request_id)
        if known is None:
            token_ids = text.tokens(0, text.length)
            step.new.append(NewSequence(request_id, token_ids, blocks, start))
            self._known[request_id] = _Known(item.epoch, text.length, text.length)
        else:
            anew = known.epoch != item.epoch
            num_output = text.length - known.num_first_tokens
            news = text.tokens(known.num_tokens, text.length)
            step.grown.append(GrownSequence(request_id, start, blocks, num_output, news, anew))
            known.epoch, known.num_tokens = item.epoch, text.length
        step.num_tokens[request_id] = until - start
        if not item.samples or until < item.start + item.num_scheduled_tokens:
            return
        token_ids, prob_rows = draft
        if token_ids:
            step.num_tokens[request_id] += len(token_ids)
            step.drafts[request_id] = token_ids
        sampling = text.request.sampling
        so_far = text.so_far(token_ids)
        step.asked.append(Asked(request_id, until, sampling, token_ids, prob_rows, so_far))
