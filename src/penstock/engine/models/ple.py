"""Per-layer embeddings: what a token's own row of a table adds to every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The table, and a projection of the embeddings that is added to it.

    table: [vocab_size, num_layers * size]; projection: [hidden_size, num_layers * size]"""

    size: int
    table: torch.Tensor
    projection: torch.Tensor
    norm: RmsNorm

    @classmethod
    def from_weights(
        cls, config: DecoderConfig, weights: dict[str, torch.Tensor], device: torch.device
    ) -> LayerInputs | None:
        """Take the weights out of `weights`; None without."""
        size = config.variant.ple_size
        if not size:
            return None
        # The projection's factor is hidden_size ** -0.5, which a norm undoes but for its eps.
        norm = RmsNorm(weights.pop("ple_norm").to(device), config.rms_norm_eps * config.hidden_size)
        table, projection = (weights.pop(x).to(device) for x in ("ple_embed", "ple_proj"))
        return cls(size, table, projection.t(), norm)

    def of_rows(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, num_layers, size]. embedded: what enters the first layer."""
        own = F.embedding(token_ids, self.table).unflatten(1, (-1, self.size))
        projected = self.norm((embedded @ self.projection).unflatten(1, (-1, self.size)))
        return (projected + own * math.sqrt(self.size)) * math.sqrt(0.5)
