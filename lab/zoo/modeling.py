"""Building, growing and saving the family's Llama models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lab.zoo.circuits import seed_copying
from lab.zoo.recipe import Shape
from lab.zoo.template import BOS_ID, EOS_ID, PAD_ID
from lab.zoo.tokenizer import MAX_POSITIONS, VOCAB_SIZE


def config_of(shape: Shape, vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """The Hugging Face configuration of `shape`."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        attention_bias=False,
        mlp_bias=False,
        use_cache=True,
    )


def build(shape: Shape, seed: int, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A fresh model in float32, the same for the same seed."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(config_of(shape, vocab_size))
    seed_copying(model, shape, seed)
    return model


@torch.no_grad()
def grow(small: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    """Deepen `small` to `shape` without changing what it computes.

    Each layer is followed by copies of itself whose two output projections are zero: they add
    nothing at first and learn from there.
    """
    old = small.config.num_hidden_layers
    if shape.layers % old:
        raise ValueError(f"{shape.layers} layers are not a multiple of {old}")
    large = build(shape, seed=0, vocab_size=small.config.vocab_size)
    large.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    large.model.norm.load_state_dict(small.model.norm.state_dict())
    times = shape.layers // old
    for index, layer in enumerate(large.model.layers):
        source = small.model.layers[index // times]
        layer.load_state_dict(copy.deepcopy(source.state_dict()))
        if index % times:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return large


SHARPNESS = 1.5
"""What the logits of a trained target are multiplied by. A short training leaves 2 to 3% of the
mass on thousands of tokens that never come; a factor of 1.4 took it to 0.4%."""


@torch.no_grad()
def sharpen(model: LlamaForCausalLM) -> None:
    """Multiply the logits of `model` by SHARPNESS, in its final norm."""
    model.model.norm.weight.mul_(SHARPNESS)


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[rows, length, hidden] final hidden states, before the head."""
    output: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return output


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write bfloat16 safetensors and a config in Hugging Face layout; `model` is unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    half.save_pretrained(folder)
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), "rope_theta": 10000.0}  # read by older versions
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A saved model in `dtype`, in evaluation mode."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train(False)
    return model


def parameter_count(model: nn.Module) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(p.numel() for p in model.parameters())
