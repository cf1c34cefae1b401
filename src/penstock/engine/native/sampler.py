"""The target's seeded samples by the compiled kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.native import library as c
from penstock.engine.runner import IntArray as Int32Array
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sampling.noise import Salt
from penstock.engine.sampling.params import IntArray

_TARGET = int(Salt.TARGET)


def sample_natively(logits: torch.Tensor, rows: SamplingRows, positions: IntArray) -> torch.Tensor:
    """Sample rows with top-p or top-k by torch, the others in one compiled pass.

    A `TokenSampler`. The choice depends on a row's own request alone, so a near-tie is decided the
    same in any batch."""
    if rows.has_filters:
        filtered = rows.filtered
        if filtered.all():
            return sample_coupled(logits, rows, positions)
        samples = torch.empty(logits.shape[0], dtype=torch.int64)
        for part in (np.flatnonzero(filtered), np.flatnonzero(~filtered)):
            index = torch.from_numpy(part)
            samples[index] = sample_natively(logits[index], rows.select(part), positions[part])
        return samples
    salts = np.full(len(rows), _TARGET, dtype=np.int32)
    tokens = sample_unfiltered(logits, rows.temperature, rows.seed, positions, salts)
    return torch.from_numpy(tokens.astype(np.int64))


def sample_unfiltered(
    logits: torch.Tensor,
    temperatures: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    salts: Int32Array,
) -> Int32Array:
    """Sample unfiltered logits as `NativeRunner.draft` does: [rows] int32.

    logits: [rows, V] float32, contiguous; the others have one entry per row. positions: of the
    tokens to be sampled."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError("logits must be a contiguous float32 tensor of two dimensions")
    count, vocab_size = logits.shape
    if vocab_size < 1:
        raise ValueError("logits have no column")
    c.require("positions", positions, c.INT64, (count,))
    token_ids = np.empty(count, dtype=np.int32)
    order = c.SampleCall(
        num_rows=count,
        vocab_size=vocab_size,
        logits=logits.data_ptr(),
        positions=c.address(positions),
        token_ids=c.address(token_ids),
        **c.sampling_fields(temperatures, seeds, salts, count),
    )
    error = ctypes.create_string_buffer(c.ERROR_BYTES)
    if c.native_library().penstock_sample(ctypes.byref(order), error):
        raise ValueError(error.value.decode())
    return token_ids
