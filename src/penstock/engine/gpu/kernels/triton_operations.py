"""A decoder's operations by Triton: few rows read a matrix once, many go through the library."""

from __future__ import annotations

import torch

from penstock.engine.gpu.kernels import fused, launch, rounds, sampling
from penstock.engine.gpu.kernels.tuning import Tile, Tuner
from penstock.engine.gpu.operations import Projection, VerifyOutcome
from penstock.engine.gpu.static_batch import MAX_WINDOW, StaticBatch, StepInputs
from penstock.engine.gpu.triton_paged import Pieces, TritonAttention, power_of_2
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.decoder import RmsNorm

MAX_FUSED_ROWS = 128
"""Beyond this a product is bound by arithmetic, and the library's is hard to beat."""

_MOST_SPLIT = 1024
"""Blocks of columns of a product whose sums are split; there are fewer than multiprocessors."""

_VOCAB_CHUNK = 4096
_HEADS_TOGETHER = 8
_SWIGLU_CHUNK = 1024
_ROWS_TOGETHER = 128
_SEQS_TOGETHER = 16


class TritonOperations:
    """See `penstock.engine.gpu.operations.Operations`.

    Raises BackendUnavailableError without Triton.
    """

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self._attention = TritonAttention(cache, num_heads)
        self._cache = cache
        self._num_heads = num_heads
        self._tuner = Tuner(cache.device)
        # One a block of columns of the product at work; a model's products follow each other.
        self._arrivals = torch.zeros(_MOST_SPLIT, dtype=torch.int32, device=cache.device)

    def num_pieces(self, seqs: int) -> int:
        return self._attention.num_pieces(seqs)

    def project(
        self,
        x: torch.Tensor,
        by: Projection,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        rows, depth = x.shape
        if rows > MAX_FUSED_ROWS:
            return self._by_library(x, by, residual, dtype)
        size = by.matrix.shape[1] // (2 if by.gated else 1)
        kind = (by.norm is not None, by.bias is not None, by.gated, residual is not None)
        tile = self._tuner.best(
            (power_of_2(rows), depth, size, by.matrix.stride(), x.dtype, dtype, *kind),
            by.matrix,
            rows,
            size,
            lambda tile, matrix: self._product(x, by, matrix, residual, dtype, tile),
        )
        return self._product(x, by, by.matrix, residual, dtype, tile)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotations: torch.Tensor,
        qk_norm: RmsNorm | None,
        batch: StaticBatch,
        layer: int,
    ) -> torch.Tensor:
        cache, heads = self._cache, self._num_heads
        angles = torch.view_as_real(rotations)
        all_heads = heads + 2 * cache.num_kv_heads
        fused.rotate_and_store[(qkv.shape[0], -(-all_heads // _HEADS_TOGETHER))](
            qkv,
            angles,
            batch.positions,
            batch.slots,
            angles if qk_norm is None else qk_norm.weight,
            cache.layers[layer],
            cache.scales[layer],
            cache.num_blocks * cache.block_size,
            0.0 if qk_norm is None else qk_norm.sum_eps,
            NUM_HEADS=heads,
            NUM_KV_HEADS=cache.num_kv_heads,
            HEAD_DIM=cache.head_dim,
            BLOCK_HALF=power_of_2(cache.head_dim // 2),
            BLOCK_HEADS=_HEADS_TOGETHER,
            QK_NORM=qk_norm is not None,
            FP8=cache.dtype == torch.float8_e4m3fn,
            **launch.options(),
        )
        return qkv[:, :heads]

    def plan(self, batch: StaticBatch) -> Pieces:
        return self._attention.plan(batch)

    def attend(self, q: torch.Tensor, layer: int, plan: Pieces) -> torch.Tensor:
        return self._attention.attend_pieces(q, layer, plan)

    def settle(
        self,
        given: StepInputs,
        late: torch.Tensor,
        settled: StaticBatch,
        keys: torch.Tensor,
        scratch_slot: int,
        *,
        by_row: bool,
    ) -> None:
        batch, capacity, num_draws = given.batch, given.batch.capacity, keys.shape[0]
        most = max(capacity.rows, capacity.seqs, num_draws)
        rounds.settle_rows[(-(-most // _ROWS_TOGETHER),)](
            batch.token_ids,
            batch.positions,
            batch.row_seq,
            batch.seq_lens,
            batch.tables,
            given.places,
            given.short,
            given.keys,
            late,
            settled.token_ids,
            settled.positions,
            settled.slots,
            settled.seq_lens,
            keys,
            capacity.rows,
            capacity.seqs,
            num_draws,
            batch.tables.stride(0),
            scratch_slot,
            BLOCK_SIZE=self._cache.block_size,
            MOST=MAX_WINDOW,
            BY_ROW=by_row,
            BLOCK=_ROWS_TOGETHER,
            **launch.options(),
        )

    def outcome(
        self,
        token_ids: torch.Tensor,
        samples: torch.Tensor,
        rows: torch.Tensor,
        limits: torch.Tensor,
    ) -> VerifyOutcome:
        num = rows.numel()
        short = torch.empty(num, dtype=torch.int32, device=rows.device)
        known = torch.empty(2 * num, dtype=torch.int32, device=rows.device)
        rounds.find_outcomes[(-(-num // _SEQS_TOGETHER),)](
            token_ids,
            samples,
            rows,
            limits,
            short,
            known,
            num,
            MOST=MAX_WINDOW,
            BLOCK=_SEQS_TOGETHER,
            **launch.options(),
        )
        return VerifyOutcome(short, known)

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, vocab: int
    ) -> torch.Tensor:
        rows, chunks = logits.shape[0], -(-vocab // _VOCAB_CHUNK)
        best = torch.empty(rows, chunks, device=logits.device)
        best_token = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
        sampling.best_of_chunks[(rows, chunks)](
            logits,
            temperature,
            keys,
            best,
            best_token,
            logits.stride(0),
            vocab,
            BLOCK=_VOCAB_CHUNK,
            **launch.options(),
        )
        sampling.best_of_rows[(rows,)](
            best, best_token, tokens, chunks, BLOCK=max(2, power_of_2(chunks)), **launch.options()
        )
        return tokens

    def _product(
        self,
        x: torch.Tensor,
        by: Projection,
        matrix: torch.Tensor,
        residual: torch.Tensor | None,
        dtype: torch.dtype | None,
        tile: Tile | None,
    ) -> torch.Tensor:
        if tile is None:
            by = Projection(matrix, by.norm, by.bias, by.gated)
            return self._by_library(x, by, residual, dtype)
        rows, depth = x.shape
        size = matrix.shape[1] // (2 if by.gated else 1)
        out = torch.empty(rows, size, dtype=dtype or x.dtype, device=x.device)
        block_m, columns = max(16, power_of_2(rows)), -(-size // tile.block_n)
        share = block_m * (2 * tile.block_n + 1) if tile.splits > 1 else 0
        fused.project_rows[(columns, tile.splits)](
            x,
            matrix,
            x if by.norm is None else by.norm.weight,
            x if by.bias is None else by.bias,
            x if residual is None else residual,
            out,
            torch.empty(tile.splits * columns * share, device=x.device),
            self._arrivals,
            rows,
            size,
            depth,
            -(-depth // (tile.splits * tile.block_k)) * tile.block_k,
            float(depth**0.5),
            0.0 if by.norm is None else by.norm.sum_eps,
            x.stride(0),
            *matrix.stride(),
            BLOCK_M=block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            EVEN_K=depth % tile.block_k == 0,
            SPLIT=tile.splits > 1,
            NORM=by.norm is not None,
            GATED=by.gated,
            BIAS=by.bias is not None,
            RESIDUAL=residual is not None,
            OPERANDS=launch.operand_type(x.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **launch.options(),
        )
        return out

    def _by_library(
        self,
        x: torch.Tensor,
        by: Projection,
        residual: torch.Tensor | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if by.norm is not None:
            x = _normed(x, by.norm)
        if residual is not None and not by.gated:
            base = residual if by.bias is None else residual + by.bias
            return torch.addmm(base, x, by.matrix)
        out = x @ by.matrix if by.bias is None else torch.addmm(by.bias, x, by.matrix)
        if by.gated:
            out = _gated(out)
        return out if dtype is None else out.to(dtype)


def _normed(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    fused.rms_norm_rows[(rows,)](
        x,
        norm.weight,
        out,
        x.stride(0),
        size,
        norm.sum_eps,
        BLOCK=power_of_2(size),
        **launch.options(),
    )
    return out


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, -(-size // _SWIGLU_CHUNK))
    fused.swiglu_rows[grid](gate_up, out, size, BLOCK=_SWIGLU_CHUNK, **launch.options())
    return out
