"""MLPs of the eager decoder: dense, or experts chosen by a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.engine.models.variant import Activation, Experts

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
        return torch.addmm(residual, _activated(self.activation, gate).mul_(up), self.down)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Mixture of experts: a token's most probable experts, weighted by probability.

    Results are added in ascending order of experts.

    router:  [experts, hidden_size], float32
    gate_up: [experts, 2 * intermediate_size, hidden_size]
    down:    [experts, hidden_size, intermediate_size]"""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    experts: Experts
    activation: Activation
    scales: torch.Tensor | None = None  # of what each expert gives

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, routed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return residual + MLP(x), [num_tokens, hidden_size]. routed: the router reads it."""
        shares, chosen = self._route(x if routed is None else routed)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts.count).tolist()
        out = torch.zeros_like(x)
        for expert, places in enumerate(order.split(counts)):
            if not counts[expert]:
                continue
            rows = places // self.experts.per_token
            gate, up = F.linear(x.index_select(0, rows), self.gate_up[expert]).chunk(2, dim=1)
            found = F.linear(_activated(self.activation, gate).mul_(up), self.down[expert])
            out.index_add_(0, rows, found * shares.flatten()[places, None])
        return residual + out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's expert weights and numbers: [num_tokens, per_token]."""
        probabilities = F.linear(x.float(), self.router).softmax(dim=-1)
        shares, chosen = probabilities.topk(self.experts.per_token, dim=-1)
        if self.experts.norm_topk_prob:
            shares /= shares.sum(dim=-1, keepdim=True)
        if self.scales is not None:
            shares = shares * self.scales[chosen]
        return shares.to(x.dtype), chosen


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
        gated = _activated(self.activation, torch.mm(hidden, self.gate)) * inputs
        return hidden + self.norm(torch.mm(gated, self.out))


def _activated(activation: Activation, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
