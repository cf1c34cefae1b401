"""What lies between the matrix products of a decoder, each in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.gpu.kernels.launch import follow

_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def rms_norm_rows(
    x, weight, out, stride, size, sum_eps, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr
):
    """out = x * weight / sqrt(Σ x² + sum_eps); weight carries the factor sqrt(size)."""
    follow(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) + sum_eps)
    scaled = values * factor * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * size + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_rows(gate_up, out, size, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr):
    """out = silu(gate) * up; gate_up: [rows, 2 * size], gates first."""
    follow(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["kv_scales"])
def rotate_and_store(
    qkv,
    rotations,
    positions,
    slots,
    norm_weight,
    kv,
    kv_scales,
    slots_per_head,
    sum_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    QK_NORM: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Normalise and turn queries and keys; queries stay in `qkv`, keys and values go to the cache.

    qkv: [rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], rotary pairs being neighbours; rotations:
    [positions, HEAD_DIM / 2, 2] float32, cosine and sine; norm_weight: [heads, HEAD_DIM] float32
    with the factor sqrt(HEAD_DIM); kv: [2, NUM_KV_HEADS, slots_per_head, HEAD_DIM].
    """
    follow(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    mask = (head < all_heads)[:, None] & (half < HEAD_DIM // 2)[None, :]
    turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    at = head[:, None] * HEAD_DIM + 2 * half[None, :]
    source = qkv + row * all_heads * HEAD_DIM + at
    even = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        squares = tl.sum(even * even + odd * odd, 1)
        factor = (1.0 / tl.sqrt(squares + sum_eps))[:, None]
        weighted = mask & turned
        even = tl.where(turned, even * factor * tl.load(norm_weight + at, mask=weighted), even)
        odd = tl.where(turned, odd * factor * tl.load(norm_weight + at + 1, mask=weighted), odd)
    position = tl.load(positions + row).to(tl.int64)
    angle = rotations + position * HEAD_DIM + 2 * half
    cosine = tl.load(angle, mask=half < HEAD_DIM // 2, other=1.0)[None, :]
    sine = tl.load(angle + 1, mask=half < HEAD_DIM // 2, other=0.0)[None, :]
    first = tl.where(turned, even * cosine - odd * sine, even)
    second = tl.where(turned, even * sine + odd * cosine, odd)
    is_query = mask & (head < NUM_HEADS)[:, None]
    tl.store(source, first.to(qkv.dtype.element_ty), mask=is_query)
    tl.store(source + 1, second.to(qkv.dtype.element_ty), mask=is_query)

    is_cached = mask & (head >= NUM_HEADS)[:, None]
    which = head - NUM_HEADS
    slot = tl.load(slots + row).to(tl.int64)
    place = which.to(tl.int64)[:, None] * slots_per_head * HEAD_DIM + slot * HEAD_DIM
    into = kv + place + 2 * half[None, :]
    if FP8:
        scale = tl.load(kv_scales + which // NUM_KV_HEADS, mask=which >= 0, other=1.0)[:, None]
        first = tl.minimum(tl.maximum(first / scale, -_LARGEST_E4M3), _LARGEST_E4M3)
        second = tl.minimum(tl.maximum(second / scale, -_LARGEST_E4M3), _LARGEST_E4M3)
    tl.store(into, first.to(kv.dtype.element_ty), mask=is_cached)
    tl.store(into + 1, second.to(kv.dtype.element_ty), mask=is_cached)


@triton.jit
def _multiplied(
    x,
    weight,
    norm_weight,
    num_rows,
    size,
    depth,
    begin,
    end,
    root,
    x_stride,
    depth_stride,
    size_stride,
    m,
    n,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Rows `m` of x times columns `n` of the matrix (and of its second half, if gated), as far as
    the depths from `begin` up to `end` bring them; and the sum of the squares of x there."""
    k = tl.arange(0, BLOCK_K)
    inside = n < size
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    w_at = weight + n.to(tl.int64)[None, :] * size_stride
    up_at = w_at + size.to(tl.int64) * size_stride
    acc = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    up_acc = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    squares = tl.zeros([m.shape[0]], tl.float32)
    for at in range(begin, end, BLOCK_K):
        deep = at + k
        w_mask = inside[None, :]
        x_mask = (m < num_rows)[:, None]
        if not EVEN_K:
            w_mask = w_mask & (deep < depth)[:, None]
            x_mask = x_mask & (deep < depth)[None, :]
        w_offset = deep.to(tl.int64)[:, None] * depth_stride
        w = tl.load(w_at + w_offset, mask=w_mask, other=0.0).to(OPERANDS)
        rows = tl.load(x_at + deep[None, :], mask=x_mask, other=0.0)
        if NORM:
            values = rows.to(tl.float32)
            squares += tl.sum(values * values, 1)
            factors = tl.load(norm_weight + deep, mask=deep < depth, other=0.0) / root
            rows = values * factors[None, :]
        rows = rows.to(OPERANDS)
        acc += tl.dot(rows, w, input_precision="ieee")
        if GATED:
            up = tl.load(up_at + w_offset, mask=w_mask, other=0.0).to(OPERANDS)
            up_acc += tl.dot(rows, up, input_precision="ieee")
    return acc, up_acc, squares


@triton.jit
def _store_finished(
    acc,
    up_acc,
    squares,
    bias,
    residual,
    out,
    num_rows,
    size,
    root,
    sum_eps,
    m,
    n,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """What comes after the whole of a product."""
    inside = n < size
    if NORM:
        factor = (root / tl.sqrt(squares + sum_eps))[:, None]
        acc = acc * factor
        up_acc = up_acc * factor
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    place = m.to(tl.int64)[:, None] * size + n[None, :]
    stored = (m < num_rows)[:, None] & inside[None, :]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_rows", "split_depth"])
def project_rows(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    shares,
    arrivals,
    num_rows,
    size,
    depth,
    split_depth,
    root,
    sum_eps,
    x_stride,
    depth_stride,
    size_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OPERANDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Few rows times a matrix that is read once: [norm] x @ weight [+ bias] [+ residual] [gated].

    x: [num_rows, depth]; weight: [depth, size], or [depth, 2 * size] if gated: silu(x @ first half)
    * (x @ second half). The norm's denominator is the same for all columns, so that it is found
    while x is read and divides the result. residual, out: [num_rows, size]. root: sqrt(depth).

    Programs are (columns, depths). If SPLIT, each brings its share of the sum over `split_depth`
    depths to `shares`, float32, and whoever is the last to arrive for its columns adds them up,
    always in the same order. shares: [splits, column blocks, 2, BLOCK_M, BLOCK_N], then [splits,
    column blocks, BLOCK_M] for squares; arrivals: int32, zero for each block of columns, before and
    after.
    """
    follow(OVERLAPPED)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * split_depth
    end = tl.minimum(begin + split_depth, depth)
    acc, up_acc, squares = _multiplied(
        x,
        weight,
        norm_weight,
        num_rows,
        size,
        depth,
        begin,
        end,
        root,
        x_stride,
        depth_stride,
        size_stride,
        m,
        n,
        BLOCK_K,
        EVEN_K,
        NORM,
        GATED,
        OPERANDS,
    )
    is_last = True
    if SPLIT:
        columns, splits = tl.num_programs(0), tl.num_programs(1)
        tile = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        share = shares + (tl.program_id(1) * columns + tl.program_id(0)) * 2 * BLOCK_M * BLOCK_N
        sums = shares + splits * columns * 2 * BLOCK_M * BLOCK_N
        tl.store(share + tile, acc)
        if GATED:
            tl.store(share + BLOCK_M * BLOCK_N + tile, up_acc)
        if NORM:
            tl.store(sums + (tl.program_id(1) * columns + tl.program_id(0)) * BLOCK_M + m, squares)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        is_last = arrived == splits - 1
        if is_last:
            tl.store(arrivals + tl.program_id(0), 0)
            acc, up_acc, squares = tl.zeros_like(acc), tl.zeros_like(acc), tl.zeros_like(squares)
            for split in range(splits):
                at = split * columns + tl.program_id(0)
                theirs = shares + at * 2 * BLOCK_M * BLOCK_N + tile
                acc += tl.load(theirs, cache_modifier=".cg")
                if GATED:
                    up_acc += tl.load(theirs + BLOCK_M * BLOCK_N, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(sums + at * BLOCK_M + m, cache_modifier=".cg")
    if is_last:
        _store_finished(
            acc,
            up_acc,
            squares,
            bias,
            residual,
            out,
            num_rows,
            size,
            root,
            sum_eps,
            m,
            n,
            NORM,
            GATED,
            BIAS,
            RESIDUAL,
        )
