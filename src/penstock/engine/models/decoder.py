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
from penstock.engine.models.delta import ConvStates, ConvWeights, DeltaWeights
from penstock.engine.models.head import Head
from penstock.engine.models.mlp import DenseMlp, ExpertMlp, ExpertsBeside, PleMlp
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
class PleInputs:
    """Per-layer embeddings: a token's row of a table, and a projection of its embedding.

    table: [vocab_size, num_layers * ple_size]; projection: [hidden_size, num_layers * ple_size]"""

    table: torch.Tensor
    projection: torch.Tensor
    norm: RmsNorm

    def of_rows(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, num_layers, ple_size]. embedded: what enters the first layer."""
        shape = (-1, size := self.norm.weight.shape[0])
        own = F.embedding(token_ids, self.table).unflatten(1, shape)
        projected = self.norm((embedded @ self.projection).unflatten(1, shape))
        return (projected + own * math.sqrt(size)) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. Matrices are [in, out]; widening ones are contiguous so.

    o_norm, down_norm: norms of attention's and the MLP's output before the residual is added.
    num_kv_heads: 0 in a layer that reads another's keys and values.
    delta: of a recurrent layer. sinks: [num_heads] float32. ple: per-layer embeddings.
    scale: of the output. gated: behind the queries' columns of qkv lie gates."""

    head_dim: int
    num_kv_heads: int
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
    delta: ConvWeights | None = None
    sinks: torch.Tensor | None = None
    value_norm: RmsNorm | None = None
    ple: PleMlp | None = None
    beside: ExpertsBeside | None = None
    scale: float = 1.0
    gated: bool = False


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
        self._ple: PleInputs | None = None
        if config.variant.ple_size:
            table, projection, weight = (
                weights.pop(f"ple_{x}").to(device) for x in ("embed", "proj", "norm")
            )
            # The projection's factor is hidden_size ** -0.5, which a norm undoes but for its eps.
            scaled = RmsNorm(weight, config.rms_norm_eps * config.hidden_size)
            self._ple = PleInputs(table, projection.t(), scaled)
        shapes = [(config.layer_rope(i), layer.head_dim) for i, layer in enumerate(self.layers)]
        kinds = {shape: shapes.index(shape) for shape in shapes}
        self._rotations = [_rotations(config, i, max_positions).to(device) for i in kinds.values()]
        self._rotation_of = [list(kinds).index(shape) for shape in shapes]

    def forward(
        self,
        batch: RaggedBatch,
        cache: PagedKVCache,
        attention: Attention,
        states: ConvStates | None = None,
        moves: StateMoves | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values, attend; float32 logits [num_logits, vocab_size].

        A batch without logits_rows only fills the cache. states, moves: of recurrent layers."""
        token_ids, positions, slots, logits_rows = _on_device(batch, cache)
        variant = self.config.variant
        everywhere = windowed = attention.prepare(batch)
        if variant.window is not None:
            windowed = attention.prepare(batch, variant.window.size)
        # A head or an assistant needs the states of all rows, an embedding those of some.
        gives_states = self.config.gives_states or batch.carry is not None
        last = -1 if gives_states else self.config.num_layers - 1

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
                if layer.num_kv_heads:
                    cache.write(index, slots, kv)
                metadata = windowed if variant.is_windowed(index) else everywhere
                attended = attention.attend(q, index, metadata, layer.sinks).flatten(1)
                if gate is not None:
                    attended = attended * gate.sigmoid()
            if index == last:
                hidden = hidden.index_select(0, logits_rows)
                attended = attended.index_select(0, logits_rows)
            return after_attention(layer, hidden, attended)

        if not gives_states:
            return self.run(token_ids, positions, compute, logits_rows)
        normed = self.norm(self.hidden(token_ids, positions, compute))
        given = normed if self.head is None else self.head.states(normed, inputs)
        if (carry := batch.carry) is not None:
            carry.after = given[torch.from_numpy(carry.rows).to(cache.device)].float()
        if self.head is not None:
            self._write_head(batch, cache, given)
        return self._logits(normed.index_select(0, logits_rows))

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits."""
        logits, cap = (normed @ self.lm_head).float(), self.config.variant.softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _write_head(self, batch: RaggedBatch, cache: PagedKVCache, states: torch.Tensor) -> None:
        """Write the head's keys and values of all rows. states: the model's."""
        assert self.head is not None
        token_ids, positions, slots, _ = _on_device(batch, cache)
        carry, starts = batch.carry, torch.from_numpy(batch.query_start[:-1]).to(cache.device)
        before = states.roll(1, 0)
        before[starts.long()] = 0.0 if carry is None else carry.before.to(states.dtype)
        index, rotations = self.config.num_layers, self.rotated(positions)[-1]
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
        q, kv, gate = self.before_attention(layer, given, self.rotated(positions)[-1])
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
        hidden, variant = F.embedding(token_ids, self.embed_tokens), self.config.variant
        if variant.embedding_scale == variant.residual_scale == 1:
            return hidden
        scale = torch.tensor(variant.embedding_scale, dtype=hidden.dtype).item()
        return hidden * (scale / variant.residual_scale)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        compute: ComputeLayer,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute all layers, each by `compute`, and float32 logits of the rows it leaves.

        logits_rows: those that it leaves in the last layer, if not all"""
        return self._logits(self.norm(self.hidden(token_ids, positions, compute, logits_rows)))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        compute: ComputeLayer,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute all layers, each by `compute`. logits_rows: as in `run`."""
        last, rotations = self.config.num_layers - 1, self.rotated(positions)
        hidden = self.embed(token_ids)
        inputs = None if self._ple is None else self._ple.of_rows(token_ids, hidden)
        for index, layer in enumerate(self.layers[: last + 1]):
            hidden = compute(index, hidden, rotations[index])
            if layer.ple is not None and inputs is not None:
                own = inputs[:, index]
                if index == last and logits_rows is not None:
                    own = own.index_select(0, logits_rows)
                hidden = layer.ple.add_to(hidden, own)
            if layer.scale != 1:
                hidden = hidden * layer.scale
        return hidden

    def rotated(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return every layer's rotations; by head where they scale the queries, too."""
        variant, found = self.config.variant, []
        scale = 1.0 if variant.qk_norm else variant.query_scale
        scales = None
        if scale != 1 or variant.query_growth:
            periods = positions // variant.query_period
            growth = scale * (1 + variant.query_growth * periods.float().log1p())
            queries = growth[:, None, None, None].expand(-1, self.config.num_heads, 1, 1)
            keys = queries.new_ones(len(positions), self.config.num_kv_heads, 1, 1)
            scales = torch.cat((queries, keys), dim=1)
        for table in self._rotations:
            rows = table.index_select(0, positions)
            found.append(rows if scales is None else rows * scales)
        return [found[kind] for kind in self._rotation_of]

    def before_attention(
        self, layer: Layer, hidden: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return rotated queries [num_tokens, num_heads, head_dim], and keys before values.

        Of a gated layer also gates: [num_tokens, num_heads * head_dim]."""
        normed = hidden if layer.input_norm is None else layer.input_norm(hidden)
        if layer.qkv_bias is None:
            flat = torch.mm(normed, layer.qkv)
        else:
            flat = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        num_heads, num_kv_heads = self.config.num_heads, layer.num_kv_heads
        gate = None
        if layer.gated:
            gate, flat = flat[:, -self.config.q_size :], flat[:, : -self.config.q_size]
        qkv = flat.unflatten(1, (num_heads + 2 * num_kv_heads, layer.head_dim))
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk.copy_(layer.qk_norm(qk))
        if layer.value_norm is not None:
            v.copy_(layer.value_norm(v))
        _rotate(qk, rotations)
        return qkv[:, :num_heads], qkv[:, num_heads:], gate


def _on_device(batch: RaggedBatch, cache: PagedKVCache) -> Iterator[torch.Tensor]:
    """Yield token ids, positions, the cache's slots, and rows of logits."""
    slots = batch.slot_mapping(cache.block_size)
    for rows in (batch.token_ids, batch.positions, slots, batch.logits_rows):
        yield torch.from_numpy(rows).to(cache.device)


def _rotations(config: DecoderConfig, index: int, max_positions: int) -> torch.Tensor:
    """Return cosines and sines of a layer, [max_positions, 1, head_dim / 2, 2]."""
    is_rotated, config = config.layer_rope(index) is not None, config.at(index)
    if not is_rotated:
        return torch.tensor((1.0, 0.0)).expand(max_positions, 1, config.head_dim // 2, 2)
    table = RopeTable.build(config, max_positions)
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
    out = layer.mlp.add_to(torch.zeros_like(hidden), normed)
    if layer.beside is not None:
        out = layer.beside.add_to(out, hidden)
    return hidden + layer.down_norm(out)


def _layer(
    config: DecoderConfig, weights: dict[str, torch.Tensor], index: int, device: torch.device
) -> Layer:
    prefix = f"layers.{index}."
    names = [name for name in weights if name.startswith(prefix)]
    mine = {name.removeprefix(prefix): weights.pop(name).to(device) for name in names}
    variant, owns_kv = config.variant, config.shape(index).kv_layer == index
    config = config.at(index)

    def norm(name: str) -> RmsNorm | None:
        return RmsNorm(mine[name], config.rms_norm_eps) if name in mine else None

    delta = None
    if "linear_in" in mine:
        qkv, delta = mine["linear_in"], ConvWeights.from_weights(mine)
    elif "linear_qkv" in mine:
        qkv, delta = mine["linear_qkv"], DeltaWeights.from_weights(mine)
    else:
        qkv = _pair_rows(config, mine["qkv"])
    has_norms, bias = "q_norm" in mine, mine.get("qkv_bias")
    num_kv_heads = config.num_kv_heads if owns_kv else 0
    value_norm = None
    if variant.value_norm:
        value_norm = RmsNorm(torch.ones(config.head_dim, device=device), config.rms_norm_eps)
    ple = None
    if variant.ple_size:
        gate, out = mine["ple_gate"].t(), mine["ple_out"].t()
        ple_norm = RmsNorm(mine["ple_norm"], config.rms_norm_eps)
        ple = PleMlp(gate, out, ple_norm, variant.activation)
    return Layer(
        head_dim=config.head_dim,
        num_kv_heads=num_kv_heads,
        input_norm=norm("input_norm"),
        qkv=qkv.t().contiguous(),
        qkv_bias=None if bias is None else _pair_rows(config, bias),
        qk_norm=_qk_norm(config, mine, num_kv_heads) if has_norms else None,
        o=mine["o"].t(),
        o_bias=mine.get("o_bias"),
        o_norm=norm("o_norm"),
        post_norm=RmsNorm(mine["post_norm"], config.rms_norm_eps),
        mlp=_make_mlp(config, mine, index),
        down_norm=norm("down_norm"),
        delta=delta,
        sinks=mine.get("sinks"),
        value_norm=value_norm,
        ple=ple,
        beside=_beside(config, mine),
        scale=float(mine.get("scale", 1.0)),
        gated=config.variant.gated,
    )


def _make_mlp(
    config: DecoderConfig, weights: dict[str, torch.Tensor], index: int
) -> DenseMlp | ExpertMlp:
    """Build the MLP of one layer from its weights."""
    activation, experts = config.variant.activation, config.variant.experts

    def dense(own: str = "") -> DenseMlp:
        gate_up, down = weights[f"{own}gate_up"], weights[f"{own}down"]
        return DenseMlp(gate_up.t().contiguous(), down.t(), activation)

    if experts is None or experts.beside or "router" not in weights:
        return dense()
    biases = None
    if experts.bias:
        gate, up, of_down = (
            weights[f"{name}_bias"].view(experts.count, -1) for name in ("gate", "up", "down")
        )
        biases = weights["router_bias"], torch.cat((gate, up), dim=1), of_down
    return ExpertMlp(
        router=weights["router"],
        choice_bias=weights.get("choice_bias"),
        gate_up=weights["gate_up"],
        down=weights["down"],
        shared=dense("shared_") if experts.shared_size else None,
        experts=experts,
        activation=activation,
        biases=biases,
    )


def _beside(config: DecoderConfig, weights: dict[str, torch.Tensor]) -> ExpertsBeside | None:
    """Build the experts that are beside a dense MLP; None without."""
    experts = config.variant.experts
    if experts is None or "experts_gate_up" not in weights:
        return None
    weights["router_norm"] *= config.hidden_size**-0.5
    mlp = ExpertMlp(
        router=weights["router"],
        choice_bias=None,
        gate_up=weights["experts_gate_up"],
        down=weights["experts_down"],
        shared=None,
        experts=experts,
        activation=config.variant.activation,
        scales=weights["experts_scale"],
    )
    norms = ("router_norm", "experts_norm", "experts_out_norm", "dense_norm")
    return ExpertsBeside(mlp, *(RmsNorm(weights[x], config.rms_norm_eps) for x in norms))


def _pair_rows(config: DecoderConfig, qkv: torch.Tensor) -> torch.Tensor:
    """Make the rotary pairs of query and key heads neighbours; gates' rows, if any, come last."""
    gates = config.q_size if config.variant.gated else 0
    kv_size = (len(qkv) - config.q_size - gates) // 2  # 0 in a layer that reads another's
    q, gate, k, v = qkv.split((config.q_size, gates, kv_size, kv_size))
    qk = torch.cat((q, k)).unflatten(0, (-1, config.head_dim))
    return torch.cat((_pair(qk, dim=1).flatten(0, 1), v, gate))


def _pair(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _qk_norm(config: DecoderConfig, weights: dict[str, torch.Tensor], num_kv_heads: int) -> RmsNorm:
    """Build the norm of every head, one row of weights each: queries, scaled, then keys."""
    rows = [weights["q_norm"].float() * config.variant.query_scale] * config.num_heads
    if num_kv_heads:
        rows += [weights["k_norm"].float()] * num_kv_heads
    return RmsNorm(_pair(torch.stack(rows), dim=1), config.rms_norm_eps)
