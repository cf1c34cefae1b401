"""Counter-based noise: every draw is a pure function of (seed, position, salt, token id).

No state advances between draws, so a sample does not depend on its batch or machine, nor, except
for drafts in `ratio` mode (`draft_seeds`), on earlier drafts of its position. The integers below
are the same everywhere, bit for bit; the two logarithms may differ by a rounding between devices.

With wrapping unsigned arithmetic (``mix64`` is the finaliser of splitmix64)::

    key  = mix64(mix64(seed + G) + G * (4 * position + salt + 1))           # uint64
    low  = key mod 2^32;  high = key >> 32
    x    = token * 0x9E3779B1 + low                                         # uint32 from here
    x    = (x ^ (x >> 16)) * 0x21F0AAAD + high
    x    = (x ^ (x >> 15)) * 0x735A2D97
    h    = x ^ (x >> 16)
    v    = min((float32(h) + 0.5) * 2^-32, 1 - 2^-24)                       # float32 from here
    E    = -log1p(-v)
    gumbel = -log(E)

Both halves of the key enter, the second between the rounds: with one alone, rows whose keys differ
in a few low bits would see the same noise in another order of tokens. ``v`` is finest near 0 (steps
of 2^-32), where the winners of an argmax lie; its coarse end near 1 affects losers only."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_STEP = 0x9E3779B1
_ROUND_1 = 0x21F0AAAD
_ROUND_2 = 0x735A2D97
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
"""Constants of the formulas above: 2^64 and 2^32 over the golden ratio, two multipliers
of a 32-bit hash, and the largest float32 below 1."""
_CHUNK_ELEMENTS = 1 << 15  # both scratch arrays of a chunk stay in the second-level cache

UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]


class Salt(IntEnum):
    """Purpose of a draw; two purposes at one position never share noise."""

    TARGET = 0  # the target's own sample; shared with the drafters in `coupled` mode
    DRAFT = 1  # a drafter's sample in `ratio` mode
    ACCEPT = 2  # the acceptance uniform in `ratio` mode
    RESIDUAL = 3  # the recovered token in `ratio` mode


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def row_keys(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    salt: Salt | npt.NDArray[np.int64],
) -> UInt32Array:
    """Return the keys [rows, 2] uint32 (low, high) of the rows' noise.

    seeds:     [rows] uint64
    positions: [rows], 0 or more: absolute position of the token to be sampled
    salt:      one for all rows, or [rows]"""
    counter = (positions * 4 + (salt + 1)).astype(np.uint64)
    key = _mix64(_mix64(seeds + _GOLDEN_64) + _GOLDEN_64 * counter)
    return key.astype("<u8").view("<u4").reshape(-1, 2)


def draft_seeds(
    seeds: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the seeds [rows] of `ratio` drafts that begin at positions ``starts`` [rows].

    A position behind a rejection is drafted again from the next position on. The new draft must not
    meet the noise of the old one, which `evidence_all` depended on."""
    return seeds + _mix64(_GOLDEN_64 * (starts + 1).astype(np.uint64))


@lru_cache(maxsize=8)
def _token_steps(vocab_size: int) -> UInt32Array:
    return np.arange(vocab_size, dtype=np.uint32) * np.uint32(_TOKEN_STEP)


def _hash_into(steps: UInt32Array, keys: UInt32Array, x: UInt32Array, shifted: UInt32Array) -> None:
    """Set x[rows, V] to the hash of (keys[rows], tokens[V]); ``shifted`` is scratch."""
    np.add(steps, keys[:, :1], out=x)
    np.right_shift(x, np.uint32(16), out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, np.uint32(_ROUND_1), out=x)
    np.add(x, keys[:, 1:], out=x)
    np.right_shift(x, np.uint32(15), out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, np.uint32(_ROUND_2), out=x)
    np.right_shift(x, np.uint32(16), out=shifted)
    np.bitwise_xor(x, shifted, out=x)


def token_hash(keys: UInt32Array, vocab_size: int) -> UInt32Array:
    """Return the integer ``h`` of the formula above for every token, [rows, vocab_size] uint32."""
    x = np.empty((keys.shape[0], vocab_size), dtype=np.uint32)
    _hash_into(_token_steps(vocab_size), keys, x, np.empty_like(x))
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def token_hash_of_words(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return `token_hash` on the device of its keys, as [rows, vocab_size] int64.

    words: keys as [rows, 2] int32 of the same bits. torch has no uint32 arithmetic, but int32 wraps
    to the same bits; only a right shift needs the sign bits masked off."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=words.device) * _signed(_TOKEN_STEP)
    x = x + words[:, :1]
    x = (x ^ ((x >> 16) & 0xFFFF)) * _ROUND_1 + words[:, 1:]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _ROUND_2
    x = x ^ ((x >> 16) & 0xFFFF)
    return x.to(torch.int64) & 0xFFFFFFFF


def _gumbel_in_place(hashed: torch.Tensor) -> None:
    """Turn float32(h) into Gumbel noise."""
    negative_v = hashed.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-_LARGEST_BELOW_ONE)
    negative_v.log1p_().neg_().log_().neg_()


def gumbel_noise(
    keys: UInt32Array, vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return Gumbel noise [rows, vocab_size] float32 on ``device``; keys from `row_keys`."""
    place = torch.device(device)
    if place.type != "cpu":
        words = torch.from_numpy(keys.view(np.int32)).to(place)
        noise = token_hash_of_words(words, vocab_size).to(torch.float32)
        _gumbel_in_place(noise)
        return noise
    num_rows = keys.shape[0]
    noise = torch.empty((num_rows, vocab_size), dtype=torch.float32)
    into = noise.numpy()
    steps = _token_steps(vocab_size)
    chunk = max(1, min(num_rows, _CHUNK_ELEMENTS // vocab_size))
    x = np.empty((chunk, vocab_size), dtype=np.uint32)
    shifted = np.empty_like(x)
    for first in range(0, num_rows, chunk):
        last = min(first + chunk, num_rows)
        _hash_into(steps, keys[first:last], x[: last - first], shifted[: last - first])
        into[first:last] = x[: last - first]
        _gumbel_in_place(noise[first:last])
    return noise


def uniform(keys: UInt32Array) -> Float32Array:
    """Return one uniform in (0, 1) per row, [rows] float32: the ``v`` of token 0."""
    hashed = token_hash(keys, 1)[:, 0].astype(np.float32)
    scaled = (hashed + np.float32(0.5)) * np.float32(2.0**-32)
    return scaled.clip(max=np.float32(_LARGEST_BELOW_ONE))
