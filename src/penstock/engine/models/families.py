"""Supported architectures: names of their configuration fields and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.engine.models.rope import Rope
from penstock.engine.models.variant import (
    Activation,
    Bias,
    DeltaNet,
    Experts,
    LayerShape,
    SlidingWindow,
    Variant,
)

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """Checkpoints of one architecture in Hugging Face layout.

    model_type:  model_type in config.json
    variant:     differences from Llama, from transformers' configuration object; raises
                 ValueError for unsupported settings
    qkv, gate_up: tensors whose rows are concatenated
    post_norm:   the norm before the MLP
    norm_offset: added to the norms' weights
    partial_rotary: partial_rotary_factor is used
    counts_scaled: max_position_embeddings includes what the rotary embedding's scaling adds"""

    model_type: str
    variant: Callable[[Any], Variant]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    post_norm: str = "post_attention_layernorm"
    norm_offset: float = 0.0
    partial_rotary: bool = False
    counts_scaled: bool = False


def _llama(config: Any) -> Variant:
    # The other families ignore these keys.
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias is true; allowed: false")
    return Variant(bias=_attention_bias(config), activation=_activation(config.hidden_act))


def _mistral(config: Any) -> Variant:
    every = frozenset(range(config.num_hidden_layers))
    return Variant(activation=_activation(config.hidden_act), window=_window(config, every))


def _qwen2(config: Any) -> Variant:
    return Variant(
        bias="qkv",
        activation=_activation(config.hidden_act),
        window=_window(config, _windowed_layers(config)),
    )


def _qwen3(config: Any) -> Variant:
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        activation=_activation(config.hidden_act),
        window=_window(config, _windowed_layers(config)),
    )


def _qwen3_moe(config: Any) -> Variant:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ValueError("some layers have no experts (mlp_only_layers, decoder_sparse_step)")
    every = frozenset(range(config.num_hidden_layers))
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        activation=_activation(config.hidden_act),
        window=_window(config, every) if config.use_sliding_window else None,
        experts=Experts(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob),
    )


def _gemma3(config: Any) -> Variant:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            raise ValueError(f"{key} is {getattr(config, key)}; allowed: null")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is true; allowed: false")
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        query_scale=math.sqrt(config.head_dim / config.query_pre_attn_scalar),
        post_norms=True,
        activation=_activation(config.hidden_activation),
        embedding_scale=math.sqrt(config.hidden_size),
        window=_window(config, _windowed_layers(config), _local_rope(config)),
    )


def _qwen3_5(config: Any) -> Variant:
    if not getattr(config, "attn_output_gate", True):
        raise ValueError("attn_output_gate is false; allowed: true")
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        gated=True,
        activation=_activation(config.hidden_act),
        delta=DeltaNet(
            layers=_layers_of(config, "linear_attention"),
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
            strided=getattr(config, "linear_value_heads_strided", False),
        ),
    )


def _gemma4(config: Any) -> Variant:
    experts = None
    if config.enable_moe_block:
        size = config.moe_intermediate_size
        experts = Experts(config.num_experts, config.top_k_experts, True, beside=size)
    ple_size = config.hidden_size_per_layer_input or 0
    if ple_size and config.vocab_size_per_layer_input != config.vocab_size:
        raise ValueError("vocab_size_per_layer_input differs from vocab_size; allowed: equal")
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        query_scale=math.sqrt(config.per_layer_config[0].head_dim),
        post_norms=True,
        activation=_activation(config.hidden_activation),
        embedding_scale=math.sqrt(config.hidden_size),
        window=_window(config, _windowed_layers(config), _local_rope(config)),
        experts=experts,
        value_norm=True,
        layer_scale=True,
        ple_size=ple_size,
        softcap=config.final_logit_softcapping or 0.0,
        shapes=_gemma4_shapes(config),
    )


