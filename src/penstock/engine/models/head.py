"""A model's head for further tokens: one layer more, over what the model gives and the next token.

A row joins its token's embedding with the state of the position before, behind the model's last
norm. The head's own states take the place of the model's behind tokens that it drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Head:
    """Weights of a head, but for its layer. fc: [2 * hidden_size, hidden_size]."""

    fc: torch.Tensor
    embed_norm: Callable[[torch.Tensor], torch.Tensor]
    hidden_norm: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def from_weights(
        cls,
        weights: dict[str, torch.Tensor],
        device: torch.device,
        norm: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]],
    ) -> Head:
        """Take a head's weights. norm: makes a norm of its weight."""
        mine = {
            name: weights.pop(f"head.{name}").to(device)
            for name in ("fc", "embed_norm", "hidden_norm", "norm")
        }
        return cls(
            mine["fc"].t().contiguous(),
            norm(mine["embed_norm"]),
            norm(mine["hidden_norm"]),
            norm(mine["norm"]),
        )

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the input of the head's layer. states: of the rows before."""
        parts = (self.embed_norm(embedded), self.hidden_norm(states.to(embedded.dtype)))
        return torch.cat(parts, dim=1) @ self.fc
