"""A decoder's pass over a static batch: the weights of `Decoder`, the steps of `Operations`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.engine.gpu.operations import Operations, Projection
from penstock.engine.gpu.static_batch import StaticBatch
from penstock.engine.models.decoder import Decoder


class StaticDecoder:
    """The same function as `Decoder.forward`, without a look at the host between its steps."""

    def __init__(self, decoder: Decoder, operations: Operations) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._operations = operations
        self._layers = [
            (
                Projection(layer.qkv, layer.input_norm, layer.qkv_bias),
                Projection(layer.o, bias=layer.o_bias),
                Projection(layer.mlp.gate_up, layer.post_norm, gated=True),
                Projection(layer.mlp.down),
            )
            for layer in decoder.layers
        ]
        self._head = Projection(decoder.lm_head, decoder.norm)

    def forward(self, batch: StaticBatch, *, all_rows: bool) -> torch.Tensor:
        """Float32 logits: [rows, V] of all rows, or [seqs, V] of `logits_rows`.

        The rows' keys and values are written to the cache.
        """
        decoder, do, config = self._decoder, self._operations, self.config
        plan = do.plan(batch)
        hidden = F.embedding(batch.token_ids, decoder.embed_tokens)
        last = len(self._layers) - 1
        for index, (qkv, o, gate_up, down) in enumerate(self._layers):
            rows = do.project(hidden, qkv).unflatten(1, (-1, config.head_dim))
            qk_norm = decoder.layers[index].qk_norm
            q = do.rotate_and_store(rows, decoder.rotations, qk_norm, batch, index)
            attended = do.attend(q, index, plan).flatten(1)
            if index == last and not all_rows:
                hidden = hidden.index_select(0, batch.logits_rows)
                attended = attended.index_select(0, batch.logits_rows)
            hidden = do.project(attended, o, residual=hidden)
            hidden = do.project(do.project(hidden, gate_up), down, residual=hidden)
        return do.project(hidden, self._head, dtype=torch.float32)
