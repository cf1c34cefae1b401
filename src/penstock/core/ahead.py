"""Drafts that a draft server sends before they are asked for, so that no round trip is waited for.

A *line* is a likely continuation of a request's text. The first follows the text; another one
leaves a line where that may turn out wrong, with the runner-up:

    text |--- a --- b --- c --- d      line 1, from the text
                    |
                    +---- e --- f      line 2, leaves line 1 instead of b's successor

The draft server grows its lines in idle time where the text is likely to come along (`spots_of`).
The verification server keeps them (`LinesAhead`) and drops what its verified text contradicts; the
next draft is what goes on from there. Their tokens are drafts like any others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_CHANCE = 0.05
"""Lowest probability of a token that is drafted ahead."""

MAX_ROWS = 8
"""Limit of lines that grow in one step: an order that comes meanwhile waits for its end."""

ROW_COST = 0.5
"""Time of a drafting step for each line beside the first, in steps of one: measured for the bundled
drafters on one core at 5d79ef34. Larger models pay less."""

MAX_LINES = 32
"""Limit of lines kept per request."""

MAX_AHEAD_TOKENS = 64
"""Limit of tokens kept beyond a request's text, and of those in one message."""


class LinePiece(NamedTuple):
    """Tokens of line `line` from position `start` of the text on.

    parent: only with a line's first tokens: the line that it leaves there, or itself where it
    follows the text."""

    line: int
    start: int
    token_ids: tuple[int, ...]
    parent: int | None = None


@dataclass(slots=True)
class _KeptLine:
    """A line that is kept.

    parent: the line on whose tokens before `start` it stands; None once those are verified.
    token_ids: from `start` on, without verified ones."""

    parent: int | None
    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Text(NamedTuple):
    """End of a verified text: the tokens from position `first` on."""

    first: int
    token_ids: Sequence[int]

    @property
    def length(self) -> int:
        return self.first + len(self.token_ids)


class LinesAhead:
    """Lines that one draft server has sent ahead for one request."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self._lines: dict[int, _KeptLine] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(len(line.token_ids) for line in self._lines.values())

    def take(self, pieces: Iterable[LinePiece], text: Text) -> int:
        """Add received pieces, and follow the text; returns the number of tokens added.

        Pieces of unknown lines, repeated ones, and tokens beyond the limits are left out."""
        added = 0
        for piece in pieces:
            before = self.num_tokens
            if before + len(piece.token_ids) > MAX_AHEAD_TOKENS or not piece.token_ids:
                continue
            if piece.parent is not None:
                self._begin(piece, text)
            elif piece.line in self._lines and self._lines[piece.line].end == piece.start:
                self._lines[piece.line].token_ids += piece.token_ids
            added += max(0, self.num_tokens - before)
        self.follow(text)
        return added

    def _begin(self, piece: LinePiece, text: Text) -> None:
        is_root = piece.parent == piece.line
        if len(self._lines) >= MAX_LINES:
            passed = next((n for n, line in self._lines.items() if not line.token_ids), None)
            if passed is None:
                return
            del self._lines[passed]
        if piece.start < text.first:
            return
        if is_root:
            if piece.start > text.length:
                return
        elif piece.parent not in self._lines or self._lines[piece.parent].end < piece.start:
            return
        parent = None if is_root else piece.parent
        self._lines[piece.line] = _KeptLine(parent, piece.start, list(piece.token_ids))

    def follow(self, text: Text) -> None:
        """Drop tokens that the text has contradicted or passed."""
        wrong: dict[int, int] = {}
        for name, line in self._lines.items():
            if line.parent is not None and not self._hangs(name, line, text, wrong):
                continue
            if name in wrong:
                continue
            for at in range(max(line.start, text.first), min(line.end, text.length)):
                if line.token_ids[at - line.start] != text.token_ids[at - text.first]:
                    wrong[name] = at
                    break
        for name in wrong:
            del self._lines[name]
        for line in self._lines.values():
            passed = min(max(text.length - line.start, 0), len(line.token_ids))
            if line.parent is None and passed:
                del line.token_ids[:passed]
                line.start += passed

    def _hangs(self, name: int, line: _KeptLine, text: Text, wrong: dict[int, int]) -> bool:
        """Return True if a line's tokens can be compared with the text by now.

        Its parent's tokens before them are verified; if they are wrong, the line is noted as wrong.
        """
        assert line.parent is not None
        known = line.parent in self._lines
        if not known or wrong.get(line.parent, line.start) < line.start:
            wrong[name] = line.start - 1
            return False
        if line.start > text.length or self._lines[line.parent].parent is not None:
            return False
        line.parent = None
        return True

    def path(self, length: int) -> tuple[int, ...]:
        """Return the likeliest tokens behind a text of `length` that has been followed.

        Older lines are likelier than those that leave them."""
        for line in self._lines.values():
            if line.parent is None and line.start <= length < line.end:
                return tuple(line.token_ids[length - line.start :])
        return ()


# --- where to draft next --------------------------------------------------------------------------


class Odds(NamedTuple):
    """Probabilities of one line, as its drafter sees it.

    reached: the text comes to its beginning; accepted: each of its tokens, behind all before it;
    left: tokens that another line has left already; can_grow: one more token can be drafted."""

    reached: float
    accepted: Sequence[float]
    left: frozenset[int]
    can_grow: bool


class DraftSpot(NamedTuple):
    """A place for the next draft token, and its probability to be right.

    It is behind the end of a line, or (`at`) instead of one of its tokens."""

    chance: float
    line: int
    at: int | None


class Choices(NamedTuple):
    """Probabilities of a drafter's choices.

    first: the first is right; runner_up: the second is, where the first is not."""

    first: float
    runner_up: float


def spots_of(lines: Sequence[Odds], choices: Choices, least: float) -> list[DraftSpot]:
    """Return all spots with at least the probability `least`."""
    spots = []
    for index, (reached, accepted, left, can_grow) in enumerate(lines):
        for at, chance in enumerate(accepted):
            if at not in left:
                spots.append(DraftSpot(reached * (1 - chance) * choices.runner_up, index, at))
            reached *= chance
        if can_grow:
            spots.append(DraftSpot(reached * choices.first, index, None))
    return [s for s in spots if s.chance >= least]


def num_worth(chances: Sequence[float]) -> int:
    """Return how many spots to draft in one step: as many as yield the most right tokens a second.

    chances: of the spots, the likeliest first."""
    total = 0.0
    for num, chance in enumerate(chances[:MAX_ROWS]):
        if chance * (1 + ROW_COST * (num - 1)) < ROW_COST * total:
            return num
        total += chance
    return min(len(chances), MAX_ROWS)
