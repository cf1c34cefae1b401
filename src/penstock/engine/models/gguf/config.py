"""Metadata of a GGUF file in the terms of config.json."""

from __future__ import annotations

import math
from typing import Any

import torch
from gguf.constants import ExpertGatingFuncType, TokenType

from penstock.engine.models.checkpoint import ASSISTANTS
from penstock.engine.models.families import FAMILIES, MISSING
from penstock.engine.models.gguf.file import GgufFile, TensorEntry
from penstock.engine.models.gguf.tokenizer import SPM_IDS
from penstock.engine.models.gguf.values import read_values
from penstock.engine.models.quantized import FLOATS

ASSISTANT = "gemma4-assistant"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    ASSISTANT: "Gemma4ForCausalLM",
}
"""GGUF's architectures; Mistral's models are of architecture llama."""

_GEMMA4 = ("gemma4", ASSISTANT)
_GRANITE = ("granite", "granitehybrid")
_SCALES = {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}
_OF_GEMMA4 = {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "expert_count",
    "final_logit_softcapping",
}
_COMPUTED = {
    **{name: {"expert_count"} for name in ("qwen3moe", "qwen35moe", "qwen3next")},
    "glm4moe": {"expert_count", "expert_gating_func", "expert_weights_scale"},
    "phi3": {"attention.sliding_window"},
    "gemma3": {"attention.sliding_window", "attention.sliding_window_pattern"},
    "gpt-oss": {"attention.sliding_window", "attention.sliding_window_pattern", "expert_count"},
    "mistral3": {"rope.scaling.yarn_log_multiplier"},
    **dict.fromkeys(_GRANITE, _SCALES),
    **dict.fromkeys(_GEMMA4, _OF_GEMMA4),
}
"""Keys of _REFUSED that an architecture supports."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of the rotary frequencies: for all texts, for texts of usual length, for longer ones."""

_GEMMA_PATTERN = 6
"""One layer in so many has no window, as in Gemma 3, unless the file says it."""
_GEMMA_27B_LAYERS = 62
"""Layers of Gemma 3 27B, the only one whose scores are not scaled by head_dim; the file does not
say it."""

_REFUSED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
)
"""Keys of an architecture that change its arithmetic, unless they are 0."""
_YARN = {"ext_factor": 1, "attn_factor": 1, "beta_fast": 32, "beta_slow": 1}
_ONLY = {
    **dict.fromkeys(_REFUSED, 0),
    **{f"rope.scaling.yarn_{name}": value for name, value in _YARN.items()},
    **dict.fromkeys(("attention.causal", "expert_gating_func", "expert_weights_scale"), 1),
    "expert_group_count": 1,
}
"""The same, and others, with the values that are computed."""

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    (
        *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>"),
        *("<end_of_turn>", "<turn|>"),
    )
)
"""Control tokens that end a text, also where the metadata names only one of them."""
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""The same of gpt-oss, where `<|end|>` ends only a message within the text."""
_END_OF_CALLS = "<|tool_response>"
"""Ends a text, too, whatever its kind: what follows is not the model's."""

_EMBEDDINGS = "token_embd.weight"
_BIAS = "blk.0.attn_output.bias"
_ALWAYS_FLOAT = (
    *(".ffn_gate_inp.weight", ".ssm_conv1d.weight", ".ssm_dt.bias"),
    *(".ffn_gate_inp_shexp.weight", ".exp_probs_b.bias"),
    ".shortconv.conv.weight",
)
"""Ends of names of tensors that are float32 in any file."""
_MIXED = {"in_proj_qkvz": ".ssm_in.weight", "in_proj_ba": ".ssm_ba.weight"}
"""Matrices that mix projections of recurrent layers, by Hugging Face's names."""
RECURRENT = ("qwen35", "qwen35moe", "qwen3next")
_PARTLY_ROTATED = ("phi3", "glm4moe", *RECURRENT)
_UNEVEN = _GEMMA4
"""Architectures of which layers have different sizes and rotary embeddings."""


