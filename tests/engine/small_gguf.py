"""Small random models and tokenizers as GGUF files, by the `gguf` package's own writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
KINDS = ("F32", "F16", "BF16", *QUANTIZED)

_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in a ggml type. The package cannot encode K-quants: there the blocks are random,
    with scales that give values of about the size of `values`."""
    known = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        encoded: np.ndarray = gguf.quantize(values, known)
        return encoded
    block, size = gguf.GGML_QUANT_SIZES[known]
    rng = np.random.default_rng(values.size)
    shape = (values.shape[0], values.shape[1] // block, size)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    scale = values.std() / {"Q4_K": 150, "Q5_K": 300, "Q6_K": 1300}[kind]
    halves = np.array([scale, scale * {"Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 1)], np.float16)
    if kind == "Q6_K":
        blocks[..., -2:] = halves[:1].view(np.uint8)
    else:
        blocks[..., :4] = halves.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def write_gguf(
    file: Path,
    case: Case,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    **changes: Any,
) -> Checkpoint:
    """A random model; the one that comes back has what was stored.

    kind: the matrices' ggml type, or what gives it for a name of Hugging Face's
    changes: metadata keys and their values, None for one that is left out
    """
    torch.manual_seed(0)
    config = case.config(**SHAPE | case.changes)
    config.pad_token_id = None
    model = case.model(config).eval()
    writer = gguf.GGUFWriter(file, config.model_type)
    for key, value in (_metadata(config) | changes).items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            add[type(value)](f"{config.model_type}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, pre)
    with torch.no_grad():
        _add_tensors(writer, model, kind)
    finish(writer)
    return Checkpoint(file, model)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
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
    writer.add_eos_token_id(SHAPE["eos_token_id"])


def _metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    scaling = {
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }
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
        **(scaling if rope["rope_type"] != "default" else {}),
    }


def _add_tensors(
    writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str | Callable[[str], str]
) -> None:
    config: Any = model.config
    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        theirs = names.get_name(name, (".weight", ".bias"))
        if parameter.dim() == 1:
            low, high = (0.5, 1.5) if name.endswith("norm.weight") else (-1.0, 1.0)
            parameter.uniform_(low, high)
            values = parameter.numpy()
            writer.add_tensor(theirs, _interleaved(config, name, values))
            continue
        parameter.normal_(std=parameter.shape[1] ** -0.5)
        own = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[own]
        encoded = encode(parameter.numpy(), own)
        parameter.copy_(torch.from_numpy(gguf.dequantize(encoded, stored)))
        writer.add_tensor(theirs, _interleaved(config, name, encoded), raw_dtype=stored)


def _interleaved(config: Any, name: str, rows: np.ndarray) -> np.ndarray:
    """Architecture llama: the two rows of a rotary pair side by side."""
    if config.model_type != "llama" or not any(f"{x}_proj." in name for x in "qk"):
        return rows
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
