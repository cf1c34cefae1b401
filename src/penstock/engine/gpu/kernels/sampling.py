"""`coupled` samples on the device, with the noise of `penstock.engine.sampling.noise`."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.gpu.kernels.launch import follow

_STEP = tl.constexpr(0x9E3779B1)
_ROUND_1 = tl.constexpr(0x21F0AAAD)
_ROUND_2 = tl.constexpr(0x735A2D97)


@triton.jit
def gumbel(tokens, low, high):
    """Standard Gumbel noise of tokens under the key (low, high); all of them uint32."""
    x = tokens * tl.full([], _STEP, tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full([], _ROUND_1, tl.uint32) + high
    x = (x ^ (x >> 15)) * tl.full([], _ROUND_2, tl.uint32)
    x = x ^ (x >> 16)
    v = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-8)
    # -log1p(-v) by way of log: the error of 1 - v cancels in the quotient.
    rest = 1.0 - v
    exact = tl.log(tl.where(rest == 1.0, 0.5, rest)) * (v / tl.where(rest == 1.0, 1.0, rest - 1.0))
    return -tl.log(tl.where(rest == 1.0, v, exact))


@triton.jit(do_not_specialize_on_alignment=["temperature", "keys"])
def best_of_chunks(
    logits,
    temperature,
    keys,
    best,
    best_token,
    stride,
    vocab,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The best score of a row's chunk of BLOCK tokens, and its lowest token.

    logits: [rows, stride] float32, of which the first `vocab` count; temperature: [rows] float32,
    0 for greedy; keys: [rows, 2] int32 words; best, best_token: [rows, chunks].
    """
    follow(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    heat = tl.load(temperature + row)
    if heat > 0.0:
        low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        scores = scores / heat + gumbel(tokens.to(tl.uint32), low, high)
    top, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, top)
    tl.store(best_token + place, chunk * BLOCK + at)


@triton.jit
def best_of_rows(
    best, best_token, tokens, num_chunks, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr
):
    """tokens[row]: the lowest token among the best of the chunks."""
    follow(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    scores = tl.load(best + row * num_chunks + at, mask=at < num_chunks, other=float("-inf"))
    chunk = tl.argmax(scores, 0, tie_break_left=True)
    tl.store(tokens + row, tl.load(best_token + row * num_chunks + chunk))
