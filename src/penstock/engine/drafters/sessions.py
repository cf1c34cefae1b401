"""Drafting for requests that are verified elsewhere: orders, draft-ahead, roll-back.

    verified text                        guesses
 |---------------------------------|--- sent draft ---|-- bonus --|---- draft-ahead ----|
 0                                 ^ prefix_len       ^ num_sent

While a draft is under way its session goes on guessing: the token that verification will add, and
then the next draft. What the verdict confirms is kept, the rest is thrown away.

A guess is a function of (text before it, seed, position, purpose) and in `ratio` mode of where its
draft begins, because all noise is. So a draft that was made ahead is the one that would have been
made after the verdict, and keeping or dropping it changes no distribution: the condition of
`engine.sampling.ratio` holds. Three things must be seen to in `ratio` mode: the bonus token is
guessed under the target's noise, and is never sent as part of a draft, which must be sampled under
the drafter's own; what was guessed for another beginning is not kept; and whether to stop before a
token is read off its distribution, not off its value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.core.types import SamplingParams
from penstock.engine.drafters.confidence import Calibration, Calibrations

LEAST_CHANCE = 0.1
"""Nothing is drafted ahead that is less likely than this to be of use."""

_FIRST_GRANT = 4
"""How far to draft ahead before the first order says what is usual."""


class TopWeights(NamedTuple):
    """A truncated distribution: token ids, and integer weights of a fixed sum."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


class Guess(NamedTuple):
    """A token, and how sure of it the drafter is (0 to 1). `source`: what a token of a `ratio`
    draft was sampled from; None otherwise."""

    token_id: int
    confidence: float
    source: TopWeights | None = None


class SessionOrder(NamedTuple):
    """Draft up to `num_draft_tokens` tokens behind a text of `prefix_len`; stop before the first
    one with which the draft's predicted survival falls under `min_survival`. `tag` comes back with
    the draft."""

    tag: Hashable
    prefix_len: int
    num_draft_tokens: int
    min_survival: float = 0.0


class SessionDraft(NamedTuple):
    """What an order came to. `sources` is empty unless the request is verified by `ratio`."""

    key: str
    tag: Hashable
    prefix_len: int
    token_ids: tuple[int, ...]
    sources: tuple[TopWeights, ...] = ()


@dataclass(slots=True)
class Session:
    """One request.

    num_sent:    tokens of the draft that verification is about to decide on (0: it will add a token
                 of its own); None while an order is awaited or under way
    is_stuck:    no further guess can be had until the text changes
    is_readable: every token of the text is in the drafter's vocabulary
    """

    key: str
    text: list[int]
    sampling: SamplingParams
    guesses: list[Guess] = field(default_factory=list)
    order: SessionOrder | None = None
    num_sent: int | None = 0
    last_grant: int = _FIRST_GRANT
    is_stuck: bool = False
    is_readable: bool = True

    @property
    def length(self) -> int:
        """Tokens of text and guesses; the position of the next guess."""
        return len(self.text) + len(self.guesses)

    @property
    def is_ratio(self) -> bool:
        return self.sampling.is_ratio

    @property
    def samples_next(self) -> bool:
        """Whether the next guess is sampled from the drafter's own distribution; otherwise it
        foresees the target's sample."""
        return self.is_ratio and len(self.guesses) != self.num_sent

    @property
    def draft_start(self) -> int:
        """Position of the first token of the draft that the next guess is for: the one at hand, or
        behind it and the bonus token the next."""
        if self.num_sent is None or len(self.guesses) < self.num_sent:
            return len(self.text)
        return len(self.text) + self.num_sent + 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of text and guesses."""
        known = len(self.text)
        head = self.text[start:end]
        if end <= known:
            return head
        return head + [g.token_id for g in self.guesses[max(start - known, 0) : end - known]]


class Proposer(Protocol):
    """A drafter, as sessions see it. Everything is for one thread at a time."""

    @property
    def max_length(self) -> int:
        """Longest text that it can guess the next token of."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_usage(self) -> float:
        """Share of its KV blocks in use."""
        ...

    def limit_vocab(self, size: int) -> None:
        """Guess no token id of `size` or above, which the target does not have."""
        ...

    def propose(self, sessions: Sequence[Session], *, ahead: bool) -> None:
        """Go on with these sessions, the first ones before the others: append a guess to each, or
        get nearer to it, or mark it as stuck. What is done `ahead` takes nothing from anybody."""
        ...

    def cut(self, session: Session, length: int) -> None:
        """What it knows of the session beyond `length` tokens is void."""
        ...

    def forget(self, session: Session) -> None:
        """The session is over."""
        ...