class Metadata:
    """Metadata values of one architecture, checked on access."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if (missing := MISSING.get(self.architecture)) is not None:
            raise file.error(f"{self.architecture} has {missing}; not computed yet")
        if self.architecture not in _ARCHITECTURES:
            raise file.error(
                f"general.architecture is {self.architecture!r}; "
                f"allowed: {', '.join(_ARCHITECTURES)}"
            )

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        return self._file.metadata.get(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise self._file.error(f"metadata key {self.key(name)} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._file.error(f"{self.key(name)} is {value!r}; one number is expected")
        if not math.isfinite(value):
            raise self._file.error(f"{self.key(name)} is {value}; must be finite")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self._file.error(f"{self.key(name)} is {value}; must be a whole number above 0")
        return value

    def per_layer(self, name: str, default: int | None = None) -> list[int]:
        """Return each layer's number, where layers may differ: one for all, or a list."""
        values = self.get(name)
        if self.architecture not in _UNEVEN or not isinstance(values, tuple):
            return [self.whole(name, default)] * self.num_layers
        if len(values) < self.num_layers or not all(type(x) is int and x > 0 for x in values):
            raise self._file.error(f"{self.key(name)} is {values}; a number a layer is expected")
        return list(values[: self.num_layers])

    @property
    def head_dim(self) -> int:
        default = self.whole("embedding_length") // self.whole("attention.head_count")
        return self.whole("attention.key_length", default)

    @property
    def num_layers(self) -> int:
        """Layers of the model, without those of heads that predict further tokens."""
        if self.architecture == ASSISTANT:
            return self.whole("block_count")
        return self.whole("block_count") - self.get("nextn_predict_layers", 0)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Key heads of each layer; 0 where it has no attention."""
        found = self.get("attention.head_count_kv", self.whole("attention.head_count"))
        listed = found if isinstance(found, tuple) else (found,) * self.num_layers
        kinds = len({*listed} - {0})
        is_allowed = kinds == 1 or (kinds > 1 and self.architecture in _UNEVEN)
        if not (all(isinstance(n, int) and n >= 0 for n in listed) and is_allowed):
            raise self._file.error(
                f"{self.key('attention.head_count_kv')} is {found!r}; one number above 0, or 0 for "
                "some layers, is expected"
            )
        return listed

    @property
    def rotated_share(self) -> float:
        """Share of a head's dimensions that is rotated."""
        return self.whole("rope.dimension_count", self.head_dim) / self.head_dim


