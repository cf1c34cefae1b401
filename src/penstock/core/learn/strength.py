"""How far requests differ from what is expected of them.

Requests are beta-binomial around that: with n tokens, of which a were accepted and p was expected,
E[(a − np)² / np(1 − p)] = 1 + (n − 1) / (strength + 1)."""

from __future__ import annotations

_FIRST_WEIGHT = 64.0  # tokens that the first value counts for; chosen by hand, like the next one
_KEEP = 0.99  # memory a request
_LEAST, _MOST = 2.0, 100.0


class Strength:
    """Learns over ended requests the tokens that an expectation counts for, against their own."""

    def __init__(self, first: float) -> None:
        self._tokens, self._excess = _FIRST_WEIGHT, _FIRST_WEIGHT / (first + 1)

    @property
    def value(self) -> float:
        if self._excess * (_MOST + 1) <= self._tokens:
            return _MOST
        return max(_LEAST, self._tokens / self._excess - 1)

    def fade(self) -> None:
        """Forget a little: once a request."""
        self._tokens *= _KEEP
        self._excess *= _KEEP

    def add(self, expected: float, accepted: float, decided: float) -> None:
        """Take in an ended request's tokens, of which a share was `expected` to be accepted."""
        if decided > 1:
            deviation = accepted - decided * expected
            self._tokens += decided - 1
            self._excess += deviation**2 / (decided * expected * (1 - expected)) - 1
