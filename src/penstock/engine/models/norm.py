"""Root-mean-square norm of the eager decoder."""

from __future__ import annotations

import math

import torch


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32.

    Computed as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight), which takes half as many passes.
    `weight` includes the factor sqrt(n), `sum_eps` is n eps."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight.float() * math.sqrt(size)
        self._eps = torch.full((), math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, length.hypot_(self._eps)).mul_(self.weight).to(x.dtype)
