"""Goodput of a choice of drafter: accepted tokens per second of the round that it causes.

A drafter inside a step delays all its requests, and its time is shared by its batch. So a choice is
charged with the round that there would be if all requests of the step chose alike: the sum of these
charges is right when they do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.learn.times import round_seconds
from penstock.core.policies.base import View
from penstock.core.policies.selection.parts.savings import num_unread
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Status

_DECAY = 0.999  # memory a round of a model's mean over all requests
_OWN_DECAY = 0.995  # memory a round of a request's mean
_NEGLIGIBLE = 1e-6  # weight below which a mean counts as unknown


def model_of(drafter: Drafter) -> str:
    """Return the drafter's model: drafters with one model share what is known of it."""
    return drafter.model or drafter.name


class RoundTimes:
    """Seconds of a round, if all `num_requests` of its step chose as one does."""

    def __init__(self, view: View, num_requests: int) -> None:
        self._view = view
        self._estimators = view.learn
        self._num_requests = max(1, num_requests)
        self._verify: list[float] = []
        self._draft: dict[tuple[str, int], float] = {}

    def verify(self, longest: int) -> Sequence[float]:
        """Return the target's seconds with 0, 1, … `longest` draft tokens each."""
        if len(self._verify) <= longest:
            rows = self._num_requests * (1 + np.arange(longest + 1, dtype=np.int64))
            self._verify = self._estimators.times.target.at(rows).tolist()
        return self._verify[: longest + 1]

    def draft(self, drafter: Drafter, batch: int, num_draft_tokens: int) -> float:
        """Return the drafting seconds of a drafter with `batch` requests."""
        if drafter.is_remote:
            return self._estimators.times.draft_seconds(drafter.name, batch, num_draft_tokens)
        key = (drafter.name, max(1, batch))
        step = self._draft.get(key)
        if step is None:
            step = self._estimators.times.curve_of(drafter.name)(key[1])
            if not self._view.is_beside(drafter):
                step *= self._num_requests / key[1]
            self._draft[key] = step
        return num_draft_tokens * step

    def seconds(self, drafter: Drafter | None, batch: int, num_draft_tokens: int) -> float:
        """Return the seconds of the whole round; 0 before the target was measured."""
        verify = self.verify(num_draft_tokens)[num_draft_tokens]
        if drafter is None or not num_draft_tokens:
            return verify
        return round_seconds(verify, inside=self.draft(drafter, batch, num_draft_tokens))

    @property
    def alone(self) -> float:
        """Return tokens per second without a draft; 0 before the target was measured."""
        seconds = self.verify(0)[0]
        return 1 / seconds if seconds else 0.0

    def reading(self, state: RequestState, drafter: Drafter) -> float:
        """Return the seconds in which a new drafter reads the text (c in Spin's eq. 6)."""
        unread = 0 if drafter.name == state.drafter else num_unread(state, drafter)
        seconds = unread * self._estimators.times.catch_up_of(drafter.name)
        return seconds if self._view.is_beside(drafter) else seconds * self._num_requests


@dataclass(slots=True)
class Mean:
    """A mean whose weight can fade."""

    count: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    def fade(self, keep: float) -> None:
        """Lower the weight; the mean stays."""
        self.count *= keep
        self.total *= keep

    @property
    def value(self) -> float:
        return self.total / self.count


class ObservedGoodput:
    """Mean tokens per second (r in the paper), by request and model, and by model.

    fades: old rounds count less, so that they exclude no choice for ever (a discounted bandit,
    Garivier and Moulines, 2008). models_time: the seconds are those of `RoundTimes`; else of the
    round as it was, from the request's verdict before."""

    def __init__(self, fades: bool = True, models_time: bool = True) -> None:
        self._fades, self._models_time = fades, models_time
        self._last_at: dict[str, float] = {}
        self._by_request: defaultdict[str, dict[str, Mean]] = defaultdict(dict)
        self.by_model: dict[str, Mean] = {}

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        """Take in a step's drafted or skipped rounds, for the request's drafter."""
        batches = Counter(o.state.drafter for o in outcomes if o.state.drafter is not None)
        times = RoundTimes(view, len(outcomes))
        decoding = [o for o in outcomes if o.state.num_output_tokens > len(o.verdict.token_ids)]
        if self._fades:
            _fade(self.by_model, _DECAY ** len(decoding))
        for state, verdict in decoding:
            if self._fades:
                _fade(self._by_request.get(state.request.id, {}), _OWN_DECAY)
            if verdict.num_looked_up and verdict.num_looked_up == verdict.num_proposed:
                continue
            drafter = view.drafters.get(state.drafter or "")
            if drafter is None or not drafter.is_up:
                continue
            if self._models_time:
                seconds = times.seconds(drafter, batches[drafter.name], verdict.num_drafted)
            else:
                seconds = view.now - self._last_at.get(state.request.id, view.now)
            if seconds:
                goodput = len(verdict.token_ids) / seconds
                self._note(state, model_of(drafter), goodput)
        for state, _ in outcomes:
            if state.status is not Status.FINISHED:
                self._last_at[state.request.id] = view.now

    def _note(self, state: RequestState, model: str, goodput: float) -> None:
        self.by_model.setdefault(model, Mean()).add(goodput)
        if state.status is not Status.FINISHED:
            self._by_request[state.request.id].setdefault(model, Mean()).add(goodput)

    def estimate(self, request_id: str, model: str) -> float:
        """Return g̃ of a request and a model: its own rounds', else all requests', else 0."""
        mean = self._by_request.get(request_id, {}).get(model) or self.by_model.get(model)
        return 0.0 if mean is None else mean.value

    def release_request(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)
        self._last_at.pop(request_id, None)


def _fade(means: dict[str, Mean], keep: float) -> None:
    for model, mean in list(means.items()):
        mean.fade(keep)
        if mean.count < _NEGLIGIBLE:
            del means[model]
