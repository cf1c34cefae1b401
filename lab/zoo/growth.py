"""Larger copies of the bundled models that make the same tokens: real acceptance at real cost.

The width grows by a power of 4. The residual stream's added channels are zero, so that the mean of
its squares is a power of 4 smaller; with eps divided by that power and the norms' weights by its
root, RMSNorm returns the same numbers, and each of these divisions is exact. Added layers, heads
and MLP channels read the stream through random weights and write nothing: the columns that they
have in the output projections are zero. Head size, rotation, vocabulary and positions stay.

Products are then sums of the same terms and zeros, which are equal wherever terms are added in the
order of the inputs, as the compiled kernels do. A library that adds in blocks may cut longer rows
at other places, and round the last bit otherwise.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from lab.common.shards import SHARD_BYTES, new_folder, save_sharded
from lab.zoo.heads import Head, load_head, save_head
from lab.zoo.manifest import heads_of, write_manifest
from lab.zoo.modeling import parameter_count
from penstock.config import ConfigError
from penstock.engine.models.checkpoint import SINGLE_FILE
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weight_specs import weight_specs
from penstock.zoo.registry import DEFAULT_TARGET, ModelCard, bundled_models

TOLERANCE = 0.015
"""How far a grown size may lie from the one that was asked for."""

_WIDTHS = (1, 4, 16, 64)
_FFN_STEPS = (256, 32)
"""256 where a size allows it, the longest block that a quantised format cuts rows into; the
bundled models' own is 32."""

_INNER = ("o_proj.weight", "down_proj.weight")
_WRITERS = (*_INNER, "embed_tokens.weight", "fc.weight")
"""What writes to the residual stream; of these what reads another than that."""

_MOST_DEPTH = 4
"""Layers over those that a model of the same proportions would have, at most."""


@dataclass(frozen=True, slots=True)
class Growth:
    """One model of the family, before and after.

    asked: parameters that were asked for
    width: by which its hidden size grows, a power of 4
    """

    card: ModelCard
    asked: int
    width: int
    small: DecoderConfig
    large: DecoderConfig

    @property
    def parameters(self) -> int:
        return count_parameters(self.large)

    @property
    def num_bytes(self) -> int:
        """Of its weights on disk."""
        return self.parameters * self.large.dtype.itemsize


def count_parameters(config: DecoderConfig) -> int:
    """Of a Llama model with tied embeddings, which count once."""
    hidden = config.hidden_size
    attention = 2 * hidden * (config.q_size + config.kv_size)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return config.vocab_size * hidden + config.num_layers * layer + hidden


def plan_family(target_params: int, drafter_share: tuple[float, float]) -> list[Growth]:
    """The default target and all bundled drafters, the target first.

    drafter_share: parameters over the target's, of the smallest drafter and of the largest; those
    between lie in proportion to the logarithm of their size.
    Raises: ConfigError for sizes under those of the bundled models, and names the smallest.
    """
    cards = bundled_models()
    drafters = [card for card in cards.values() if card.role == "drafter"]
    sizes = [card.parameters for card in drafters]
    low, high = drafter_share
    target = cards[DEFAULT_TARGET]
    if target_params < target.parameters * (1 - TOLERANCE):
        raise ConfigError(
            f"--target-params: {target.name} has {target.parameters:,} parameters and can only "
            f"grow; {target_params:,} is less"
        )
    grown = [_plan(target, target_params)]
    for card in drafters:
        place = math.log(card.parameters / min(sizes)) / math.log(max(sizes) / min(sizes))
        asked = round(target_params * low ** (1 - place) * high**place)
        if asked < card.parameters * (1 - TOLERANCE):
            raise ConfigError(
                f"--drafter-share: {card.name} has {card.parameters:,} parameters and can only "
                f"grow; its share of {target_params:,} is {asked / target_params:.4f}, which must "
                f"be at least {card.parameters / target_params:.4f}"
            )
        grown.append(_plan(card, asked))
    return grown


def _plan(card: ModelCard, asked: int) -> Growth:
    small = DecoderConfig.from_pretrained(card.path)
    width, large = grown_shape(small, asked)
    return Growth(card, asked, width, small, large)


def grown_shape(small: DecoderConfig, parameters: int) -> tuple[int, DecoderConfig]:
    """Width factor and config nearest to `small` in proportions, within TOLERANCE in size."""
    shapes = [shape for shape in _shapes(small, parameters) if _error(shape[1], parameters) <= 1]
    even = [shape for shape in shapes if shape[1].intermediate_size % _FFN_STEPS[0] == 0]
    return min(even or shapes, key=lambda shape: _distance(small, *shape))


def _error(large: DecoderConfig, parameters: int) -> float:
    """Of its size, as a share of what is tolerated."""
    return abs(count_parameters(large) / parameters - 1) / TOLERANCE


def _distance(small: DecoderConfig, width: int, large: DecoderConfig) -> float:
    """Squared, between the proportions of layers and MLP to the hidden size, in logarithms."""
    depth = large.num_layers / (small.num_layers * width)
    ffn = large.intermediate_size / (small.intermediate_size * width)
    return math.log(depth) ** 2 + math.log(ffn) ** 2


def _shapes(small: DecoderConfig, parameters: int) -> Iterator[tuple[int, DecoderConfig]]:
    """For every width and depth the MLP that comes nearest to `parameters`."""
    for width in _WIDTHS:
        wide = widened(small, width)
        for layers in range(small.num_layers, _MOST_DEPTH * small.num_layers * width + 1):
            flat = replace(wide, num_layers=layers)
            missing = parameters - count_parameters(flat)
            channels = small.intermediate_size + missing / (3 * wide.hidden_size * layers)
            for step in _FFN_STEPS:
                ffn = round(channels / step) * step
                if ffn >= small.intermediate_size:
                    yield width, replace(flat, intermediate_size=ffn)


