"""Drafting for requests that are verified elsewhere: orders, draft-ahead, roll-back.

    verified text                        guesses
 |---------------------------------|--- sent draft ---|-- bonus --|---- draft-ahead ----|
 0                                 ^ prefix_len       ^ num_sent

During verification its session goes on guessing: the token that verification will add, and then the
next draft. What the verdict confirms is kept, the rest is dropped. Where drafts are compared with
the target's sample, sessions also guess other outcomes, and send guesses before they are ordered
(`lines`).

A guess is a function of (text before it, seed, position, purpose) and in `ratio` mode of its
draft's start, because all noise is. So a draft made ahead equals the one made after the verdict,
and keeping or dropping it changes no distribution: the condition of `engine.sampling.ratio` holds.
In `ratio` mode the bonus token is guessed under the target's noise and never sent as part of a
draft, which must be sampled under the drafter's own; guesses for another start are dropped; and
stopping before a token depends on its distribution, not on its value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.core.ahead import LEAST_CHANCE as LEAST_LINE_CHANCE
from penstock.core.ahead import Choices, DraftSpot, LinePiece, num_worth, spots_of
from penstock.core.drafting import lines
from penstock.core.drafting.lines import Guess, Session, SessionOrder, TopWeights
from penstock.core.learn.confidence import Calibration, Calibrations
from penstock.core.types import SamplingParams

LEAST_CHANCE = 0.1
"""Least probability of use of a token drafted ahead. Chosen by hand."""


class SessionDraft(NamedTuple):
    """Draft of an order; `sources` is empty unless verification is by `ratio`."""

    key: str
    tag: Hashable
    prefix_len: int
    token_ids: tuple[int, ...]
    sources: tuple[TopWeights, ...] = ()


class SessionLines(NamedTuple):
    """Guesses of a request made ahead and not sent before."""

    key: str
    pieces: tuple[LinePiece, ...]


class Proposer(Protocol):
    """Interface of a drafter for sessions; used by one thread at a time."""

    @property
    def max_length(self) -> int:
        """Longest text whose next token it can guess."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def limit_vocab(self, size: int) -> None:
        """Exclude token ids of `size` or above, which the target does not have."""
        ...

    @property
    def has_runner_up(self) -> bool:
        """True if it can give a second choice of a token."""
        ...

    def fork(self, session: Session, branch: Session) -> None:
        """Begin a new line with the KV of another."""
        ...

    def propose(self, sessions: Sequence[Session], *, ahead: bool) -> None:
        """Advance the sessions, the first ones first.

        Each gets a guess, comes nearer to one, or is marked as stuck. `ahead` displaces nothing."""
        ...

    def cut(self, session: Session, length: int) -> None:
        """Drop what is known of the session beyond `length` tokens."""
        ...

    def release_session(self, session: Session) -> None: ...


