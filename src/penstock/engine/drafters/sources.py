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

    def best_parts(self, order: DraftOrder, match: Match, num_left: int) -> Parts:
        """Of a draft of an order: those that promise most tokens per second of the round. The model
        is not asked while to read what it has not read takes longer than it would save until the
        end: it may not be needed for an edit, whose first tokens are new. Where no times are known,
        all that look-up has, and of the model the rest.

        num_left: tokens to the request's end
        """
        most = order.max_draft_tokens
        if order.costs is None:
            num_found = min(len(match.token_ids), most)
            return Parts(match, num_found, most - num_found)
        mean = self._acceptance.mean
        found = [
            mean(order.request_id, _kind(match, i)) for i in range(min(len(match.token_ids), most))
        ]
        guessed = self._acceptance.survival(order.request_id, _MODEL, most)
        tokens = expected_tokens(found, guessed)
        each = round_seconds(order.costs, len(found), most) / tokens
        kept, more = np.unravel_index(np.argmin(each), each.shape)
        alone = np.argmin(each[:, 0])
        saving = self._savings[order.request_id]
        for kind in (saving, self._saving):
            kind.note(each[alone, 0] - each[kept, more], tokens[alone, 0])
        # The model's first step reads one token. To have read the others serves all later rounds.
        reading = order.costs.read * (order.num_catch_up_tokens - 1)
        if num_left * saving.mean(self._saving.mean()) < reading:
            return Parts(match, int(alone), 0)
        return Parts(match, int(kept), int(more))

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
    """Of the same rounds; infinite where a draft would be longer than `most`."""
    kept, guessed = np.arange(num_found + 1)[:, None], np.arange(most + 1)
    rounds = np.append(costs.rounds, np.inf)[np.minimum(kept + guessed, most + 1)]
    seconds: FloatArray = rounds + costs.step * guessed + costs.read * kept * (guessed > 0)
    return seconds


def _kind(match: Match, position: int) -> str:
    """Matches of about the same length have the same, longer by what was right of the draft."""
    length = min(match.length + position, LONGEST_MATCH)
    return f"{'own' if match.is_own else 'tenant'} {length.bit_length()}"
