"""Random matrices in ggml's block formats and in groups of integers."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.engine.models.quantized import GROUP_FORMATS, QuantizedMatrix

# Where a block's scales lie, in bytes (float16, in groups float32), and what the largest code times
# the largest sub-scale comes to.
SCALES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q8_0": ((0,), 128),
    "Q4_0": ((0,), 8),
    "Q4_1": ((0, 2), 15),
    "Q5_0": ((0,), 16),
    "Q5_1": ((0, 2), 31),
    "Q4_K": ((0, 2), 15 * 63),
    "Q5_K": ((0, 2), 31 * 63),
    "Q6_K": ((208,), 32 * 128),
    "INT8_32": ((0,), 128),
    "INT8_128": ((0,), 128),
    "INT4_32": ((0,), 8),
    "INT4_128": ((0,), 8),
    "UINT4_32": ((0, 4), 15),
    "UINT4_128": ((0, 4), 15),
    "INT8_ROWS": ((0,), 128),
    "IQ4_NL": ((0,), 127),
    "IQ4_XS": ((0,), 127 * 32),
    "MXFP4": ((), 12),
}


def random_matrix(
    kind: str, rows: int, columns: int, rng: np.random.Generator, size: float = 1.0
) -> QuantizedMatrix:
    """Every bit of the codes and sub-scales is random; weights are at most about `size`."""
    groups = GROUP_FORMATS.get(kind)
    if groups is None:
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    else:
        block, num_bytes = groups.size, groups.block_bytes
    scale_type = np.dtype(np.float16 if groups is None else np.float32)
    data = rng.integers(256, size=(rows, columns // block, num_bytes), dtype=np.uint8)
    places, largest = SCALES[kind]
    for place in places:
        scale = rng.uniform(0.2, 1.0, size=data.shape[:2]) * rng.choice([-1, 1], data.shape[:2])
        # A minimum (the second scale) is subtracted or added once, not once for every code.
        unit = largest if place in (0, 208) else 64 if kind.endswith("K") else 1
        stored = (scale * size / unit).astype(scale_type)
        data[..., place : place + scale_type.itemsize] = stored[..., None].view(np.uint8)
    if kind == "MXFP4":  # whose scale is a power of two
        data[..., 0] = (
            128 + np.floor(np.log2(size / largest)) - rng.integers(3, size=data.shape[:2])
        )
    return QuantizedMatrix(kind, rows, columns, torch.from_numpy(data.reshape(rows, -1)))
