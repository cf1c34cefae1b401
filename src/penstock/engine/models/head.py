"""A model's head for further tokens: one layer more, over what the model gives and the next token.

A row joins its token's embedding with the state of the position before. A state is what is behind
the model's last norm (multi-token prediction), or a product of the inputs of some of its layers
(EAGLE-3). The head's own states take their place behind tokens that it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig

HEAD_NORMS = ("embed_norm", "hidden_norm", "norm")

_Norm = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Head:
    """Weights of a head, but for its layer.

    fc:      [inputs, hidden_size]: of embedding and state, or of what EAGLE-3 reads (`reads`)
    lm_head: [hidden_size, tokens] of EAGLE-3, whose tokens have the ids `token_ids`"""

    reads: tuple[int, ...]
    fc: Tensor
    embed_norm: _Norm
    hidden_norm: _Norm
    norm: _Norm
    lm_head: Tensor | None = None
    token_ids: Tensor | None = None

    @classmethod
    def from_weights(
        cls,
        config: DecoderConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        norm: Callable[[Tensor], _Norm],
    ) -> Head | None:
        """Take a head's weights, if the model has one. norm: makes a norm of its weight."""
        if config.head is None:
            return None
        mine = {n: weights.pop(n).to(device) for n in list(weights) if n.startswith("head.")}
        fc, embed, hidden, last = (mine[f"head.{n}"] for n in ("fc", *HEAD_NORMS))
        head = cls(config.head.reads, fc.t().contiguous(), norm(embed), norm(hidden), norm(last))
        if head.reads:
            head.lm_head = mine["head.lm_head"].t().contiguous()
            head.token_ids = ids_of(mine["head.d2t"], config.vocab_size)
        return head

    def states(self, normed: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the model's states. inputs: of the layers that are read."""
        return torch.cat(list(inputs), dim=1) @ self.fc if self.reads else normed

    def enter(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads, and what is added to. states: of the rows before."""
        states = states.to(embedded.dtype)
        parts = torch.cat((self.embed_norm(embedded), self.hidden_norm(states)), dim=1)
        if self.reads:
            return parts, states
        joined = parts @ self.fc
        return joined, joined

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's own states, and what the output matrix reads."""
        normed = self.norm(hidden)
        return hidden if self.reads else normed, normed

    def logits(self, normed: Tensor, lm_head: Tensor, vocab: int) -> Tensor:
        """Return float32 logits [rows, vocab], or of all tokens if vocab is 0."""
        vocab = vocab or lm_head.shape[1]
        if self.lm_head is None or self.token_ids is None:
            return (normed @ lm_head[:, :vocab]).float()
        every = torch.full((len(normed), vocab), -torch.inf, device=normed.device)
        return every.index_copy_(1, self.token_ids, (normed @ self.lm_head).float())


def ids_of(offsets: Tensor, vocab_size: int) -> Tensor:
    """Return the ids of an EAGLE-3 head's tokens. Raises: CheckpointError for unusable ones.

    offsets: what each id exceeds its place by"""
    ids = offsets + torch.arange(len(offsets), device=offsets.device)
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(f"d2t: ids of tokens must differ, within 0..{vocab_size - 1}")
    return ids
