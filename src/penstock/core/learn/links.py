"""Round trips and drafting times of draft servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Line:
    """Line through (tokens, seconds) by discounted least squares.

    round_trip: seconds at no tokens, through which it goes at first."""

    round_trip: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0
    error: float = 0.0

    def add_transfer(self, tokens: float, seconds: float, keep: float) -> None:
        if self.weight:
            error = abs(seconds - self.at(tokens))
            self.error += (1 - keep) * (error - self.error)
        self.weight = keep * self.weight + 1
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.tokens_squared = keep * self.tokens_squared + tokens * tokens
        self.product = keep * self.product + tokens * (seconds - self.round_trip)

    @property
    def slope(self) -> float:
        weight = self.weight + _ORIGIN_WEIGHT
        spread = self.tokens_squared * weight - self.tokens**2
        if spread <= 0:
            return 0.0
        beyond = self.seconds - self.weight * self.round_trip
        return max(0.0, (self.product * weight - self.tokens * beyond) / spread)

    @property
    def intercept(self) -> float:
        """Seconds at no tokens; not negative."""
        return max(0.0, (self.seconds - self.slope * self.tokens) / self.weight)

    def at(self, tokens: float) -> float:
        return self.intercept + self.slope * tokens


_ORIGIN_WEIGHT = 0.5  # in drafts, of the round trip without one; chosen by hand, like these
_LINK_KEEP = 0.95  # memory a draft
_FIRST_PATIENCE_S = 2.0  # before the first draft
_LEAST_PATIENCE_S = 0.05  # above the jitter of a fast network


class LinkTimes:
    """Seconds from an order to its draft, measured here: a round trip, plus time per token."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._round_trips: dict[str, float] = {}

    def add_transfer(self, drafter: str, num_tokens: int, seconds: float) -> None:
        """Take in a draft that came `seconds` after its order."""
        line = self._lines.get(drafter)
        if line is None:
            line = self._lines[drafter] = _Line(self._round_trips.get(drafter, 0.0))
        line.add_transfer(num_tokens, seconds, _LINK_KEEP)

    def add_round_trip(self, drafter: str, seconds: float) -> None:
        """Take in a round trip without a draft."""
        self._round_trips[drafter] = seconds

    def seconds(self, drafter: str, num_tokens: int) -> float:
        """Return the expected seconds of a draft.

        While no draft was measured: the round trip, if that was, and the other servers' mean."""
        own = self._lines.get(drafter)
        lines = list(self._lines.values()) if own is None else [own]
        num = max(1, len(lines))
        each = sum(line.slope for line in lines) / num
        round_trip = sum(line.intercept for line in lines) / num
        if own is None:
            round_trip = self._round_trips.get(drafter, round_trip)
        return round_trip + each * num_tokens

    def patience(self, drafter: str, num_tokens: int) -> float:
        """Return the seconds after which a draft is given up, well beyond the usual ones."""
        line = self._lines.get(drafter)
        if line is None:
            return _FIRST_PATIENCE_S
        return _LEAST_PATIENCE_S + 2 * line.at(num_tokens) + 4 * line.error

    def drop_drafter(self, drafter: str) -> None:
        self._lines.pop(drafter, None)
        self._round_trips.pop(drafter, None)
