"""Muon for the matrices of layers, AdamW for embeddings, output matrices and norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the odd quintic iteration that drives singular values to one ("Polar Express",
# arXiv 2505.16932); float32 throughout, since not every CPU computes in bfloat16.
_QUINTIC = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)

_TABLES = ("embed_tokens.weight", "lm_head.weight")

EMBEDDING_LR = 0.5
"""The embedding's learning rate over the norms': it begins that much larger than is usual."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values near one; `matrix` is [rows, columns]."""
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x / (x.norm() * 1.02 + 1e-7)
    for a, b, c in _QUINTIC:
        gram = x @ x.mT
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (after K. Jordan, 2024), with decoupled weight decay.

    Not torch.optim.Muon: that orthogonalises in bfloat16 with other coefficients, and the recipe,
    and so the bundled weights, were made with these.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                buffer = state["momentum"]
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalise(param.grad.lerp(buffer, group["momentum"]))
                scale = math.sqrt(max(1.0, param.size(0) / param.size(1)))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale)


class Optimizers:
    """Both optimisers behind one learning-rate factor."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        matrices = [
            p for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith(_TABLES)
        ]
        ids = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in ids]
        embeddings, norms = ([p for p in rest if p.ndim == n] for n in (2, 1))
        self.muon = Muon(matrices, lr=muon_lr)
        groups = [
            {"params": embeddings, "base": EMBEDDING_LR * adam_lr},
            {"params": norms, "base": adam_lr},
        ]
        self.adam = torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.muon.param_groups[0]["base"] = muon_lr

    def step(self, factor: float) -> None:
        """Update with both learning rates multiplied by `factor`, then clear gradients."""
        for optimizer in (self.muon, self.adam):
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both states."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def cosine_factor(step: int, steps: int, warmup: int, floor: float = 0.02) -> float:
    """Learning-rate factor of `step`: linear warm-up, then half a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