class DraftingSessions:
    """All sessions of one drafter.

    max_draft_tokens: longest draft that is ever sent
    """

    def __init__(self, proposer: Proposer, max_draft_tokens: int) -> None:
        self.proposer = proposer
        self._max_draft_tokens = max_draft_tokens
        self._sessions: dict[str, Session] = {}
        self._calibrations = Calibrations()

    def begin(self, key: str, token_ids: Iterable[int], sampling: SamplingParams) -> None:
        """A new request; one with the same key is forgotten."""
        self.forget(key)
        session = Session(key, list(token_ids), sampling)
        self._sessions[key] = session
        self._read(session, session.text)

    def extend(self, key: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Verified tokens follow the text; of the draft that was sent, `num_accepted` were kept."""
        session = self._sessions.get(key)
        if session is None or not token_ids:
            return
        guesses = session.guesses
        matched = 0
        while matched < min(len(token_ids), len(guesses)):
            if guesses[matched].token_id != token_ids[matched]:
                break
            matched += 1
        self._learn(session, matched, len(token_ids), num_accepted)
        is_ahead = session.num_sent is not None and matched == session.num_sent + 1
        if matched == len(token_ids) and (is_ahead or not session.is_ratio):
            del guesses[:matched]
        else:
            self.proposer.cut(session, len(session.text) + matched)
            guesses.clear()
        session.text += token_ids
        session.num_sent = None
        session.order = None
        session.is_stuck = False
        self._read(session, token_ids)

    def order(self, key: str, order: SessionOrder) -> None:
        """Draft for a request, whose text must have the order's length. An order before it that is
        not finished is dropped."""
        session = self._sessions.get(key)
        if session is not None and len(session.text) == order.prefix_len:
            session.order = order
            session.num_sent = None
            session.is_stuck = False
            session.last_grant = order.num_draft_tokens

    def forget(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.proposer.forget(session)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has anything to do."""
        return any(s.order is not None or self._looks_ahead(s) for s in self._sessions.values())

    def step(self) -> list[SessionDraft]:
        """One more guess for every request that is due, or if none is, ahead for the others; the
        drafts that are finished."""
        due = [s for s in self._sessions.values() if s.order is not None]
        drafts = [d for s in due if (d := self._finish(s)) is not None]
        if drafts:
            return drafts
        sessions = due or [s for s in self._sessions.values() if self._looks_ahead(s)]
        if sessions:
            self.proposer.propose(sessions, ahead=not due)
        return [d for s in due if (d := self._finish(s)) is not None]

    def _finish(self, session: Session) -> SessionDraft | None:
        order = session.order
        size = None if order is None else self._draft_size(session, order)
        if order is None or size is None:
            return None
        sent = session.guesses[:size]
        session.order = None
        session.num_sent = size
        if session.is_ratio and len(session.guesses) > size and session.guesses[size].source:
            self._drop_guesses(session, size)
        sources = tuple(g.source for g in sent if g.source is not None)
        return SessionDraft(
            session.key, order.tag, order.prefix_len, tuple(g.token_id for g in sent), sources
        )

    def _draft_size(self, session: Session, order: SessionOrder) -> int | None:
        """Tokens of the finished draft; None if it is not finished."""
        limit = min(order.num_draft_tokens, self._max_draft_tokens)
        survival = 1.0
        for size, guess in enumerate(session.guesses[:limit]):
            if session.is_ratio and guess.source is None:
                self._drop_guesses(session, size)
                break
            survival *= self._acceptance(session, guess)
            if survival < order.min_survival:
                return size
        if len(session.guesses) >= limit or not self._can_grow(session):
            return min(limit, len(session.guesses))
        return None

    def _looks_ahead(self, session: Session) -> bool:
        wanted = min(session.last_grant, self._max_draft_tokens)
        if session.num_sent is not None:
            wanted += session.num_sent + 1
        if len(session.guesses) >= wanted or not self._can_grow(session):
            return False
        chance = 1.0
        for guess in session.guesses:
            chance *= self._acceptance(session, guess)
        return chance >= LEAST_CHANCE

    def _can_grow(self, session: Session) -> bool:
        if session.is_stuck or not session.is_readable:
            return False
        return session.length <= self.proposer.max_length

    def _drop_guesses(self, session: Session, kept: int) -> None:
        del session.guesses[kept:]
        self.proposer.cut(session, session.length)

    def _read(self, session: Session, token_ids: Iterable[int]) -> None:
        if any(not 0 <= t < self.proposer.vocab_size for t in token_ids):
            session.is_readable = False

    # --- confidence -----------------------------------------------------------------------------

    def _calibration(self, session: Session, guess: Guess) -> Calibration:
        return self._calibrations.of(session.sampling, is_drawn=guess.source is not None)

    def _acceptance(self, session: Session, guess: Guess) -> float:
        return self._calibration(session, guess).acceptance(guess.confidence)

    def _learn(self, session: Session, matched: int, num_tokens: int, num_accepted: int) -> None:
        """Positions up to and including the first rejection say something. Where drafts are
        compared with the target's sample every guess does, otherwise those that were sent."""
        if session.is_ratio:
            decided = min(num_accepted + 1, session.num_sent or 0)
            successes = num_accepted
        else:
            decided = min(matched + 1, num_tokens, len(session.guesses))
            successes = matched
        guesses = session.guesses[:decided]
        if guesses:
            confidences = [guess.confidence for guess in guesses]
            self._calibration(session, guesses[0]).observe(confidences, successes)
