"""Seconds that drafts save requests to their ends, at present step times.

A step without own drafts for each token to come is compared with steps with drafts over the tokens
they yield, plus reading of the text. All requests of a step wait for drafts that are made inside
it, and each waits for its own that are made beside it, the link to a draft server included.

Which drafters serve is decided for all requests together: each pays its share of a drafter's steps.
Which of these a request gets is decided by what it adds: it waits for the others' drafts in any
case.

Look-up makes a share of a request's tokens whatever its drafter is; a drafter saves on the
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from penstock.core.learn.acceptance import survival_of
from penstock.core.learn.times import round_seconds
from penstock.core.policies.base import View
from penstock.core.state import Drafter, RequestState
from penstock.core.types import TARGET
from penstock.fluid.step_profile import StepWork

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
        looked_up: FloatArray,
    ) -> None:
        """looked_up: share of tokens made by look-up, [1 + S], at first over all requests."""
        self._drafters, self._view, self._sharing = list(drafters.values()), view, num_sharing
        times, acceptance = view.learn.times, view.learn.acceptance
        self._lengths = np.arange(1, longest + 1)
        plain = times.target(num_sharing)
        self._plain = round_seconds(plain, host=times.overhead)
        self._added = times.added(num_sharing, num_sharing * (1 + self._lengths))
        """Seconds [K] by which verifying such drafts exceeds a step without."""
        self._factors = np.array([acceptance.shape_of(n).factors[:longest] for n in drafters])
        ids = ["", *(s.request.id for s in states)]
        self._found = np.array([[acceptance.found(i, n) for n in drafters] for i in ids])
        """Probability that there is a draft, [1 + S, J]."""
        self._share = 1 - looked_up[:, None]
        """Share of tokens that drafters may be of, [1 + S, 1]."""
        remaining = view.learn.lengths.remaining
        self.remaining = np.array(
            [remaining(s.num_output_tokens, s.num_remaining_tokens) for s in states]
        )[:, None]
        """Expected remaining tokens, [S, 1]."""
        self._stays = np.array([[s.drafter == n for n in drafters] for s in states])
        # A first drafter replaces none: it must only save more than its reading takes.
        self._changes = np.array([[s.drafter not in (None, n) for n in drafters] for s in states])
        reading = [
            times.catch_up_of(d.name) * (1 if view.is_beside(d) else num_sharing)
            for d in self._drafters
        ]
        self.unread = np.array([[num_unread(s, d) for d in self._drafters] for s in states])
        """Tokens [S, J] of a request's text that a drafter has not read."""
        has_time = np.array(
            [d.has_lane and not d.is_remote and not view.loads.get(d.name) for d in self._drafters]
        )
        hidden = np.array([[_prompt_seconds(s, view)] for s in states]) if has_time.any() else 0.0
        self.reading = np.maximum(0.0, self.unread * reading - has_time * hidden)
        """Seconds [S, J] that a step's requests wait until a drafter has read the text. One
        with a lane, and without other requests, reads a prompt while the target does."""

    def share(self, rates: FloatArray, kept: Sequence[int]) -> list[int]:
        """Divide requests with rates [P, J] among drafters, and return which ones serve them.

        kept: the ones that serve so far, which stay unless others save a margin more."""
        shares = self._divide(rates, kept) if self._sharing > 1 else {}
        accepted = self._accepted(rates.mean(axis=0)[None], self._found[0])[0]
        drafted = float(self._share[0, 0])
        self._base, drafts = self._plain, []
        for j, drafter in enumerate(self._drafters):
            users = round(self._sharing * shares.get(j, 0.0))
            own = self._drafting(drafter, max(1, users))
            if self._is_inside(drafter):
                before = 0.0
                if users > 1:
                    seconds = self._plain + self._added + own * self._sharing / users
                    longest = int((seconds / (1 + accepted[j])).argmin())
                    waits = 1 - (1 - drafted) ** (users - 1)  # for some other request's draft
                    before = waits * float(self._drafting(drafter, users - 1)[longest])
                    rows = drafted * self._added[longest] * users / self._sharing
                    self._base += before + rows
                    own = np.maximum(own, own[longest])
                own = self._sharing * (own - before)
            drafts.append(own)
        self._drafts = np.array(drafts)
        self._change = np.where(self._changes, 1.0 + MARGIN, 1.0)
        return list(shares)

    def _divide(self, rates: FloatArray, kept: Sequence[int]) -> dict[int, float]:
        """Return the drafters that serve requests with rates [P, J], with their shares of them.

        Those beside the step may all serve. For one inside it other requests wait, too: these are
        added one by one, the one first with which all requests save most, while that grows."""
        inside = [j for j, d in enumerate(self._drafters) if self._is_inside(d)]
        beside = [j for j in range(len(self._drafters)) if j not in inside]
        accepted, rows = self._accepted(rates, self._found[0]), np.arange(len(rates))
        undrafted = np.full(len(rates), self._plain)

        @cache
        def seconds(users: int) -> FloatArray:
            drafting = np.array(
                [
                    self._drafting(d, users) * (self._sharing / users if self._is_inside(d) else 1)
                    for d in self._drafters
                ]
            )
            own = self._per_token(self._plain, drafting, accepted, self._found[0])
            return np.asarray(self._plain - self._share[0] * (self._plain - own))

        def per_token(used: Sequence[int], shares: Sequence[float]) -> FloatArray:
            """Return the seconds per token [U + 1, P] with each of these drafters and with none."""
            users = [max(1, round(self._sharing * share)) for share in shares]
            own = [seconds(num)[:, j] for j, num in zip(used, users, strict=True)]
            return np.array([*own, undrafted])

        def divided(used: Sequence[int]) -> tuple[float, list[float]]:
            """Return the mean seconds per token if each request has its best, and the shares."""
            taken = per_token(used, [1 / len(used)] * len(used)).argmin(axis=0)
            shares = (np.bincount(taken, minlength=len(used) + 1)[:-1] / len(rates)).tolist()
            return float(per_token(used, shares)[taken, rows].mean()), shares

        def grown(used: Sequence[int]) -> tuple[float, Sequence[int], list[float]]:
            """Return the least mean with these drafters and others, with those and their shares."""
            least, shares = divided(used) if used else (self._plain, [])
            while left := [j for j in inside if j not in used]:
                mean, by_used, best = min((*divided([*used, j]), j) for j in left)
                if mean >= least:
                    break
                least, used, shares = mean, [*used, best], by_used
            return least, used, shares

        anew, with_kept = grown(beside), grown([*beside, *(j for j in kept if j in inside)])
        _, used, shares = with_kept if with_kept[0] < (1 + MARGIN) * anew[0] else anew
        return {j: share for j, share in zip(used, shares, strict=True) if share}

    def at(self, rates: FloatArray, *, is_read: bool = False) -> FloatArray:
        """Return seconds saved [S, J] at these rates, after `share`. is_read: the whole text is."""
        found = self._found[1:]
        per_token = self._per_token(self._base, self._drafts, self._accepted(rates, found), found)
        saved = self.remaining * self._share[1:] * (self._base - self._change * per_token)
        return np.asarray(saved if is_read else saved - self.reading)

    def _drafting(self, drafter: Drafter, users: int) -> FloatArray:
        """Return the seconds [K] of drafts, if so many requests share the drafter."""
        times = self._view.learn.times
        first, second = (times.draft_seconds(drafter.name, users, k) for k in (1, 2))
        host = times.draft_overhead if self._is_inside(drafter) else 0.0
        return np.asarray(host + first + (second - first) * (self._lengths - 1))

    def _is_inside(self, drafter: Drafter) -> bool:
        """Return True if all requests of a step wait for the drafter."""
        return not (drafter.is_remote or self._view.is_beside(drafter))

    def _per_token(
        self, base: float, drafting: FloatArray, right: FloatArray, found: FloatArray
    ) -> FloatArray:
        """Return the seconds per token [S, J] with the best draft length.

        base: of a step without own drafts; drafting: seconds [..., J, K]; right: of `_accepted`;
        found: [..., J]"""
        seconds = base + found[..., None] * self._added + drafting
        return np.asarray((seconds / (1 + right)).min(axis=-1))

    def _accepted(self, rates: FloatArray, found: FloatArray) -> FloatArray:
        """Return the expected accepted tokens [S, J, K] of drafts, of which so many are found."""
        survival = survival_of(rates, self._factors)
        return np.asarray(found[..., None] * survival.cumsum(axis=-1))


def _prompt_seconds(state: RequestState, view: View) -> float:
    """Return the seconds that the target takes for the rest of a request's prompt."""
    if state.num_output_tokens:
        return 0.0
    num_tokens, end = state.num_unread(TARGET), state.num_known_tokens
    work = StepWork(num_tokens, num_tokens * (end - 0.5 * num_tokens))
    return view.learn.times.step_seconds(work)


def num_unread(state: RequestState, drafter: Drafter) -> int:
    """Return the tokens of a request's text that a drafter has to read."""
    if drafter.pool is None and not drafter.is_remote:
        return 0
    return max(0, state.num_unread(drafter.name))
