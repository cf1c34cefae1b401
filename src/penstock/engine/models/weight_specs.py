"""Names and shapes of a decoder's tensors, here and in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.engine.models.checkpoint import HEAD_PROJECTION, LM_HEAD
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.families import FAMILIES, Family
from penstock.engine.models.variant import LLAMA, DeltaNet, LayerShape

EMBEDDINGS = "model.embed_tokens.weight"
_HEAD_NORMS = {
    "embed_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}
_EAGLE_NORMS = {
    "head.embed_norm": "midlayer.input_layernorm",
    "head.hidden_norm": "midlayer.hidden_norm",
    "head.norm": "norm",
    "{}.post_norm": "midlayer.post_attention_layernorm",
}
_PLAIN: dict[str, Any] = {"architecture": "LlamaForCausalLM", "variant": LLAMA}
"""An EAGLE-3 head's layer, whatever the model's are."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name and shape of a tensor, and the checkpoint tensors that are stacked along its rows.

    offset: added to them; factor: they are multiplied by it then. orders: the rows taken of each
    source, if not all as they are."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    offset: float = 0.0
    factor: float = 1.0
    orders: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    @property
    def stays_float32(self) -> bool:
        """True for norms, routers and what a recurrent state depends on: float32 in any dtype."""
        names = (
            "norm",
            "router",
            "router_bias",
            "choice_bias",
            ".conv",
            ".dt_bias",
            ".a_log",
            "sinks",
            "scale",
        )
        return self.name.endswith(names)


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a decoder's tensors, all in `dtype`, as on a GPU.

    The native runner keeps quantised and bfloat16 matrices as stored."""
    specs = (*weight_specs(config), *head_specs(config))
    beside = 0 if config.assistant is None else weight_bytes(config.assistant, dtype)
    return beside + sum(math.prod(spec.shape) for spec in specs) * dtype.itemsize


def weight_specs(config: DecoderConfig) -> Iterator[WeightSpec]:
    """Yield every tensor of a decoder, in the order in which the forward pass reads them.

    embed_tokens              [vocab_size, hidden_size]
    layers.I.input_norm       [hidden_size]
    layers.I.qkv              [q_size + 2 * kv_size, hidden_size]: query, key, value rows; with
                              variant.gated q_size more, the gates', behind the queries
    layers.I.qkv_bias         [q_size + 2 * kv_size], if variant.qkv_bias
    layers.I.q_norm, k_norm   [head_dim], if variant.qk_norm
    layers.I.o                [hidden_size, q_size]
    layers.I.o_bias           [hidden_size], if variant.o_bias
    layers.I.sinks            [num_heads], if variant.sinks
    layers.I.o_norm           [hidden_size], if variant.post_norms: of attention's output
    layers.I.post_norm        [hidden_size]: before the MLP
    layers.I.gate_up          [2 * intermediate_size, hidden_size]: gate rows, then up rows
    layers.I.down             [hidden_size, intermediate_size]
    layers.I.down_norm        [hidden_size], if variant.post_norms: of the MLP's output
    norm                      [hidden_size]
    lm_head                   [vocab_size, hidden_size], unless config.tie_word_embeddings

    With variant.experts gate_up and down have a leading axis of experts, and there are

    layers.I.router           [experts, hidden_size]; with gates_shared one row more, its last
    layers.I.choice_bias      [experts], if chosen_with_bias
    layers.I.shared_gate_up   [2 * shared_size, hidden_size], if there are shared experts
    layers.I.shared_down      [hidden_size, shared_size]
    layers.I.router_bias      [experts], if experts.bias; and of all experts one after the other
    layers.I.gate_bias, up_bias, down_bias

    Recurrent layers have, in place of everything from qkv to o_bias,

    layers.I.linear_qkv       [delta.conv_size, hidden_size]: query, key, value rows
    layers.I.linear_z         [delta.value_size, hidden_size]: gate of the output
    layers.I.beta, alpha      [value_heads, hidden_size]: strength of the update, decay
    layers.I.conv             [conv_size, 1, kernel]
    layers.I.dt_bias, a_log   [value_heads]
    layers.I.linear_norm      [value_dim]
    layers.I.o                [hidden_size, value_size]

    or, without key heads,

    layers.I.linear_in        [3 * value_size, hidden_size]: gates of the convolution's input and
                              output, input
    layers.I.conv             [value_size, 1, kernel]
    layers.I.o                [hidden_size, value_size]

    Sizes are those of the layer (`DecoderConfig.at`); a layer that reads another's keys and values
    has neither their rows nor k_norm. Further, in some variants,

    ple_embed                 [vocab_size, num_layers * ple_size]: what a token adds to every layer
    ple_proj                  [num_layers * ple_size, hidden_size]; ple_norm [ple_size]
    layers.I.ple_gate         [ple_size, hidden_size]; ple_out its transpose; ple_norm [hidden_size]
    layers.I.scale            [1]: of the layer's output
    layers.I.experts_gate_up  and experts_down of experts beside a dense MLP (`Experts.beside`);
                              experts_norm of their input, experts_out_norm of their sum
    layers.I.experts_scale    [experts]: of what each gives
    layers.I.router_norm      [hidden_size], to be multiplied by hidden_size ** -0.5
    layers.I.dense_norm       [hidden_size]: of what the dense MLP gives
    head.fc                   [hidden_size, 2 * assists]: of an assistant, over embedding and state
    head.out                  [assists, hidden_size]: gives its state"""
    for spec in _usual_specs(config):
        sources = spec.sources
        for usual, theirs in FAMILIES[config.architecture].renamed:
            sources = tuple((name.replace(usual, theirs), shape) for name, shape in sources)
        yield replace(spec, sources=sources)


def _usual_specs(config: DecoderConfig) -> Iterator[WeightSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _spec("embed_tokens", (EMBEDDINGS, (vocab, hidden)))
    if size := config.variant.assists:
        yield _spec("head.fc", ("pre_projection.weight", (hidden, 2 * size)))
        yield _spec("head.out", ("post_projection.weight", (size, hidden)))
    if size := config.variant.ple_size:
        rows = config.num_layers * size
        yield _spec("ple_embed", ("model.embed_tokens_per_layer.weight", (vocab, rows)))
        yield _spec("ple_proj", ("model.per_layer_model_projection.weight", (rows, hidden)))
        yield _norm_spec(config, "ple_norm", "model.per_layer_projection_norm.weight", size)
    for index in range(config.num_layers):
        yield from _layer_specs(config, index)
    norm = _norm_spec(config, "norm", "model.norm.weight", hidden)
    yield replace(norm, factor=config.variant.logit_scale)
    if not config.tie_word_embeddings:
        yield lm_head_spec(config)


def head_specs(config: DecoderConfig) -> Iterator[WeightSpec]:
    """Yield the tensors of a model's head, if it has one: those of a layer more, and its own.

    EAGLE-3's layer has no input_norm, and reads embeddings and states, [..., 2 * hidden_size]."""
    head, hidden, ours = config.head, config.hidden_size, f"layers.{config.num_layers}"
    if head is None:
        return
    if not head.reads:
        yield _spec("head.fc", (HEAD_PROJECTION, (hidden, 2 * hidden)))
        for name, theirs in _HEAD_NORMS.items():
            yield _norm_spec(config, f"head.{name}", f"mtp.{theirs}.weight", hidden)
        yield from _layer_specs(config, config.num_layers, "mtp.layers.0")
        return
    llama = replace(config, intermediate_size=head.intermediate_size, **_PLAIN)
    yield _spec("head.fc", ("fc.weight", (hidden, len(head.reads) * hidden)))
    for name, theirs in _EAGLE_NORMS.items():
        yield _norm_spec(llama, name.format(ours), f"{theirs}.weight", hidden)
    yield _spec("head.lm_head", (LM_HEAD, (head.vocab_size, hidden)))
    yield _spec("head.d2t", ("d2t", (head.vocab_size,)))
    qkv = FAMILIES[llama.architecture].qkv
    yield from _attention_specs(llama, ours, "midlayer", qkv, 2 * hidden)
    yield from _mlp_specs(llama, config.num_layers, ours, "midlayer")


