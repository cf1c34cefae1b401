"""Drafts that a draft server sends before they are ordered, to save the round trip.

A *line* is a likely continuation of a request's text. The first follows the text; another one
leaves a line where that may turn out wrong, with the runner-up:

    text |--- a --- b --- c --- d      line 1, from the text
                    |
                    +---- e --- f      line 2, leaves line 1 instead of b's successor

The draft server extends its lines in idle time (`spots_of`). The verification server keeps them
(`LinesAhead`) and drops what its verified text contradicts; the rest is the next draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_CHANCE = 0.05
"""Least probability that a token drafted ahead is right. Chosen by hand."""

MAX_ROWS = 8
"""Most lines extended in one step, whose end a new order waits for."""

ROW_COST = 0.5
"""Time of a drafting step per line beside the first, in steps of one: measured for the bundled
drafters on one core at 5d79ef34. Larger models take less."""

MAX_LINES = 32
"""Limit of lines kept per request."""

MAX_AHEAD_TOKENS = 64
"""Most tokens of one request kept beyond its text, and of one message."""


class LinePiece(NamedTuple):
    """Consecutive tokens of a line."""

    line: int
    start: int  # position of the first in the text
    token_ids: tuple[int, ...]
    parent: int | None = None  # with a line's first tokens: the line left, or itself


@dataclass(slots=True)
class _KeptLine:
    """A kept line."""

    parent: int | None  # line with the tokens before `start`; None once verified
    start: int
    token_ids: list[int]  # unverified, from `start` on

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
    """Lines of one request that a draft server has sent."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self._lines: dict[int, _KeptLine] = {}

    @property
    def num_tokens(self) -> int:
        return sum(len(line.token_ids) for line in self._lines.values())

    def add_pieces(self, pieces: Iterable[LinePiece], text: Text) -> int:
        """Add new pieces of known lines, follow the text, and return how many tokens are new."""
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
        """Drop what the text has contradicted or passed."""
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
        """Return whether a line can be compared with the text; note wrong tokens in `wrong`."""
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
        """Return the likeliest tokens behind a followed text of `length`."""
        for line in self._lines.values():
            if line.parent is None and line.start <= length < line.end:
                return tuple(line.token_ids[length - line.start :])
        return ()


# --- where to draft next --------------------------------------------------------------------------


class Odds(NamedTuple):
    """Odds of one line, by its drafter."""

    reached: float  # probability that the text reaches its start
    accepted: Sequence[float]  # of each token, behind all before it
    left: frozenset[int]  # tokens that other lines have left
    can_grow: bool  # one more token can be drafted


class DraftSpot(NamedTuple):
    """Spot for a next token, with its probability: a line's end, or `at`, instead of a token."""

    chance: float
    line: int
    at: int | None


class Choices(NamedTuple):
    """Accuracy of a drafter's choices."""

    first: float  # probability that the first choice is right
    runner_up: float  # that the second is, if the first is not


def spots_of(lines: Sequence[Odds], choices: Choices, least: float) -> list[DraftSpot]:
    """Return all spots with a probability of at least `least`."""
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
    """Return how many of these spots, the likeliest first, give the most right tokens a second."""
    total = 0.0
    for num, chance in enumerate(chances[:MAX_ROWS]):
        if chance * (1 + ROW_COST * (num - 1)) < ROW_COST * total:
            return num
        total += chance
    return min(len(chances), MAX_ROWS)
