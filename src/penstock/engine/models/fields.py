"""Checks of the values of a config.json, before transformers reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_WHOLE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "decoder_sparse_step",
    "shared_expert_intermediate_size",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "shared_intermediate_size",
    "conv_L_cache",
)
_WHOLE_OR_NULL = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "original_max_position_embeddings",
    "moe_intermediate_size",
    "num_experts",
    "global_head_dim",
    "num_global_key_value_heads",
    "top_k_experts",
)
_NUMBERS = (
    *("rms_norm_eps", "query_pre_attn_scalar", "rope_local_base_freq", "norm_eps"),
    *(
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "routed_scaling_factor",
    ),
)
_NUMBERS_OR_NULL = ("rope_theta", "partial_rotary_factor")
_BOOLEANS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "use_qk_norm",
    "attention_k_eq_v",
    "use_double_wide_mlp",
    "enable_moe_block",
)
_DTYPES = ("float32", "bfloat16", "float16")
_TEXTS = ("hidden_act", "hidden_activation")
_ROPES = ("rope_parameters", "rope_scaling")
_TYPES = ("rope_type", "type")

_LIBRARY = re.compile(r"^(Class v|V)alidation error for \w+ '[^']*': \w+: ")
"""Prefix of transformers' own messages: the class and check they come from."""


def check_fields(content: Mapping[str, Any]) -> None:
    """Raises ValueError for an impossible value.

    Missing values are not checked: transformers knows the defaults."""
    for name, must in _faults(content):
        raise ValueError(f"{name} is {content[name]!r}; must be {must}")
    for name in _ROPES:
        _check_rope(name, content.get(name))


def in_words(error: Exception, content: Mapping[str, Any]) -> str:
    """Return a one-line message for an error of transformers in a configuration."""
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    if hidden and heads and hidden % heads:
        return f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
    told = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return f"cannot be used: {_LIBRARY.sub('', ' '.join(told.split()))}"


def are_ids(value: Any) -> bool:
    """Return whether a value is a token id, a list of them, or null."""
    listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return all(type(one) is int and one >= 0 for one in listed)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Both spellings of eos_token_id: one id, or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _faults(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names of impossible values, and the allowed values."""

    def given(*names: str) -> Iterator[tuple[str, Any]]:
        return ((name, content[name]) for name in names if name in content)

    for name, value in given(*_WHOLE, *_WHOLE_OR_NULL):
        is_null = value is None and name in _WHOLE_OR_NULL
        if not is_null and (type(value) is not int or value < 1):
            yield name, "a whole number above 0"
    for name, value in given(*_NUMBERS, *_NUMBERS_OR_NULL):
        is_null = value is None and name in _NUMBERS_OR_NULL
        if not is_null and not _is_above_0(value):
            yield name, "a number above 0"
    for name, value in given(*_BOOLEANS):
        if not isinstance(value, bool):
            yield name, "true or false"
    for name, value in given("dtype", "torch_dtype"):
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            yield name, " or ".join(_DTYPES)
    for name, value in given(*_TEXTS):
        if not isinstance(value, str):
            yield name, "a string"
    for name, value in given("layer_types"):
        is_list = isinstance(value, list) and all(isinstance(kind, str) for kind in value)
        if value is not None and not is_list:
            yield name, "a list of strings"
    for name, value in given("eos_token_id"):
        if not are_ids(value):
            yield name, "a token id or a list of them"


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _check_rope(where: str, values: Any) -> None:
    """Raises ValueError."""
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{where} is {values!r}; must be an object")
    for name, value in (values or {}).items():
        if isinstance(value, dict):
            _check_rope(f"{where}.{name}", value)
        elif name in _TYPES and not isinstance(value, str | None):
            raise ValueError(f"{where}.{name} is {value!r}; must be a string")
        elif name == "rope_theta" and not _is_above_0(value):
            raise ValueError(f"{where}.{name} is {value!r}; must be a number above 0")
