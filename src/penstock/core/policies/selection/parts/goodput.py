"""What a choice of drafter is judged by: accepted tokens per second of the round that it causes.

Whoever drafts inside a step delays everybody in it, and a drafter's time is shared by all that it
drafts for. So a choice is charged with the round that there would be if all requests of the step
did as this one does: the sum of these charges is right when they all do."""

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

_DECAY = 0.999
_OWN_DECAY = 0.995
_NEGLIGIBLE = 1e-6


def model_of(drafter: Drafter) -> str:
    """Instances of one model accept alike, and share what is known of it."""
    return drafter.model or drafter.name


class RoundTimes:
    """Seconds of a round, were all `num_requests` of its step to do as one of them does."""

    def __init__(self, view: View, num_requests: int) -> None:
        self._view = view
        self._estimators = view.learn
        self._num_requests = max(1, num_requests)
        self._verify: list[float] = []
        self._draft: dict[tuple[str, int], float] = {}

    def verify(self, longest: int) -> Sequence[float]:
        """Seconds of the target's part with 0, 1, … `longest` draft tokens each."""
        if len(self._verify) <= longest:
            rows = self._num_requests * (1 + np.arange(longest + 1, dtype=np.int64))
            self._verify = self._estimators.times.target.at(rows).tolist()
        return self._verify[: longest + 1]

    def draft(self, drafter: Drafter, batch: int, num_draft_tokens: int) -> float:
        """Seconds of the drafting, where the drafter drafts for `batch` requests at once."""
        if drafter.remote:
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
        """Of the whole round; 0 before the target was measured."""
        verify = self.verify(num_draft_tokens)[num_draft_tokens]
        if drafter is None or not num_draft_tokens:
            return verify
        return round_seconds(verify, inside=self.draft(drafter, batch, num_draft_tokens))

    @property
    def alone(self) -> float:
        """Tokens per second without a draft; 0 before the target was measured."""
        seconds = self.verify(0)[0]
        return 1 / seconds if seconds else 0.0

    def reading(self, state: RequestState, drafter: Drafter) -> float:
        """Seconds of a switch to a drafter (c in Spin's eq. 6): it has to read the text first, and
        the longer that is the longer it takes. Inside a step all others wait for it."""
        unread = 0 if drafter.name == state.drafter else num_unread(state, drafter)
        seconds = unread * self._estimators.times.catch_up_of(drafter.name)
        return seconds if self._view.is_beside(drafter) else seconds * self._num_requests


@dataclass(slots=True)
class Mean:
    """A mean in which what is old can fade."""

    count: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    def fade(self, keep: float) -> None:
        """Count for less; the mean stays."""
        self.count *= keep
        self.total *= keep

    @property
    def value(self) -> float:
        return self.total / self.count


class ObservedGoodput:
    """Tokens per second of the rounds that were seen (r in the paper): of every request with each
    model, and of every model over all requests. Every round makes ALL that is known count for less
    (a discounted bandit; Garivier and Moulines, 2008), so that old means are not held against a
    choice for ever. fades: or nothing does."""

    def __init__(self, fades: bool = True) -> None:
        self._fades = fades
        self._by_request: defaultdict[str, dict[str, Mean]] = defaultdict(dict)
        self.by_model: dict[str, Mean] = {}

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        """Take in a step. Rounds count for the drafter that the request had, drafts or not; those
        that only end a prompt, or that have lost their drafter, for none."""
        batches = Counter(o.state.drafter for o in outcomes if o.state.drafter is not None)
        times = RoundTimes(view, len(outcomes))
        decoding = [o for o in outcomes if o.state.num_output_tokens > len(o.verdict.token_ids)]
        if self._fades:
            _fade(self.by_model, _DECAY ** len(decoding))
        for state, verdict in decoding:
            if self._fades:
                _fade(self._by_request.get(state.request.id, {}), _OWN_DECAY)
            drafter = view.drafters.get(state.drafter or "")
            if drafter is None or not drafter.up or drafter.silent:
                continue
            seconds = times.seconds(drafter, batches[drafter.name], verdict.num_drafted)
            if seconds:
                goodput = len(verdict.token_ids) / seconds
                self._note(state, model_of(drafter), goodput)

    def _note(self, state: RequestState, model: str, goodput: float) -> None:
        self.by_model.setdefault(model, Mean()).add(goodput)
        if state.status is not Status.FINISHED:
            self._by_request[state.request.id].setdefault(model, Mean()).add(goodput)

    def estimate(self, request_id: str, model: str) -> float:
        """g̃ of a request and a model: the mean of its own rounds, or where it has none that of all
        requests; 0 where nobody has any."""
        mean = self._by_request.get(request_id, {}).get(model) or self.by_model.get(model)
        return 0.0 if mean is None else mean.value

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


def _fade(means: dict[str, Mean], keep: float) -> None:
    for model, mean in list(means.items()):
        mean.fade(keep)
        if mean.count < _NEGLIGIBLE:
            del means[model]
