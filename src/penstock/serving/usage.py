"""Counts of output tokens and of speculation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types import Output


@dataclass(slots=True)
class Usage:
    """Counts of one request or several. A draft is a round in which a drafter proposed tokens.

    num_reasoning_tokens: among num_tokens. num_rounds: outputs with tokens. drafts: rounds by
    drafter."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafts: Counter[str] = field(default_factory=Counter)

    def on_output(self, output: Output) -> None:
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_rounds += bool(output.token_ids)
        if output.drafter is not None and output.num_proposed:
            self.drafts[output.drafter] += 1
            self.num_draft_tokens += output.num_proposed
            self.num_accepted_tokens += output.num_accepted

    def add(self, other: Usage) -> None:
        self.num_tokens += other.num_tokens
        self.num_reasoning_tokens += other.num_reasoning_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.drafts += other.drafts

    @property
    def drafter(self) -> str | None:
        """The drafter with most drafts."""
        return max(self.drafts, key=self.drafts.__getitem__, default=None)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as vLLM reports it; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(self.drafts.total(), 1)

    def speculation(self) -> dict[str, Any]:
        """Return the counts for reports."""
        return {
            "drafter": self.drafter,
            "num_drafts": self.drafts.total(),
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
        }
