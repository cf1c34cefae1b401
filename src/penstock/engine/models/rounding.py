"""Rounding of a drafter's matrices to 4 bits on loading.

The time of a draft token is that of reading the drafter's weights. Rounding costs acceptance only:
the target verifies every token, so its distribution is unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from penstock.engine.models.quantized import QuantizedMatrix, Stored, Weight

KIND = "Q4_1"
"""ggml's blocks of 32 weights d * code + m, d and m float16: 5 bits per weight."""
_SIZE = 32
_BLOCK_BYTES = 4 + _SIZE // 2
_MOST_CODE = 15
"""Weights and bytes of a block, and its largest code, as in the format."""
_SHARES = (1.0, 0.92, 0.84)
"""Shares of a block's range that the codes are tried over; clipping outliers helps the others."""
_MOST_BITS = 6.0
"""Bits per weight up to which a matrix is kept: rounding would gain little."""
_CACHED_BYTES = 64 << 20
"""Bytes of matrices that a processor's cache might hold: reading those takes little."""
_CHUNK = 1 << 18
"""Values rounded at once, so that intermediate results stay in the cache."""


def is_large(weights: Mapping[str, Weight]) -> bool:
    """Return whether rounding saves time: no cache holds what would be rounded."""
    matrices = [
        part
        for weight in weights.values()
        for part in (weight if isinstance(weight, tuple) else (weight,))
        if _is_rounded(part)
    ]
    return sum(math.prod(_shape(m)) * _bits(m) / 8 for m in matrices) > _CACHED_BYTES


def round_weights(weights: Mapping[str, Weight], num_threads: int) -> dict[str, Weight]:
    """Round all matrices of more than 6 bits per weight, the head included, to blocks of 4 bits.

    A tied head is rounded apart from the embedding. Kept are embeddings, of which only rows are
    read, routers, vectors, and matrices whose columns do not fill blocks. weights: as
    `load_weights` names them."""
    rows = ("embed_tokens", "ple_embed")
    stays = {n: w for n, w in weights.items() if n in rows or n.endswith("router")}
    others = {"lm_head": weights["embed_tokens"], **weights}
    names = [name for name in others if name not in stays]
    with ThreadPoolExecutor(num_threads) as pool:
        found = pool.map(_round, [others[name] for name in names])
        return stays | dict(zip(names, found, strict=True))


def _round(weight: Weight) -> Weight:
    if isinstance(weight, tuple):
        return tuple(_round_one(part) for part in weight)
    return _round_one(weight)


def _round_one(weight: Stored) -> Stored:
    if not _is_rounded(weight):
        return weight
    if isinstance(weight, torch.Tensor):
        weight = weight.flatten(0, -2)  # of all experts
    rows, columns = _shape(weight)
    data = torch.empty(rows, columns // _SIZE * _BLOCK_BYTES, dtype=torch.uint8)
    at_once = max(1, _CHUNK // columns)
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        data[part] = encode(_values(weight, part))
    if isinstance(weight, QuantizedMatrix):
        weight.drop_pages()
    return QuantizedMatrix(KIND, rows, columns, data)


def _is_rounded(weight: Stored) -> bool:
    if isinstance(weight, torch.Tensor) and weight.dim() < 2:
        return False
    return _shape(weight)[1] % _SIZE == 0 and _bits(weight) > _MOST_BITS


def _shape(weight: Stored) -> tuple[int, int]:
    if isinstance(weight, QuantizedMatrix):
        return weight.rows, weight.columns
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _bits(weight: Stored) -> float:
    """Return the bits per weight, block scales included."""
    if isinstance(weight, QuantizedMatrix):
        return 8 * weight.data.shape[1] / weight.columns
    return 8 * weight.itemsize


def _values(weight: Stored, rows: slice) -> torch.Tensor:
    """Return [rows, columns] float32."""
    if isinstance(weight, QuantizedMatrix):
        data = weight.data[rows]
        return replace(weight, rows=len(data), data=data).dequantize()
    return weight[rows].float()


def encode(values: torch.Tensor) -> torch.Tensor:
    """Return the blocks of `values` [rows, columns] float32, as [rows, bytes] uint8.

    Each block has the codes with the least squared error among those tried, d and m by least
    squares."""
    # A column a block: sums over a block and factors of it then take whole vectors.
    blocks = values.view(-1, _SIZE).t().contiguous()
    low, high, mean = blocks.amin(0), blocks.amax(0), blocks.mean(0)
    blocks -= mean
    centre, half = (low + high) / 2 - mean, ((high - low) / 2).clamp_(min=1e-12)
    codes, products = torch.empty_like(blocks), torch.empty_like(blocks)
    least, best = torch.full_like(mean, torch.inf), mean.new_zeros(4, len(mean))
    for share in _SHARES:
        start, scale = centre - share * half, _MOST_CODE / (2 * share) / half
        _put_codes(blocks, start, scale, codes)
        total, squares = codes.sum(0), torch.mul(codes, codes, out=products).sum(0)
        product = torch.mul(codes, blocks, out=products).sum(0)
        slope = product / (squares - total * total / _SIZE).clamp_(min=1e-12)
        # Rounded as they are stored, before the error is computed.
        d = slope.half().float()
        m = (mean - d * total / _SIZE).half().float()
        off = m - mean
        # Without the sum of squares, which is the same for all.
        error = d * (d * squares + 2 * off * total - 2 * product) + _SIZE * off * off
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = torch.where(is_better, torch.stack((d, m, start, scale)), best)
    _put_codes(blocks, best[2], best[3], codes)
    data = torch.empty(len(mean), _BLOCK_BYTES, dtype=torch.uint8)
    data[:, :4] = best[:2].t().half().contiguous().view(torch.uint8)
    data[:, 4:] = (codes[: _SIZE // 2] + 16 * codes[_SIZE // 2 :]).to(torch.uint8).t()
    return data.view(len(values), -1)


def _put_codes(
    blocks: torch.Tensor, start: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor
) -> None:
    """Fill `codes` [32, blocks], of which `start` is 0 and a code more is 1 / scale more."""
    torch.mul(blocks, scale, out=codes).sub_(start * scale).round_().clamp_(0, _MOST_CODE)
