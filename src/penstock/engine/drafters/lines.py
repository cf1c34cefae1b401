"""The lines of a drafting session (`core.ahead`): what it drafts and sends before it is asked.

A session's own guesses are the line that follows its text. Every other line is a session, too, of a
text that ends where the line leaves the one above it; its first guess is the runner-up to the token
that it stands in for. All lines of a request share the KV of what their texts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.ahead import MAX_AHEAD_TOKENS, MAX_LINES, MAX_ROWS, LinePiece, Odds

if TYPE_CHECKING:
    from penstock.engine.drafters.sessions import Guess, Session

Acceptance = Callable[["Session", "Guess"], float]


@dataclass(slots=True)
class Line:
    """name: from 1 on, by request. parent: the line that it leaves; itself where it follows the
    text. start: position of its first token. barred: what that token must not be. told_to: up to
    where it was sent; None before. left: positions at which other lines leave it."""

    name: int
    parent: int
    start: int
    barred: int | None = None
    told_to: int | None = None
    left: set[int] = field(default_factory=set)


def lines_of(session: Session) -> Iterator[Session]:
    """The session itself, and then what leaves it: whatever is left comes before."""
    yield session
    yield from session.branches


def begin_line(session: Session) -> None:
    """What the session guesses behind its text is a new line, for whoever it is sent to."""
    session.num_lines += 1
    leaving = [b.line for b in session.branches if b.line.parent == session.line.name]
    for line in leaving:
        line.parent = session.num_lines
    left = {line.start for line in leaving}
    session.line = Line(session.num_lines, session.num_lines, len(session.text), left=left)


def fork(session: Session, line: Session, at: int) -> Session:
    """A new line of a session that leaves another one at its guess `at`."""
    session.num_lines += 1
    branch = line.fork(at, session.num_lines)
    session.branches.append(branch)
    return branch


def heir(session: Session, token_ids: Sequence[int]) -> Session | None:
    """The line on which the text has gone on with these tokens, if it was not the session's own."""
    known = len(session.text)
    end = known + len(token_ids)
    for branch in session.branches:
        is_long_enough = len(branch.text) <= end <= branch.length
        if is_long_enough and branch.tokens(known, end) == list(token_ids):
            return branch
    return None


def inherit(session: Session, branch: Session, token_ids: Sequence[int]) -> None:
    """A branch that the text has gone on with takes the session's place."""
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
    """Drop the lines that leave another text than the session's, of which what is behind `known` is
    new; returns them."""
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
    """What of the session's lines was not sent before; now it was."""
    found = []
    if session.line.told_to is not None and session.line.told_to < len(session.text):
        # Between what was sent and what is guessed there is text by now.
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
    """Whether another step's tokens may be drafted ahead for a request."""
    num_tokens = sum(len(s.guesses) for s in lines_of(session))
    has_tokens = num_tokens <= MAX_AHEAD_TOKENS - MAX_ROWS
    return has_tokens and len(session.branches) < MAX_LINES - MAX_ROWS


def odds(
    session: Session, acceptance: Acceptance, can_grow: Callable[[Session], bool]
) -> list[Odds]:
    """Of the session's lines, in their order."""
    found: dict[int, tuple[Session, Odds]] = {}
    for line in lines_of(session):
        accepted = [acceptance(line, guess) for guess in line.guesses]
        left = {at - len(line.text) for at in line.line.left}
        reached = 1.0
        if line is not session:
            # Its own first token stands in for another one, and nothing for it.
            left.add(0)
            above, known = found[line.line.parent]
            at = line.line.start - len(above.text)
            reached = known.reached * math.prod(known.accepted[:at]) * (1 - known.accepted[at])
        found[line.line.name] = line, Odds(reached, accepted, frozenset(left), can_grow(line))
    return [odds for _, odds in found.values()]
