"""Values of a GGUF file's tensors."""

from __future__ import annotations

import torch

from penstock.engine.models.gguf.file import GgufFile, TensorEntry
from penstock.engine.models.quantized import dequantize_into


def read_values(file: GgufFile, entry: TensorEntry, out: torch.Tensor) -> None:
    """Fill `out`, of the tensor's shape and any float type, with its values.

    Raises CheckpointError for an unsupported type."""
    data = torch.from_numpy(file.data(entry))
    try:
        dequantize_into(entry.kind, data, out.view(len(data), -1))
    except NotImplementedError:
        raise file.error(f"tensor {entry.name} is {entry.kind}, which is not read") from None
