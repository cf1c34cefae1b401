"""Counts of output tokens and of speculation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types import PREDICTION, Output


@dataclass(slots=True)
class Usage:
    """Counts of one request or several. A draft is a round in which a drafter proposed tokens.

    num_reasoning_tokens: among num_tokens. num_rounds: outputs with tokens. drafts: rounds by
    drafter. proposed, accepted: draft tokens by who proposed them."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_rounds: int = 0
    drafts: Counter[str] = field(default_factory=Counter)
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def on_output(self, output: Output) -> None:
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_rounds += bool(output.token_ids)
        parts = output.drafts
        if parts:
            # A round is one draft, of the last proposer.
            self.drafts[parts[-1][0]] += 1
        for proposer, num_proposed, num_accepted in parts:
            self.proposed[proposer] += num_proposed
            self.accepted[proposer] += num_accepted

    def add(self, other: Usage) -> None:
        self.num_tokens += other.num_tokens
        self.num_reasoning_tokens += other.num_reasoning_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_rounds += other.num_rounds
        self.drafts += other.drafts
        self.proposed += other.proposed
        self.accepted += other.accepted

    @property
    def drafter(self) -> str | None:
        """The drafter with most drafts."""
        return max(self.drafts, key=self.drafts.__getitem__, default=None)

    @property
    def num_draft_tokens(self) -> int:
        return self.proposed.total()

    @property
    def num_accepted_tokens(self) -> int:
        return self.accepted.total()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as vLLM reports it; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(self.drafts.total(), 1)

    def prediction(self) -> dict[str, int]:
        """Return the tokens of predictions that were drafted, as OpenAI names them."""
        num_right = self.accepted[PREDICTION]
        return {
            "accepted_prediction_tokens": num_right,
            "rejected_prediction_tokens": self.proposed[PREDICTION] - num_right,
        }

    def speculation(self) -> dict[str, Any]:
        """Return the counts for reports."""
        return {
            "drafter": self.drafter,
            "num_drafts": self.drafts.total(),
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "drafters": {
                name: {"num_draft_tokens": num, "num_accepted_tokens": self.accepted[name]}
                for name, num in self.proposed.items()
            },
        }