class DraftingSessions:
    """All sessions of one drafter; `max_draft_tokens` is the longest draft ever sent."""

    def __init__(self, proposer: Proposer, max_draft_tokens: int) -> None:
        self.proposer = proposer
        self._max_draft_tokens = max_draft_tokens
        self._sessions: dict[str, Session] = {}
        self._calibrations = Calibrations()
        self._lined: set[str] = set()
        self._next: list[tuple[Session, Session, DraftSpot]] | None = None
        self.num_ahead = 0

    def begin(
        self,
        key: str,
        token_ids: Iterable[int],
        sampling: SamplingParams,
        *,
        sends_lines: bool = False,
    ) -> None:
        """Begin a request; `sends_lines`: send guesses made ahead, if not verified by `ratio`."""
        self.release_session(key)
        session = Session(key, list(token_ids), sampling, kv_key=key)
        lines.begin_line(session)
        self._sessions[key] = session
        if sends_lines and not session.is_ratio:
            self._lined.add(key)
        self._read(session, session.text)

    def extend(self, key: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Append verified tokens; `num_accepted` tokens of the sent draft were kept."""
        session = self._sessions.get(key)
        if session is None or not token_ids:
            return
        guesses = session.guesses
        matched = 0
        while matched < min(len(token_ids), len(guesses)):
            if guesses[matched].token_id != token_ids[matched]:
                break
            matched += 1
        self._next = None
        self._learn(session, matched, token_ids, num_accepted)
        is_ahead = session.num_sent is not None and matched == session.num_sent + 1
        known = len(session.text)
        heir = lines.heir(session, token_ids) if matched < len(token_ids) else None
        if matched == len(token_ids) and (is_ahead or not session.is_ratio):
            del guesses[:matched]
            session.text += token_ids
        elif heir is not None:
            lines.inherit(session, heir, token_ids)
            self.proposer.release_session(session)
            session = self._sessions[key] = heir
        else:
            self.proposer.cut(session, known + matched)
            guesses.clear()
            session.text += token_ids
        for branch in lines.prune(session, known):
            self.proposer.release_session(branch)
        if not session.guesses:
            lines.begin_line(session)
        session.num_sent = None
        session.order = None
        session.is_stuck = False
        self._read(session, token_ids)

    def order(self, key: str, order: SessionOrder) -> None:
        """Start an order behind a text of its length, replacing an unfinished one."""
        session = self._sessions.get(key)
        if session is not None and len(session.text) == order.prefix_len:
            self._next = None
            session.order = order
            session.num_sent = None
            session.is_stuck = False
            session.last_grant = order.num_draft_tokens

    def release_session(self, key: str) -> None:
        self._next = None
        self._lined.discard(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            for line in lines.lines_of(session):
                self.proposer.release_session(line)

    def begin_stream(self) -> None:
        """Mark all that was sent ahead as lost."""
        self._next = None
        for session in self._sessions.values():
            for branch in session.branches:
                self.proposer.release_session(branch)
            session.branches.clear()
            lines.begin_line(session)

    @property
    def is_busy(self) -> bool:
        if any(s.order is not None or self._looks_ahead(s) for s in self._sessions.values()):
            return True
        return bool(self._spots())

    def step(self) -> list[SessionDraft]:
        """Make one guess for every due request, or else ahead; return finished drafts."""
        due = [s for s in self._sessions.values() if s.order is not None]
        drafts = [d for s in due if (d := self._finish(s)) is not None]
        if drafts:
            return drafts
        growing = due or self._growing()
        if growing:
            self._next = None
            self.proposer.propose(growing, ahead=not due)
        return [d for s in due if (d := self._finish(s)) is not None]

    # --- ahead ----------------------------------------------------------------------------------

    def take_lines(self) -> list[SessionLines]:
        """Return the guesses made ahead since the last call, to be sent."""
        found = []
        for session in self._sending():
            pieces = lines.pieces(session)
            if pieces:
                self.num_ahead += sum(len(p.token_ids) for p in pieces)
                found.append(SessionLines(session.key, tuple(pieces)))
        return found

    def _sending(self) -> list[Session]:
        return [s for key, s in self._sessions.items() if key in self._lined]

    def _growing(self) -> list[Session]:
        """Return the sessions to advance in idle time; new lines begin here."""
        growing = [s for s in self._sessions.values() if self._looks_ahead(s)]
        for session, line, spot in self._spots():
            if spot.at is None:
                growing.append(line)
            else:
                branch = lines.fork(session, line, spot.at)
                self.proposer.fork(line, branch)
                growing.append(branch)
        return growing

    def _spots(self) -> list[tuple[Session, Session, DraftSpot]]:
        """Return session, line and spot of the next guesses of all requests that send lines."""
        if self._next is None:
            found = []
            for session in filter(lines.has_room, self._sending()):
                odds = lines.odds(session, self._acceptance, self._can_grow)
                every = list(lines.lines_of(session))
                spots = spots_of(odds, self._choices(session), LEAST_LINE_CHANCE)
                found += [(session, every[spot.line], spot) for spot in spots]
            found.sort(key=lambda entry: -entry[2].chance)
            self._next = found[: num_worth([spot.chance for _, _, spot in found])]
        return self._next

    def _choices(self, session: Session) -> Choices:
        first = self._calibrations.for_sampling(session.sampling, is_drawn=False).mean
        has_runner_up = self.proposer.has_runner_up
        return Choices(first, self._calibrations.runner_up.mean if has_runner_up else 0.0)

    # --- drafts ---------------------------------------------------------------------------------

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
        """Return the tokens of the finished draft; None if unfinished."""
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
        """Return whether to advance a session that sends no lines."""
        if session.key in self._lined:
            return False
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
        if session.line.barred is not None and guess is session.guesses[0]:
            return self._calibrations.runner_up
        return self._calibrations.for_sampling(session.sampling, is_drawn=guess.source is not None)

    def _acceptance(self, session: Session, guess: Guess) -> float:
        return self._calibration(session, guess).acceptance(guess.confidence)

    def _learn(
        self, session: Session, matched: int, token_ids: Sequence[int], num_accepted: int
    ) -> None:
        """Learn acceptance from all compared guesses, or the decided tokens of the sent draft."""
        if session.is_ratio:
            # At the output's end no token follows the accepted ones.
            decided = min(num_accepted + 1, len(token_ids), session.num_sent or 0)
            successes = num_accepted
        else:
            decided = min(matched + 1, len(token_ids), len(session.guesses))
            successes = matched
        guesses = session.guesses[:decided]
        if guesses:
            confidences = [guess.confidence for guess in guesses]
            self._calibration(session, guesses[0]).add_draft(confidences, successes)
        for branch in session.branches:
            # The first choice was wrong: learn whether the second was right.
            at = branch.line.start - len(session.text)
            if at == matched < decided and branch.guesses:
                second = branch.guesses[0]
                is_right = second.token_id == token_ids[matched]
                self._calibrations.runner_up.add_draft([second.confidence], int(is_right))
