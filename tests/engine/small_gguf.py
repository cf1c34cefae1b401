"""Small random models and tokenizers as GGUF files, by the `gguf` package's own writer."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tests.engine.small_models import SHAPE, Case, Checkpoint, parameters, randomise
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
}
"""Rows of whole blocks in every format."""

QUANTIZED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
WIDENED = ("Q2_K", "Q3_K", "TQ1_0", "TQ2_0")
"""Formats without a kernel."""
KINDS = ("F32", "F16", "BF16", *QUANTIZED, *WIDENED)

_RANDOM: dict[str, tuple[float, dict[int, float]]] = {
    "Q2_K": (15, {-4: 1, -2: 1.5}),
    "Q3_K": (43, {-2: 1}),
    "Q4_K": (150, {0: 1, 2: 7.5}),
    "Q5_K": (300, {0: 1, 2: 15.5}),
    "Q6_K": (1300, {-2: 1}),
    "IQ4_NL": (70, {0: 1}),
    "IQ4_XS": (1300, {0: 1}),
}
"""Formats that the package cannot encode: the size of random blocks' weights over their scale, and
where the float16 scales lie and how large they are beside each other."""

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE,  # as llama.cpp has it without other layers
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}
_RECURRENT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")

_PAIRS = ("LLAMA", "SMOLLM3", "MISTRAL3", "GRANITE", "GRANITE_HYBRID")
"""Architectures with the two rows of a rotary pair side by side."""


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in a ggml type. What the package cannot encode are random blocks, with scales that
    give values of about the size of `values`."""
    known = gguf.GGMLQuantizationType[kind]
    if kind not in _RANDOM:
        return gguf.quantize(values, known)
    block, size = gguf.GGML_QUANT_SIZES[known]
    rng = np.random.default_rng(values.size)
    shape = (*values.shape[:-1], values.shape[-1] // block, size)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    largest, places = _RANDOM[kind]
    for place, share in places.items():
        scale = np.array([values.std() / largest * share], np.float16)
        blocks[..., range(place, place + 2)] = scale.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    file: Path,
    case: Case,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    split: int = 0,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    fused: bool = False,
    **changes: Any,
) -> Checkpoint:
    """A random model; the one that comes back has what was stored."""
    torch.manual_seed(0)
    rows = {} if tokenizer is None else {"vocab_size": 512}
    if rows and "vocab_size_per_layer_input" in case.changes:
        rows["vocab_size_per_layer_input"] = 512
    config = case.config(**SHAPE | case.changes | rows)
    config.pad_token_id = None
    model = case.model(config).eval()
    randomise(model, mild=True)
    return save_gguf(file, model, kind, tokenizer, pre, split, tensors, fused, **changes)


def save_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    split: int = 0,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    fused: bool = False,
    architecture: str | None = None,
    **changes: Any,
) -> Checkpoint:
    """A model, which comes back with what was stored.

    architecture: by GGUF's name, if it is not that of the model's text part
    kind: the matrices' ggml type, or what gives it for a name of Hugging Face's
    split: most tensors of a part of `file`; 0: it is not split
    tensors: further ones, by name
    fused: gates and ups of experts are one tensor; projections of recurrent layers as in folders
    changes: metadata keys and their values, None for one that is left out
    """
    config: Any = model.config.get_text_config()
    architecture = architecture or gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for key, value in (_metadata(config) | changes).items():
        if value is not None:
            add = {
                bool: writer.add_bool,
                str: writer.add_string,
                float: writer.add_float32,
                int: writer.add_uint32,
                list: writer.add_array,
            }
            add[type(value)](f"{architecture}.{key}", value)
    if tokenizer is not None:
        end = config.eos_token_id  # a file must have one
        add_tokenizer(
            writer, tokenizer, pre, tokenizer.get_vocab_size() - 1 if end is None else end
        )
    with torch.no_grad():
        _add_tensors(writer, model, kind, fused)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return Checkpoint(file, model)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: Tokenizer,
    pre: str = "gpt-2",
    eos_token_id: int | None = SHAPE["eos_token_id"],
) -> None:
    """A byte-level tokenizer; added tokens that are not special are the user's own."""
    content = json.loads(tokenizer.to_str())
    tokens = {index: token for token, index in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        own = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        kinds[added["id"]] = own
    order = range(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[i] for i in order])
    writer.add_token_types([kinds[i] for i in order])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    if eos_token_id is not None:
        writer.add_eos_token_id(eos_token_id)


def _metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    scaling = {
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }
    if config.model_type == "gemma4_text":
        return _gemma4_metadata(config, rope)
    head_dim = getattr(config, "head_dim", None)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "rope.freq_base": float(rope["rope_theta"]),
        **(scaling if rope["rope_type"] in ("linear", "yarn") else {}),
        **_own_metadata(config, rope),
    }


