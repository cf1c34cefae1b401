"""Seconds that drafts save requests to their ends, at present step times.

A step without drafts for each token to come is compared with steps with drafts over the tokens they
yield, plus reading of the text. All requests of a step wait for drafts that are made inside it, and
each waits for its own that are made beside it, the link to a draft server included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.learn.times import round_seconds
from penstock.core.policies.base import View
from penstock.core.state import Drafter, RequestState

FloatArray = npt.NDArray[np.float64]

MARGIN = 0.04  # share of the time that a change must save over staying


class Savings:
    """Savings [S, J] of S requests and J drafters; `num_sharing` requests share a step."""

    def __init__(
        self,
        states: Sequence[RequestState],
        drafters: Mapping[str, Drafter],
        view: View,
        num_sharing: int,
        longest: int,
    ) -> None:
        self._drafters, self._view, self._sharing = list(drafters.values()), view, num_sharing
        times, acceptance = view.learn.times, view.learn.acceptance
        self._lengths = np.arange(1, longest + 1)
        plain = times.target(num_sharing)
        self._plain = round_seconds(plain, host=times.overhead)
        verify = plain + times.added(num_sharing, num_sharing * (1 + self._lengths))
        self._step = round_seconds(verify, host=times.overhead + times.draft_overhead)
        self._factors = np.array([acceptance.shape_of(n).factors[:longest] for n in drafters])
        remaining = view.learn.lengths.remaining
        self.remaining = np.array(
            [remaining(s.num_output_tokens, s.num_remaining_tokens) for s in states]
        )[:, None]
        """Expected remaining tokens, [S, 1]."""
        self._stays = np.array([[s.drafter == n for n in drafters] for s in states])
        reading = [
            times.catch_up_of(d.name) * (1 if view.is_beside(d) else num_sharing)
            for d in self._drafters
        ]
        self.unread = np.array([[num_unread(s, d) for d in self._drafters] for s in states])
        """Tokens [S, J] of a request's text that a drafter has not read."""
        self.reading = self.unread * reading
        """Seconds [S, J] that a step's requests wait until a drafter has read the text."""

    def if_shared(self, rates: FloatArray) -> FloatArray:
        """Return seconds [S, J] saved per token, at these rates, if all requests chose alike."""
        drafting = np.array([self._drafting(d, self._sharing) for d in self._drafters])
        return self._plain - self._per_token(drafting, rates)

    def share(self, demand: FloatArray) -> None:
        """Divide the drafters' time by `demand`, the share of requests [J] that each would get."""
        loads, wanted = self._view.loads, np.rint(self._sharing * demand)
        seconds = []
        for drafter, most in zip(self._drafters, wanted.tolist(), strict=True):
            load = loads.get(drafter.name, 0)
            joined, kept = max(1, load + 1, int(most)), max(1, load, int(most))
            own = self._drafting(drafter, joined)
            seconds.append((own if kept == joined else self._drafting(drafter, kept), own))
        kept_s, joined_s = np.array(seconds).swapaxes(0, 1)
        self._shared = np.where(self._stays[..., None], kept_s, joined_s)
        self._change = np.where(self._stays, 1.0, 1.0 + MARGIN)

    def at(self, rates: FloatArray) -> FloatArray:
        """Return seconds saved [S, J] at these rates, after `share`."""
        per_token = self._change * self._per_token(self._shared, rates)
        return np.asarray(self.remaining * (self._plain - per_token) - self.reading)

    def _drafting(self, drafter: Drafter, users: int) -> FloatArray:
        """Return the seconds [K] that drafts take from a request, if so many share the drafter."""
        times = self._view.learn.times
        if drafter.remote:
            first, longest = (times.draft_seconds(drafter.name, users, k) for k in (1, 2))
            return np.asarray(first + (longest - first) * (self._lengths - 1))
        seconds = times.curve_of(drafter.name)(users)
        if drafter.is_chained:
            seconds *= times.steps_of(drafter.name)  # looked-up tokens take none
        if not self._view.is_beside(drafter):
            seconds *= self._sharing / users
        return np.asarray(seconds * self._lengths)

    def _per_token(self, drafting: FloatArray, rates: FloatArray) -> FloatArray:
        """Return the seconds per token [S, J] with the best draft length; drafting: [..., J, K]."""
        odds = (rates / (1 - rates))[..., None] * self._factors
        tokens = 1 + (odds / (1 + odds)).cumprod(axis=-1).cumsum(axis=-1)
        return np.asarray(((self._step + drafting) / tokens).min(axis=-1))


def num_unread(state: RequestState, drafter: Drafter) -> int:
    """Return the tokens of a request's text that a drafter has to read; 0 for look-up."""
    if drafter.pool is None and not drafter.remote:
        return 0
    return max(0, state.num_unread(drafter.name))
