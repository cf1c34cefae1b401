"""Yields of drafts that end by themselves: tokens proposed and accepted, by price and request.

Acceptance overestimates such drafts: only tokens that the drafter is sure of are verified. Under a
low price drafts are long; yields under other prices only say how a request differs from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_MEMORY = 500  # drafts of all requests that a drafter's mean covers
_OWN_KEEP = 0.97  # memory of a request's own drafts a draft; chosen by hand
_STRENGTH = 4.0
"""Drafts that the mean over requests counts for in one request's estimate: drafts vary about twice
as much within a request as means do between requests."""
_PRICES = 8  # price classes from 0 to 1


class DraftYield(NamedTuple):
    """Mean tokens of a draft, proposed and accepted."""

    proposed: float
    accepted: float


class _AllDrafts:
    """Drafts of all requests under one price; at first even up to a length by the price."""

    def __init__(self, longest: int, price: float) -> None:
        likely = 1 + round(longest * (1 - price))
        self._lengths = [_STRENGTH / likely] * likely + [0.0] * (longest + 1 - likely)
        self._accepted = _STRENGTH * (likely - 1) / 2 * (1 + price) / 2
        self._num = _STRENGTH

    def add_verified(self, weight: float, num_proposed: int, num_accepted: int) -> None:
        keep = 1 - weight / _MEMORY
        self._lengths = [n * keep for n in self._lengths]
        self._lengths[min(num_proposed, len(self._lengths) - 1)] += weight
        self._accepted = self._accepted * keep + weight * num_accepted
        self._num = self._num * keep + weight

    @property
    def mean(self) -> DraftYield:
        proposed = sum([n * length for length, n in enumerate(self._lengths)])
        return DraftYield(proposed / self._num, self._accepted / self._num)

    def longest(self, num_drafts: int) -> float:
        shorter = expected = 0.0
        for n in self._lengths[:-1]:
            shorter += n / self._num
            expected += 1 - min(1.0, shorter) ** num_drafts
        return expected


@dataclass(slots=True)
class _Own:
    """Sums over the drafts of one request, and over their expectations."""

    num: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    expected_proposed: float = 0.0
    expected_accepted: float = 0.0

    def add_verified(self, num_proposed: int, num_accepted: int, expected: DraftYield) -> None:
        self.num = self.num * _OWN_KEEP + 1
        self.proposed = self.proposed * _OWN_KEEP + num_proposed
        self.accepted = self.accepted * _OWN_KEEP + num_accepted
        self.expected_proposed = self.expected_proposed * _OWN_KEEP + expected.proposed
        self.expected_accepted = self.expected_accepted * _OWN_KEEP + expected.accepted


class DraftYields:
    """Yields of one drafter, whose drafts have at most `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_price = [_AllDrafts(limit, (i + 0.5) / _PRICES) for i in range(_PRICES)]
        self._by_request: dict[str, _Own] = {}

    def add_verified(
        self, request_id: str, price: float, num_proposed: int, num_accepted: int
    ) -> None:
        """Take in a draft that was verified, or ended before its first token."""
        own = self._by_request.setdefault(request_id, _Own())
        all_drafts = self._at(price)
        # Later drafts of a request say less of other requests; and long-drafting requests are those
        # with good drafts.
        weight = _STRENGTH / (_STRENGTH + own.num)
        all_drafts.add_verified(weight, num_proposed, num_accepted)
        own.add_verified(num_proposed, num_accepted, all_drafts.mean)

    def mean(self, price: float) -> DraftYield:
        """Return the mean yield over requests."""
        return self._at(price).mean

    def yield_of(self, request_id: str, mean: DraftYield) -> DraftYield:
        """Return the expected yield of a request's next draft, from the `mean` over requests."""
        own = self._by_request.get(request_id)
        if own is None:
            return mean
        proposed, accepted = _STRENGTH * mean.proposed, _STRENGTH * mean.accepted
        longer = (own.proposed + proposed) / max(own.expected_proposed + proposed, 1e-9)
        better = (own.accepted + accepted) / max(own.expected_accepted + accepted, 1e-9)
        found = min(float(self.limit), longer * mean.proposed)
        return DraftYield(found, min(found, better * mean.accepted))

    def longest(self, price: float, num_drafts: int) -> float:
        """Return the expected length of the longest of some drafts."""
        return self._at(price).longest(num_drafts)

    def information(self, request_id: str) -> float:
        """Return the fall in variance of a request's estimate by one more draft."""
        own = self._by_request.get(request_id)
        num = _STRENGTH + (own.num if own is not None else 0.0)
        return 1 / (num * (num + 1))

    def release_request(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def _at(self, price: float) -> _AllDrafts:
        return self._by_price[min(_PRICES - 1, int(price * _PRICES))]
