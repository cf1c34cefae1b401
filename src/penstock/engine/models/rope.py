"""Parameters of the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
    "proportional": {"factor"},
}
_ROPE_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_LISTS = ("short_factor", "long_factor")
"""longrope's divisors of the frequencies."""
_NOT_NUMBERS = {"truncate", *_LISTS}
PARTIAL_TYPES = ("default", "longrope", "proportional")
"""With which part of a head may be rotated."""


def check_rope_type(rope_type: str) -> None:
    """Raises ValueError for an unsupported type."""
    if rope_type not in _ROPE_FIELDS:
        raise ValueError(f"rope_type is {rope_type!r}; allowed: {', '.join(_ROPE_FIELDS)}")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, its parameters under transformers' names; None where the type has none.

    partial_rotary_factor: share of a head that is rotated, its first dimensions. short_factor,
    long_factor: longrope's divisors of the frequencies; see `divisors`."""

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_rope_type(self.rope_type)
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}; allowed: above 0, up to 1"
            )
        if self.partial_rotary_factor != 1 and self.rope_type not in PARTIAL_TYPES:
            raise ValueError(
                f"rope {self.rope_type}: partial_rotary_factor is {self.partial_rotary_factor}; "
                f"other than 1 it is allowed with {', '.join(PARTIAL_TYPES)}"
            )
        for name in sorted(_ROPE_FIELDS[self.rope_type] - _ROPE_OPTIONAL - _NOT_NUMBERS):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or value <= 0:
                raise ValueError(f"rope {self.rope_type}: {name} is {value!r}; must be above 0")
        if self.factor < 1:
            raise ValueError(f"rope {self.rope_type}: factor is {self.factor}; must be at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError("rope llama3: low_freq_factor must be below high_freq_factor")
        for name in _LISTS:
            if not all(number > 0 for number in getattr(self, name)):
                raise ValueError(f"rope longrope: {name} must be numbers above 0")

    @classmethod
    def from_transformers(cls, values: Mapping[str, Any]) -> Rope:
        """Build from transformers' rope_parameters, or from version 4's with rope_theta added."""
        given = {key: value for key, value in values.items() if value is not None}
        rope_type = given.get("rope_type") or given.get("type") or "default"
        check_rope_type(rope_type)
        if "rope_theta" not in given:
            raise ValueError("rope_theta is missing")
        used = {key: given[key] for key in _ROPE_FIELDS[rope_type] & given.keys()}
        if "factor" in _ROPE_FIELDS[rope_type]:
            used.setdefault("factor", float(rope_type == "proportional"))
        used |= {name: tuple(used[name]) for name in _LISTS if name in used}
        partial = given.get("partial_rotary_factor", 1.0)
        return cls(float(given["rope_theta"]), rope_type, partial_rotary_factor=partial, **used)

    def as_transformers(self) -> dict[str, Any]:
        """Return the scaling parameters in the form of transformers."""
        used = _ROPE_FIELDS[self.rope_type]
        values = {k: v for k, v in asdict(self).items() if k in used and v is not None}
        return {"rope_type": self.rope_type, **values}

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def is_spread(self) -> bool:
        """True if pairs of a whole head lie half of its size apart in checkpoints."""
        return self.partial_rotary_factor == 1 or self.rope_type == "proportional"

    def scaled_positions(self, max_positions: int) -> int:
        """Return the positions of a model that was trained on `max_positions` without scaling.

        As vLLM has them: `factor` times as many with linear and yarn."""
        if self.rope_type not in ("linear", "yarn"):
            return max_positions
        original = self.original_max_position_embeddings or max_positions
        return max(max_positions, int(original * self.factor))

    def divisors(self, max_positions: int) -> tuple[float, ...]:
        """Return longrope's divisors for texts of up to `max_positions` tokens.

        One choice for all texts of a model, as in vLLM: another for longer texts would change keys
        that are cached."""
        assert self.original_max_position_embeddings is not None
        is_long = max_positions > self.original_max_position_embeddings
        return self.long_factor if is_long else self.short_factor

    def spread_pairs(self, rows: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Reorder query or key rows [heads * head_dim, ...] so that pairs lie head_dim / 2 apart.

        The rotated pairs come first, as if the whole head was rotated, the rest by zero.
        Checkpoints that rotate a part of a head store its two halves side by side instead."""
        if self.is_spread:
            return rows
        rotated, kept = torch.arange(head_dim).split(
            (self.rotary_dim(head_dim), head_dim - self.rotary_dim(head_dim))
        )
        halves = zip(rotated.chunk(2), kept.chunk(2), strict=True)
        order = torch.cat([part for half in halves for part in half])
        return rows.unflatten(0, (-1, head_dim)).index_select(1, order).flatten(0, 1)


WHOLE_HEADS = Rope()
"""Rotation of every dimension of a head, without scaling."""
