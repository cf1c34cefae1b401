"""Differences of a decoder from Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.models.rope import Rope

Activation = Literal["silu", "gelu_tanh"]
Bias = Literal["none", "qkv", "qkvo"]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers with sliding-window attention.

    size:   tokens that one sees, itself included
    layers: numbers of these layers
    rope:   theirs, if different from the other layers'"""

    size: int
    layers: frozenset[int]
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"sliding_window is {self.size}; must be at least 1")


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in every layer's MLP.

    norm_topk_prob: the probabilities of the chosen experts are normalised to sum to 1."""

    count: int
    per_token: int
    norm_topk_prob: bool

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"num_experts_per_tok is {self.per_token}; allowed: 1..{self.count} (num_experts)"
            )


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences from Llama; the defaults are Llama's.

    bias:            attention projections with a bias
    qk_norm:         RMSNorm over head_dim on every query and key head, before the rotation
    query_scale:     scores are this times q k / sqrt(head_dim); other than 1 with qk_norm only
    post_norms:      also an RMSNorm on the outputs of attention and MLP
    activation:      of the gate
    embedding_scale: factor on the token embeddings that enter the first layer"""

    bias: Bias = "none"
    qk_norm: bool = False
    query_scale: float = 1.0
    post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    window: SlidingWindow | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.query_scale != 1 and not self.qk_norm:
            raise ValueError(f"query_scale is {self.query_scale}; without qk_norm it must be 1")

    @property
    def qkv_bias(self) -> bool:
        return self.bias != "none"

    @property
    def o_bias(self) -> bool:
        return self.bias == "qkvo"

    def is_windowed(self, layer: int) -> bool:
        return self.window is not None and layer in self.window.layers


LLAMA = Variant()
