"""Choice of the numbers of looked-up and model tokens in a draft, by learned acceptance."""

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
"""Weight of the mean of all requests, in tokens of a request: a choice, as is the discount."""
_NEVER = 1e9
"""Penalty in tokens of a draft that is not allowed."""


class Parts(NamedTuple):
    """Parts of a draft: `num_kept` looked-up tokens, then `num_guessed` tokens of the model."""

    match: Match
    num_kept: int
    num_guessed: int

    def behind_look_up(self, order: DraftOrder) -> DraftOrder:
        """Return the model's order, to which looked-up tokens are text.

        It has no early stop: evidence needs whole parts."""
        return order._replace(
            num_catch_up_tokens=order.num_catch_up_tokens + self.num_kept,
            max_draft_tokens=self.num_guessed,
            min_survival=0.0,
        )


class _Drafted(NamedTuple):
    """A draft after `start` known tokens."""

    start: int
    parts: Parts
    guessed: list[int]


@dataclass(slots=True)
class _Saving:
    """Seconds that the model saves against look-up alone, and the tokens of look-up alone."""

    seconds: float = 0.0
    tokens: float = 0.0

    def note(self, seconds_each: float, tokens: float) -> None:
        self.seconds = _SAVING_DISCOUNT * self.seconds + seconds_each * tokens
        self.tokens = _SAVING_DISCOUNT * self.tokens + tokens

    def mean(self, prior: float | None = None) -> float:
        """Return seconds per token. prior: has the weight of _SAVING_STRENGTH tokens."""
        if prior is None:
            return self.seconds / self.tokens
        total = self.seconds + prior * _SAVING_STRENGTH
        return total / (self.tokens + _SAVING_STRENGTH)


