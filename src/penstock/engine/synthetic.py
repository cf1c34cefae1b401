"""Made-up acceptance, to measure the speed of models whose weights are random.

What the target samples is a function of (seed, position) alone; a drafter foresees it with a given
probability, at each position independently. Both still do all their work. For benchmarks only:
what is generated means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.sampling import KeyedSampler, SamplingRows, TokenSampler, sample_coupled
from penstock.engine.sampling.noise import Salt, row_keys
from penstock.engine.sampling.params import IntArray


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """probability: that a drafter foresees the target's token. vocab: tokens that are made up."""

    probability: float
    vocab: int

    def decides(self, really: KeyedSampler, *, drafts: bool) -> KeyedSampler:
        """In place of what `really` samples, which is computed all the same."""

        def decide(
            logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, vocab: int
        ) -> torch.Tensor:
            sampled = really(logits, temperature, keys, vocab)
            return self._tokens(keys, drafts=drafts).to(sampled.dtype) + 0 * sampled

        return decide

    def samples(self, *, drafts: bool) -> TokenSampler:
        """The same, for steps without a graph."""

        def sample(logits: torch.Tensor, rows: SamplingRows, positions: IntArray) -> torch.Tensor:
            sampled = sample_coupled(logits, rows, positions)
            words = row_keys(rows.seed, positions, Salt.TARGET).view(np.int32)
            keys = torch.from_numpy(words).to(logits.device)
            return self._tokens(keys, drafts=drafts) + 0 * sampled

        return sample

    def _tokens(self, keys: torch.Tensor, *, drafts: bool) -> torch.Tensor:
        low, high = (keys.long() & 0xFFFFFFFF).unbind(-1)
        truth = low % self.vocab
        if not drafts:
            return truth
        missed = high >= int(self.probability * 2**32)
        return (truth + missed) % self.vocab
