"""Tables of the rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.rope import PARTIAL_TYPES, Rope


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary tables as transformers computes them, attention scaling included.

    cos, sin: [max_positions, head_dim] float32; both halves of the last axis are equal, for the
    rotation x * cos + concat(-x[d/2:], x[:d/2]) * sin. Pairs beyond the rotated part of a head are
    rotated by zero (see `Rope.spread_pairs`)."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, config: DecoderConfig, max_positions: int) -> RopeTable:
        """Build tables for positions 0..max_positions - 1.

        Raises ValueError beyond config.max_position_embeddings:
        dynamic scaling, without effect up to there, would change keys already cached."""
        if not 0 < max_positions <= config.max_position_embeddings:
            raise ValueError(
                f"max_positions is {max_positions}; "
                f"allowed: 1..{config.max_position_embeddings} (max_position_embeddings)"
            )
        frequencies, attention_scaling = _inverse_frequencies(config, config.rope)
        angles = torch.arange(max_positions).float()[:, None] * frequencies
        unmoved = (max_positions, config.head_dim // 2 - len(frequencies))
        cos, sin = angles.cos() * attention_scaling, angles.sin() * attention_scaling
        cos = torch.cat((cos, torch.ones(unmoved)), dim=1)
        sin = torch.cat((sin, torch.zeros(unmoved)), dim=1)
        return cls(cos=torch.cat((cos, cos), dim=1), sin=torch.cat((sin, sin), dim=1))


def _inverse_frequencies(config: DecoderConfig, rope: Rope) -> tuple[torch.Tensor, float]:
    """Return [rotary_dim / 2] float32, and the factor on cos and sin."""
    if rope.rope_type in PARTIAL_TYPES:
        dim = rope.rotary_dim(config.head_dim)
        whole = config.head_dim if rope.rope_type == "proportional" else dim
        powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float) / whole)
        if rope.rope_type == "default":
            return 1.0 / powers, 1.0
        if rope.rope_type == "proportional":
            return 1.0 / (rope.factor * powers), 1.0
        divisors = torch.tensor(rope.divisors(config.max_position_embeddings))
        return 1.0 / (divisors * powers), _longrope_scaling(rope)
    # Imported here: it takes seconds, and few models need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The older spelling, which transformers reads from version 4 on.
    parameters: dict[str, Any] = {
        "hidden_size": config.num_heads * config.head_dim,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": rope.as_transformers(),
    }
    rope_init = ROPE_INIT_FUNCTIONS[rope.rope_type]
    frequencies, factor = rope_init(LlamaConfig(**parameters), "cpu")
    return frequencies.float(), float(factor)


def _longrope_scaling(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.original_max_position_embeddings is not None
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