def widened(small: DecoderConfig, width: int) -> DecoderConfig:
    """Hidden size, heads and key heads times `width`, a power of 4."""
    return replace(
        small,
        hidden_size=small.hidden_size * width,
        num_heads=small.num_heads * width,
        num_kv_heads=small.num_kv_heads * width,
        rms_norm_eps=small.rms_norm_eps / width,
    )


def write_family(
    out: Path, family: list[Growth], on_bytes: Callable[[int], object] = lambda num: None
) -> None:
    """Write every model to its folder in `out`, with a manifest; what is unfinished goes again.

    Raises: ConfigError where `out` is not an empty or new folder, or the disk has no room.
    """
    new_folder(out, sum(growth.num_bytes for growth in family))
    folders = [out / growth.card.name for growth in family]
    try:
        for growth, folder in zip(family, folders, strict=True):
            write_grown(folder, growth, on_bytes)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    heads = heads_of(family[0].card.name)
    sizes = [growth.parameters for growth in family]
    sizes += [write_grown_head(out / head.name, head.path, family[0]) for head in heads]
    originals = [*(growth.card for growth in family), *heads]
    cards = {
        card.name: {
            "role": card.role,
            "parameters": size,
            "description": f"{card.description}; grown from {card.parameters:,}",
        }
        for card, size in zip(originals, sizes, strict=True)
    }
    write_manifest(out, cards)


def write_grown(
    folder: Path,
    growth: Growth,
    on_bytes: Callable[[int], object] = lambda num: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write one grown model in Hugging Face layout, in files of at most `shard_bytes`."""
    shutil.copytree(
        growth.card.path, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors")
    )
    raw: dict[str, Any] = json.loads((growth.card.path / "config.json").read_text())
    raw |= _sizes(growth.large) | {"num_hidden_layers": growth.large.num_layers}
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    old = load_file(growth.card.path / SINGLE_FILE)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in weight_specs(growth.large):
            for name, shape in spec.sources:
                tensor = _grown_tensor(name, shape, old, growth, generator)
                on_bytes(tensor.nbytes)
                yield name, tensor

    save_sharded(folder, tensors(), shard_bytes)


def _sizes(large: DecoderConfig) -> dict[str, Any]:
    """Fields of config.json that grow in a head, too."""
    return {
        "hidden_size": large.hidden_size,
        "intermediate_size": large.intermediate_size,
        "num_attention_heads": large.num_heads,
        "num_key_value_heads": large.num_kv_heads,
        "rms_norm_eps": large.rms_norm_eps,
    }


def write_grown_head(folder: Path, original: Path, target: Growth) -> int:
    """Write a target's head so that it drafts the same beside the grown target.

    Its MLP grows in the target's proportion. Returns its number of parameters."""
    content: dict[str, Any] = json.loads((original / "config.json").read_text())
    small = load_head(original)
    ffn = content["intermediate_size"] / target.small.intermediate_size
    ffn = round(ffn * target.large.intermediate_size / _FFN_STEPS[1]) * _FFN_STEPS[1]
    content |= _sizes(target.large) | {"intermediate_size": ffn}
    large = Head(LlamaConfig(**content), small.reads, small.tokens)
    old, tensors = small.checkpoint(), large.checkpoint()
    generator = torch.Generator().manual_seed(0)
    for name, blank in tensors.items():
        if not blank.is_floating_point():
            tensors[name] = old[name]
        elif blank.ndim == 1:
            tensors[name] = _grown_norm(old[name], target)
        else:
            tensors[name] = _grown_matrix(name, blank.shape, old[name], target, generator)
    content["num_hidden_layers"] = target.large.num_layers
    save_head(folder, tensors, large.description(content))
    return parameter_count(large)


def _grown_tensor(
    name: str,
    shape: tuple[int, ...],
    old: dict[str, torch.Tensor],
    growth: Growth,
    generator: torch.Generator,
) -> torch.Tensor:
    """The old values in the first rows and columns; around them zeros in what writes to the
    residual stream, and random numbers in what reads it."""
    own = old.get(name)
    if len(shape) == 1:
        # An added layer has the norms of the last one.
        last = name.split(".")
        last[2:3] = [str(growth.small.num_layers - 1)] if own is None else last[2:3]
        return _grown_norm(old[".".join(last)], growth)
    return _grown_matrix(name, shape, own, growth, generator)


def _grown_norm(values: torch.Tensor, growth: Growth) -> torch.Tensor:
    return values.repeat(growth.width) / math.sqrt(growth.width)


def _grown_matrix(
    name: str,
    shape: tuple[int, ...],
    own: torch.Tensor | None,
    growth: Growth,
    generator: torch.Generator,
) -> torch.Tensor:
    hidden = growth.small.hidden_size
    tensor = torch.zeros(shape, dtype=growth.large.dtype)
    if not name.endswith(_WRITERS):
        # Only the old channels are ever anything but zero.
        tensor.normal_(std=hidden**-0.5, generator=generator)
    if own is not None:
        # What a head joins lies side by side, and grows side by side.
        joined = 1 if name.endswith(_INNER) else own.shape[1] // hidden
        rows, columns = own.shape[0], own.shape[1] // joined
        parts = tensor.view(len(tensor), joined, -1)
        parts[:rows, :, :columns] = own.view(rows, joined, columns)
    return tensor
