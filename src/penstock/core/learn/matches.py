"""Acceptance of looked-up tokens, by source, length of match and request.

Every round teaches, whether or not what was found was drafted: its tokens are compared with the
text up to the first that differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.core.learn.saved import numbers
from penstock.core.learn.strength import Strength
from penstock.core.types import Match

_LEAST_SURVIVAL = 0.05  # of a looked-up token: a row's cost is not known better than that
_LONGEST = 32  # longer matches count the same
_FIRST_RATES = (0.5, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97)
"""Expected share of right tokens behind matches of 0, 1, 2, 4, 8, 16 and 32 tokens."""
_KEEP, _OWN_KEEP = 0.995, 0.97  # memory a round, over all requests and of one; chosen by hand
_STRENGTH = 32.0  # tokens that the expected rates count for, over all requests
_FIRST_OWN_STRENGTH = 4.0  # and of one, before any request; chosen by hand


class _Counts:
    """Right and decided tokens by length of match."""

    __slots__ = ("decided", "right")

    def __init__(self) -> None:
        self.right = [0.0] * len(_FIRST_RATES)
        self.decided = [0.0] * len(_FIRST_RATES)

    def add_round(self, match: Match, num_right: int, num_decided: int, keep: float) -> None:
        for values in (self.right, self.decided):
            values[:] = [keep * value for value in values]
        for i in range(num_decided):
            kind = _kind(match.length + i)
            self.right[kind] += i < num_right
            self.decided[kind] += 1

    def rates(self, expected: Sequence[float], strength: float) -> list[float]:
        """Return the rates by length of match, which are drawn towards `expected` ones.

        Where these were too high or too low for some lengths they are taken to be for the others,
        in odds."""
        total = sum(self.decided)
        likely = sum(n * e for n, e in zip(self.decided, expected, strict=True))
        right = sum(self.right)
        shift = (right + strength / 2) / (total - right + strength / 2)
        shift *= (total - likely + strength / 2) / (likely + strength / 2)
        found = []
        for made, num, rate in zip(self.right, self.decided, expected, strict=True):
            shifted = rate * shift / (rate * shift + 1 - rate)
            found.append((made + strength * shifted) / (num + strength))
        return found


class MatchRates:
    """Acceptance rates of what is looked up."""

    def __init__(self) -> None:
        self._by_source: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._by_request: defaultdict[str, dict[str, _Counts]] = defaultdict(dict)
        self._rates: dict[tuple[str, str], list[float]] = {}
        first = partial(Strength, _FIRST_OWN_STRENGTH)
        self._own_strength: defaultdict[str, Strength] = defaultdict(first)

    def survival(self, request_id: str, match: Match) -> list[float]:
        """Return the probabilities that the first 1, 2, … tokens of a match are all right.

        Up to the last that is not negligible."""
        rates = self._rates_of(request_id, match.source)
        survival, product = [], 1.0
        for length in range(match.length, match.length + len(match.token_ids)):
            product *= rates[_kind(length)]
            if product < _LEAST_SURVIVAL:
                break
            survival.append(product)
        return survival

    def learn(self, request_id: str, match: Match, truth: Sequence[int]) -> None:
        """Compare what was found with the tokens that came."""
        most = min(len(match.token_ids), len(truth))
        num_right = next((i for i in range(most) if match.token_ids[i] != truth[i]), most)
        num_decided = min(num_right + 1, most)
        own = self._by_request[request_id].setdefault(match.source, _Counts())
        own.add_round(match, num_right, num_decided, _OWN_KEEP)
        self._by_source[match.source].add_round(match, num_right, num_decided, _KEEP)
        self._rates.pop((request_id, match.source), None)

    def _rates_of(self, request_id: str, source: str) -> list[float]:
        found = self._rates.get((request_id, source))
        if found is None:
            found = self._usual_rates(source)
            own = self._by_request.get(request_id, {}).get(source)
            if own is not None:
                found = own.rates(found, self._own_strength[source].value)
            self._rates[request_id, source] = found
        return found

    def _usual_rates(self, source: str) -> list[float]:
        """Return the rates of all requests."""
        known = self._by_source.get(source)
        return [*_FIRST_RATES] if known is None else known.rates(_FIRST_RATES, _STRENGTH)

    def release_request(self, request_id: str) -> None:
        for source, own in self._by_request.pop(request_id, {}).items():
            self._rates.pop((request_id, source), None)
            if total := sum(own.decided):
                usual = zip(own.decided, self._usual_rates(source), strict=True)
                strength = self._own_strength[source]
                strength.fade()
                strength.add(sum(n * p for n, p in usual) / total, sum(own.right), total)
        for key in [k for k in self._rates if k[0] == request_id]:
            del self._rates[key]

    def state(self) -> dict[str, Any]:
        """Return what is known over all requests, as plain values."""
        return {name: [c.right, c.decided] for name, c in self._by_source.items()}

    def restore(self, state: Any) -> None:
        """Take over a `state`, before any request."""
        for name, (right, decided) in state.items():
            counts = self._by_source[name]
            counts.right, counts.decided = numbers(right), numbers(decided)
            if not len(counts.right) == len(counts.decided) == len(_FIRST_RATES):
                raise ValueError(
                    f"{name}: a rate for each of {len(_FIRST_RATES)} lengths is needed"
                )


def _kind(length: int) -> int:
    """Return the index in _FIRST_RATES of a match's length."""
    return min(length, _LONGEST).bit_length()