def lm_head_spec(config: DecoderConfig) -> WeightSpec:
    """Return the output matrix, where it is not the embeddings."""
    return _spec("lm_head", (LM_HEAD, (config.vocab_size, config.hidden_size)))


def _spec(name: str, *sources: tuple[str, tuple[int, ...]]) -> WeightSpec:
    rows = sum(shape[0] for _, shape in sources)
    return WeightSpec(name, (rows, *sources[0][1][1:]), sources)


def _norm_spec(config: DecoderConfig, name: str, source: str, size: int) -> WeightSpec:
    offset = FAMILIES[config.architecture].norm_offset
    spec = WeightSpec(name, (size,), ((source, (size,)),), offset)
    of_heads = name.endswith(("q_norm", "k_norm"))
    return replace(spec, orders=_in_pairs(config, torch.arange(size))) if of_heads else spec


def _layer_specs(
    config: DecoderConfig, index: int, theirs: str | None = None
) -> Iterator[WeightSpec]:
    """theirs: the checkpoint's name of the layer, where it is not one of the model's."""
    family, variant, shape = FAMILIES[config.architecture], config.variant, config.shape(index)
    ours, theirs = f"layers.{index}", theirs or f"model.layers.{index}"
    whole, hidden, config = config, config.hidden_size, config.at(index)

    def norm(name: str, source: str, size: int = hidden) -> WeightSpec:
        return _norm_spec(config, f"{ours}.{name}", f"{theirs}.{source}.weight", size)

    yield norm("input_norm", "input_layernorm")
    if variant.delta is not None and index in variant.delta.layers:
        if variant.delta.key_heads:
            yield from _delta_specs(config, ours, f"{theirs}.linear_attn")
        else:
            yield from _conv_specs(config, variant.delta, ours, f"{theirs}.conv")
    else:
        yield from _attention_specs(config, ours, theirs, _heads_of(family, shape, index))
    if variant.post_norms:
        yield norm("o_norm", "post_attention_layernorm")
    yield norm("post_norm", family.post_norm)
    yield from _mlp_specs(config, index, ours, theirs)
    if variant.post_norms:
        yield norm("down_norm", "post_feedforward_layernorm")
    if variant.experts is not None and variant.experts.beside:
        yield from _beside_specs(whole, variant.experts.count, ours, theirs)
        yield norm("experts_norm", "pre_feedforward_layernorm_2")
        yield norm("experts_out_norm", "post_feedforward_layernorm_2")
        yield norm("dense_norm", "post_feedforward_layernorm_1")
    if size := variant.ple_size:
        yield _spec(f"{ours}.ple_gate", (f"{theirs}.per_layer_input_gate.weight", (size, hidden)))
        yield _spec(f"{ours}.ple_out", (f"{theirs}.per_layer_projection.weight", (hidden, size)))
        yield norm("ple_norm", "post_per_layer_input_norm")
    if variant.layer_scale:
        yield _spec(f"{ours}.scale", (f"{theirs}.layer_scalar", (1,)))


