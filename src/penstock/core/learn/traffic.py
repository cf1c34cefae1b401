"""Prompts that arrive: how long they are, and how many."""

from __future__ import annotations

import math

from penstock.core.types import Request


class Traffic:
    """Prompts that arrive: how long they are, and how many of their tokens come in a second. Both
    fade exponentially, by requests and by seconds."""

    def __init__(self, memory: float = 500.0, seconds: float = 30.0) -> None:
        self._keep = 1 - 1 / memory
        self._seconds = seconds
        self._weight = 0.0
        self._prompt_tokens = 0.0
        self._recent_tokens = 0.0
        self._since = self._last = 0.0

    def arrived(self, request: Request, now: float) -> None:
        """A request has come."""
        if not self._weight:
            self._since = self._last = now
        self._weight = self._keep * self._weight + 1
        self._prompt_tokens = self._keep * self._prompt_tokens + request.prompt_len
        self._recent_tokens *= math.exp((self._last - now) / self._seconds)
        self._recent_tokens += request.prompt_len
        self._last = now

    @property
    def mean_prompt_len(self) -> float:
        """Tokens; 1 before the first request."""
        return self._prompt_tokens / self._weight if self._weight else 1.0

    def prompt_tokens_per_s(self, now: float) -> float:
        """Rate of the recent past; 0 before anything is known."""
        known = 1 - math.exp((self._since - now) / self._seconds)
        if known <= 0:
            return 0.0
        recent = self._recent_tokens * math.exp((self._last - now) / self._seconds)
        return recent / (self._seconds * known)
