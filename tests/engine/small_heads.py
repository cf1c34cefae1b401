"""Small random heads beside models (`mtp.*`), and what they draft by transformers' layers."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_models import Checkpoint
from transformers import PreTrainedModel

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.families import FAMILIES
from penstock.engine.models.weights import head_specs


def head_tensors(path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a head for the model in a folder or file."""
    config = dataclasses.replace(DecoderConfig.from_pretrained(path), has_head=True)
    offset = FAMILIES[config.architecture].norm_offset
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in [source for spec in head_specs(config) for source in spec.sources]:
        if len(shape) == 1:
            found[name] = torch.rand(shape, generator=generator) + 0.5 - offset
        else:
            found[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return found


def add_head(path: Path, seed: int = 0, beside: Path | None = None) -> dict[str, torch.Tensor]:
    """Write a random head into a model's folder, or into one `beside` it."""
    tensors = head_tensors(path, seed)
    own = {} if beside else load_file(path / "model.safetensors")
    (beside or path).mkdir(exist_ok=True)
    save_file(own | tensors, (beside or path) / "model.safetensors", {"format": "pt"})
    return tensors


class ReferenceHead:
    """What a head drafts: one layer of transformers, over the whole text each time."""

    def __init__(self, saved: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        self._model: PreTrainedModel = saved.model
        config = copy.deepcopy(saved.model.config)
        self._offset = 1.0 if config.model_type == "qwen3_5_text" else 0.0
        config.num_hidden_layers = 1
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"]
        self._layer = type(saved.model)(config).model.eval()
        self._tensors = tensors
        own = {
            name.removeprefix("mtp."): values
            for name, values in tensors.items()
            if name.startswith(("mtp.layers", "mtp.norm"))
        }
        missing, unknown = self._layer.load_state_dict(own, strict=False)
        assert not unknown
        assert all("embed_tokens" in name for name in missing), missing

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int, front: Sequence[int] = ()) -> list[int]:
        """The likeliest tokens behind a text and a draft's looked-up front."""
        ids = torch.tensor([*text, *front])
        known = self._model.model(input_ids=torch.tensor(text)[None]).last_hidden_state[0]
        states = torch.cat((torch.zeros_like(known[:1]), known[:-1]))
        drafted: list[int] = []
        while len(drafted) < count:
            for _ in range(len(ids) - len(states) + 1):
                here = ids[: len(states)]
                own = self._layer(inputs_embeds=self._join(here, states)[None])
                last = own.last_hidden_state[0, -1:]
                states = torch.cat((states, last))
            drafted.append(int(self._model.lm_head(last).argmax()))
            ids = torch.cat((ids, torch.tensor(drafted[-1:])))
        return drafted

    def _join(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = self._model.model.embed_tokens(ids)
        parts = [
            self._normed(embedded, "mtp.pre_fc_norm_embedding.weight"),
            self._normed(states, "mtp.pre_fc_norm_hidden.weight"),
        ]
        return torch.cat(parts, dim=1) @ self._tensors["mtp.fc.weight"].t()

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._model.config.rms_norm_eps).rsqrt()
        return x * scale * (self._tensors[name] + self._offset)


def in_gguf(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, np.ndarray]:
    """A head's tensors as they lie in a file of Qwen3.5's, whose norms include the 1."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, layer + 1)
    of_head = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    found = {}
    for name, values in tensors.items():
        base = name.removeprefix("mtp.").removesuffix(".weight")
        theirs = f"blk.{layer}.nextn.{of_head.get(base, 'shared_head_norm')}"
        if base.startswith("layers.0."):
            theirs = str(names.get_name(base.replace("layers.0.", f"model.layers.{layer}.")))
        found[f"{theirs}.weight"] = (values + 1 if values.dim() == 1 else values).numpy()
    return found