def _heads_of(family: Family, shape: LayerShape, index: int) -> tuple[str, ...]:
    """Return the tensors with the rows of queries, keys and values."""
    if shape.kv_layer != index:
        return family.qkv[:1]
    return (*family.qkv[:2], family.qkv[1]) if shape.keys_are_values else family.qkv


def _attention_specs(
    config: DecoderConfig,
    ours: str,
    theirs: str,
    projections: tuple[str, ...],
    width: int | None = None,
) -> Iterator[WeightSpec]:
    """width: of what queries, keys and values are products of, if not hidden_size."""
    variant, is_fused = config.variant, FAMILIES[config.architecture].qkv == projections[:1]
    hidden, q_size = config.hidden_size, config.q_size
    orders = _head_orders(config)[: None if is_fused else len(projections)]
    sizes = [sum(map(len, orders))] if is_fused else map(len, orders)
    rows = [(f"{theirs}.{x}", n) for x, n in zip(projections, sizes, strict=True)]
    if config.rope.is_spread and not variant.gated:
        orders = ()
    elif is_fused:
        starts = (0, q_size, q_size + config.kv_size)
        orders = (torch.cat([start + o for start, o in zip(starts, orders, strict=True)]),)
    width = width or hidden
    qkv = _spec(f"{ours}.qkv", *((f"{x}.weight", (n, width)) for x, n in rows))
    yield replace(qkv, orders=orders)
    if variant.qkv_bias:
        bias = _spec(f"{ours}.qkv_bias", *((f"{x}.bias", (n,)) for x, n in rows))
        yield replace(bias, orders=orders)
    if variant.qk_norm:
        has_keys = is_fused or len(projections) > 1
        for x in ("q_norm", "k_norm") if has_keys else ("q_norm",):
            source = f"{theirs}.self_attn.{x}.weight"
            yield _norm_spec(config, f"{ours}.{x}", source, config.head_dim)
    yield _spec(f"{ours}.o", (f"{theirs}.self_attn.o_proj.weight", (hidden, q_size)))
    if variant.o_bias:
        yield _spec(f"{ours}.o_bias", (f"{theirs}.self_attn.o_proj.bias", (hidden,)))
    if variant.sinks:
        yield _spec(f"{ours}.sinks", (f"{theirs}.self_attn.sinks", (config.num_heads,)))


