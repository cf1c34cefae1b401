"""Eager decoder: all architectures as one function, selected by the config's variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from penstock.engine.attention import Attention
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.delta import DeltaStates, DeltaWeights
from penstock.engine.models.head import Head
from penstock.engine.models.mlp import DenseMlp, ExpertMlp
from penstock.engine.models.rope import Rope
from penstock.engine.models.rope_table import RopeTable
from penstock.engine.runner import RaggedBatch
from penstock.engine.states import StateMoves


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32.

    Computed as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight), which takes half as many passes.
    `weight` includes the factor sqrt(n), `sum_eps` is n eps."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight.float() * math.sqrt(size)
        self._eps = torch.full((), math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, length.hypot_(self._eps)).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. Matrices are [in, out]; widening ones are contiguous so.

    o_norm, down_norm: norms of attention's and the MLP's output before the residual is added.
    delta: of a recurrent layer."""

    input_norm: RmsNorm | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: RmsNorm | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    o_norm: RmsNorm | None
    post_norm: RmsNorm
    mlp: DenseMlp | ExpertMlp
    down_norm: RmsNorm | None
    delta: DeltaWeights | None = None


ComputeLayer = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a layer from its number, its input and the rows' rotations."""


class Decoder:
    """Weights on a device, and the forward pass over a ragged batch.

    Rotary pairs (i, i + head_dim / 2) of query and key rows are stored as neighbours (2i, 2i + 1):
    products of queries and keys are unchanged, and the rotation is one complex multiplication."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        max_positions: int,
        device: torch.device,
    ) -> None:
        """Take `weights` as `load_weights` returns them; computes in their dtype.

        The dict is emptied in the process, so that no layer is held twice for long."""
        self.config = config
        self.embed_tokens = weights.pop("embed_tokens").to(device)
        self.layers = [_layer(config, weights, i, device) for i in range(config.num_all_layers)]
        self.norm = RmsNorm(weights.pop("norm").to(device), config.rms_norm_eps)
        norm = partial(RmsNorm, eps=config.rms_norm_eps)
        self.head = Head.from_weights(config, weights, device, norm)
        if "lm_head" in weights:
            self.lm_head = weights.pop("lm_head").to(device).t().contiguous()
        else:
            self.lm_head = self.embed_tokens.t()
        self.rotations = _rotations(config, max_positions, config.rope).to(device)
        self._local_rotations = self.rotations
        window = config.variant.window
        if window is not None and window.rope is not None:
            self._local_rotations = _rotations(config, max_positions, window.rope).to(device)

    def forward(
        self,
        batch: RaggedBatch,
        cache: PagedKVCache,
        attention: Attention,
        states: DeltaStates | None = None,
        moves: StateMoves | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values, attend; float32 logits [num_logits, vocab_size].

        A batch without logits_rows only fills the cache. states, moves: of recurrent layers."""
        token_ids, positions, slots, logits_rows = _on_device(batch, cache)
        variant = self.config.variant
        everywhere = windowed = attention.prepare(batch)
        if variant.window is not None:
            windowed = attention.prepare(batch, variant.window.size)
        # A head needs the states of all rows.
        last = self.config.num_layers - 1 if self.head is None else -1

        inputs: list[torch.Tensor] = []

        def compute(index: int, hidden: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
            layer = self.layers[index]
            if self.head is not None and index in self.head.reads:
                inputs.append(hidden)
            if layer.delta is not None:
                assert states is not None
                assert moves is not None
                assert layer.input_norm is not None
                normed = layer.input_norm(hidden)
                qkv = torch.mm(normed, layer.qkv)
                attended = states.mix(index, layer.delta, qkv, normed, batch, moves)
            else:
                q, kv, gate = self.before_attention(layer, hidden, rotations)
                cache.write(index, slots, kv)
                metadata = windowed if variant.is_windowed(index) else everywhere
                attended = attention.attend(q, index, metadata).flatten(1)
                if gate is not None:
                    attended = attended * gate.sigmoid()
            if index == last:
                hidden = hidden.index_select(0, logits_rows)
                attended = attended.index_select(0, logits_rows)
            return after_attention(layer, hidden, attended)

        if self.head is None:
            return self.run(token_ids, positions, compute)
        normed = self.norm(self.hidden(token_ids, positions, compute))
        self._write_head(batch, cache, self.head.states(normed, inputs))
        return (normed.index_select(0, logits_rows) @ self.lm_head).float()

    def _write_head(self, batch: RaggedBatch, cache: PagedKVCache, states: torch.Tensor) -> None:
        """Write the head's keys and values of all rows. states: the model's."""
        assert self.head is not None
        token_ids, positions, slots, _ = _on_device(batch, cache)
        carry, starts = batch.carry, torch.from_numpy(batch.query_start[:-1]).to(cache.device)
        before = states.roll(1, 0)
        before[starts.long()] = 0.0 if carry is None else carry.before.to(states.dtype)
        if carry is not None:
            carry.after = states[torch.from_numpy(carry.rows).to(cache.device)].float()
        index, rotations = self.config.num_layers, self.rotations.index_select(0, positions)
        given, _ = self.head.enter(self.embed(token_ids), before)
        _, kv, _ = self.before_attention(self.layers[index], given, rotations)
        cache.write(index, slots, kv)

    def forward_head(
        self, batch: RaggedBatch, cache: PagedKVCache, attention: Attention
    ) -> torch.Tensor:
        """Compute one row of each sequence by the head; as `ModelRunner.forward_head`."""
        assert self.head is not None
        token_ids, positions, slots, logits_rows = _on_device(batch, cache)
        carry, index = batch.carry, self.config.num_layers
        embedded = self.embed(token_ids)
        before = torch.zeros_like(embedded) if carry is None else carry.before
        layer, (given, hidden) = self.layers[index], self.head.enter(embedded, before)
        rotations = self.rotations.index_select(0, positions)
        q, kv, gate = self.before_attention(layer, given, rotations)
        cache.write(index, slots, kv)
        attended = attention.attend(q, index, attention.prepare(batch)).flatten(1)
        if gate is not None:
            attended = attended * gate.sigmoid()
        states, normed = self.head.leave(after_attention(layer, hidden, attended))
        if carry is not None:
            carry.after = states.float()
        vocab = 0 if carry is None else carry.vocab
        return self.head.logits(normed.index_select(0, logits_rows), self.lm_head, vocab)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, as they enter a layer."""
        hidden, scale = (
            F.embedding(token_ids, self.embed_tokens),
            self.config.variant.embedding_scale,
        )
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, compute: ComputeLayer
    ) -> torch.Tensor:
        """Compute all layers, each by `compute`, and float32 logits of the rows it leaves."""
        return (self.norm(self.hidden(token_ids, positions, compute)) @ self.lm_head).float()

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, compute: ComputeLayer
    ) -> torch.Tensor:
        """Compute all layers, each by `compute`."""
        variant = self.config.variant
        everywhere = windowed = self.rotations.index_select(0, positions)
        if variant.window is not None:
            windowed = self._local_rotations.index_select(0, positions)
        hidden = self.embed(token_ids)
        for index in range(self.config.num_layers):
            rotations = windowed if variant.is_windowed(index) else everywhere
            hidden = compute(index, hidden, rotations)
        return hidden

    def before_attention(
        self, layer: Layer, hidden: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return rotated queries [num_tokens, num_heads, head_dim], and keys before values.

        With variant.gated also gates: [num_tokens, num_heads * head_dim]."""
        normed = hidden if layer.input_norm is None else layer.input_norm(hidden)
        if layer.qkv_bias is None:
            flat = torch.mm(normed, layer.qkv)
        else:
            flat = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        gate = None
        if self.config.variant.gated:
            gate, flat = flat[:, -self.config.q_size :], flat[:, : -self.config.q_size]
        qkv = flat.unflatten(1, (num_heads + 2 * num_kv_heads, self.config.head_dim))
        qk = qkv[:, :-num_kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(layer.qk_norm(qk))
        _rotate(qk, rotations)
        return qkv[:, :num_heads], qkv[:, num_heads:], gate


def _on_device(batch: RaggedBatch, cache: PagedKVCache) -> Iterator[torch.Tensor]:
    """Yield token ids, positions, the cache's slots, and rows of logits."""
    slots = batch.slot_mapping(cache.block_size)
    for rows in (batch.token_ids, batch.positions, slots, batch.logits_rows):
        yield torch.from_numpy(rows).to(cache.device)


def _rotations(config: DecoderConfig, max_positions: int, rope: Rope) -> torch.Tensor:
    """Return cosines and sines, [max_positions, 1, head_dim / 2, 2]."""
    table = RopeTable.build(config, max_positions, rope)
    half = config.head_dim // 2
    return torch.stack((table.cos[:, :half], table.sin[:, :half]), dim=-1).unsqueeze(1)


def _rotate(qk: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate the pairs of all heads [num_tokens, heads, head_dim] in place."""
    pairs = qk.float().unflatten(2, (-1, 2))
    if torch.compiler.is_compiling():  # torch.compile fuses no complex numbers
        (x, y), (cos, sin) = pairs.unbind(-1), rotations.unbind(-1)
        rotated = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)
    else:
        product = torch.view_as_complex(pairs).mul_(torch.view_as_complex(rotations))
        if qk.dtype == torch.float32:
            return
        rotated = torch.view_as_real(product)
    qk.copy_(rotated.flatten(2))


def after_attention(layer: Layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Return a layer's output from its input and what its heads attended to."""
    return _mlp(layer, _project_out(layer, hidden, attended))


def _project_out(layer: Layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    if layer.o_norm is not None:
        out = torch.mm(attended, layer.o)
        return hidden + layer.o_norm(out if layer.o_bias is None else out + layer.o_bias)
    if layer.o_bias is not None:
        hidden = hidden + layer.o_bias
    return torch.addmm(hidden, attended, layer.o)


def _mlp(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    normed = layer.post_norm(hidden)
    if layer.down_norm is None:
        return layer.mlp.add_to(hidden, normed)
    return hidden + layer.down_norm(layer.mlp.add_to(torch.zeros_like(hidden), normed))


def _layer(
    config: DecoderConfig, weights: dict[str, torch.Tensor], index: int, device: torch.device
) -> Layer:
    prefix = f"layers.{index}."
    names = [name for name in weights if name.startswith(prefix)]
    mine = {name.removeprefix(prefix): weights.pop(name).to(device) for name in names}
    variant = config.variant

    def norm(name: str) -> RmsNorm | None:
        return RmsNorm(mine[name], config.rms_norm_eps) if name in mine else None

    is_recurrent = variant.is_recurrent(index)
    qkv = mine["linear_qkv"] if is_recurrent else _pair_rows(config, mine["qkv"])
    has_norms, bias = "q_norm" in mine, mine.get("qkv_bias")
    return Layer(
        input_norm=norm("input_norm"),
        qkv=qkv.t().contiguous(),
        qkv_bias=None if bias is None else _pair_rows(config, bias),
        qk_norm=_qk_norm(config, mine["q_norm"], mine["k_norm"]) if has_norms else None,
        o=mine["o"].t(),
        o_bias=mine.get("o_bias"),
        o_norm=norm("o_norm"),
        post_norm=RmsNorm(mine["post_norm"], config.rms_norm_eps),
        mlp=_make_mlp(config, mine),
        down_norm=norm("down_norm"),
        delta=DeltaWeights.from_weights(mine) if is_recurrent else None,
    )


def _make_mlp(config: DecoderConfig, weights: dict[str, torch.Tensor]) -> DenseMlp | ExpertMlp:
    """Build the MLP of one layer from its weights."""
    variant, gate_up, down = config.variant, weights["gate_up"], weights["down"]
    if variant.experts is None or "router" not in weights:
        return DenseMlp(gate_up.t().contiguous(), down.t(), variant.activation)
    return ExpertMlp(weights["router"], gate_up, down, variant.experts, variant.activation)


def _pair_rows(config: DecoderConfig, qkv: torch.Tensor) -> torch.Tensor:
    """Make the rotary pairs of query and key heads neighbours; gates' rows, if any, come last."""
    gates = config.q_size if config.variant.gated else 0
    q, gate, k, v = qkv.split((config.q_size, gates, config.kv_size, config.kv_size))
    qk = torch.cat((q, k)).unflatten(0, (-1, config.head_dim))
    return torch.cat((_pair(qk, dim=1).flatten(0, 1), v, gate))


def _pair(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _qk_norm(config: DecoderConfig, q_norm: torch.Tensor, k_norm: torch.Tensor) -> RmsNorm:
    """Build the norm of every head, one row of weights each: queries, scaled, then keys."""
    scaled = q_norm.float() * config.variant.query_scale
    rows = [scaled] * config.num_heads + [k_norm.float()] * config.num_kv_heads
    return RmsNorm(_pair(torch.stack(rows), dim=1), config.rms_norm_eps)
