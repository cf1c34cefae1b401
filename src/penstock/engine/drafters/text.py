"""Drafter with another tokenizer: its drafted text is tokenized for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.core.types import MOST_EVALUATED, DraftOrder, Replayed, Request, SamplingParams
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.recent import RecentKv
from penstock.engine.drafters.spelling import RECENT, OwnText, Vocabularies
from penstock.engine.sequences import TokenBuffer

if TYPE_CHECKING:
    from penstock.engine.runner import ModelRunner

_LIKELIEST = SamplingParams(temperature=0.0)


class _Told(NamedTuple):
    """A text in the model's tokens. num_same: unchanged since the last call, drafts included."""

    text: OwnText
    num_same: int


class _Reader:
    """One request's text in the model's tokens. told: followed by its draft tokens."""

    def __init__(self, name: str, vocabularies: Vocabularies, max_length: int) -> None:
        request = Request(name, 0, max_length, prompt_token_ids=(), sampling=_LIKELIEST)
        self.told = TokenBuffer(request)
        self._text = OwnText(vocabularies)
        """Verified part."""
        self._num_same = 0
        """Tokens of `told` that are certain to be those of the text."""
        self._max_length = max_length

    def read(self, text: TokenBuffer, end: int) -> _Told | None:
        """Convert the first `end` tokens of a text, of which the last may be only foreseen.

        Draft tokens that were right are kept. None if the text is empty or too long."""
        num_verified = min(end, text.length)
        verified = text.tokens(self._text.num_read, num_verified)
        self._num_same = min(self._num_same, self._text.read(verified))
        own, lasting = self._text, len(self._text.token_ids)
        if end > num_verified:
            own = self._text.copy()
            lasting = own.read(text.tokens(num_verified, end))
        ids = own.token_ids
        if not 0 < len(ids) <= self._max_length:
            return None
        begin = min(self._num_same, lasting)
        same = begin + _num_equal(ids[begin:], self.told.tokens(begin, self.told.length))
        if same < len(ids):
            self.told.length = same
            self.told.append(ids[same:])
        else:
            same = self.told.length
        self._num_same = lasting
        return _Told(own, same)


class _Job(NamedTuple):
    """The model's order for the one at `place`. num_judged: last tokens to evaluate."""

    place: int
    order: DraftOrder
    text: OwnText
    told: TokenBuffer
    num_judged: int = 0


class TextDrafter(LocalDrafter):
    """Drafts for a target with another vocabulary, with KV blocks of its own.

    Drafts are the model's greedy text for any sampling, as the target's noise does not apply to
    other tokens: point masses to the verifier.
    """

    def __init__(self, model: ModelDrafter, vocabularies: Vocabularies, max_length: int) -> None:
        """Create the drafter. max_length: limit of a text in the model's own tokens."""
        self.name = model.name
        self.runner: ModelRunner = model.runner
        self._model = model
        self._vocabularies = vocabularies
        self._kv = RecentKv(model)
        self._max_length = min(max_length, self._kv.pool.capacity_tokens)
        self._readers: dict[str, _Reader] = {}

    @property
    def timed(self) -> LocalDrafter:
        """The model, whose times are used until drafts are measured."""
        return self._model

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafts = [Draft([], [], is_unread=True) for _ in orders]
        jobs = self._jobs(orders, texts)
        made = self._model.draft([j.order for j in jobs], [j.told for j in jobs]) if jobs else None
        for job, own in zip(jobs, made.drafts if made else (), strict=True):
            told, most = job.told, orders[job.place].max_draft_tokens
            told.append(own.token_ids)
            self._kv.text_of(job.order.request_id).num_computed = told.length - 1
            guessed = told.tokens(len(job.text.token_ids), told.length)
            tokens = job.text.respelt(guessed)[:most]
            drafts[job.place] = Draft(tokens, [-1] * len(tokens))
        # A step counts per token of the target.
        longest = max(len(d.token_ids) for d in drafts)
        return Drafts(drafts, num_steps=max(longest, 1) if jobs else 0)

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        replays = [Replayed(o.request_id, o.epoch, self.name) for o in orders]
        jobs = self._jobs(orders, texts)
        if not jobs:
            return tuple(replays)
        counts = [j.num_judged + 1 for j in jobs]
        logits = self._model.read([j.order for j in jobs], [j.told for j in jobs], counts)
        likeliest = logits.argmax(dim=-1).cpu().numpy()
        for job, own in zip(jobs, np.split(likeliest, np.cumsum(counts)[:-1]), strict=True):
            self._kv.text_of(job.order.request_id).num_computed = len(job.text.token_ids)
            judged = _judged(orders[job.place], texts[job.place])
            num, num_right = job.text.compare(judged, own[:-1].tolist())
            replays[job.place] = replays[job.place]._replace(num_tokens=num, num_matched=num_right)
        return tuple(replays)

    def drop_table(self, request_id: str) -> None:
        self._kv.evict(request_id)

    def release_request(self, request_id: str) -> None:
        self._kv.evict(request_id)
        self._model.release_request(request_id)
        self._readers.pop(request_id, None)

    def _jobs(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> list[_Job]:
        """Return the feasible jobs: enough memory, no too long text, a supported language."""
        jobs: list[_Job] = []
        spared: set[str] = set()
        for place, (order, text) in enumerate(zip(orders, texts, strict=True)):
            job = self._job(place, order, text, spared)
            if job is not None:
                jobs.append(job)
        return jobs

    def _job(
        self, place: int, order: DraftOrder, text: TokenBuffer, spared: set[str]
    ) -> _Job | None:
        name, most = order.request_id, order.max_draft_tokens
        if name not in self._readers:
            self._readers[name] = _Reader(name, self._vocabularies, self._max_length)
        reader, end = self._readers[name], order.start + order.num_catch_up_tokens
        if not self._vocabularies.is_made_for(text.tokens(max(0, end - RECENT), end)):
            return None
        read = reader.read(text, end)
        if read is None:
            return None
        self._kv.cut(name, read.num_same)
        known = length = len(read.text.token_ids)
        steps = num_judged = 0
        if most:
            known = reader.told.length
            steps = max(1, read.text.num_own(most) - (known - length))
            steps = min(steps, self._max_length - known + 1)
        elif order.evaluate and not text.is_ratio:
            num_judged = min(read.text.num_covering(_judged(order, text)), known - 1)
        if most and steps < 1:
            return None
        cached = self._kv.text_of(name)
        start = min(cached.num_computed, known - 1 - num_judged)
        spared.add(name)
        blocks = self._kv.grow(name, known + max(steps - 1, 0), spared)
        if blocks is None:
            return None
        cached.num_computed = start
        inner = DraftOrder(
            request_id=name,
            epoch=0,
            round=0,
            drafter=self.name,
            start=start,
            num_catch_up_tokens=known - start,
            max_draft_tokens=steps,
            new_blocks=blocks,
        )
        return _Job(place, inner, read.text, reader.told, num_judged)


def _judged(order: DraftOrder, text: TokenBuffer) -> list[int]:
    end = order.start + order.num_catch_up_tokens
    return text.tokens(max(order.start, text.request.prompt_len, end - MOST_EVALUATED), end)


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    most = min(len(tokens), len(others))
    return next((i for i in range(most) if tokens[i] != others[i]), most)
