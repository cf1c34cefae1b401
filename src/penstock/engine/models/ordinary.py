"""Configurations read without transformers, whose configuration classes take seconds to import."""

from __future__ import annotations

from types import NoneType, SimpleNamespace
from typing import Any

_ALWAYS_THERE: dict[str, tuple[type, ...]] = {
    "vocab_size": (int,),
    "hidden_size": (int,),
    "intermediate_size": (int,),
    "num_hidden_layers": (int,),
    "num_attention_heads": (int,),
    "num_key_value_heads": (int,),
    "max_position_embeddings": (int,),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "tie_word_embeddings": (bool,),
    "eos_token_id": (int, NoneType, list),
}
"""Required fields and types; where one is missing or of another type transformers decides."""

_IF_THERE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0,),
    "original_max_position_embeddings": (None,),
    "is_causal": (True,),
}
"""Optional fields, and the only values that are read here."""

_DTYPES = ("float32", "bfloat16", "float16")

_ALSO_THERE: dict[str, dict[str, tuple[type, ...]]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": (int,)},
}
"""Further required fields by architecture; other architectures are read by transformers."""


def ordinary_config(architecture: str, content: dict[str, Any]) -> Any:
    """Return config.json as an object like transformers', or None where transformers is needed.

    It is needed where it would fill in, derive or refuse a field that is read here."""
    also = _ALSO_THERE.get(architecture)
    if also is None:
        return None
    head_dim = {"head_dim": (int, NoneType)} if "head_dim" in content else {}
    types = _ALWAYS_THERE | head_dim | also
    if not all(name in content and type(content[name]) in kinds for name, kinds in types.items()):
        return None
    for name, allowed in _IF_THERE.items():
        if name in content and not any(_is_same(content[name], value) for value in allowed):
            return None
    dtype = content.get("dtype") or content.get("torch_dtype")
    rope = _plain_rope(content)
    if dtype not in _DTYPES or rope is None or not _is_divisible(content):
        return None
    ends = content["eos_token_id"]
    if isinstance(ends, list) and not all(type(end) is int for end in ends):
        return None
    layers = content.get("layer_types") or ["full_attention"] * content["num_hidden_layers"]
    if not isinstance(layers, list) or not all(kind == "full_attention" for kind in layers):
        return None
    found = {"layer_types": layers, "sliding_window": None, "dtype": dtype}
    return SimpleNamespace(**content | found | {"rope_parameters": rope})


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _is_divisible(content: dict[str, Any]) -> bool:
    heads = content["num_attention_heads"]
    return heads > 0 and content["hidden_size"] % heads == 0


def _plain_rope(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return unscaled rotary parameters from either spelling, else None."""
    rope = content.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": content.get("rope_theta"), "rope_type": "default"}
    is_plain = (
        isinstance(rope, dict)
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) in (int, float)
    )
    return rope if is_plain else None
