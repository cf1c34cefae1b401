"""Write GGUF files for a program, of a Llama checkpoint or of a GGUF file with formats that it does
not read; needs `gguf` from the environment of a worker."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection
from pathlib import Path

import numpy as np

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a bfloat16 safetensors file, as float32."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}; only BF16 is read")
        first, last = (8 + size + at for at in entry["data_offsets"])
        halves = np.frombuffer(raw[first:last], np.uint16).astype(np.uint32)
        tensors[name] = (halves << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of Hugging Face's Llama."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection, (heads x head_dim, hidden), in GGUF's rotary order.

    Hugging Face rotates component i of a head with i + head_dim / 2, GGUF's Llama 2i with 2i + 1.
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def write(checkpoint: Path, file: Path, kind: str) -> None:
    """Write `checkpoint` to `file`: matrices as `kind` (f16 or bf16), norms as float32."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kinds = {
        "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    }
    tensor_type, file_type = kinds[kind]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name(checkpoint.name)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, checkpoint, config)
    for name, tensor in read_safetensors(checkpoint / "model.safetensors").items():
        if ".q_proj." in name or ".k_proj." in name:
            tensor = interleave(tensor, heads if ".q_proj." in name else kv_heads)
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor)
        else:
            packed = gguf.quantize(tensor, tensor_type)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer, checkpoint: Path, config: dict) -> None:
    """The byte-level BPE. Prompts go in as ids, so the pre-tokenizer's name is of no effect."""
    import gguf

    loaded = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"] for token in loaded["added_tokens"]}
    tokens = {index: token for token, index in loaded["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in loaded["added_tokens"]}
    order = range(config["vocab_size"])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens[i] for i in order])
    writer.add_token_types([kinds[i in special] for i in order])
    writer.add_token_merges([" ".join(pair) for pair in loaded["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def cached(checkpoint: Path, kind: str, folder: Path) -> Path:
    """The GGUF file of `checkpoint`, written under `folder` unless it is there; alone in its own
    folder, which is named after the weights' digest."""
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:16]
    file = folder / f"{checkpoint.name}-{digest}-{kind}" / "model.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        write(checkpoint, unfinished, kind)
        unfinished.rename(file)
    return file


def readable(file: Path, kinds: Collection[str], folder: Path) -> Path:
    """`file` in a folder of its own under `folder`, as it is where its matrices' formats are all of
    `kinds`; the others' become Q8_0."""
    import gguf

    # Of one name may be several files.
    place = hashlib.sha256(f"{file.resolve()} {file.stat().st_size}".encode()).hexdigest()[:16]
    out = folder / f"{file.stem}-{place}" / "model.gguf"
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(file)
    if all(tensor.tensor_type.name in kinds for tensor in reader.tensors):
        out.symlink_to(file.resolve())
        return out
    unfinished = out.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(str(unfinished), reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub_kind = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub_kind)
    widest = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name not in kinds:
            data, kind = gguf.quantize(gguf.dequantize(data, kind), widest), widest
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)
    return out
