"""What a decoder does over a static batch: the interface of `torch_operations` and of
`kernels.triton_operations`.

No operation looks at a tensor's content on the host, so a GPU can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from penstock.engine.gpu.static_batch import StaticBatch, StepInputs
from penstock.engine.models.decoder import RmsNorm


@dataclass(frozen=True, slots=True)
class Projection:
    """[norm] x @ matrix [+ bias] [gated: silu(first half) * second half] [+ residual].

    matrix: [depth, size], or [depth, 2 * size] if gated
    """

    matrix: torch.Tensor
    norm: RmsNorm | None = None
    bias: torch.Tensor | None = None
    gated: bool = False


class VerifyOutcome(NamedTuple):
    """What a verification came to for n sequences, int32 on the device. short: [n], draft tokens
    that count and were not accepted; known: [2 * n], the last two known tokens of each."""

    short: torch.Tensor
    known: torch.Tensor


class Operations(Protocol):
    """What a decoder does, in one way. Rows of no sequence get any numbers."""

    def num_pieces(self, seqs: int) -> int:
        """Pieces of keys to provide for so many sequences."""
        ...

    def project(
        self,
        x: torch.Tensor,
        by: Projection,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x: [rows, depth]; returns [rows, size], in `dtype` (default: that of x)."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotations: torch.Tensor,
        qk_norm: RmsNorm | None,
        batch: StaticBatch,
        layer: int,
    ) -> torch.Tensor:
        """Normalise and turn queries and keys, and write keys and values into the cache.

        qkv: [rows, heads + 2 * kv_heads, head_dim], overwritten; rotations: [positions, 1,
        head_dim / 2] complex64. Returns the queries [rows, heads, head_dim], perhaps a view.
        """
        ...

    def plan(self, batch: StaticBatch) -> Any:
        """What `attend` needs to know of the sequences as they are now."""
        ...

    def attend(self, q: torch.Tensor, layer: int, plan: Any) -> torch.Tensor:
        """As `AttentionBackend.attend`."""
        ...

    def settle(
        self,
        given: StepInputs,
        late: torch.Tensor,
        settled: StaticBatch,
        keys: torch.Tensor,
        scratch_slot: int,
        *,
        by_row: bool,
    ) -> None:
        """Put into a batch what the host did not know when it wrote it: the rows' `late` tokens,
        and how much shorter the sequences are. Writes `settled`'s tokens, positions, slots and
        lengths, and each draw's keys, [num_draws, 2]. by_row: draws are rows; otherwise sequences,
        once or several times."""
        ...

    def outcome(
        self,
        token_ids: torch.Tensor,
        samples: torch.Tensor,
        rows: torch.Tensor,
        limits: torch.Tensor,
    ) -> VerifyOutcome:
        """What the rows' samples, [rows] int32, mean for drafts among their tokens.

        rows, limits: [n] int32, where sequences begin, and how many draft tokens behind count
        """
        ...

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, vocab: int
    ) -> torch.Tensor:
        """Seeded samples, [rows] int32, of the first `vocab` tokens.

        logits: [rows, V] float32; temperature: [rows] float32, 0 for greedy; keys: [rows, 2] int32,
        the words of `penstock.engine.sampling.noise.row_keys`.
        """
        ...
