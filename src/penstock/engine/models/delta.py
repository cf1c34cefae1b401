"""Gated DeltaNet of the eager decoder: a short convolution, then a state for each value head."""

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
class DeltaWeights:
    """Weights of a recurrent layer, but for its queries, keys and values. Matrices are [in, out].

    z:     gate of the output
    gates: strength of the update, then decay
    conv:  [kernel, conv_size] float32
    rate:  [value_heads] float32, below 0; dt_bias likewise
    norm:  [value_dim]"""

    z: torch.Tensor
    gates: torch.Tensor
    conv: torch.Tensor
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


class DeltaStates:
    """States of every recurrent layer, and the inputs of rows behind them (`engine.states`)."""

    def __init__(self, config: DecoderConfig, num_slots: int, device: torch.device) -> None:
        delta = config.variant.delta
        assert delta is not None
        self._delta, self._eps = delta, config.rms_norm_eps
        each = delta.value_heads // delta.key_heads
        order = [h for i in range(delta.key_heads) for h in delta.value_heads_of(i)]
        self._key_head = torch.tensor(order, device=device).argsort() // each
        state = (num_slots, delta.value_heads, delta.key_dim, delta.value_dim)
        rows = delta.kernel - 1 + MOST_KEPT
        inputs = (num_slots, rows, delta.conv_size + 2 * delta.value_heads)
        self._states = {i: torch.zeros(state, device=device) for i in delta.layers}
        self._inputs = {i: torch.zeros(inputs, device=device) for i in delta.layers}
        before = (x[:, : delta.kernel - 1] for x in self._inputs.values())
        self.parts = *self._states.values(), *before

    def mix(
        self,
        index: int,
        weights: DeltaWeights,
        qkv: torch.Tensor,
        normed: torch.Tensor,
        batch: RaggedBatch,
        moves: StateMoves,
    ) -> torch.Tensor:
        """Return a layer's output before its last projection, [num_tokens, value_size].

        qkv: of the rows, [num_tokens, conv_size]; normed: the layer's input"""
        rows = torch.cat((qkv.float(), (normed @ weights.gates).float()), dim=1)
        shape = (len(rows), self._delta.value_heads, self._delta.value_dim)
        out = torch.empty(shape, device=rows.device)
        for seq, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            if start < end:
                move = [int(x[seq]) for x in (moves.slots, moves.replayed, moves.committed)]
                out[start:end] = self._run(index, weights, rows[start:end], *move)
        z = (normed @ weights.z).float().view_as(out)
        scale = (out.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return (out * scale * weights.norm * F.silu(z)).flatten(1).to(normed.dtype)

    def _run(
        self,
        index: int,
        w: DeltaWeights,
        rows: torch.Tensor,
        slot: int,
        replayed: int,
        committed: int,
    ) -> torch.Tensor:
        """Take in one sequence's rows; return [num_rows, value_heads, value_dim]."""
        delta, state, kept = self._delta, self._states[index][slot], self._inputs[index][slot]
        before = delta.kernel - 1
        if replayed < 0:
            state.zero_()
            kept.zero_()
            replayed = 0
        inputs = torch.cat((kept[: before + replayed], rows))
        qkv, beta, alpha = inputs.split(
            (delta.conv_size, delta.value_heads, delta.value_heads), dim=1
        )
        mixed = F.silu((qkv.unfold(0, delta.kernel, 1) * w.conv.t()).sum(-1))
        q, k, v = _heads(delta, mixed)
        q, k = _normalised(q) * delta.key_dim**-0.5, _normalised(k)
        q, k = q[:, self._key_head], k[:, self._key_head]
        strength = beta[before:].sigmoid()
        decay = (w.rate * F.softplus(alpha[before:] + w.dt_bias)).exp()
        now, out = state.clone(), torch.empty_like(v)
        for t in range(len(v)):
            if t == replayed + committed:
                state.copy_(now)
            now = now * decay[t, :, None, None]
            held = (now * k[t, :, :, None]).sum(1)
            now = now + k[t, :, :, None] * (strength[t, :, None] * (v[t] - held))[:, None]
            out[t] = (now * q[t, :, :, None]).sum(1)
        if replayed + committed == len(v):
            state.copy_(now)
        left = inputs[replayed + committed :]
        kept[: len(left)] = left
        return out[replayed:]


def _heads(delta: DeltaNet, mixed: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values: [rows, heads, channels]."""
    size = delta.key_heads * delta.key_dim
    parts = mixed.split((size, size, delta.value_size), dim=1)
    heads = (delta.key_heads, delta.key_heads, delta.value_heads)
    return [x.unflatten(1, (n, -1)) for x, n in zip(parts, heads, strict=True)]


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
