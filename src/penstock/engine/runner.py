"""One model on one device, as executors and drafters call it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.learn.confidence import Stop
from penstock.core.types import SamplingParams
from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.drafters.drafts import Drafts
from penstock.engine.models.config import DecoderConfig
from penstock.engine.sampling import SamplingRows, TokenSampler
from penstock.engine.sampling.params import BoolArray


class Model(ABC):
    """A model with its paged KV cache, whoever computes it: what memory it has, and steps that are
    only timed.

    keeps_batches: a step with the requests of the step before is the usual one, and faster.
    """

    num_blocks: int
    block_size: int
    device: torch.device
    keeps_batches = False

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def dummy_run(self, batch: RaggedBatch) -> None:
        """A step and its samples, for nothing but the time that it takes."""

    def limit_threads(self, num_threads: int) -> None:  # noqa: B027
        """Compute with at most so many threads from now on: others are at work."""

    def num_that_fit(self, num_tokens: int) -> int:
        """Requests of so many tokens that the KV cache holds."""
        return self.num_blocks // self.blocks_for(num_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks of so many tokens."""
        return -(-num_tokens // self.block_size)


class ModelRunner(Model):
    """Weights, paged KV cache and forward pass of one model.

    A backend may compute how it likes, but never changes which function it computes: logits equal
    the reference within rounding, and rows of one sequence do not depend on the others in a batch.

    sample: draws the target's seeded samples from logits.
    """

    config: DecoderConfig
    sample: TokenSampler

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @abstractmethod
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the rows' KV, attend, and return float32 logits [num_logits, vocab_size]."""

    def verify(
        self,
        batch: RaggedBatch,
        row_start: IntArray,
        params: SamplingRows,
        kept: IntArray,
    ) -> tuple[list[int], torch.Tensor] | None:
        """`forward` and the target's samples of its rows in one call that brings back only the
        logits of some rows, [len(kept), vocab_size]; None where there is no such call.

        row_start: [num_requests + 1], the rows of logits of each request; params: of which
        temperature and seed are read; kept: int32, rows of logits, rising
        """
        return None

    def propose(
        self,
        first: RaggedBatch,
        limits: IntArray,
        params: SamplingRows,
        ratio: BoolArray,
        starts: npt.NDArray[np.int64],
        stop: Stop | None = None,
    ) -> Drafts | None:
        """Read a batch and draft up to limits[i] tokens behind sequence i, in one call; None where
        it must go step by step.

        ratio: [num_seqs], whose drafts are sampled from the drafter's own distribution; params:
        unfiltered; starts: [num_seqs] int64, positions at which the drafts begin; stop: where
        drafts end before their limit, if they may
        """
        return None

    def dummy_run(self, batch: RaggedBatch) -> None:
        logits = self.forward(batch)
        rows = SamplingRows.of([SamplingParams(temperature=0.0)] * logits.shape[0])
        self.sample(logits, rows, np.zeros(logits.shape[0], dtype=np.int64)).cpu()
