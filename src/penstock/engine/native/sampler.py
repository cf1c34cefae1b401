"""The target's seeded samples by the compiled kernels."""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.native import runner
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sampling.noise import Salt
from penstock.engine.sampling.params import IntArray

_TARGET = int(Salt.TARGET)


def sample_natively(logits: torch.Tensor, rows: SamplingRows, positions: IntArray) -> torch.Tensor:
    """A `Sampler`: rows under top-p or top-k are sorted by torch, the others sampled in one
    compiled pass. Which way a row takes depends on its own request alone, so that a near-tie falls
    the same way in any batch."""
    if rows.has_filters:
        filtered = rows.filtered
        if filtered.all():
            return sample_coupled(logits, rows, positions)
        samples = torch.empty(logits.shape[0], dtype=torch.int64)
        for part in (np.flatnonzero(filtered), np.flatnonzero(~filtered)):
            index = torch.from_numpy(part)
            samples[index] = sample_natively(logits[index], rows.take(part), positions[part])
        return samples
    salts = np.full(len(rows), _TARGET, dtype=np.int32)
    tokens = runner.sample_coupled(logits, rows.temperature, rows.seed, positions, salts)
    return torch.from_numpy(tokens.astype(np.int64))