def config_json(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of the model. Raises CheckpointError."""
    metadata = Metadata(file)
    _check(file, metadata)
    hidden = metadata.whole("embedding_length")
    embeddings = file.tensors.get(_EMBEDDINGS)
    if embeddings is None or len(embeddings.shape) != 2 or embeddings.shape[1] != hidden:
        found = "is missing" if embeddings is None else f"has shape {embeddings.shape}"
        raise file.error(f"tensor {_EMBEDDINGS} {found}; shape (vocabulary, {hidden}) expected")
    heads = metadata.whole("attention.head_count")
    architecture = _ARCHITECTURES[metadata.architecture]
    own = _own(file, metadata)
    inner = own.get("moe_intermediate_size")  # also where all layers have experts
    content = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.per_layer("feed_forward_length", inner)[0],
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(metadata.kv_heads),
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": _BIAS in file.tensors,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": _dtype(file),
        **own,
        **_rope(file, metadata),
        **(_gemma4(file, metadata) if metadata.architecture in _GEMMA4 else {}),
    }
    if metadata.architecture != ASSISTANT:
        return content
    size = metadata.whole("embedding_length_out")
    own = {"architectures": [ASSISTANTS[0]], "model_type": "gemma4_assistant"}
    return {**own, "text_config": content, "backbone_hidden_size": size}


def _own(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return the fields of some architectures only."""
    window = metadata.get("attention.sliding_window") or None
    if metadata.architecture == "phi3":
        return {"sliding_window": window}
    if metadata.architecture == "gemma3":
        pattern = metadata.whole("attention.sliding_window_pattern", _GEMMA_PATTERN)
        scaled_by = metadata.head_dim
        if metadata.whole("block_count") == _GEMMA_27B_LAYERS:
            scaled_by = metadata.whole("embedding_length") // metadata.whole("attention.head_count")
        return {
            "sliding_window": metadata.whole("attention.sliding_window"),
            "sliding_window_pattern": pattern,
            "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
            "query_pre_attn_scalar": scaled_by,
        }
    if metadata.architecture in RECURRENT:
        heads = metadata.whole("ssm.time_step_rank")
        return {
            "layer_types": _layer_types(metadata),
            "linear_num_key_heads": metadata.whole("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_key_head_dim": metadata.whole("ssm.state_size"),
            "linear_value_head_dim": metadata.whole("ssm.inner_size") // heads,
            "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
            "linear_value_heads_strided": metadata.architecture != "qwen3next",
            "linear_mixed": [
                name for name, end in _MIXED.items() if any(t.endswith(end) for t in file.tensors)
            ],
            **_experts(file, metadata),
        }
    if metadata.architecture in _GRANITE:
        is_rotated = metadata.get("rope.scaling.finetuned", 1)
        return {
            "attention_multiplier": metadata.number("attention.scale", 0)
            or metadata.head_dim**-0.5,
            "embedding_multiplier": metadata.number("embedding_scale", 0) or 1.0,
            "residual_multiplier": metadata.number("residual_scale", 0) or 1.0,
            "logits_scaling": metadata.number("logit_scale", 0) or 1.0,
            "position_embedding_type": "rope" if is_rotated else None,
        }
    if metadata.architecture == "lfm2":
        return {
            "layer_types": ["full_attention" if n else "conv" for n in metadata.kv_heads],
            "conv_L_cache": metadata.whole("shortconv.l_cache"),
            "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
            "block_auto_adjust_ff_dim": False,
        }
    return _experts(file, metadata)


def _experts(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return the fields of experts, if there are any."""
    if not metadata.get("expert_count"):
        return {}
    inner, is_glm = metadata.whole("expert_feed_forward_length"), metadata.architecture == "glm4moe"
    if metadata.architecture == "gpt-oss":
        return {
            "intermediate_size": inner,
            "layer_types": _window_types(metadata),
            "num_local_experts": metadata.whole("expert_count"),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "rope_scaling": {"rope_type": "default"},  # transformers would take YaRN
            "sliding_window": metadata.whole("attention.sliding_window"),
        }
    fields = {
        "n_routed_experts" if is_glm else "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", not is_glm)),
    }
    if metadata.architecture in ("qwen3moe", *_GEMMA4):
        return fields
    if not is_glm:
        shared = metadata.whole("expert_shared_feed_forward_length")
        return fields | {"shared_expert_intermediate_size": shared}
    sigmoid = int(ExpertGatingFuncType.SIGMOID)
    if (gating := metadata.get("expert_gating_func", sigmoid)) != sigmoid:
        raise file.error(
            f"{metadata.key('expert_gating_func')} is {gating!r}; allowed: {sigmoid} (sigmoid)"
        )
    return fields | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "n_shared_experts": metadata.whole("expert_shared_count"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
    }


def _window_types(metadata: Metadata) -> list[str]:
    """Return the layers' kinds: one in so many has no window, unless the file lists them."""
    count, listed = metadata.num_layers, metadata.get("attention.sliding_window_pattern", 2)
    if not isinstance(listed, tuple):
        every = metadata.whole("attention.sliding_window_pattern", 2)
        listed = [(i + 1) % every for i in range(count)]
    return ["sliding_attention" if kind else "full_attention" for kind in listed[:count]]


def _gemma4(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Gemma 4, of which layers without a window have heads of other sizes."""
    count, shared = metadata.num_layers, metadata.get("attention.shared_kv_layers", 0)
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, tuple) or len(pattern) != count or len({*pattern}) < 2:
        raise file.error(f"{metadata.key('attention.sliding_window_pattern')} is {pattern!r}")
    size, full, windowed = metadata.whole("attention.key_length_swa"), *map(pattern.index, (0, 1))
    kv_heads, inner = metadata.kv_heads, metadata.per_layer("feed_forward_length")
    own = {"head_dim": metadata.head_dim, "num_key_value_heads": kv_heads[full]}
    wide = inner[-1] == 2 * inner[0]
    expected = [inner[0] << (wide and i >= count - shared) for i in range(count)]
    for name, value, only in (
        ("rope.dimension_count_swa", metadata.whole("rope.dimension_count_swa", size), size),
        ("rope.scaling.factor", metadata.number("rope.scaling.factor", 1.0), 1.0),
        ("feed_forward_length", inner, expected),
    ):
        if value != only:
            raise file.error(f"{metadata.key(name)} is {value}; allowed: {only}")
    return {
        "enable_moe_block": bool(metadata.get("expert_count")),
        "top_k_experts": metadata.get("expert_used_count"),
        "head_dim": size,
        "num_key_value_heads": kv_heads[windowed],
        "per_layer_config": {i: own for i in range(count) if not pattern[i]},
        "layer_types": [f"{'sliding' if x else 'full'}_attention" for x in pattern],
        "sliding_window": metadata.whole("attention.sliding_window"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.tensors[_EMBEDDINGS].shape[0],
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": _proportional(file, metadata),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _proportional(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return the rotary embedding of which pairs from some on are not rotated."""
    entry, pairs = file.tensors.get(ROPE_TENSORS[0]), metadata.head_dim // 2
    factors = torch.ones(pairs)
    if entry is not None and entry.shape == (pairs,):
        read_values(file, entry, factors)
    rotated = int((factors == 1).sum())
    if entry is None or not rotated or not bool((factors[rotated:] >= 1e30).all()):
        raise file.error(f"tensor {ROPE_TENSORS[0]} is not 1, then 1e30, for {pairs} pairs")
    return {
        "rope_type": "proportional",
        "rope_theta": metadata.number("rope.freq_base"),
        "partial_rotary_factor": rotated / pairs,
    }


def _layer_types(metadata: Metadata) -> list[str]:
    """Return the layers' kinds: one in so many has attention, unless the file lists them."""
    count, every = metadata.num_layers, metadata.whole("full_attention_interval", 4)
    listed = metadata.get("attention.recurrent_layers")
    if not isinstance(listed, tuple):
        listed = [(i + 1) % every for i in range(count)]
    return ["linear_attention" if kind else "full_attention" for kind in listed[:count]]


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return end-of-text ids: those named in the metadata, and known control tokens.

    Raises CheckpointError where a tokenizer has none, or does not fit the embeddings."""
    named = [file.metadata.get(f"tokenizer.ggml.{name}") for name in _END_IDS]
    if named[0] is None and file.metadata.get("tokenizer.ggml.model") == "llama":
        named[0] = SPM_IDS["eos"]
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    tokens, rows = file.strings("tokenizer.ggml.tokens"), file.tensors[_EMBEDDINGS].shape[0]
    if len(tokens) > rows:
        raise file.error(f"has {len(tokens)} tokens; tensor {_EMBEDDINGS} has {rows} rows")
    texts = _END_TEXTS | _HARMONY_ENDS
    if _HARMONY_ENDS.issubset(tokens):
        texts -= {"<|end|>"}
    known = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if (kind == TokenType.CONTROL and token in texts) or token == _END_OF_CALLS
    ]
    ends = tuple(dict.fromkeys([i for i in named if i is not None] + known))
    if tokens and not (ends and {*ends} <= {*range(len(tokens))}):
        raise file.error(
            f"tokens that end a text are {ends}; one is needed, allowed: 0..{len(tokens) - 1}"
        )
    return ends


def _check(file: GgufFile, metadata: Metadata) -> None:
    computed = _COMPUTED.get(metadata.architecture, ())
    for name, only in _ONLY.items():
        if metadata.get(name, only) != only and name not in computed:
            raise file.error(
                f"{metadata.key(name)} is {metadata.get(name)!r}, which is not computed"
            )
    layers = metadata.whole("block_count")
    if layers > len(file.tensors):
        raise file.error(f"{metadata.key('block_count')} is {layers}; the file has fewer tensors")
    if 0 in metadata.kv_heads and metadata.architecture != "lfm2":
        raise file.error(
            f"{metadata.architecture} has layers without attention, of Mamba-2; not computed yet"
        )
    rotated = metadata.whole("rope.dimension_count", metadata.head_dim)
    values = metadata.whole("attention.value_length", metadata.head_dim)
    in_part = metadata.architecture in _PARTLY_ROTATED and rotated < metadata.head_dim
    if values != metadata.head_dim or not (in_part or rotated == metadata.head_dim):
        raise file.error(
            f"heads of {metadata.head_dim} have {rotated} rotated dimensions and values of "
            f"{values}; allowed: all alike"
        )


def _rope(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return base and scaling in the spelling that every version of transformers reads."""
    theta = metadata.number("rope.freq_base", 10_000.0)
    if metadata.architecture in _UNEVEN:
        return {}
    if any(name in file.tensors for name in ROPE_TENSORS):
        return {"rope_theta": theta, **_rope_factors(file, metadata)}
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0)) or 1
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_theta": theta, "partial_rotary_factor": metadata.rotated_share}
    if kind not in ("linear", "yarn"):
        raise file.error(
            f"{metadata.key('rope.scaling.type')} is {kind!r}; allowed: none, linear, yarn"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = metadata.whole("context_length")
        original = metadata.whole("rope.scaling.original_context_length", context)
        scaling["original_max_position_embeddings"] = original
        if metadata.architecture == "gpt-oss":  # as it was trained; llama.cpp truncates
            scaling["truncate"] = False
        if metadata.get("rope.scaling.attn_factor") is not None:
            # GGUF multiplies the usual factor by it, transformers replaces it.
            usual = 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor") * usual
        if metadata.architecture == "mistral3":
            every = metadata.number("rope.scaling.yarn_log_multiplier", 0)
            scaling |= {"mscale": 1.0, "mscale_all_dim": every} if every else {}
            scaling["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale", 0)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rope_factors(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return longrope parameters; factors for all texts are both short and long ones."""
    found = [name for name in ROPE_TENSORS if name in file.tensors]
    original = metadata.whole("context_length")
    if found != [ROPE_TENSORS[0]]:
        original = metadata.whole("rope.scaling.original_context_length")
    expected = (metadata.whole("rope.dimension_count", metadata.head_dim) // 2,)
    factors = []
    for name in (found[0], found[-1]):
        entry = file.tensors[name]
        if entry.shape != expected:
            raise file.error(
                f"tensor {name} has shape {entry.shape}; its metadata asks for {expected}"
            )
        values = torch.empty(entry.shape)
        read_values(file, entry, values)
        factors.append(values.tolist())
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors[0],
        "long_factor": factors[1],
        "factor": metadata.whole("context_length") / original,
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }
    return {
        "rope_scaling": scaling,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": metadata.rotated_share,
    }


def _dtype(file: GgufFile) -> str:
    """Return the type of all matrices if they share one and it holds all biases, else float32."""
    own = [entry for entry in file.tensors.values() if not entry.name.endswith(_ALWAYS_FLOAT)]
    biases = [entry for entry in own if entry.name.endswith(".bias")]
    kinds = {entry.kind for entry in own if len(entry.shape) > 1 and entry not in biases}
    dtype = FLOATS.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
    if not all(_holds(dtype, file, entry) for entry in biases):
        dtype = torch.float32
    return str(dtype).removeprefix("torch.")


def _holds(dtype: torch.dtype, file: GgufFile, entry: TensorEntry) -> bool:
    values = torch.empty(entry.shape)
    read_values(file, entry, values)
    return torch.equal(values, values.to(dtype).float())
