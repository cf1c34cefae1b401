"""Differences of a decoder from Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.models.rope import Rope

Activation = Literal["silu", "gelu_tanh", "clamped"]
Bias = Literal["none", "qkv", "qkvo"]

CLAMP, CLAMPED_SLOPE = 7.0, 1.702
"""Limit and slope of the clamped activation, as in gpt-oss (`clamped` in simd.h)."""


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
    """Mixture of experts in the layers' MLPs.

    norm_topk_prob: the scores of the chosen experts are normalised to sum to 1
    sigmoid_scores: a logit's sigmoid is its score, else the softmax of all
    chosen_with_bias: a bias is added to the scores for the choice, and not to what they weigh
    scale:        factor on the scores of the chosen ones
    shared_size:  inner size of the experts that every token has, together; 0: none
    gates_shared: what these give is multiplied by the sigmoid of a row of the router
    dense:        numbers of layers without experts, and their inner size
    bias:         the router and the experts' matrices have one
    beside:       of a dense MLP, whose size is the layer's; with norms of their own"""

    count: int
    per_token: int
    norm_topk_prob: bool
    sigmoid_scores: bool = False
    chosen_with_bias: bool = False
    scale: float = 1.0
    shared_size: int = 0
    gates_shared: bool = False
    dense: frozenset[int] = frozenset()
    dense_size: int = 0
    bias: bool = False
    beside: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"num_experts_per_tok is {self.per_token}; allowed: 1..{self.count} (num_experts)"
            )

    @property
    def router_rows(self) -> int:
        return self.count + self.gates_shared


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers with a gated DeltaNet, a recurrent state of fixed size, in place of attention.

    Without key heads it is the short convolution before it alone, its input and output gated.

    layers: numbers of these layers
    kernel: rows of the short convolution before it
    strided: value heads of key head i are i, i + key_heads, …; else they lie side by side
    mixed:   matrices of a checkpoint that have a key head's rows of several projections together"""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    strided: bool = False
    mixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key_heads and self.value_heads % self.key_heads:
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

    @property
    def gate_size(self) -> int:
        """Numbers of a row that a state's update reads beside these channels."""
        return 2 * self.value_heads if self.key_heads else 0

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
    kv_layer:        whose keys and values it reads: its own, or an earlier layer's of equal heads;
                     in an assistant ~I for layer I of the other model
    keys_are_values: one projection gives both"""

    head_dim: int
    num_kv_heads: int
    inner_size: int
    kv_layer: int
    keys_are_values: bool = False


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Layer behind the model's that predicts further tokens.

    intermediate_size: of its MLP
    reads: layers whose inputs EAGLE-3 joins; none: it reads what is behind the model's last norm
    vocab_size: tokens of EAGLE-3's own output matrix; 0: it has the model's"""

    intermediate_size: int
    reads: tuple[int, ...] = ()
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences from Llama; the defaults are Llama's.

    bias:            attention projections with a bias
    qk_norm:         RMSNorm over head_dim on every query and key head, before the rotation
    query_scale:     scores are this times q k / sqrt(head_dim)
    post_norms:      also an RMSNorm on the outputs of attention and MLP
    gated:           what a head attends to is multiplied by the sigmoid of a projection of its own
    activation:      of the gate; clamped: gate sigmoid(1.702 gate) (up + 1), both clamped at 7
    embedding_scale: factor on the token embeddings that enter the first layer
    sinks:           the denominator of a head's softmax also has exp of a learned number
    residual_scale:  factor on what attention and MLP add
    logit_scale:     factor on the logits
    unrotated:       layers whose queries and keys are not rotated
    query_growth:    scores at position p are times 1 + this * log(1 + p // query_period)
    value_norm:      RMSNorm without weights over head_dim on every value head
    layer_scale:     a layer's output is multiplied by a number of its own
    ple_size:        of what a token adds to every layer (per-layer embeddings); 0: nothing
    softcap:         logits are softcap * tanh(logits / softcap); 0: as they are
    shapes:          of every layer, where they differ
    assists:         hidden_size of the model for which an assistant drafts; 0: it is none"""

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
    sinks: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    unrotated: frozenset[int] = frozenset()
    query_growth: float = 0.0
    query_period: int = 1
    value_norm: bool = False
    layer_scale: bool = False
    ple_size: int = 0
    softcap: float = 0.0
    shapes: tuple[LayerShape, ...] = ()
    assists: int = 0

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
