"""A decoder's operations by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.engine.gpu.operations import Projection, VerifyOutcome
from penstock.engine.gpu.static_batch import MAX_WINDOW, StaticBatch, StepInputs
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.decoder import RmsNorm
from penstock.engine.sampling.filters import lowest_argmax
from penstock.engine.sampling.noise import gumbel_of_words


class TorchOperations:
    """On any device. Attention is padded to the tables' width."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self._cache = cache
        self._num_heads = num_heads

    def num_pieces(self, seqs: int) -> int:
        return seqs + 1

    def project(
        self,
        x: torch.Tensor,
        by: Projection,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if by.norm is not None:
            x = by.norm(x)
        out = x @ by.matrix
        if by.bias is not None:
            out = out + by.bias
        if by.gated:
            gate, up = out.chunk(2, dim=1)
            out = F.silu(gate) * up
        if residual is not None:
            out = out + residual
        return out if dtype is None else out.to(dtype)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotations: torch.Tensor,
        qk_norm: RmsNorm | None,
        batch: StaticBatch,
        layer: int,
    ) -> torch.Tensor:
        kv_heads = self._cache.num_kv_heads
        qk = qkv[:, :-kv_heads]
        if qk_norm is not None:
            qk.copy_(qk_norm(qk))
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:2], -1, 2))
        turned = pairs * rotations.index_select(0, batch.positions)
        qk.copy_(torch.view_as_real(turned).flatten(2))
        self._cache.write(layer, batch.slots.long(), qkv[:, self._num_heads :])
        return qkv[:, : self._num_heads]

    def plan(self, batch: StaticBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows' tables, and which keys of them a row sees: [rows, width * block_size] bool."""
        seq = batch.row_seq.long().clamp(min=0)
        rows = torch.arange(batch.capacity.rows, device=seq.device)
        ends = batch.query_start.long()[seq + 1]
        position = batch.seq_lens.long()[seq] - ends + rows
        columns = torch.arange(
            batch.capacity.width * self._cache.block_size, device=position.device
        )
        visible = (columns <= position[:, None]) & (batch.row_seq >= 0)[:, None]
        tables = batch.tables.clamp(max=self._cache.num_blocks - 1).long()
        return tables[seq], visible

    def attend(
        self, q: torch.Tensor, layer: int, plan: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        tables, visible = plan
        kv = self._cache.layers[layer]
        if kv.dtype == torch.float8_e4m3fn:
            kv = kv.view(torch.uint8)[:, :, tables].view(kv.dtype).to(q.dtype)
            kv = kv * self._cache.scales[layer].to(q.dtype)[:, None, None, None, None, None]
        else:
            kv = kv[:, :, tables]
        # A weight of 0 does not hide the NaN that a freed block may hold.
        kv = kv.flatten(3, 4).masked_fill(~visible[:, :, None], 0)
        keys, values = kv.transpose(1, 2)
        grouped = q.reshape(q.shape[0], self._cache.num_kv_heads, -1, q.shape[-1])
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible[:, None, None, :]
        )
        return out.flatten(1, 2)

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
        batch, size = given.batch, self._cache.block_size
        settled.token_ids.copy_(
            torch.where(
                given.places < 0, batch.token_ids, late.index_select(0, given.places.clamp(min=0))
            )
        )
        settled.seq_lens.copy_(batch.seq_lens - given.short)
        is_padding, seq = batch.row_seq < 0, batch.row_seq.clamp(min=0)
        short = given.short.index_select(0, seq).masked_fill_(is_padding, 0)
        position = batch.positions - short
        settled.positions.copy_(position)
        slot = batch.tables[seq, position // size] * size + position % size
        settled.slots.copy_(slot.masked_fill_(is_padding, scratch_slot))
        of_draw = short if by_row else given.short.repeat(len(keys) // len(given.short))
        which = of_draw.long()[:, None, None].expand(-1, 1, 2)
        keys.copy_(given.keys.gather(1, which).squeeze(1))

    def outcome(
        self,
        token_ids: torch.Tensor,
        samples: torch.Tensor,
        rows: torch.Tensor,
        limits: torch.Tensor,
    ) -> VerifyOutcome:
        draft = torch.arange(MAX_WINDOW - 1, device=rows.device)
        at = rows.long()[:, None] + draft
        drafted = token_ids[(at + 1).clamp(max=token_ids.numel() - 1)]
        right = (samples[at.clamp(max=samples.numel() - 1)] == drafted) & (draft < limits[:, None])
        accepted = right.int().cumprod(1).sum(1)
        last = rows + accepted
        known = torch.stack((token_ids[last], samples[last]), dim=1).reshape(-1)
        return VerifyOutcome((limits - accepted).int(), known)

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, vocab: int
    ) -> torch.Tensor:
        logits = logits[:, :vocab]
        greedy = (temperature == 0)[:, None]
        scores = logits / temperature.masked_fill(temperature == 0, 1.0)[:, None]
        scores = torch.where(greedy, logits, scores + gumbel_of_words(keys, vocab))
        return lowest_argmax(scores.contiguous()).int()
