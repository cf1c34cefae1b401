"""Inputs and results of sampling and verification: numpy per request, torch for logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.types import SamplingParams

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SeedArray = npt.NDArray[np.uint64]


def as_index(values: IntArray, like: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as an index on the device of ``like``."""
    return torch.from_numpy(values).to(like.device)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters, one entry per row (or request).

    temperature: [rows] float64; 0 is greedy
    top_p:       [rows] float64 in (0, 1]; 1 is off
    top_k:       [rows] int64; 0 is off
    seed:        [rows] uint64
    min_p:       [rows] float64 in [0, 1], or None where it is off in all of them
    reads_text:  some row's logits depend on the text so far (`changes`)
    reads_tokens: some row's logits depend on more of it than a grammar's state"""

    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    seed: SeedArray
    min_p: FloatArray | None = None
    reads_text: bool = False
    reads_tokens: bool = False

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> SamplingRows:
        """Build the rows of some requests, in their order."""
        return cls(
            np.array([p.temperature for p in params], dtype=np.float64),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([p.top_k for p in params], dtype=np.int64),
            np.array([p.seed for p in params], dtype=np.uint64),
            np.array([p.min_p for p in params]) if any(p.min_p for p in params) else None,
            any(p.reads_text for p in params),
            any(p.reads_tokens for p in params),
        )

    def __len__(self) -> int:
        return int(self.seed.shape[0])

    @property
    def greedy(self) -> BoolArray:
        """[rows] bool: rows with a point mass."""
        return np.equal(self.temperature, 0.0)

    @property
    def filtered(self) -> BoolArray:
        """[rows] bool: rows that top-p, top-k or min-p may cut."""
        cut: BoolArray = (self.top_p < 1.0) | (self.top_k > 0)
        if self.min_p is not None:
            cut |= self.min_p > 0.0
        return cut & ~self.greedy

    @cached_property
    def has_filters(self) -> bool:
        """True where top-p, top-k or min-p may cut any row."""
        cuts = min(self.top_p.tolist(), default=1.0) < 1.0 or any(self.top_k.tolist())
        return (cuts or self.min_p is not None) and bool(self.filtered.any())

    @property
    def is_plain(self) -> bool:
        """True where only temperature and noise apply, so that a backend may sample on its own."""
        return not (self.reads_text or self.has_filters)

    @property
    def is_masked_at_most(self) -> bool:
        """True where beside these only the mask of a grammar applies."""
        return not (self.reads_tokens or self.has_filters)

    def select(self, index: IntArray | BoolArray) -> SamplingRows:
        """Return the rows that ``index`` selects, in its order."""
        return SamplingRows(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.seed[index],
            None if self.min_p is None else self.min_p[index],
            self.reads_text,
            self.reads_tokens,
        )


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Drafts of n requests and the target's logits for them, laid end to end.

    Request i owns logits rows ``row_start[i]:row_start[i + 1]``, one more than draft tokens: row j
    is the target's distribution after its first j draft tokens, the last row that of the bonus
    token. A request without a draft has one row.

    logits:         [num_rows, V] float32
    row_start:      [n + 1] int64, strictly increasing, from 0 to num_rows
    positions:      [n] int64, absolute position of the first token to be decided
    params:         n entries
    ratio:          [n] bool: `ratio` mode, else `coupled`
    draft_tokens:   [num_rows - n] int64, in the order of the requests
    draft_probs:    [num_prob_rows, V] float32 or None; for `ratio` mode only
    draft_prob_row: [num_rows - n] int64: row of ``draft_probs`` of a draft token's distribution, or
                    -1 for a point mass (a greedy or looked-up token)

    Raises ValueError where shapes disagree or a draft token is outside the vocabulary."""

    logits: torch.Tensor
    row_start: IntArray
    positions: IntArray
    params: SamplingRows
    ratio: BoolArray
    draft_tokens: IntArray
    draft_probs: torch.Tensor | None
    draft_prob_row: IntArray

    def __post_init__(self) -> None:
        num_rows, vocab_size = self.logits.shape
        num_requests = len(self.params)
        starts = self.row_start.tolist()
        if len(starts) != num_requests + 1 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"row_start must hold {num_requests + 1} strictly increasing offsets, not {starts}"
            )
        if starts[0] != 0 or starts[-1] != num_rows:
            raise ValueError(f"row_start must run from 0 to the number of logits rows, {num_rows}")
        num_drafts = num_rows - num_requests
        for name in ("draft_tokens", "draft_prob_row"):
            if getattr(self, name).shape != (num_drafts,):
                raise ValueError(f"{name} must have one entry a draft token, {num_drafts} in all")
        if not num_drafts:
            return
        if not 0 <= self.draft_tokens.min() <= self.draft_tokens.max() < vocab_size:
            raise ValueError(f"draft tokens must lie in the vocabulary, 0 to {vocab_size - 1}")
        num_prob_rows = 0 if self.draft_probs is None else self.draft_probs.shape[0]
        if not -1 <= self.draft_prob_row.min() <= self.draft_prob_row.max() < num_prob_rows:
            raise ValueError(
                f"draft_prob_row must be -1 or one of the {num_prob_rows} rows of draft_probs"
            )

    @property
    def num_requests(self) -> int:
        return len(self.params)

    @property
    def num_rows(self) -> IntArray:
        """[n] int64: logits rows of each request."""
        return self.row_start[1:] - self.row_start[:-1]

    @property
    def num_draft(self) -> IntArray:
        """[n] int64: draft tokens of each request."""
        return self.num_rows - 1

    @property
    def draft_start(self) -> IntArray:
        """[n + 1] int64: start of each request's draft tokens in ``draft_tokens``."""
        return self.row_start - np.arange(self.num_requests + 1)

    @property
    def request_of_draft(self) -> IntArray:
        """[num_drafts] int64: request of each draft token."""
        return np.arange(self.num_requests).repeat(self.num_draft)

    @property
    def request_of_row(self) -> IntArray:
        """[num_rows] int64: request of each logits row."""
        return np.arange(self.num_requests).repeat(self.num_rows)

    @property
    def row_positions(self) -> IntArray:
        """[num_rows] int64: absolute position of the token that each logits row decides."""
        before = self.positions - self.row_start[:-1]
        return before.repeat(self.num_rows) + np.arange(self.logits.shape[0])

    def select(self, chosen: IntArray) -> VerifyBatch:
        """Return the batch of the requests ``chosen`` (ascending indices) alone."""
        mask = np.zeros(self.num_requests, dtype=np.bool_)
        mask[chosen] = True
        rows = np.flatnonzero(mask[self.request_of_row])
        drafts = mask[self.request_of_draft]
        return VerifyBatch(
            logits=self.logits[as_index(rows, self.logits)],
            row_start=np.concatenate(([0], np.cumsum(self.num_rows[chosen]))),
            positions=self.positions[chosen],
            params=self.params.select(chosen),
            ratio=self.ratio[chosen],
            draft_tokens=self.draft_tokens[drafts],
            draft_probs=self.draft_probs,
            draft_prob_row=self.draft_prob_row[drafts],
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of verification for n requests.

    num_accepted: [n] int64, accepted draft tokens
    last_token:   [n] int64, the recovered or bonus token after them
    evidence:     [num_drafts] float64, success of each draft position up to and including the first
                  rejection, 0 behind it: Σ_x min(target(x), draft(x)) for samples in `ratio` mode,
                  otherwise (and for greedy) 1 if accepted
    evidence_all: [num_drafts] float64, of all draft positions, also those behind the first
                  rejection: min(1, target(x) / draft(x)) of the draft token x in `ratio` mode
                  (GoodSpeed, eq. 3), otherwise 1 if it equals the target's sample on the draft's
                  prefix"""

    num_accepted: IntArray
    last_token: IntArray
    evidence: FloatArray
    evidence_all: FloatArray


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of `verify` for n requests.

    num_accepted: [n] int64
    num_decided:  [n] int64, draft positions up to and including the first rejection; later ones
                  had a wrong prefix
    evidence:     [num_drafts] float64, see `Decisions`
    evidence_all: [num_drafts] float64, likewise
    draft_start:  [n + 1] int64, offsets into both
    token_ids:    [Σ (num_accepted + 1)] int64, every request's accepted tokens, then its recovered
                  or bonus token
    token_start:  [n + 1] int64, offsets into token_ids"""

    num_accepted: IntArray
    num_decided: IntArray
    evidence: FloatArray
    evidence_all: FloatArray
    draft_start: IntArray
    token_ids: IntArray
    token_start: IntArray

    def tokens(self, request: int) -> list[int]:
        """Return the token ids that request number ``request`` emits."""
        own: list[int] = self.token_ids[
            self.token_start[request] : self.token_start[request + 1]
        ].tolist()
        return own
