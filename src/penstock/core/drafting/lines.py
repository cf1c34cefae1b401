"""One request's drafting session and its lines (`core.ahead`), drafted before the order.

A session's own guesses are the line that follows its text. Every other line is a session, too, of a
text that ends where it leaves its parent line; its first guess is the runner-up to the token that
it replaces. All lines of a request share the KV of their common texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.ahead import MAX_AHEAD_TOKENS, MAX_LINES, MAX_ROWS, LinePiece, Odds
from penstock.core.types import SamplingParams

_FIRST_GRANT = 4  # draft-ahead length before the first order shows the usual one


class TopWeights(NamedTuple):
    """Truncated distribution: token ids, and integer weights of a fixed sum."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


class Guess(NamedTuple):
    """A token, and the drafter's confidence (0 to 1)."""

    token_id: int
    confidence: float
    source: TopWeights | None = None  # distribution of a sampled `ratio` token


class SessionOrder(NamedTuple):
    """Order for a draft of one request."""

    tag: Hashable  # comes back with the draft
    prefix_len: int  # of the text behind which to draft
    num_draft_tokens: int  # at most
    min_survival: float = 0.0  # least predicted survival of a token


@dataclass(slots=True)
class Line:
    """A line of a request."""

    name: int  # from 1 on
    parent: int  # the line that it leaves; itself if it follows the text
    start: int  # position of its first token
    barred: int | None = None  # what that token must not be
    told_to: int | None = None  # end of the part that was sent; None before
    left: set[int] = field(default_factory=set)  # positions at which other lines leave it


@dataclass(slots=True)
class Session:
    """Drafting of one request, or one of its lines."""

    key: str
    text: list[int]
    sampling: SamplingParams
    guesses: list[Guess] = field(default_factory=list)
    order: SessionOrder | None = None
    num_sent: int | None = 0  # tokens under verification; None while an order is due or open
    last_grant: int = _FIRST_GRANT
    is_stuck: bool = False  # no further guess before the text changes
    is_readable: bool = True  # its vocabulary has every token of the text
    kv_key: str = ""  # names its KV
    line: Line = field(default_factory=lambda: Line(1, 1, 0))
    branches: list[Session] = field(default_factory=list)  # the request's other lines
    num_lines: int = 1  # how many there ever were

    @property
    def barred(self) -> int | None:
        """Token that the next guess must not be."""
        return self.line.barred if self.length == self.line.start else None

    @property
    def length(self) -> int:
        """Tokens of text and guesses; the position of the next guess."""
        return len(self.text) + len(self.guesses)

    @property
    def is_ratio(self) -> bool:
        return self.sampling.is_ratio

    @property
    def samples_next(self) -> bool:
        """True if the next guess is from the drafter's distribution, not the target's noise."""
        return self.is_ratio and len(self.guesses) != self.num_sent

    @property
    def draft_start(self) -> int:
        """Position of the first token of the draft that the next guess is for."""
        if self.num_sent is None or len(self.guesses) < self.num_sent:
            return len(self.text)
        return len(self.text) + self.num_sent + 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Return token ids of text and guesses."""
        known = len(self.text)
        head = self.text[start:end]
        if end <= known:
            return head
        return head + [g.token_id for g in self.guesses[max(start - known, 0) : end - known]]


Acceptance = Callable[[Session, Guess], float]


def lines_of(session: Session) -> Iterator[Session]:
    """Yield the session, then its other lines, parents first."""
    yield session
    yield from session.branches


def begin_line(session: Session) -> None:
    """Start a new line with the session's guesses behind its text."""
    session.num_lines += 1
    leaving = [b.line for b in session.branches if b.line.parent == session.line.name]
    for line in leaving:
        line.parent = session.num_lines
    left = {line.start for line in leaving}
    session.line = Line(session.num_lines, session.num_lines, len(session.text), left=left)


def fork(session: Session, line: Session, at: int) -> Session:
    """Return a new line of a session that leaves another instead of its guess `at`."""
    session.num_lines += 1
    name, start = session.num_lines, len(line.text) + at
    line.line.left.add(start)
    left = Line(name, line.line.name, start, barred=line.guesses[at].token_id)
    text, kv_key = line.tokens(0, start), f"{line.key}\0{name}"
    branch = Session(line.key, text, line.sampling, kv_key=kv_key, line=left)
    session.branches.append(branch)
    return branch


def heir(session: Session, token_ids: Sequence[int]) -> Session | None:
    """Return the line that these tokens confirm, if it is not the session's own."""
    known = len(session.text)
    end = known + len(token_ids)
    for branch in session.branches:
        is_long_enough = len(branch.text) <= end <= branch.length
        if is_long_enough and branch.tokens(known, end) == list(token_ids):
            return branch
    return None


def inherit(session: Session, branch: Session, token_ids: Sequence[int]) -> None:
    """Replace the session by a branch that the text has followed."""
    text = session.text + list(token_ids)
    del branch.guesses[: len(text) - len(branch.text)]
    branch.text = text
    branch.branches = [b for b in session.branches if b is not branch]
    branch.num_lines = session.num_lines
    branch.last_grant = session.last_grant
    branch.is_readable = session.is_readable
    session.branches = []
    if branch.line.told_to is None:
        begin_line(branch)
    elif len(text) > branch.line.start:
        branch.line.barred = None


def prune(session: Session, known: int) -> list[Session]:
    """Drop and return the lines that contradict the text, which is new behind `known`."""
    news = session.text[known:]
    end = len(session.text)
    kept: list[Session] = []
    dropped: list[Session] = []
    for branch in session.branches:
        goes_on = len(branch.text) >= end and branch.text[known:end] == news
        (kept if goes_on else dropped).append(branch)
        branch.is_stuck = False
    session.branches = kept
    return dropped


def pieces(session: Session) -> list[LinePiece]:
    """Return the parts of the session's lines that were not sent, and mark them as sent."""
    found = []
    if session.line.told_to is not None and session.line.told_to < len(session.text):
        # By now there is text between what was sent and the guesses.
        begin_line(session)
    for line in lines_of(session):
        begin = line.line.told_to
        parent = line.line.parent if begin is None else None
        begin = len(line.text) if begin is None else begin
        if begin < line.length:
            tokens = tuple(line.tokens(begin, line.length))
            found.append(LinePiece(line.line.name, begin, tokens, parent))
            line.line.told_to = line.length
    return found


def has_room(session: Session) -> bool:
    """Return whether another step's tokens may be drafted ahead."""
    num_tokens = sum(len(s.guesses) for s in lines_of(session))
    has_tokens = num_tokens <= MAX_AHEAD_TOKENS - MAX_ROWS
    return has_tokens and len(session.branches) < MAX_LINES - MAX_ROWS


def odds(
    session: Session, acceptance: Acceptance, can_grow: Callable[[Session], bool]
) -> list[Odds]:
    """Return the odds of the session's lines, in their order."""
    found: dict[int, tuple[Session, Odds]] = {}
    for line in lines_of(session):
        accepted = [acceptance(line, guess) for guess in line.guesses]
        left = {at - len(line.text) for at in line.line.left}
        reached = 1.0
        if line is not session:
            # A line's own first token replaces another; no token replaces it.
            left.add(0)
            above, known = found[line.line.parent]
            at = line.line.start - len(above.text)
            reached = known.reached * math.prod(known.accepted[:at]) * (1 - known.accepted[at])
        found[line.line.name] = line, Odds(reached, accepted, frozenset(left), can_grow(line))
    return [odds for _, odds in found.values()]
