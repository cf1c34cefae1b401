"""A conversation as chat templates take it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.api.bodies import ChatMessage, Tool

COST_PER_TEXT = 100
"""Overhead of tokenising any text, in characters."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and its tools, as chat templates take them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    is_asked: bool = True
    """True if the assistant's turn has begun."""
    continues: bool = False
    """True if the last message is the beginning of that turn."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""
    """Beginning of that turn."""

    @classmethod
    def from_messages(
        cls, messages: Iterable[ChatMessage], tools: Iterable[Tool], is_asked: bool = True
    ) -> Self:
        return cls(
            [m.for_template() for m in messages], [t.for_template() for t in tools], is_asked
        )

    @property
    def continued(self) -> str | None:
        """Text that the answer continues, or None."""
        text: str | None = self.messages[-1]["content"] if self.continues else None
        return text

    @property
    def size(self) -> int:
        """Cost of tokenising it, in characters."""
        calls = [call for m in self.messages for call in m.get("tool_calls", ())]
        given = [*self.tools, *calls, *self.variables.items()]
        written = len(json.dumps(given)) if given else 0
        return written + sum(COST_PER_TEXT + len(m["content"]) for m in self.messages)
