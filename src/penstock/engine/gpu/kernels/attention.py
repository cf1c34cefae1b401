"""Paged split-KV attention of few query rows a sequence.

A sequence's keys are cut into pieces of one length (flash-decoding); every piece attends with all
query rows of its sequence, the heads of a group folded into rows, and the pieces of a row are
merged by the logarithm of their denominators. That is Spin's request decomposition (section V-A,
equation 13) without rows of a fixed shape. A sequence of a single piece needs no merging.

Numbers that change from batch to batch, and pointers that are not always at multiples of 16 bytes,
are not specialised on: that would compile the same kernel again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.gpu.kernels.launch import follow

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_seqs", "num_pieces"])
def plan_pieces(
    seq_lens,
    piece_len,
    piece_seq,
    piece_start,
    first_piece,
    num_seqs,
    num_pieces,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Which keys every piece reads.

    seq_lens: [num_seqs]; 0 for a place without a sequence. piece_len: [1]. Out: piece_seq
    [num_pieces], -1 past the last; piece_start [num_pieces], first key; first_piece
    [num_seqs + 1].
    """
    follow(OVERLAPPED)
    seqs = tl.arange(0, BLOCK_SEQS)
    length = tl.load(piece_len)
    lens = tl.load(seq_lens + seqs, mask=seqs < num_seqs, other=0)
    counts = (lens + length - 1) // length
    ends = tl.cumsum(counts, 0)
    firsts = ends - counts
    if tl.program_id(0) == 0:
        tl.store(first_piece + seqs, firsts, mask=seqs < num_seqs)
        tl.store(first_piece + num_seqs, tl.sum(counts, 0))
    pieces = tl.program_id(0) * BLOCK_PIECES + tl.arange(0, BLOCK_PIECES)
    owned = (firsts[None, :] <= pieces[:, None]) & (pieces[:, None] < ends[None, :])
    owner = tl.sum(tl.where(owned, seqs[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(owned, firsts[None, :], 0), 1)
    tl.store(piece_seq + pieces, owner, mask=pieces < num_pieces)
    tl.store(piece_start + pieces, (pieces - first) * length, mask=pieces < num_pieces)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["kv_scales"])
def attend_pieces(
    q,
    kv,
    kv_scales,
    out,
    partial_out,
    partial_log,
    tables,
    query_start,
    seq_lens,
    piece_seq,
    piece_start,
    first_piece,
    piece_len,
    scale,
    q_stride,
    out_stride,
    table_stride,
    slots_per_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERANDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One piece for one key-value head: its result, if it is the sequence's only one, or a part.

    q, out: [rows, heads, HEAD_DIM]; kv: [2, kv_heads, slots_per_head, HEAD_DIM]; kv_scales: [2];
    partial_out: [pieces, kv_heads, BLOCK_M, HEAD_DIM] and partial_log without the last axis,
    base-2 logarithms, both float32. OPERANDS: type of the matrix products' operands.
    """
    follow(OVERLAPPED)
    piece = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq = tl.load(piece_seq + piece)
    if seq < 0:
        return
    start = tl.load(piece_start + piece)
    length = tl.load(seq_lens + seq)
    stop = tl.minimum(start + tl.load(piece_len), length)
    first_row = tl.load(query_start + seq)
    num_rows = tl.load(query_start + seq + 1) - first_row

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_DIM)
    row = m // GROUP
    heads = head * GROUP + m % GROUP
    wanted = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    position = length - num_rows + row
    at = (first_row + row).to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM
    queries = tl.load(q + at + dim[None, :], mask=wanted, other=0.0).to(OPERANDS)
    weight_scale = scale * LOG2_E * tl.load(kv_scales)

    keys = kv + head.to(tl.int64) * slots_per_head * HEAD_DIM
    values = keys + num_kv_heads.to(tl.int64) * slots_per_head * HEAD_DIM
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for begin in range(start, stop, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        real = n < stop
        block = tl.load(tables + seq * table_stride + n // BLOCK_SIZE, mask=real, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = slot[:, None] * HEAD_DIM + dim[None, :]
        loaded = real[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + offset, mask=loaded, other=0.0).to(OPERANDS)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * weight_scale
        visible = real[None, :] & (n[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet would be -inf - -inf.
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + offset, mask=loaded, other=0.0).to(OPERANDS)
        acc = acc * fade[:, None]
        acc += tl.dot(weights.to(OPERANDS), v, input_precision="ieee")
        highest = top

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * tl.load(kv_scales + 1)
    if tl.load(first_piece + seq + 1) - tl.load(first_piece + seq) == 1:
        at = (first_row + row).to(tl.int64)[:, None] * out_stride + heads[:, None] * HEAD_DIM
        tl.store(out + at + dim[None, :], result.to(out.dtype.element_ty), mask=wanted)
    else:
        part = (piece.to(tl.int64) * num_kv_heads + head) * BLOCK_M + m
        tl.store(partial_out + part[:, None] * HEAD_DIM + dim[None, :], result, mask=wanted)
        tl.store(
            partial_log + part,
            highest + tl.log2(tl.where(total == 0.0, 1.0, total)),
            mask=row < num_rows,
        )


@triton.jit
def merge_pieces(
    out,
    partial_out,
    partial_log,
    row_seq,
    query_start,
    first_piece,
    out_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One row and head whose keys lie in several pieces: Σ d_k o_k / Σ d_k, all d_k over the
    largest so far. row_seq: [rows], -1 for a row of no sequence, which gets zeros."""
    follow(OVERLAPPED)
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1) // GROUP
    dim = tl.arange(0, BLOCK_DIM)
    at = row.to(tl.int64) * out_stride + head * HEAD_DIM + dim
    seq = tl.load(row_seq + row)
    if seq < 0:
        # What the memory held before could overflow in the layers above.
        tl.store(out + at, tl.zeros([BLOCK_DIM], out.dtype.element_ty), mask=dim < HEAD_DIM)
        return
    first = tl.load(first_piece + seq)
    last = tl.load(first_piece + seq + 1)
    if last - first < 2:
        return
    m = (row - tl.load(query_start + seq)) * GROUP + head % GROUP
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(first, last, BLOCK_PIECES):
        piece = begin + tl.arange(0, BLOCK_PIECES)
        part = (piece.to(tl.int64) * num_kv_heads + head // GROUP) * BLOCK_M + m
        logs = tl.load(partial_log + part, mask=piece < last, other=float("-inf"))
        top = tl.maximum(highest, tl.max(logs, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(logs - base)
        fade = tl.exp2(highest - base)
        mask = (piece < last)[:, None] & (dim < HEAD_DIM)[None, :]
        parts = tl.load(partial_out + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        acc = acc * fade + tl.sum(parts * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        highest = top
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)
