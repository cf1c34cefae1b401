"""Small random heads and assistants beside models, and what they draft by transformers' layers."""

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_models import SHAPE, Checkpoint, randomise
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from penstock.engine.models.checkpoint import EAGLE3
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.families import FAMILIES
from penstock.engine.models.variant import HeadShape
from penstock.engine.models.weight_specs import head_specs

EAGLE = HeadShape(72, (0, 1, 3), 100)
"""An EAGLE-3 head of a model of four layers."""


def head_tensors(
    path: Path, seed: int = 0, shape: HeadShape | None = None
) -> dict[str, torch.Tensor]:
    """Random tensors of a head for the model in a folder or file."""
    config = DecoderConfig.from_pretrained(path)
    config = dataclasses.replace(config, head=shape or HeadShape(config.intermediate_size))
    offset = 0.0 if shape else FAMILIES[config.architecture].norm_offset
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in [source for spec in head_specs(config) for source in spec.sources]:
        if name == "d2t":
            ids = torch.randperm(config.vocab_size, generator=generator)[: size[0]].sort().values
            found[name] = ids - torch.arange(size[0])
        elif len(size) == 1:
            found[name] = torch.rand(size, generator=generator) + 0.5 - offset
        else:
            found[name] = torch.randn(size, generator=generator) * size[-1] ** -0.5
    return found


