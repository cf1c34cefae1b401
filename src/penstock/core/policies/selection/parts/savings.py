"""Seconds that drafts save requests to their ends, at present step times.

A step without drafts for each token to come is compared with steps with drafts over the tokens they
yield, plus reading of the text. All requests of a step wait for its seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.learn.prior import mean_rate
from penstock.core.learn.times import Times, round_seconds
from penstock.core.policies.base import View
from penstock.core.policies.selection.parts.pace import Pace
from penstock.core.state import Drafter, RequestState

FloatArray = npt.NDArray[np.float64]

_BEST_RATE = 0.9  # acceptance of a draft token that hardly any drafter exceeds
_NODES = np.array([-math.sqrt(3), 0.0, math.sqrt(3)])
WEIGHTS = np.array([1 / 6, 2 / 3, 1 / 6])
"""Three-point Gauss-Hermite rule for a normal variable."""


class Prices:
    """Costs of a step without drafts, and with drafts of 1 to K tokens by drafter."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        pace: Pace,
        num_sharing: int,
        view: View,
        longest: int,
        margin: float,
    ) -> None:
        """Compute the costs, for `num_sharing` requests a step and drafts up to `longest`."""
        times = view.learn.times
        self.view, self.margin = view, margin
        self.num_sharing = sharing = num_sharing
        self.base = round_seconds(times.target(sharing), host=times.overhead)
        self._lengths = np.arange(1.0, longest + 1)
        # Rows that are verified besides delay all requests.
        rows = pace.num_undrafted_rows
        slower = sharing * (times.target.at(rows + self._lengths) - times.target(rows))
        self._steps = self.base + times.draft_overhead + slower
        alone = np.array([_token_seconds(d, sharing, times) for d in drafters.values()])
        most = 1 + (_BEST_RATE**self._lengths).cumsum()
        pays = self.per_token(alone, most) < self.base / (1 + margin)
        self.drafters = {
            n: d for (n, d), p in zip(drafters.items(), pays.tolist(), strict=True) if p
        }
        self.alone = alone[pays]
        """Seconds [J] of a draft token if all requests shared the drafter."""

    def per_token(
        self, drafting: FloatArray, tokens: FloatArray, limits: FloatArray | None = None
    ) -> FloatArray:
        """Return the seconds per token with the best draft length, [...].

        drafting: [...] of a draft token; tokens: [..., K] yields of a round; limits: [...] longest
        drafts."""
        seconds = (self._steps + drafting[..., None] * self._lengths) / tokens
        if limits is not None:
            seconds = np.where(self._lengths <= limits[..., None], seconds, np.inf)
        found: FloatArray = seconds.min(axis=-1)
        return found

    @property
    def longest(self) -> int:
        return len(self._lengths)


class Savings:
    """Savings [S, J] of S requests and J drafters."""

    def __init__(self, prices: Prices, states: Sequence[RequestState]) -> None:
        self.states, self.drafters, self.view = states, prices.drafters, prices.view
        self._prices, view = prices, prices.view
        drafters = list(prices.drafters.values())
        learn = view.learn
        left = [s.num_remaining_tokens for s in states]
        expected = [
            learn.lengths.remaining(s.num_output_tokens, n)
            for s, n in zip(states, left, strict=True)
        ]
        self.remaining = np.array(expected)[:, None]
        """Expected remaining tokens, [S, 1]."""
        self._limits = None
        if min(left) <= prices.longest:
            self._limits = np.maximum(1.0, np.array(left, dtype=np.float64) - 1)[:, None]
        shapes = [learn.acceptance.shape_of(d.name).factors[: prices.longest] for d in drafters]
        self._factors = np.array(shapes)
        unread = [[float(num_unread(s, d)) for d in drafters] for s in states]
        self.unread = np.array(unread)
        """Tokens of a request's text that a drafter has not read, [S, J]."""
        costs = [
            (1 if view.is_beside(d) else prices.num_sharing) * learn.times.catch_up_of(d.name)
            for d in drafters
        ]
        self.reading = self.unread * costs
        """Seconds [S, J] that all requests of a drafter wait until it has read the text."""

    def share(self, demand: Mapping[str, float]) -> None:
        """Divide the drafters' time by `demand`, the share of requests that each would get."""
        drafters, prices = list(self.drafters.values()), self._prices
        stays = np.array([[s.drafter == d.name for d in drafters] for s in self.states])
        seconds = [
            _shares(d, alone, prices, demand)
            for d, alone in zip(drafters, prices.alone.tolist(), strict=True)
        ]
        joined, kept = np.array(seconds).T
        self._drafting = np.where(stays, kept, joined)
        self._change = np.where(stays, 1.0, 1.0 + prices.margin)

    def at(self, rates: FloatArray) -> FloatArray:
        """Return seconds saved at acceptance rates [..., S, J], once the text has been read."""
        per_token = self._prices.per_token(self._drafting, self._tokens(rates), self._limits)
        saved: FloatArray = self.remaining * (self._prices.base - self._change * per_token)
        return saved

    def shared(self, rates: FloatArray) -> FloatArray:
        """Return seconds [S, J] saved per token if all requests shared the drafter."""
        tokens = self._tokens(rates)
        return self._prices.base - self._prices.per_token(self._prices.alone, tokens, self._limits)

    def told(self, mean: FloatArray, variance: FloatArray, information: FloatArray) -> FloatArray:
        """Return the seconds saved at three possible later estimates, [3, ..., S, J].

        mean, variance: [S, J] of the log-odds; information: [..., S, J] Fisher's; weights:
        `WEIGHTS`."""
        told = variance * variance * information / (1 + variance * information)
        spread = np.multiply.outer(_NODES, np.sqrt(told))
        return self.at(mean_rate(mean + spread, variance - told))

    def _tokens(self, rates: FloatArray) -> FloatArray:
        """Return the yields of a round, [..., S, J, K]."""
        odds = (rates / (1 - rates))[..., None] * self._factors
        tokens: FloatArray = 1 + (odds / (1 + odds)).cumprod(axis=-1).cumsum(axis=-1)
        return tokens


def num_unread(state: RequestState, drafter: Drafter) -> int:
    """Return the tokens of a request's text that a drafter has to read; 0 for look-up."""
    if drafter.pool is None and not drafter.remote:
        return 0
    return max(0, state.num_unread(drafter.name))


def _shares(
    drafter: Drafter, alone: float, prices: Prices, demand: Mapping[str, float]
) -> tuple[float, float]:
    """Return seconds of a draft token for a request that joins a drafter, and that stays."""
    load, sharing = prices.view.loads.get(drafter.name, 0), prices.num_sharing
    wanted = max(1, round(sharing * demand.get(drafter.name, 0.0)))
    # Inside a step all requests wait for a drafter; beside it only its own.
    is_beside, times = prices.view.is_beside(drafter), prices.view.learn.times
    found = {sharing: alone}
    for users in (max(load + 1, wanted), max(load, wanted)):
        if users not in found:
            share = 1.0 if is_beside else sharing / users
            found[users] = share * _token_seconds(drafter, users, times)
    return found[max(load + 1, wanted)], found[max(load, wanted)]


def _token_seconds(drafter: Drafter, batch: int, times: Times) -> float:
    """Return the seconds of a draft token; a chain's looked-up tokens take none."""
    seconds = times.curve_of(drafter.name)(batch)
    return seconds * times.steps_of(drafter.name) if drafter.is_chained else seconds