def _gemma4_shapes(config: Any) -> tuple[LayerShape, ...]:
    kinds, shapes = config.layer_types, []
    first = config.num_hidden_layers - config.num_kv_shared_layers
    for index, kind in enumerate(kinds):
        own, inner, reads = config.per_layer_config[index], config.intermediate_size, index
        if index >= first:
            if kind not in kinds[:first]:
                raise ValueError(f"num_kv_shared_layers leaves no layer of {kind} with keys")
            reads = first - 1 - kinds[:first][::-1].index(kind)
            inner *= 1 + config.use_double_wide_mlp
        is_both = config.attention_k_eq_v and kind == "full_attention"
        heads = (own.head_dim, own.num_key_value_heads)
        shapes.append(LayerShape(*heads, inner, reads, keys_are_values=is_both))
    return tuple(shapes)


FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("mistral", _mistral),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe),
    "Phi3ForCausalLM": Family(
        "phi3",
        _mistral,
        qkv=("self_attn.qkv_proj",),
        gate_up=("gate_up_proj",),
        partial_rotary=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _gemma3,
        post_norm="pre_feedforward_layernorm",
        norm_offset=1.0,
        counts_scaled=True,
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", _qwen3_5, norm_offset=1.0, partial_rotary=True),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        _gemma4,
        post_norm="pre_feedforward_layernorm",
        partial_rotary=True,
        counts_scaled=True,
    ),
}
"""Families by the name in config.json's architectures."""

TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
}
"""Text parts of models that also read images."""


_SHARED_EXPERTS = "experts that every token has (shared experts)"
MISSING = dict.fromkeys(
    (
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3next",
        "qwen35moe",
    ),
    _SHARED_EXPERTS,
)
"""Missing parts of other architectures, by name in config.json and in GGUF."""


def rope_of(architecture: str, config: Any) -> Rope:
    """Return the rotary embedding of layers without a window. Raises ValueError if unsupported."""
    values = _rope_values(config, "full_attention")
    family = FAMILIES[architecture]
    if not family.partial_rotary and values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1; allowed: rotation of the whole head")
    if (original := getattr(config, "original_max_position_embeddings", None)) is not None:
        # Transformers too prefers the value at the top of config.json.
        values["original_max_position_embeddings"] = original
    original = values.get("original_max_position_embeddings")
    if (
        values.get("rope_type") in ("yarn", "longrope")
        and values.get("factor") is None
        and original
    ):
        values["factor"] = config.max_position_embeddings / original
    return Rope.from_transformers(values)


def _rope_values(config: Any, layer_type: str) -> dict[str, Any]:
    """Return rope_parameters (transformers 5), or rope_theta with rope_scaling (4)."""
    values = dict(getattr(config, "rope_parameters", None) or {})
    if layer_type in values:
        values = dict(values[layer_type])
    elif not values:
        values = {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}
        values["partial_rotary_factor"] = getattr(config, "partial_rotary_factor", 1.0)
    return values


def _local_rope(config: Any) -> Rope:
    if getattr(config, "rope_parameters", None):
        return Rope.from_transformers(_rope_values(config, "sliding_attention"))
    return Rope(float(config.rope_local_base_freq))


def _window(config: Any, layers: frozenset[int], rope: Rope | None = None) -> SlidingWindow | None:
    """Return the sliding window; None where every layer sees all positions of the model."""
    size = config.sliding_window
    if not layers or size is None:
        return None
    if rope is None and size >= config.max_position_embeddings:
        return None
    return SlidingWindow(size, layers, rope)


def _windowed_layers(config: Any) -> frozenset[int]:
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ValueError("sliding_window is missing; layer_types asks for sliding_attention")
    return _layers_of(config, "sliding_attention")


def _layers_of(config: Any, other: str) -> frozenset[int]:
    """Return the layers of the other kind that the architecture has beside full attention."""
    kinds, known = config.layer_types, {"full_attention", other}
    if not known.issuperset(kinds) or len(kinds) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types is {kinds}; allowed: {', '.join(sorted(known))}, one for each layer"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind == other)


def _attention_bias(config: Any) -> Bias:
    return "qkvo" if getattr(config, "attention_bias", False) else "none"


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; allowed: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
