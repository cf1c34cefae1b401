"""How speculation went, counted from outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types import Output


@dataclass(slots=True)
class Speculated:
    """Drafts of one request or several. A draft is a round in which a drafter proposed something.

    drafts: rounds by drafter
    """

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafts: Counter[str] = field(default_factory=Counter)

    def observe(self, output: Output) -> None:
        if output.drafter is not None and output.num_proposed:
            self.drafts[output.drafter] += 1
            self.num_draft_tokens += output.num_proposed
            self.num_accepted_tokens += output.num_accepted

    def add(self, other: Speculated) -> None:
        self.drafts += other.drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens

    @property
    def num_drafts(self) -> int:
        return self.drafts.total()

    @property
    def drafter(self) -> str | None:
        """The one that drafted most often."""
        return max(self.drafts, key=self.drafts.__getitem__, default=None)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "drafter": self.drafter,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
        }
