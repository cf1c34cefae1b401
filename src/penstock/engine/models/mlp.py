"""MLPs of the eager decoder: dense, or experts chosen by a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.engine.models.variant import CLAMP, CLAMPED_SLOPE, Activation, Experts

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(act(gate x) * up x). Matrices are [in, out]; gate_up is contiguous so."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + MLP(x), both [num_tokens, hidden_size]."""
        gate, up = torch.mm(x, self.gate_up).chunk(2, dim=1)
        return torch.addmm(residual, _gated(self.activation, gate, up), self.down)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Mixture of experts: a token's most probable experts, weighted by probability.

    Results are added in ascending order of experts, then that of the shared ones.

    router:  [experts (+ 1), hidden_size], float32; the last row gates the shared ones
    choice_bias: [experts], for the choice alone
    gate_up: [experts, 2 * intermediate_size, hidden_size]
    down:    [experts, hidden_size, intermediate_size]
    biases:  of router, gate_up and down, [experts, …]
    scales:  [experts], of what each gives"""

    router: torch.Tensor
    choice_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: DenseMlp | None
    experts: Experts
    activation: Activation
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    scales: torch.Tensor | None = None

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, routed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return residual + MLP(x), [num_tokens, hidden_size]. routed: the router reads it."""
        of_router, of_gate_up, of_down = self.biases or (None, None, None)
        routed = x if routed is None else routed
        logits = F.linear(routed.float(), self.router, of_router)
        shares, chosen = self._route(logits[:, : self.experts.count], x.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts.count).tolist()
        out = torch.zeros_like(x)
        for expert, places in enumerate(order.split(counts)):
            if not counts[expert]:
                continue
            rows = places // self.experts.per_token
            bias = None if of_gate_up is None else of_gate_up[expert]
            gate, up = F.linear(x.index_select(0, rows), self.gate_up[expert], bias).chunk(2, dim=1)
            bias = None if of_down is None else of_down[expert]
            found = F.linear(_gated(self.activation, gate, up), self.down[expert], bias)
            out.index_add_(0, rows, found * shares.flatten()[places, None])
        if self.shared is not None:
            found = self.shared.add_to(torch.zeros_like(x), x)
            if self.experts.gates_shared:
                found *= logits[:, -1:].sigmoid().to(x.dtype)
            out += found
        return residual + out

    def _route(self, logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's expert weights and numbers: [num_tokens, per_token]."""
        scores = logits.sigmoid() if self.experts.sigmoid_scores else logits.softmax(dim=-1)
        ranked = scores if self.choice_bias is None else scores + self.choice_bias
        chosen = ranked.topk(self.experts.per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if self.experts.norm_topk_prob:
            shares /= shares.sum(dim=-1, keepdim=True)
        if self.scales is not None:
            shares = shares * self.scales[chosen]
        return (shares * self.experts.scale).to(dtype), chosen


def _gated(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if activation == "clamped":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(gate * CLAMPED_SLOPE) * (up + 1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts beside a dense MLP, whose router and they have norms of their own."""

    mlp: ExpertMlp
    router_norm: Norm
    norm: Norm
    out_norm: Norm
    dense_norm: Norm

    def add_to(self, dense: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm of what the dense MLP gives + that of what the experts give."""
        x = self.norm(hidden)
        found = self.mlp.add_to(torch.zeros_like(x), x, self.router_norm(hidden))
        return self.dense_norm(dense) + self.out_norm(found)


@dataclass(frozen=True, slots=True)
class PleMlp:
    """norm(out(act(gate x) * inputs)), of what a token adds to a layer. Matrices are [in, out]."""

    gate: torch.Tensor
    out: torch.Tensor
    norm: Norm
    activation: Activation

    def add_to(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden + MLP(hidden). inputs: [num_tokens, ple_size]."""
        gated = _gated(self.activation, torch.mm(hidden, self.gate), inputs)
        return hidden + self.norm(torch.mm(gated, self.out))