def _head_orders(config: DecoderConfig) -> tuple[torch.Tensor, ...]:
    """Return a checkpoint's rows of queries (and gates), of keys and of values, as they lie here.

    With gates a head's rows are its query, then its gate; here the gates of all heads follow."""
    query = torch.arange(config.q_size)
    if config.variant.gated:
        both = torch.arange(2 * config.q_size).view(config.num_heads, 2, config.head_dim)
        query, gate = both[:, 0].flatten(), both[:, 1].flatten()
    keys = torch.arange(config.kv_size)
    query, key = _in_pairs(config, query)[0], _in_pairs(config, keys)[0]
    return torch.cat((query, gate)) if config.variant.gated else query, key, keys


def _in_pairs(config: DecoderConfig, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (config.rope.spread_pairs(rows, config.head_dim),)


def _delta_specs(config: DecoderConfig, ours: str, theirs: str) -> Iterator[WeightSpec]:
    delta, hidden = config.variant.delta, config.hidden_size
    assert delta is not None
    heads, size = delta.value_heads, delta.value_size
    for name, (apart, mixed, order) in _projections(delta).items():
        if mixed not in delta.mixed:
            yield _spec(f"{ours}.{name}", (f"{theirs}.{apart}.weight", (len(order), hidden)))
            continue
        rows = 2 * heads if mixed == "in_proj_ba" else delta.conv_size + size
        spec = _spec(f"{ours}.{name}", (f"{theirs}.{mixed}.weight", (rows, hidden)))
        yield replace(spec, shape=(len(order), hidden), orders=(order,))
    yield _spec(f"{ours}.conv", (f"{theirs}.conv1d.weight", (delta.conv_size, 1, delta.kernel)))
    yield _spec(f"{ours}.dt_bias", (f"{theirs}.dt_bias", (heads,)))
    yield _spec(f"{ours}.a_log", (f"{theirs}.A_log", (heads,)))
    yield _spec(f"{ours}.linear_norm", (f"{theirs}.norm.weight", (delta.value_dim,)))
    yield _spec(f"{ours}.o", (f"{theirs}.out_proj.weight", (hidden, size)))


def _projections(delta: DeltaNet) -> dict[str, tuple[str, str, torch.Tensor]]:
    """Return where the projections of a recurrent layer lie in a checkpoint, by their names here.

    That is a matrix of its own, or one that mixes several, by key heads, and which of its rows."""
    key, value = delta.key_dim, delta.value_size // delta.key_heads
    rows = torch.arange(delta.conv_size + delta.value_size).view(delta.key_heads, -1)
    *qkv, z = (x.flatten() for x in rows.split((key, key, value, value), dim=1))
    gates = torch.arange(2 * delta.value_heads).view(delta.key_heads, 2, -1)
    return {
        "linear_qkv": ("in_proj_qkv", "in_proj_qkvz", torch.cat(qkv)),
        "linear_z": ("in_proj_z", "in_proj_qkvz", z),
        "beta": ("in_proj_b", "in_proj_ba", gates[:, 0].flatten()),
        "alpha": ("in_proj_a", "in_proj_ba", gates[:, 1].flatten()),
    }


def _conv_specs(
    config: DecoderConfig, conv: DeltaNet, ours: str, theirs: str
) -> Iterator[WeightSpec]:
    hidden, size = config.hidden_size, conv.value_size
    yield _spec(f"{ours}.linear_in", (f"{theirs}.in_proj.weight", (3 * size, hidden)))
    yield _spec(f"{ours}.conv", (f"{theirs}.conv.weight", (size, 1, conv.kernel)))
    yield _spec(f"{ours}.o", (f"{theirs}.out_proj.weight", (hidden, size)))


def _mlp_specs(config: DecoderConfig, index: int, ours: str, theirs: str) -> Iterator[WeightSpec]:
    family, experts = FAMILIES[config.architecture], config.variant.experts
    hidden, inner, folder = config.hidden_size, config.shape(index).inner_size, f"{theirs}.mlp"
    if experts is None or experts.beside or index in experts.dense:
        yield from _gate_up_down(config, f"{ours}.", [folder], inner)
        return
    router = [(f"{folder}.{family.router}.weight", (experts.count, hidden))]
    if experts.gates_shared:
        router.append((f"{folder}.{family.shared}_gate.weight", (1, hidden)))
    yield _spec(f"{ours}.router", *router)
    if experts.bias:
        yield _spec(f"{ours}.router_bias", (f"{folder}.{family.router}.bias", (experts.count,)))
    if experts.chosen_with_bias:
        bias = f"{folder}.gate.e_score_correction_bias"
        yield _spec(f"{ours}.choice_bias", (bias, (experts.count,)))
    folders = [f"{folder}.experts.{i}" for i in range(experts.count)]
    yield from _gate_up_down(config, f"{ours}.", folders, inner, experts.count)
    if experts.bias:
        for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
            biases = ((f"{of_one}.{name}_proj.bias", (size,)) for of_one in folders)
            yield _spec(f"{ours}.{name}_bias", *biases)
    if experts.shared_size:
        folders = [f"{folder}.{family.shared}"]
        yield from _gate_up_down(config, f"{ours}.shared_", folders, experts.shared_size)


def _beside_specs(
    config: DecoderConfig, count: int, ours: str, theirs: str
) -> Iterator[WeightSpec]:
    """config: of the whole model, as `at` a layer it has the dense MLP's size."""
    hidden, inner, folder = config.hidden_size, config.intermediate_size, f"{theirs}.experts"
    yield _spec(f"{ours}.router", (f"{theirs}.router.proj.weight", (count, hidden)))
    yield _spec(f"{ours}.router_norm", (f"{theirs}.router.scale", (hidden,)))
    yield _spec(f"{ours}.experts_scale", (f"{theirs}.router.per_expert_scale", (count,)))
    gate_up = (f"{folder}.gate_up_proj", (count, 2 * inner, hidden))
    yield _spec(f"{ours}.experts_gate_up", gate_up)
    yield _spec(f"{ours}.experts_down", (f"{folder}.down_proj", (count, hidden, inner)))


def _gate_up_down(
    config: DecoderConfig, ours: str, folders: list[str], inner: int, *own: int
) -> Iterator[WeightSpec]:
    """Yield the matrices of an MLP. own: the leading axis of experts, which have a folder each."""
    names, hidden = FAMILIES[config.architecture].gate_up, config.hidden_size
    gate_up = (2 * inner // len(names), hidden)
    yield WeightSpec(
        f"{ours}gate_up",
        (*own, 2 * inner, hidden),
        tuple((f"{folder}.{name}.weight", gate_up) for folder in folders for name in names),
    )
    yield WeightSpec(
        f"{ours}down",
        (*own, hidden, inner),
        tuple((f"{folder}.down_proj.weight", (hidden, inner)) for folder in folders),
    )