def _gemma4_metadata(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    full, other = layers[windowed.index(False)].head_dim, layers[windowed.index(True)].head_dim
    shared, inner = config.num_kv_shared_layers, config.intermediate_size
    wide = [
        1 + (config.use_double_wide_mlp and i >= len(layers) - shared) for i in range(len(layers))
    ]
    local = config.rope_parameters["sliding_attention"]
    return {
        "block_count": len(layers),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": [inner * n for n in wide] if max(wide) > 1 else inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": other,
        "attention.value_length_swa": other,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.freq_base_swa": float(local["rope_theta"]),
        "rope.dimension_count": full,
        "rope.dimension_count_swa": other,
    }


def _own_metadata(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    if config.model_type == "gemma3_text":
        return {"attention.sliding_window": config.sliding_window}
    experts = _expert_metadata(config)
    if config.model_type == "glm4_moe":
        share = rope["partial_rotary_factor"]
        return experts | {"rope.dimension_count": int(config.head_dim * share)}
    if config.model_type in _RECURRENT:
        return experts | {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    if config.model_type == "ministral3":
        return {
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        }
    if config.model_type.startswith("granite"):
        return {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "feed_forward_length": getattr(
                config, "shared_intermediate_size", config.intermediate_size
            ),
            "rope.scaling.finetuned": getattr(config, "position_embedding_type", "rope") == "rope",
        }
    if config.model_type == "lfm2":
        heads = config.num_key_value_heads
        return {
            "attention.head_count_kv": [0 if x == "conv" else heads for x in config.layer_types],
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "feed_forward_length": Lfm2MLP(config).w1.out_features,
            "shortconv.l_cache": config.conv_L_cache,
            "vocab_size": config.vocab_size,
        }
    if config.model_type != "phi3":
        return experts
    factor = config.max_position_embeddings / config.original_max_position_embeddings
    scale = math.sqrt(1 + math.log(factor) / math.log(config.original_max_position_embeddings))
    return {
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.scaling.attn_factor": scale if rope["rope_type"] == "longrope" else None,
    }


def _expert_metadata(config: Any) -> dict[str, Any]:
    if config.model_type == "gpt_oss":
        rope = config.rope_parameters
        return {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    if not hasattr(config, "moe_intermediate_size"):
        return {}
    is_glm = config.model_type == "glm4_moe"
    own = {
        "expert_count": config.n_routed_experts if is_glm else config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    if is_glm:
        return own | {
            "expert_group_count": config.n_group,
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": config.norm_topk_prob,
        }
    if config.model_type == "qwen3_moe":
        return own
    shared = {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return own | shared | {"feed_forward_length": None}


def _rope_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """What frequencies are divided by, where that is scaling."""
    config: Any = model.config.get_text_config()
    rope, names = config.rope_parameters, gguf.MODEL_TENSOR
    factors = {}
    if config.model_type == "gemma4_text":
        full = config.layer_types.index("full_attention")
        pairs = config.per_layer_config[full].head_dim // 2
        rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        values = [1.0] * rotated + [1e30] * (pairs - rotated)
        factors[names.ROPE_FREQS] = np.array(values, np.float32)
    if rope.get("rope_type") == "llama3":
        inverse = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        factors[names.ROPE_FREQS] = (inverse / model.model.rotary_emb.inv_freq).numpy()
    if rope.get("rope_type") == "longrope":
        factors[names.ROPE_FACTORS_SHORT] = np.array(rope["short_factor"], np.float32)
        factors[names.ROPE_FACTORS_LONG] = np.array(rope["long_factor"], np.float32)
    return {f"{gguf.TENSOR_NAMES[name]}.weight": values for name, values in factors.items()}


def _add_tensors(
    writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str | Callable[[str], str], fused: bool
) -> None:
    config: Any = model.config.get_text_config()
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _rope_tensors(model).items():
        writer.add_tensor(name, values)
    for name, parameter in _parameters(model, fused):
        theirs = names.get_name(name, (".weight", ".bias")) or f"nextn.{name}"
        if ".router." in name and "scale" in name:
            layer, _, use = name.removesuffix(".weight").rpartition(".router.")
            of = "experts.down_proj" if use == "per_expert_scale" else "router.proj"
            theirs = f"{names.get_name(f'{layer}.{of}')}.scale"
        if "linear_attn." in name and _add_delta_values(writer, config, names, name, parameter):
            continue
        if name.endswith("shared_expert_gate.weight"):
            writer.add_tensor(theirs, parameter.numpy() if fused else parameter.numpy()[0])
            continue
        if name.endswith(".conv.conv.weight"):
            writer.add_tensor(theirs, parameter.numpy().squeeze(1))
            continue
        if parameter.dim() == 1 or name.endswith(".bias"):
            is_centred = config.model_type in ("gemma3_text", *_RECURRENT)
            values = parameter.numpy() + np.float32(is_centred and name.endswith("norm.weight"))
            writer.add_tensor(theirs, _interleaved(config, name, values))
            continue
        own = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[own]
        axis, order = _strided(config, name, parameter.shape)
        encoded = encode(np.ascontiguousarray(parameter.numpy().take(order, axis)), own)
        values = gguf.dequantize(encoded, stored).take(order.argsort(), axis)
        parameter.copy_(torch.from_numpy(values))
        if name.endswith("in_proj_qkvz.weight") and not fused:
            for part, rows in _unmixed(config):
                theirs = names.get_name(name.replace("qkvz", part), (".weight",))
                writer.add_tensor(theirs, encoded[rows], raw_dtype=stored)
            continue
        writer.add_tensor(theirs, _interleaved(config, name, encoded), raw_dtype=stored)


def _add_delta_values(
    writer: gguf.GGUFWriter,
    config: Any,
    names: gguf.TensorNameMap,
    name: str,
    parameter: torch.Tensor,
) -> bool:
    """What a recurrent layer has beside matrices, under llama.cpp's names; False for a matrix."""
    base, values = name.removesuffix(".weight"), parameter.numpy()
    _, order = _strided(config, name, parameter.shape)
    if base.endswith(".A_log"):
        writer.add_tensor(names.get_name(base), -np.exp(values[order]))
    elif base.endswith(".dt_bias"):
        theirs = names.get_name(base.replace("dt_bias", "dt_proj"))
        writer.add_tensor(f"{theirs}.bias", values[order])
    elif base.endswith(".conv1d"):
        writer.add_tensor(f"{names.get_name(base)}.weight", values.squeeze(1)[order])
    elif base.endswith(".norm"):
        writer.add_tensor(f"{names.get_name(base)}.weight", values)
    else:
        return False
    return True


def _strided(config: Any, name: str, shape: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """The axis of value heads in a tensor of a recurrent layer, and its order in a file: the first
    value head of every key head, then the second ones; of other tensors the rows as they are."""
    axis = int("linear_attn.out_proj" in name)
    every = np.arange(shape[axis])
    if "linear_attn." not in name or ".norm." in name or config.model_type == "qwen3_next":
        return axis, every
    keys = config.linear_num_key_heads
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = every[before:].reshape(keys, config.linear_num_value_heads // keys, -1)
    return axis, np.concatenate((every[:before], heads.swapaxes(0, 1).flatten()))


def _unmixed(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of queries, keys and values, and of gates, which lie together by key heads."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    rows = np.arange(2 * keys * (size + values)).reshape(keys, -1)
    *qkv, z = np.split(rows, np.cumsum([size, size, values]), axis=1)
    yield "qkv", np.concatenate([part.flatten() for part in qkv])
    yield "z", z.flatten()


def _parameters(model: PreTrainedModel, fused: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Gates and ups apart, of experts unless they are fused, and of Granite's shared MLP."""
    of_gpt_oss = model.config.model_type == "gpt_oss"
    for name, parameter in parameters(model):
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        if of_gpt_oss and ".experts." in name:
            yield from _alternating(name, parameter)
        elif name.endswith("correction_bias"):
            yield name.replace("_correction_bias", "_correction.bias"), parameter
        elif name.endswith("mlp.experts.gate_up_proj") and not fused:
            for half, part in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{half}_proj.weight"), part
        elif "shared_mlp.input_linear" in name:
            for half, part in zip(("gate", "up"), parameter.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{half}_proj"), part
        else:
            yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", parameter


def _alternating(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Of gpt-oss's experts: rows of gates and ups in turn, matrices transposed."""
    base, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    rows = parameter.transpose(1, 2) if kind == "weight" else parameter
    if "down_proj" in name:
        yield f"{base}.{kind}", rows
        return
    for start, half in enumerate(("gate", "up")):
        yield base.replace("gate_up_proj", f"{half}_proj.{kind}"), rows[:, start::2]


def _interleaved(config: Any, name: str, rows: np.ndarray) -> np.ndarray:
    """Some architectures: the two rows of a rotary pair side by side."""
    if ARCHITECTURES[config.model_type].name not in _PAIRS or not any(
        f"{x}_proj." in name for x in "qk"
    ):
        return rows
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
