"""What look-up and a model are worth to a draft that both can make, and what to take of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.learn.acceptance import AcceptanceEstimator
from penstock.core.types import DraftOrder, RoundCosts, Verdict
from penstock.engine.drafters.lookup import LONGEST_MATCH, Match, num_equal
from penstock.engine.sequences import TokenBuffer

FloatArray = npt.NDArray[np.float64]

_MODEL = "model"
_SAVING_DISCOUNT = 0.999
_SAVING_STRENGTH = 16.0
"""Tokens of a request that say as much of it as all requests do."""
_NEVER = 1e9
"""Tokens that a draft which is not allowed is short of."""


class Parts(NamedTuple):
    """What a draft is made of: `num_kept` tokens of look-up's match, then `num_guessed` of the
    model."""

    match: Match
    num_kept: int
    num_guessed: int

    def behind_look_up(self, order: DraftOrder) -> DraftOrder:
        """The model's part of an order. What was looked up is text to it. It drafts to its end:
        evidence is of whole parts."""
        return order._replace(
            num_catch_up_tokens=order.num_catch_up_tokens + self.num_kept,
            max_draft_tokens=self.num_guessed,
            min_survival=0.0,
        )


class _Drafted(NamedTuple):
    """A draft behind `start` known tokens."""

    start: int
    parts: Parts
    guessed: list[int]


@dataclass(slots=True)
class _Saving:
    """What the model saves beside look-up alone, once it has read the text: seconds, by the tokens
    that look-up alone would have given in the same rounds."""

    seconds: float = 0.0
    tokens: float = 0.0

    def note(self, seconds_each: float, tokens: float) -> None:
        """Of a round."""
        self.seconds = _SAVING_DISCOUNT * self.seconds + seconds_each * tokens
        self.tokens = _SAVING_DISCOUNT * self.tokens + tokens

    def mean(self, prior: float | None = None) -> float:
        """Seconds a token. prior: what is expected of it, worth a number of tokens"""
        if prior is None:
            return self.seconds / self.tokens
        total = self.seconds + prior * _SAVING_STRENGTH
        return total / (self.tokens + _SAVING_STRENGTH)


class SourceEvidence:
    """Acceptance by source: of look-up by how long the match was, that much longer at each token
    that was right; of the model along its part of the draft. Of each request, beside all requests.

    What a draft came to is read off the text behind it: a token was accepted if it is there. That
    holds in `ratio` mode as well, where what is put in a rejected token's place is another.
    """

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator()
        self._drafted: dict[str, _Drafted] = {}
        self._saving = _Saving()
        self._savings: defaultdict[str, _Saving] = defaultdict(_Saving)

    def drafted(self, text: TokenBuffer, parts: Parts, guessed: list[int]) -> None:
        """A draft behind the text as it is. guessed: the model's tokens"""
        self._drafted[text.request.id] = _Drafted(text.length, parts, guessed)

    def observe(self, text: TokenBuffer) -> None:
        """Learn from what has become of the request's last draft, if anything has."""
        last = self._drafted.pop(text.request.id, None)
        if last is None or last.start == text.length:
            return
        match, num_kept, _ = last.parts
        truth = text.tokens(last.start, text.length)
        num_right = num_equal(match.token_ids, truth)
        num_decided = min(num_right + 1, len(match.token_ids), len(truth))
        for i in range(num_decided):
            self._note(text, _kind(match, i), int(i < num_right), 1)
        beyond = truth[num_kept:]
        if not last.guessed:
            self._acceptance.fade(text.request.id, _MODEL)
            self._acceptance.fade_drafter(_MODEL)
        elif num_right >= num_kept and beyond:
            num_right = num_equal(last.guessed, beyond)
            num_decided = min(num_right + 1, len(last.guessed), len(beyond))
            self._note(text, _MODEL, num_right, num_decided)

    def best_parts(
        self, orders: Sequence[DraftOrder], matches: Sequence[Match], left: Sequence[int]
    ) -> list[Parts]:
        """The drafts of a round with which it makes most tokens per second. All its requests wait
        for the model's steps and for each other's rows, so that drafts are chosen together. An
        order without times has all that look-up has, and of the model the rest.

        left: tokens to each request's end
        """
        chosen, timed = [], []
        for i, (order, match) in enumerate(zip(orders, matches, strict=True)):
            num_found = min(len(match.token_ids), order.max_draft_tokens)
            chosen.append((num_found, order.max_draft_tokens - num_found))
            if order.costs is not None:
                timed.append((i, order.costs))
        if timed:
            tables = [self._tokens(orders[i], costs, matches[i], left[i]) for i, costs in timed]
            longest = max((costs for _, costs in timed), key=lambda costs: len(costs.rounds))
            for (i, _), parts in zip(timed, best_together(tables, longest), strict=True):
                chosen[i] = parts
        return [Parts(match, *parts) for match, parts in zip(matches, chosen, strict=True)]

    def _tokens(
        self, order: DraftOrder, costs: RoundCosts, match: Match, num_left: int
    ) -> FloatArray:
        """Expected tokens of an order's rounds, [kept, guessed], without those of the model where
        it is not to be asked: while to read what it has not read takes longer than it would save
        until the end. It may not be needed for an edit, whose first tokens are new. What it saves
        is reckoned as if all requests drafted alike."""
        most = order.max_draft_tokens
        mean = self._acceptance.mean
        found = [
            mean(order.request_id, _kind(match, i)) for i in range(min(len(match.token_ids), most))
        ]
        guessed = self._acceptance.survival(order.request_id, _MODEL, most)
        tokens = expected_tokens(found, guessed)
        each = round_seconds(costs, len(found), most) / tokens
        alone, best = np.argmin(each[:, 0]), each.min()
        saving = self._savings[order.request_id]
        for kind in (saving, self._saving):
            kind.note(each[alone, 0] - best, tokens[alone, 0])
        # The model's first step reads one token. To have read the others serves all later rounds.
        reading = costs.num_requests * costs.read * (order.num_catch_up_tokens - 1)
        is_asked = num_left * saving.mean(self._saving.mean()) >= reading
        tokens[np.isinf(each)] = -np.inf
        return tokens if is_asked else tokens[:, :1]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._drafted.pop(request_id, None)
        self._savings.pop(request_id, None)
        self._acceptance.forget(request_id)

    def _note(self, text: TokenBuffer, source: str, num_accepted: int, num_decided: int) -> None:
        self._acceptance.observe(
            Verdict(
                text.request.id,
                epoch=0,
                round=0,
                drafter=source,
                num_accepted=num_accepted,
                num_decided=num_decided,
                evidence=num_accepted,
            )
        )


