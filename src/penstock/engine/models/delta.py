"""Recurrent layers of the eager decoder: short convolutions, and states behind them.

A gated DeltaNet has a state for each value head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.variant import DeltaNet
from penstock.engine.runner import RaggedBatch
from penstock.engine.states import MOST_KEPT, StateMoves


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Weights of a short convolution: [kernel, conv_size] float32."""

    conv: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights(ConvWeights):
    """Weights of a DeltaNet, but for its queries, keys and values. Matrices are [in, out].

    z:     gate of the output
    gates: strength of the update, then decay
    rate:  [value_heads] float32, below 0; dt_bias likewise
    norm:  [value_dim]"""

    z: torch.Tensor
    gates: torch.Tensor
    dt_bias: torch.Tensor
    rate: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def from_weights(cls, weights: dict[str, torch.Tensor]) -> DeltaWeights:
        return cls(
            z=weights["linear_z"].t().contiguous(),
            gates=torch.cat((weights["beta"], weights["alpha"])).t().contiguous(),
            conv=weights["conv"].squeeze(1).t().contiguous(),
            dt_bias=weights["dt_bias"],
            rate=-weights["a_log"].exp(),
            norm=weights["linear_norm"],
        )


class ConvStates:
    """Inputs of every layer's short convolution, and of rows behind them (`engine.states`)."""

    def __init__(self, config: DecoderConfig, num_slots: int, device: torch.device) -> None:
        delta = config.variant.delta
        assert delta is not None
        self._delta = delta
        inputs = (num_slots, delta.kernel - 1 + MOST_KEPT, delta.conv_size + delta.gate_size)
        self._inputs = {i: torch.zeros(inputs, device=device) for i in delta.layers}
        self._memory = [self._inputs]

    def mix(
        self,
        index: int,
        weights: ConvWeights,
        qkv: torch.Tensor,
        normed: torch.Tensor,
        batch: RaggedBatch,
        moves: StateMoves,
    ) -> torch.Tensor:
        """Return a layer's output before its last projection, [num_tokens, value_size].

        qkv: of the rows, [num_tokens, conv_size], of a short convolution alone gates of input and
        output and the input; normed: the layer's input"""
        rows = self._rows(weights, qkv, normed)
        before, parts = self._delta.kernel - 1, []
        for seq, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            if start == end:
                continue
            slot, replayed, committed = (
                int(x[seq]) for x in (moves.slots, moves.replayed, moves.committed)
            )
            if replayed < 0:
                replayed = 0
                for layers in self._memory:
                    layers[index][slot].zero_()
            kept = self._inputs[index][slot]
            inputs = torch.cat((kept[: before + replayed], rows[start:end]))
            mixed = self._take_in(index, weights, inputs, slot, replayed + committed)
            left = inputs[replayed + committed :]
            kept[: len(left)] = left
            parts.append(mixed[replayed:])
        return self._gated(weights, torch.cat(parts), qkv, normed).to(normed.dtype)

    def _rows(self, w: ConvWeights, qkv: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return the rows' inputs as they are kept."""
        gate, _, x = qkv.float().chunk(3, dim=1)
        return gate * x

    def _gated(
        self, w: ConvWeights, mixed: torch.Tensor, qkv: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        return mixed * qkv.float().chunk(3, dim=1)[1]

    def _take_in(
        self, index: int, w: ConvWeights, inputs: torch.Tensor, slot: int, certain: int
    ) -> torch.Tensor:
        """Return what a sequence's rows give, those that are replayed first.

        certain: rows that the state takes in"""
        return (inputs.unfold(0, self._delta.kernel, 1) * w.conv.t()).sum(-1)


class DeltaStates(ConvStates):
    """The same with the states of every DeltaNet."""

    def __init__(self, config: DecoderConfig, num_slots: int, device: torch.device) -> None:
        super().__init__(config, num_slots, device)
        self._eps, delta = config.rms_norm_eps, self._delta
        each = delta.value_heads // delta.key_heads
        order = [h for i in range(delta.key_heads) for h in delta.value_heads_of(i)]
        self._key_head = torch.tensor(order, device=device).argsort() // each
        state = (num_slots, delta.value_heads, delta.key_dim, delta.value_dim)
        self._states = {i: torch.zeros(state, device=device) for i in delta.layers}
        self._memory.append(self._states)

    def _rows(self, w: ConvWeights, qkv: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        assert isinstance(w, DeltaWeights)
        return torch.cat((qkv.float(), (normed @ w.gates).float()), dim=1)

    def _gated(
        self, w: ConvWeights, mixed: torch.Tensor, qkv: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(w, DeltaWeights)
        z = (normed @ w.z).float().view_as(mixed)
        scale = (mixed.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return (mixed * scale * w.norm * F.silu(z)).flatten(1)

    def _take_in(
        self, index: int, w: ConvWeights, inputs: torch.Tensor, slot: int, certain: int
    ) -> torch.Tensor:
        """Return [num_rows, value_heads, value_dim]."""
        assert isinstance(w, DeltaWeights)
        delta, state, before = self._delta, self._states[index][slot], self._delta.kernel - 1
        qkv, beta, alpha = inputs.split(
            (delta.conv_size, delta.value_heads, delta.value_heads), dim=1
        )
        q, k, v = _heads(delta, F.silu(super()._take_in(index, w, qkv, slot, certain)))
        q, k = _normalised(q) * delta.key_dim**-0.5, _normalised(k)
        q, k = q[:, self._key_head], k[:, self._key_head]
        strength = beta[before:].sigmoid()
        decay = (w.rate * F.softplus(alpha[before:] + w.dt_bias)).exp()
        now, out = state.clone(), torch.empty_like(v)
        for t in range(len(v)):
            if t == certain:
                state.copy_(now)
            now = now * decay[t, :, None, None]
            held = (now * k[t, :, :, None]).sum(1)
            now = now + k[t, :, :, None] * (strength[t, :, None] * (v[t] - held))[:, None]
            out[t] = (now * q[t, :, :, None]).sum(1)
        if certain == len(v):
            state.copy_(now)
        return out


def _heads(delta: DeltaNet, mixed: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values: [rows, heads, channels]."""
    size = delta.key_heads * delta.key_dim
    parts = mixed.split((size, size, delta.value_size), dim=1)
    heads = (delta.key_heads, delta.key_heads, delta.value_heads)
    return [x.unflatten(1, (n, -1)) for x, n in zip(parts, heads, strict=True)]


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
