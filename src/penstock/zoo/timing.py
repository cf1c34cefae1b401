"""Seconds of one decode step, measured on the layer arithmetic alone; no transformers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

CONTEXT = 192
"""Cached positions that the measured steps attend to."""


class _Stack:
    """The matrices of one model and caches of CONTEXT positions."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        tensors = {k: v.to(dtype) for k, v in load_file(folder / "model.safetensors").items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.embedding = tensors["model.embed_tokens.weight"]
        self.norm = tensors["model.norm.weight"]
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            pre = f"model.layers.{i}."
            layer = {k[len(pre) :]: v for k, v in tensors.items() if k.startswith(pre)}
            attn = [layer[f"self_attn.{x}_proj.weight"] for x in "qkv"]
            mlp = [layer[f"mlp.{x}_proj.weight"] for x in ("gate", "up")]
            layer["qkv"], layer["gate_up"] = torch.cat(attn), torch.cat(mlp)
            self.layers.append(layer)
        shape = (1, self.kv_heads, CONTEXT, self.head_dim)
        self.keys = torch.randn(shape, dtype=dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.size(-1),), weight, 1e-5)

    def step(self, ids: Tensor) -> Tensor:
        """Logits of the new positions `ids` [positions] on top of the cache."""
        n, width = len(ids), self.heads * self.head_dim
        x = self.embedding[ids]
        for layer in self.layers:
            qkv = functional.linear(self._normed(x, layer["input_layernorm.weight"]), layer["qkv"])
            q, kv = qkv[:, :width], qkv[:, width:]
            heads = q.view(n, self.heads, self.head_dim).transpose(0, 1)[None]
            new = kv.reshape(n, 2, self.kv_heads, self.head_dim).permute(1, 2, 0, 3)
            keys = torch.cat((self.keys, new[0][None]), dim=2)
            values = torch.cat((self.keys, new[1][None]), dim=2)
            out = functional.scaled_dot_product_attention(heads, keys, values, enable_gqa=True)
            flat = out[0].transpose(0, 1).reshape(n, width)
            x = x + functional.linear(flat, layer["self_attn.o_proj.weight"])
            both = functional.linear(
                self._normed(x, layer["post_attention_layernorm.weight"]), layer["gate_up"]
            )
            gate, up = both.chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["mlp.down_proj.weight"])
        return functional.linear(self._normed(x, self.norm), self.embedding)


@torch.inference_mode()
def step_seconds(
    folder: Path, positions: int = 1, repeats: int = 60, dtype: torch.dtype = torch.float32
) -> float:
    """Lower-quartile wall time in seconds of a step with `positions` new tokens at batch 1.

    The lower quartile, since other work on the machine only ever adds to a measurement.
    """
    stack = _Stack(folder, dtype)
    ids = torch.arange(positions) + 10
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        stack.step(ids).argmax(-1)
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 4]