def add_head(
    path: Path, seed: int = 0, beside: Path | None = None, shape: HeadShape | None = None
) -> dict[str, torch.Tensor]:
    """Write a random head into a model's folder, or into one `beside` it."""
    tensors = head_tensors(path, seed, shape)
    own = {} if beside else load_file(path / "model.safetensors")
    folder = beside or path
    folder.mkdir(exist_ok=True)
    own |= {_stored_name(path, name): values for name, values in tensors.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    if shape is not None:
        content = {
            "architectures": [EAGLE3],
            "intermediate_size": shape.intermediate_size,
            "draft_vocab_size": shape.vocab_size,
            "eagle_aux_hidden_state_layer_ids": shape.reads,
        }
        (folder / "config.json").write_text(json.dumps(content))
    return tensors


def _stored_name(path: Path, name: str) -> str:
    """A tensor's name as the model's publishers write it."""
    config = DecoderConfig.from_pretrained(path)
    if config.architecture != "Glm4MoeForCausalLM":
        return name
    of_head = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    base = name.removeprefix("mtp.").removeprefix("layers.0.").removesuffix(".weight")
    theirs = of_head.get(base, "shared_head.norm" if base == "norm" else base)
    suffix = ".weight" if name.endswith(".weight") else ""
    return f"model.layers.{config.num_layers}.{theirs}{suffix}"


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices of all experts as one: `experts.gate_proj` and so on."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, values in tensors.items():
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(values)
    return {n: torch.stack(x) if ".experts." in n else x[0] for n, x in found.items()}


class ReferenceHead:
    """What a head drafts: one layer of transformers, over the whole text each time."""

    def __init__(self, saved: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        self._model: PreTrainedModel = saved.model
        config = copy.deepcopy(saved.model.config)
        self._is_eagle = "d2t" in tensors
        is_centred = config.model_type == "qwen3_5_text" and not self._is_eagle
        self._offset = 1.0 if is_centred else 0.0
        config.num_hidden_layers = 1
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"]
        if self._is_eagle:
            config = LlamaConfig(**SHAPE | {"intermediate_size": EAGLE.intermediate_size})
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        kind = LlamaForCausalLM if self._is_eagle else type(saved.model)
        self._layer = kind(config).model.eval()
        self._tensors = tensors
        prefix = "midlayer." if self._is_eagle else "mtp.layers.0."
        layer = self._layer.layers[0]
        own = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
        if self._is_eagle:
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = own.pop(f"self_attn.{name}.weight")
                getattr(layer.self_attn, name).weight = torch.nn.Parameter(weight)
            self._embed_norm = own.pop("input_layernorm.weight")
            self._hidden_norm = own.pop("hidden_norm.weight")
            layer.input_layernorm = torch.nn.Identity()
            own["input_layernorm.weight"] = torch.empty(0)
        else:
            self._embed_norm = tensors["mtp.pre_fc_norm_embedding.weight"]
            self._hidden_norm = tensors["mtp.pre_fc_norm_hidden.weight"]
        own = _stacked(own)
        if (gate := own.pop("mlp.experts.gate_proj.weight", None)) is not None:
            up = own.pop("mlp.experts.up_proj.weight")
            own["mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            own["mlp.experts.down_proj"] = own.pop("mlp.experts.down_proj.weight")
        missing, _ = layer.load_state_dict(own, strict=False)
        assert all("q_proj" in n or "k_proj" in n or "v_proj" in n for n in missing), missing

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int, front: Sequence[int] = ()) -> list[int]:
        """The likeliest tokens behind a text and a draft's looked-up front."""
        ids, known = torch.tensor([*text, *front]), self._known(torch.tensor(text)[None])
        states = torch.cat((torch.zeros_like(known[:1]), known[:-1]))
        drafted: list[int] = []
        while len(drafted) < count:
            for _ in range(len(ids) - len(states) + 1):
                state, told = self._rows(ids[: len(states)], states)
                states = torch.cat((states, state[-1:]))
            drafted.append(told)
            ids = torch.cat((ids, torch.tensor(drafted[-1:])))
        return drafted

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own states."""
        out = self._model.model(input_ids=ids, output_hidden_states=self._is_eagle)
        if not self._is_eagle:
            return out.last_hidden_state[0]
        read = torch.cat([out.hidden_states[i][0] for i in EAGLE.reads], dim=1)
        return read @ self._tensors["fc.weight"].t()

    def _rows(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The head's own states of all rows, and the likeliest token behind the last."""
        embedded = self._model.model.embed_tokens(ids)
        parts = self._normed(embedded, self._embed_norm), self._normed(states, self._hidden_norm)
        joined, layer = torch.cat(parts, dim=1), self._layer.layers[0]
        if not self._is_eagle:
            joined = joined @ self._tensors["mtp.fc.weight"].t()
            norm = self._tensors["mtp.norm.weight"]
            places = torch.arange(len(ids))[None]
            angles = self._layer.rotary_emb(joined[None], places)
            out = layer(joined[None], position_embeddings=angles)
            normed = self._normed((out[0] if isinstance(out, tuple) else out)[0], norm)
            return normed, int(self._model.lm_head(normed[-1]).argmax())
        angles = self._layer.rotary_emb(states[None], torch.arange(len(ids))[None])
        attended = layer.self_attn(joined[None], angles, None)[0][0]
        hidden = states + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = self._normed(hidden[-1], self._tensors["norm.weight"])
        place = int((self._tensors["lm_head.weight"] @ logits).argmax())
        return hidden, place + int(self._tensors["d2t"][place])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._model.config.rms_norm_eps).rsqrt()
        return x * scale * (weight + self._offset)


def in_gguf(
    tensors: dict[str, torch.Tensor], layer: int, architecture: gguf.MODEL_ARCH
) -> dict[str, np.ndarray]:
    """A head's tensors as they lie in a file. Qwen3.5's norms include the 1."""
    names = gguf.get_tensor_name_map(architecture, layer + 1)
    is_centred = architecture is gguf.MODEL_ARCH.QWEN35
    of_head = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    found = {}
    for name, values in _stacked(tensors).items():
        suffix = ".bias" if name.endswith(("bias",)) else ".weight"
        base = name.removeprefix("mtp.").removesuffix(".weight").removesuffix(".bias")
        base = base.replace("_correction_bias", "_correction")
        theirs = f"blk.{layer}.nextn.{of_head.get(base, 'shared_head_norm')}"
        if base.startswith("layers.0."):
            theirs = str(names.get_name(base.replace("layers.0.", f"model.layers.{layer}.")))
        found[theirs + suffix] = (values + int(is_centred and values.dim() == 1)).numpy()
    return found


def add_assistant(target: Checkpoint, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random assistant of a small Gemma 4 into a folder. changes: of its text model."""
    theirs: Any = target.model.config
    kinds = ("sliding_attention", "sliding_attention", "full_attention")
    heads = [theirs.per_layer_config[theirs.layer_types.index(kind)] for kind in kinds[1:]]
    sizes = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "layer_types": list(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": heads[0].num_key_value_heads,
        "head_dim": heads[0].head_dim,
        "num_global_key_value_heads": heads[1].num_key_value_heads,
        "global_head_dim": heads[1].head_dim,
        "attention_k_eq_v": True,
        "sliding_window": theirs.sliding_window,
        "max_position_embeddings": theirs.max_position_embeddings,
        **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0),
    }
    text = Gemma4TextConfig(**sizes | changes)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=theirs.hidden_size)
    torch.manual_seed(5)
    # The property knows no model of which every layer reads another's keys.
    modes = property(lambda own: ["reuse"] * own.num_hidden_layers)
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", modes):
        model = Gemma4AssistantForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


class ReferenceAssistant:
    """What an assistant drafts: transformers' model, over the target's keys and values.

    These are of the text but its last token, which the target has not read."""

    def __init__(self, saved: Checkpoint, assistant: PreTrainedModel) -> None:
        self._model, self._assistant = saved.model, assistant

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int, front: Sequence[int] = ()) -> list[int]:
        """As `ReferenceHead.draft`."""
        rows = self.rows(text, len(front) + count, front)
        return [int(logits.argmax()) for logits, _ in rows[len(front) :]]

    @torch.inference_mode()
    def rows(
        self, text: Sequence[int], count: int, front: Sequence[int] = ()
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and states of the first rows: of a text's last token, its front and its draft."""
        cache, config = DynamicCache(), self._model.config
        read = torch.tensor([text[:-1]])
        state = self._model.model(input_ids=read, past_key_values=cache).last_hidden_state[:, -1:]
        shared = {
            kind: (layer.keys, layer.values)
            for layer, kind in zip(cache.layers, config.layer_types, strict=False)
        }
        window = shared["sliding_attention"]
        seen = config.sliding_window - 1  # and the position of the draft
        shared["sliding_attention"] = tuple(x[:, :, -seen:] for x in window)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        ids = [text[-1], *front]
        while len(found) < count:
            embedded = self._model.model.embed_tokens(torch.tensor([[ids[len(found)]]]))
            out = self._assistant(
                inputs_embeds=torch.cat((embedded, state), dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=shared,
            )
            state = out.last_hidden_state
            found.append((out.logits[0, 0], state[0]))
            if len(found) == len(ids):
                ids.append(int(out.logits[0, 0].argmax()))
        return found
