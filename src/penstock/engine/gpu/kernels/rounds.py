"""Between two rounds: what came of the one, and the next one's rows in their places."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.gpu.kernels.launch import follow


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "num_draws", "table_stride", "scratch_slot"])
def settle_rows(
    token_ids,
    positions,
    row_seq,
    seq_lens,
    tables,
    places,
    short,
    keys,
    late,
    settled_ids,
    settled_positions,
    settled_slots,
    settled_lens,
    settled_keys,
    num_rows,
    num_seqs,
    num_draws,
    table_stride,
    scratch_slot,
    BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """See `Operations.settle`. The rows `places` of `late`, sequences shorter by `short`.

    All int32. keys: [num_draws, MOST, 2]; settled_keys: [num_draws, 2], num_draws being num_rows if
    BY_ROW, or else a multiple of num_seqs.
    """
    follow(OVERLAPPED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    seq = tl.load(row_seq + at, mask=inside, other=-1)
    real = seq >= 0
    less = tl.load(short + seq, mask=real, other=0)
    position = tl.load(positions + at, mask=inside, other=0) - less
    block = tl.load(tables + seq * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, scratch_slot)
    place = tl.load(places + at, mask=inside, other=-1)
    token = tl.load(token_ids + at, mask=inside, other=0)
    token = tl.where(place < 0, token, tl.load(late + place, mask=place >= 0, other=0))
    tl.store(settled_ids + at, token, mask=inside)
    tl.store(settled_positions + at, position, mask=inside)
    tl.store(settled_slots + at, slot, mask=inside)

    inside = at < num_seqs
    length = tl.load(seq_lens + at, mask=inside, other=0)
    length -= tl.load(short + at, mask=inside, other=0)
    tl.store(settled_lens + at, length, mask=inside)

    inside = at < num_draws
    if not BY_ROW:
        less = tl.load(short + at % num_seqs, mask=inside, other=0)
    key = keys + (at * MOST + less) * 2
    tl.store(settled_keys + 2 * at, tl.load(key, mask=inside, other=0), mask=inside)
    tl.store(settled_keys + 2 * at + 1, tl.load(key + 1, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["rows", "limits"])
def find_outcomes(
    token_ids,
    samples,
    rows,
    limits,
    short,
    known,
    num,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """See `Operations.outcome`. All int32; limits: less than MOST."""
    follow(OVERLAPPED)
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num
    first = tl.load(rows + seq, mask=inside, other=0)
    limit = tl.load(limits + seq, mask=inside, other=0)
    draft = tl.arange(0, MOST)
    counts = draft[None, :] < limit[:, None]
    at = first[:, None] + draft[None, :]
    sampled = tl.load(samples + at, mask=counts, other=0)
    drafted = tl.load(token_ids + at + 1, mask=counts, other=0)
    # The first that is wrong; where all are right, the first that does not count.
    right = counts & (sampled == drafted)
    accepted = tl.min(tl.where(right, MOST, draft[None, :]), 1)
    last = first + accepted
    tl.store(short + seq, limit - accepted, mask=inside)
    tl.store(known + 2 * seq, tl.load(token_ids + last, mask=inside, other=0), mask=inside)
    tl.store(known + 2 * seq + 1, tl.load(samples + last, mask=inside, other=0), mask=inside)
