"""Models with real shapes and random weights, for timing."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.rope import Rope
from penstock.engine.models.variant import Variant
from penstock.engine.models.weights import weight_specs


def shape_names() -> list[str]:
    """Return the names of the shapes in this package."""
    return list(_shapes())


def shape(name: str) -> DecoderConfig:
    """Return a shape by name, or the shape of a checkpoint.

    The 265M and 616M LLaMA drafters of Spin (arXiv 2503.15921, section VI) are not described;
    theirs are shapes of those sizes. Raises CheckpointError for any other name."""
    if Path(name).exists():
        return DecoderConfig.from_pretrained(Path(name))
    known = _shapes()
    if name not in known:
        raise CheckpointError(
            f"{name!r} is neither a checkpoint nor a known shape; known are {', '.join(known)}"
        )
    fields = dict(known[name])
    rope = Rope(fields.pop("rope_theta"), **fields.pop("rope_scaling", {}))
    variant = Variant(**fields.pop("variant", {}))
    return DecoderConfig(**{"rope": rope, "variant": variant, "dtype": torch.bfloat16, **fields})


def random_weights(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return weights as `load_weights`: matrices keep the scale of activations, norms are ones."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for spec in weight_specs(config):
        weight = torch.ones(spec.shape, dtype=dtype, device=device)
        if len(spec.shape) > 1 or spec.name.endswith("bias"):
            weight.normal_(std=spec.shape[-1] ** -0.5, generator=generator)
        weights[spec.name] = weight
    return weights


def _shapes() -> dict[str, dict[str, Any]]:
    file = resources.files("penstock.engine.models").joinpath("shapes.json")
    shapes: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return shapes
