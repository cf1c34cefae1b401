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

    norm_topk_prob: the probabilities of the chosen experts are normalised to sum to 1.
    beside:         their inner size, where they are beside a dense MLP, with norms of their own"""

    count: int
    per_token: int
    norm_topk_prob: bool
    beside: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"num_experts_per_tok is {self.per_token}; allowed: 1..{self.count} (num_experts)"
            )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers with a gated DeltaNet, a recurrent state of fixed size, in place of attention.

    layers: numbers of these layers
    kernel: rows of the short convolution before it
    strided: value heads of key head i are i, i + key_heads, …; else they lie side by side"""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    strided: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.value_heads} is not a multiple of "
                f"linear_num_key_heads {self.key_heads}"
            )

    @property
    def value_size(self) -> int:
        """Channels of values, and of the layer's output before its projection."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of queries, keys and values, in this order."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    def value_heads_of(self, key_head: int) -> range:
        """Return the value heads that a key head serves."""
        if self.strided:
            return range(key_head, self.value_heads, self.key_heads)
        each = self.value_heads // self.key_heads
        return range(key_head * each, (key_head + 1) * each)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer.

    inner_size:      of the MLP
    kv_layer:        whose keys and values it reads: its own, or an earlier layer's of equal heads
    keys_are_values: one projection gives both"""

    head_dim: int
    num_kv_heads: int
    inner_size: int
    kv_layer: int
    keys_are_values: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences from Llama; the defaults are Llama's.

    bias:            attention projections with a bias
    qk_norm:         RMSNorm over head_dim on every query and key head, before the rotation
    query_scale:     scores are this times q k / sqrt(head_dim); other than 1 with qk_norm only
    post_norms:      also an RMSNorm on the outputs of attention and MLP
    gated:           what a head attends to is multiplied by the sigmoid of a projection of its own
    activation:      of the gate
    embedding_scale: factor on the token embeddings that enter the first layer
    value_norm:      RMSNorm without weights over head_dim on every value head
    layer_scale:     a layer's output is multiplied by a number of its own
    ple_size:        of what a token adds to every layer (per-layer embeddings); 0: nothing
    softcap:         logits are softcap * tanh(logits / softcap); 0: as they are
    shapes:          of every layer, where they differ"""

    bias: Bias = "none"
    qk_norm: bool = False
    query_scale: float = 1.0
    post_norms: bool = False
    gated: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    window: SlidingWindow | None = None
    experts: Experts | None = None
    delta: DeltaNet | None = None
    value_norm: bool = False
    layer_scale: bool = False
    ple_size: int = 0
    softcap: float = 0.0
    shapes: tuple[LayerShape, ...] = ()

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

    def is_recurrent(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers


LLAMA = Variant()
