"""Supported architectures: names of their configuration fields and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.engine.models.rope import Rope
from penstock.engine.models.variant import (
    CLAMP,
    CLAMPED_SLOPE,
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
    counts_scaled: max_position_embeddings includes what the rotary embedding's scaling adds
    shared:      the experts that every token has
    router:      of experts
    dtype:       where config.json does not say it
    usual_fields: the other families' configuration fields that this one spells otherwise
    renamed:     parts of the tensors' usual names, and theirs"""

    model_type: str
    variant: Callable[[Any], Variant]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    post_norm: str = "post_attention_layernorm"
    norm_offset: float = 0.0
    partial_rotary: bool = False
    counts_scaled: bool = False
    shared: str = "shared_expert"
    router: str = "gate"
    dtype: torch.dtype = torch.float32
    usual_fields: Callable[[Any], dict[str, Any]] = lambda _: {}
    renamed: tuple[tuple[str, str], ...] = ()


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
    every = frozenset(range(config.num_hidden_layers))
    return Variant(
        bias=_attention_bias(config),
        qk_norm=True,
        activation=_activation(config.hidden_act),
        window=_window(config, every) if config.use_sliding_window else None,
        experts=_experts(config),
    )


def _experts(config: Any, shared_size: int = 0) -> Experts:
    """Return the experts of Qwen's models. shared_size: as of `Experts`."""
    only = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    layers = range(config.num_hidden_layers)
    dense = frozenset(i for i in layers if i in only or (i + 1) % step)
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        getattr(config, "norm_topk_prob", True),
        shared_size=shared_size,
        gates_shared=shared_size > 0,
        dense=dense,
        dense_size=config.intermediate_size if dense else 0,
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


def _qwen3_5_moe(config: Any) -> Variant:
    experts = _experts(config, config.shared_expert_intermediate_size)
    return replace(_qwen3_5(config), experts=experts)


def _qwen3_next(config: Any) -> Variant:
    found = _qwen3_5_moe(config)
    assert found.delta is not None
    mixed = getattr(config, "linear_mixed", ("in_proj_qkvz", "in_proj_ba"))
    return replace(found, delta=replace(found.delta, mixed=tuple(mixed)))


def _glm4_moe(config: Any) -> Variant:
    if config.n_group != 1:
        raise ValueError(f"n_group is {config.n_group}; allowed: 1, as groups are not computed")
    dense = frozenset(range(min(config.first_k_dense_replace, config.num_hidden_layers)))
    return Variant(
        bias="qkv" if config.attention_bias else "none",
        qk_norm=config.use_qk_norm,
        activation=_activation(config.hidden_act),
        experts=Experts(
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            sigmoid_scores=True,
            chosen_with_bias=True,
            scale=float(config.routed_scaling_factor),
            shared_size=config.moe_intermediate_size * config.n_shared_experts,
            dense=dense,
            dense_size=config.intermediate_size if dense else 0,
        ),
    )


def _gpt_oss(config: Any) -> Variant:
    if not config.num_local_experts:
        raise ValueError("num_local_experts is 0; must be a whole number above 0")
    computed = {"hidden_act": "silu", "swiglu_alpha": CLAMPED_SLOPE, "swiglu_limit": CLAMP}
    for key, only in computed.items():
        if getattr(config, key, only) != only:
            raise ValueError(f"{key} is {getattr(config, key)!r}; allowed: {only!r}")
    return Variant(
        bias=_attention_bias(config),
        activation="clamped",
        window=_window(config, _windowed_layers(config)),
        experts=Experts(config.num_local_experts, config.num_experts_per_tok, True, bias=True),
        sinks=True,
    )


def _smollm3(config: Any) -> Variant:
    rotated = config.no_rope_layers
    if len(rotated) != config.num_hidden_layers:
        raise ValueError(f"no_rope_layers is {rotated}; one number for each layer is needed")
    return replace(
        _llama(config),
        window=_window(config, _windowed_layers(config)),
        unrotated=frozenset(i for i, flag in enumerate(rotated) if not flag),
    )


def _ministral3(config: Any) -> Variant:
    growth = config.rope_parameters.get("llama_4_scaling_beta") or 0.0
    period = config.rope_parameters.get("original_max_position_embeddings")
    if growth and type(period) is not int:
        raise ValueError("llama_4_scaling_beta needs original_max_position_embeddings")
    return replace(_mistral(config), query_growth=growth, query_period=period or 1)


def _granite(config: Any) -> Variant:
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ValueError("some layers are of Mamba-2 (layer_types); not computed yet")
    if getattr(config, "num_local_experts", 0):
        raise ValueError("num_local_experts is not 0; its experts are not computed yet")
    is_rotated = getattr(config, "position_embedding_type", "rope") is not None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return replace(
        _llama(config),
        query_scale=config.attention_multiplier * math.sqrt(head_dim),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
        unrotated=frozenset(() if is_rotated else range(config.num_hidden_layers)),
    )


def _lfm2(config: Any) -> Variant:
    if config.conv_bias:
        raise ValueError("conv_bias is true; allowed: false")
    layers, width = _layers_of(config, "conv"), config.hidden_size
    conv = DeltaNet(layers, 0, 1, key_dim=0, value_dim=width, kernel=config.conv_L_cache)
    return Variant(qk_norm=True, delta=conv if layers else None)


def _lfm2_fields(config: Any) -> dict[str, Any]:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int((config.block_ffn_dim_multiplier or 1) * int(2 * inner / 3))
        inner = config.block_multiple_of * math.ceil(inner / config.block_multiple_of)
    return {"rms_norm_eps": config.norm_eps, "intermediate_size": inner}


def _gemma4(config: Any) -> Variant:
    experts = None
    if config.enable_moe_block:
        experts = Experts(config.num_experts, config.top_k_experts, True, beside=True)
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
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text", _qwen3_5_moe, norm_offset=1.0, partial_rotary=True
    ),
    "Qwen3NextForCausalLM": Family("qwen3_next", _qwen3_next, norm_offset=1.0, partial_rotary=True),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", _glm4_moe, partial_rotary=True, shared="shared_experts"
    ),
    "GptOssForCausalLM": Family("gpt_oss", _gpt_oss, router="router", dtype=torch.bfloat16),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3),
    "Ministral3ForCausalLM": Family("ministral3", _ministral3, counts_scaled=True),
    "GraniteForCausalLM": Family("granite", _granite),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        _granite,
        gate_up=("input_linear",),
        usual_fields=lambda config: {"intermediate_size": config.shared_intermediate_size},
        renamed=((".mlp.", ".shared_mlp."), (".down_proj.", ".output_linear.")),
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        _lfm2,
        gate_up=("w1", "w3"),
        post_norm="ffn_norm",
        usual_fields=_lfm2_fields,
        renamed=(
            (".input_layernorm.", ".operator_norm."),
            *((f".{x}_norm.", f".{x}_layernorm.") for x in "qk"),
            *((".o_proj.", ".out_proj."), ("model.norm.", "model.embedding_norm.")),
            *((".mlp.", ".feed_forward."), (".down_proj.", ".w2.")),
        ),
    ),
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
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
}
"""Text parts of models that also read images, unless their model_type is another's."""


MISSING = dict.fromkeys(
    ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "deepseek2"),
    "attention over latent keys and values (MLA)",
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
