"""Random weights in the shape of a known model as a GGUF file, for programs to be timed on.

    python -m lab.bench.random_gguf qwen3-moe|gemma3-1b OUT.gguf --like FILE.gguf

`qwen3-moe` is Qwen3-30B-A3B with 8 of 64 experts and 17 layers (3 GB); `gemma3-1b` is Gemma 3 1B.
Matrices are Q4_0, which every program has kernels for; vocabulary and tokenizer are those of FILE.
What such a model says means nothing: time it with `lab.bench.servers`, which ignores its end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """A model's shape. metadata: keys of its architecture alone; experts: number, rows of each."""

    architecture: gguf.MODEL_ARCH
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    metadata: dict[str, Any] = field(default_factory=dict)
    experts: tuple[int, int] | None = None
    is_tied: bool = False


SHAPES = {
    "qwen3-moe": Shape(
        *(gguf.MODEL_ARCH.QWEN3MOE, 17, 2048, 6144, 32, 4, 128, 1e6),
        {"expert_used_count": 8},
        experts=(64, 768),
    ),
    "gemma3-1b": Shape(
        *(gguf.MODEL_ARCH.GEMMA3, 26, 1152, 6912, 4, 1, 256, 1e6),
        {"attention.sliding_window": 512},
        is_tied=True,
    ),
}
_KIND = gguf.GGMLQuantizationType.Q4_0
_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[_KIND]
_EXPERT_KEYS = ("expert_count", "expert_feed_forward_length")
_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
_GEMMA_NORMS = (*_NORMS, "post_attention_norm", "post_ffw_norm")


def tensor_shapes(shape: Shape, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, rows first; vectors are norms."""
    h, d = shape.hidden, shape.head_dim
    found: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, h), "output_norm": (h,)}
    if not shape.is_tied:
        found["output"] = (vocabulary, h)
    layer: dict[str, tuple[int, ...]] = {
        name: (d if name in ("attn_q_norm", "attn_k_norm") else h,)
        for name in (_GEMMA_NORMS if shape.architecture == gguf.MODEL_ARCH.GEMMA3 else _NORMS)
    }
    layer |= {"attn_q": (shape.heads * d, h), "attn_output": (h, shape.heads * d)}
    layer |= dict.fromkeys(("attn_k", "attn_v"), (shape.kv_heads * d, h))
    if shape.experts is None:
        layer |= dict.fromkeys(("ffn_gate", "ffn_up"), (shape.inner, h))
        layer["ffn_down"] = (h, shape.inner)
    else:
        count, inner = shape.experts
        layer["ffn_gate_inp"] = (count, h)
        layer |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (count, inner, h))
        layer["ffn_down_exps"] = (count, h, inner)
    for number in range(shape.layers):
        found |= {f"blk.{number}.{name}": size for name, size in layer.items()}
    return found


def blocks(size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random blocks of Q4_0 whose weights have a deviation of one over the root of a row."""
    data = rng.integers(0, 256, (*size[:-1], size[-1] // _BLOCK, _BLOCK_BYTES), dtype=np.uint8)
    scale = np.array([size[-1] ** -0.5 / 4.6], np.float16)  # codes' deviation
    data[..., :2] = scale.view(np.uint8)
    return data.reshape(*size[:-1], -1)


def write(shape: Shape, out: Path, like: Path) -> None:
    """Write the file. like: whose tokenizer it gets. Raises: OSError; ValueError."""
    name = gguf.MODEL_ARCH_NAMES[shape.architecture]
    writer = gguf.GGUFWriter(out, name)
    given = gguf.GGUFReader(like).fields
    for key, value in {
        "block_count": shape.layers,
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        **shape.metadata,
        **dict(zip(_EXPERT_KEYS, shape.experts or (), strict=False)),
    }.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{name}.rope.freq_base", shape.rope_base)
    for key, entry in given.items():
        if key.startswith("tokenizer."):
            kind = entry.types[0]
            parts = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, entry.contents(), kind, parts)
    rng = np.random.default_rng(0)
    sizes = tensor_shapes(shape, len(given["tokenizer.ggml.tokens"].data))
    for tensor, size in sizes.items():
        if len(size) == 1:
            writer.add_tensor(f"{tensor}.weight", np.ones(size, np.float32))
        elif tensor.endswith("ffn_gate_inp"):  # every program keeps the router unquantised
            router = rng.standard_normal(size, np.float32) * size[-1] ** -0.5
            writer.add_tensor(f"{tensor}.weight", router)
        else:
            writer.add_tensor(f"{tensor}.weight", blocks(size, rng), raw_dtype=_KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, required=True, metavar="FILE.gguf")
    args = parser.parse_args(arguments)
    try:
        write(SHAPES[args.shape], args.out, args.like)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.like}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