class SourceEvidence:
    """Acceptance rates by request and source: look-up by length of match, and the model.

    A token counts as accepted if the text has it. This holds in `ratio` mode, too, where a rejected
    token is replaced by another one.
    """

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator()
        self._drafted: dict[str, _Drafted] = {}
        self._saving = _Saving()
        self._savings: defaultdict[str, _Saving] = defaultdict(_Saving)

    def drafted(self, text: TokenBuffer, parts: Parts, guessed: list[int]) -> None:
        """Note a draft after the present text. guessed: the model's tokens."""
        self._drafted[text.request.id] = _Drafted(text.length, parts, guessed)

    def on_text(self, text: TokenBuffer) -> None:
        """Learn from the request's last draft, if the text has grown."""
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
        """Choose the drafts of a step jointly, for most tokens per second.

        An order without costs takes all looked-up tokens, and the rest from the model.

        left: tokens to each request's end
        """
        chosen, timed = [], []
        for i, (order, match) in enumerate(zip(orders, matches, strict=True)):
            num_found = min(len(match.token_ids), order.max_draft_tokens)
            chosen.append((num_found, order.max_draft_tokens - num_found))
            if order.costs is not None:
                timed.append(i)
        if timed:
            costs = max((c for o in orders if (c := o.costs)), key=lambda c: len(c.rounds))
            own, found = [orders[i] for i in timed], [matches[i] for i in timed]
            tokens = self._tokens(own, costs, found, [left[i] for i in timed])
            best = best_together(tokens, costs)
            for i, parts in zip(timed, best, strict=True):
                chosen[i] = parts
        return [Parts(match, *parts) for match, parts in zip(matches, chosen, strict=True)]

    def _tokens(
        self,
        orders: Sequence[DraftOrder],
        costs: RoundCosts,
        matches: Sequence[Match],
        left: Sequence[int],
    ) -> FloatArray:
        """Return expected tokens of N orders, [N, kept, guessed]; minus infinity if not allowed.

        Only guessed = 0 while the model would take longer to read the unread text than it saves
        until the request's end. Savings are estimated as if all requests drafted alike."""
        longest, mean = len(costs.rounds) - 1, self._acceptance.mean
        found, guessed = np.zeros((2, len(orders), longest))
        num_found = []
        for i, (order, match) in enumerate(zip(orders, matches, strict=True)):
            num_found.append(min(len(match.token_ids), order.max_draft_tokens))
            known: dict[str, float] = {}
            for j in range(num_found[-1]):
                kind = _kind(match, j)
                if kind not in known:
                    known[kind] = mean(order.request_id, kind)
                found[i, j] = known[kind]
            survival = self._acceptance.survival(order.request_id, _MODEL, order.max_draft_tokens)
            guessed[i, : len(survival)] = survival
        tokens = expected_tokens(found, guessed)
        kept, added = np.arange(longest + 1)[:, None], np.arange(longest + 1)
        most = np.array([order.max_draft_tokens for order in orders])
        beyond = kept + added > most[:, None, None]
        tokens[beyond | (kept > np.array(num_found)[:, None, None])] = -np.inf
        each = round_seconds(costs) / np.where(tokens > 0, tokens, 1e-9)
        alone = each[:, :, 0].argmin(axis=1)
        best = each.reshape(len(orders), -1).min(axis=1)
        for i, order in enumerate(orders):
            saving = self._savings[order.request_id]
            for total in (saving, self._saving):
                total.note(float(each[i, alone[i], 0] - best[i]), float(tokens[i, alone[i], 0]))
            # The model's first step reads one token; reading the others serves all later steps.
            reading = costs.num_requests * costs.read * (order.num_catch_up_tokens - 1)
            if left[i] * saving.mean(self._saving.mean()) < reading:
                tokens[i, :, 1:] = -np.inf
        return tokens

    def release_request(self, request_id: str) -> None:
        """Drop all state of a finished request."""
        self._drafted.pop(request_id, None)
        self._savings.pop(request_id, None)
        self._acceptance.release_request(request_id)

    def _note(self, text: TokenBuffer, source: str, num_accepted: int, num_decided: int) -> None:
        self._acceptance.on_verdict(
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


def expected_tokens(found: FloatArray, guessed: FloatArray) -> FloatArray:
    """Return the expected tokens of N drafts, [N, kept, guessed], including the target's own.

    found: [N, K] acceptance of each looked-up token; guessed: [N, K] probability that the model's
    first 1, 2, … tokens are accepted, given that look-up's are
    """
    ones, zeros = np.ones((len(found), 1)), np.zeros((len(found), 1))
    survival = np.cumprod(np.concatenate([ones, found], axis=1), axis=1)
    more = np.cumsum(np.concatenate([zeros, guessed], axis=1), axis=1)
    looked_up = np.cumsum(survival, axis=1)
    return np.asarray(looked_up[:, :, None] + survival[:, :, None] * more[:, None, :])


def round_seconds(costs: RoundCosts) -> FloatArray:
    """Return seconds of a step if all requests drafted alike, [kept, guessed]; inf if too many."""
    most = len(costs.rounds) - 1
    kept, guessed = np.arange(most + 1)[:, None], np.arange(most + 1)
    rounds = np.append(costs.rounds, np.inf)[np.minimum(kept + guessed, most + 1)]
    reading = costs.num_requests * costs.read * kept * (guessed > 0)
    seconds: FloatArray = rounds + costs.step * guessed + reading
    return seconds


def best_together(tables: FloatArray, costs: RoundCosts) -> list[tuple[int, int]]:
    """Return (kept, guessed) of each draft of a step, for most tokens per second of the step.

    The model takes as many steps as the longest guess, for which all requests wait.

    tables: expected tokens of each draft, [N, kept, guessed]; minus infinity if not allowed
    """
    num, most = len(tables), len(costs.rounds) - 1
    reading = costs.read * costs.num_requests / costs.rounds[0]
    numbers = np.arange(most + 1)
    worth = tables - reading * numbers[:, None] * (numbers > 0)
    # [draft, rows, guessed]: rows are those added to the target's batch.
    kept = numbers[:, None] - numbers
    by_rows = np.where(kept < 0, -np.inf, worth[:, kept, numbers])
    # [draft, rows, steps]: with at most `steps` steps of the model.
    best = np.maximum(np.maximum.accumulate(by_rows, axis=2), -_NEVER)
    each = np.diff(best, axis=1).reshape(num * most, most + 1)
    # The gain of a row falls along most drafts, so taking the largest first is a good order.
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
    """Return the source of a looked-up token: by length of match, plus the tokens before it."""
    length = min(match.length + position, LONGEST_MATCH)
    return f"{'own' if match.is_own else 'tenant'} {length.bit_length()}"
