"""One model on one device: the interface that every backend implements."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.engine.batch import RaggedBatch
from penstock.engine.models.config import DecoderConfig


class ModelRunner(Protocol):
    """Weights, paged KV cache and forward pass of one model.

    A backend may compute how it likes, but never changes which function it computes: logits equal
    the reference within rounding, and rows of one sequence do not depend on the others in a batch.
    """

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the rows' KV, attend, and return float32 logits [num_logits, vocab_size]."""
        ...
