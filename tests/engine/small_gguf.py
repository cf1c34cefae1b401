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
from tests.engine.small_models import SHAPE, Case, Checkpoint
from tokenizers import Tokenizer
from transformers import PreTrainedModel

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

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in a ggml type. What the package cannot encode are random blocks, with scales that
    give values of about the size of `values`."""
    known = gguf.GGMLQuantizationType[kind]
    if kind not in _RANDOM:
        encoded: np.ndarray = gguf.quantize(values, known)
        return encoded
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
    with torch.no_grad():
        _randomise(model)
    return save_gguf(file, model, kind, tokenizer, pre, split, tensors, **changes)


def save_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    split: int = 0,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Checkpoint:
    """A model, which comes back with what was stored.

    kind: the matrices' ggml type, or what gives it for a name of Hugging Face's
    split: most tensors of a part of `file`; 0: it is not split
    tensors: further ones, by name
    changes: metadata keys and their values, None for one that is left out
    """
    config: Any = model.config
    architecture = gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for key, value in (_metadata(config) | changes).items():
        if value is not None:
            add = {
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
        _add_tensors(writer, model, kind)
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
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
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
    if config.model_type == "qwen3_moe":
        return {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if config.model_type == "qwen3_5_text":
        return {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    if config.model_type != "phi3":
        return {}
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


def _rope_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """What frequencies are divided by, where that is scaling."""
    config: Any = model.config
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
    writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str | Callable[[str], str]
) -> None:
    config: Any = model.config
    architecture = _ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _rope_tensors(model).items():
        writer.add_tensor(name, values)
    for name, parameter in _parameters(model):
        theirs = names.get_name(name, (".weight", ".bias"))
        if "router." in name and parameter.dim() == 1:
            layer, _, use = name.removesuffix(".weight").rpartition(".router.")
            of = "experts.down_proj" if use == "per_expert_scale" else "router.proj"
            theirs = f"{names.get_name(f'{layer}.{of}')}.scale"
        if "linear_attn." in name and _add_delta_values(writer, config, names, name, parameter):
            continue
        if parameter.dim() == 1:
            is_centred = config.model_type in ("gemma3_text", "qwen3_5_text")
            values = parameter.numpy() + np.float32(is_centred and name.endswith("norm.weight"))
            writer.add_tensor(theirs, _interleaved(config, name, values))
            continue
        own = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[own]
        axis, order = _strided(config, name, parameter.shape)
        encoded = encode(np.ascontiguousarray(parameter.numpy().take(order, axis)), own)
        values = gguf.dequantize(encoded, stored).take(order.argsort(), axis)
        parameter.copy_(torch.from_numpy(values))
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
    if "linear_attn." not in name or ".norm." in name:
        return 0, every
    keys = config.linear_num_key_heads
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = every[before:].reshape(keys, config.linear_num_value_heads // keys, -1)
    return axis, np.concatenate((every[:before], heads.swapaxes(0, 1).flatten()))


def _randomise(model: PreTrainedModel) -> None:
    for name, parameter in _parameters(model):
        if parameter.dim() == 1:
            low, high = (0.5, 1.5) if "norm" in name or "scal" in name else (-1.0, 1.0)
            parameter.uniform_(low, high)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts' gates and ups apart."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.experts.gate_up_proj"):
            for half, part in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{half}_proj.weight"), part
        else:
            yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", parameter
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            yield f"{name}.weight", buffer


def _interleaved(config: Any, name: str, rows: np.ndarray) -> np.ndarray:
    """Architecture llama: the two rows of a rotary pair side by side."""
    if _ARCHITECTURES[config.model_type] != gguf.MODEL_ARCH.LLAMA or not any(
        f"{x}_proj." in name for x in "qk"
    ):
        return rows
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