def expected_tokens(found: Sequence[float], guessed: Sequence[float]) -> FloatArray:
    """Of a round, [kept, guessed]: with so many looked-up tokens and so many of the model, the
    target's own included.

    found: acceptance of each looked-up token; guessed: probability that the model's first 1, 2, …
    tokens are accepted, once look-up's are
    """
    survival = np.cumprod([1.0, *found])
    looked_up = np.cumsum(survival)
    tokens: FloatArray = looked_up[:, None] + survival[:, None] * np.cumsum([0.0, *guessed])
    return tokens


def round_seconds(costs: RoundCosts, num_found: int, most: int) -> FloatArray:
    """Of the same rounds, were all requests to draft alike; infinite where a draft would be longer
    than `most`."""
    kept, guessed = np.arange(num_found + 1)[:, None], np.arange(most + 1)
    rounds = np.append(costs.rounds, np.inf)[np.minimum(kept + guessed, most + 1)]
    reading = costs.num_requests * costs.read * kept * (guessed > 0)
    seconds: FloatArray = rounds + costs.step * guessed + reading
    return seconds


def best_together(tables: Sequence[FloatArray], costs: RoundCosts) -> list[tuple[int, int]]:
    """For each draft of a round how many tokens to keep and to guess, so that the round makes most
    tokens per second. The model takes as many steps as the longest guess; whoever guesses less, or
    nothing, waits for it.

    tables: expected tokens of each draft, [kept, guessed]; minus infinity where one is not allowed
    """
    num, most = len(tables), len(costs.rounds) - 1
    reading = costs.read * costs.num_requests / costs.rounds[0]
    numbers = np.arange(most + 1)
    padded = np.full((num, most + 1, most + 1), -np.inf)
    for own, tokens in zip(padded, tables, strict=True):
        own[: tokens.shape[0], : tokens.shape[1]] = tokens
    padded -= reading * numbers[:, None] * (numbers > 0)
    # [draft, rows, guessed]: every draft by the rows that it adds to the target's.
    kept = numbers[:, None] - numbers
    by_rows = np.where(kept < 0, -np.inf, padded[:, kept, numbers])
    # [draft, rows, steps]: with at most so many steps of the model.
    best = np.maximum(np.maximum.accumulate(by_rows, axis=2), -_NEVER)
    each = np.diff(best, axis=1).reshape(num * most, most + 1)
    # What one row more is worth falls along most drafts: the likeliest first is a good order.
    falling = np.minimum.accumulate(each.reshape(num, most, most + 1), axis=1).reshape(each.shape)
    order = np.argsort(-falling, axis=0, kind="stable")
    gained = np.cumsum(np.take_along_axis(each, order, axis=0), axis=0)
    tokens_of_round = costs.num_requests + np.vstack([np.zeros(most + 1), gained])
    rows = np.arange(num * most + 1) / costs.num_requests
    seconds = np.interp(rows, numbers, costs.rounds)[:, None] + costs.step * numbers
    num_bought, steps = np.unravel_index(np.argmax(tokens_of_round / seconds), seconds.shape)
    bought = np.bincount(order[:num_bought, steps] // most, minlength=num).tolist()
    guessed = [int(np.argmax(own[n, : steps + 1])) for own, n in zip(by_rows, bought, strict=True)]
    return [(n - g, g) for n, g in zip(bought, guessed, strict=True)]


def _kind(match: Match, position: int) -> str:
    """Matches of about the same length have the same, longer by what was right of the draft."""
    length = min(match.length + position, LONGEST_MATCH)
    return f"{'own' if match.is_own else 'tenant'} {length.bit_length()}"
