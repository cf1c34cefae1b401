"""Lines that are sent ahead: followed along the text, against a plain definition."""

import random

import pytest

from penstock.core.ahead import (
    MAX_AHEAD_TOKENS,
    MAX_LINES,
    MAX_ROWS,
    ROW_COST,
    Choices,
    LinePiece,
    LinesAhead,
    Odds,
    Text,
    num_worth,
    spots_of,
)

FIRST = 5
"""Length of the prompt."""


def text(*tokens: int) -> Text:
    return Text(FIRST, list(tokens))


def kept(*pieces: LinePiece, after: Text | None = None) -> LinesAhead:
    lines = LinesAhead("far")
    lines.add_pieces(pieces, after or text())
    return lines


TRUNK = LinePiece(1, FIRST, (10, 11, 12), 1)
BRANCH = LinePiece(2, FIRST + 1, (21, 22), 1)


def test_what_comes_late_is_compared_with_the_text_of_now() -> None:
    """The text has gone on while the pieces were under way."""
    assert kept(TRUNK, BRANCH, after=text(10)).path(FIRST + 1) == (11, 12)
    assert kept(TRUNK, BRANCH, after=text(10, 21)).path(FIRST + 2) == (22,)
    assert kept(TRUNK, BRANCH, after=text(9)).path(FIRST + 1) == ()


def test_pieces_that_hang_in_the_air_are_left_out() -> None:
    lines = kept(
        LinePiece(1, FIRST + 1, (7,), 1),
        LinePiece(2, FIRST, (7,)),
        LinePiece(3, FIRST, (7,), 9),
        LinePiece(4, FIRST - 1, (7,), 4),
        LinePiece(5, FIRST, (), 5),
    )
    assert lines.num_tokens == 0
    lines.add_pieces([TRUNK, LinePiece(2, FIRST + 4, (7,), 1)], text())
    lines.add_pieces([LinePiece(1, FIRST + 1, (99,)), LinePiece(1, FIRST + 4, (99,))], text())
    assert lines.path(FIRST) == TRUNK.token_ids, "repeated, and behind a gap"


def test_memory_is_bounded() -> None:
    lines = LinesAhead("far")
    for line in range(1, 200):
        lines.add_pieces([LinePiece(line, FIRST, (line, 1, 2, 3), line)], text())
    assert lines.num_tokens == MAX_AHEAD_TOKENS
    lines = LinesAhead("far")
    output: list[int] = []
    for line in range(1, 3 * MAX_LINES):
        # Lines that end where the text goes on: all right, and of no more use.
        lines.add_pieces([LinePiece(line, FIRST + len(output), (1,), line)], Text(FIRST, output))
        assert lines.path(FIRST + len(output)) == (1,)
        output += [1, 2]
        lines.follow(Text(FIRST, output))


class Plain:
    """By definition: every line's whole text is known, and the first one that agrees counts."""

    def __init__(self) -> None:
        self.whole: dict[int, dict[int, int]] = {}

    def take(self, piece: LinePiece) -> None:
        if piece.parent is not None and piece.parent != piece.line:
            above = self.whole[piece.parent]
            self.whole[piece.line] = {p: t for p, t in above.items() if p < piece.start}
        line = self.whole.setdefault(piece.line, {})
        line.update(enumerate(piece.token_ids, piece.start))

    def path(self, output: list[int]) -> tuple[int, ...]:
        end = FIRST + len(output)
        for line in self.whole.values():
            known = [p for p in line if p < end]
            if end in line and all(line[p] == output[p - FIRST] for p in known):
                return tuple(line[p] for p in range(end, max(line) + 1))
        return ()


@pytest.mark.parametrize("seed", range(40))
def test_against_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    lines, plain, output = LinesAhead("far"), Plain(), []
    ends: dict[int, tuple[int, int]] = {}
    num_hits = 0
    for _ in range(60):
        if rng.random() < 0.6 and lines.num_tokens < MAX_AHEAD_TOKENS - 8 and len(ends) < 30:
            tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 4)))
            at = FIRST + len(output)
            alive = [n for n in ends if ends[n][1] > at]
            name = len(ends) + 1
            if alive and rng.random() < 0.7:
                parent = rng.choice(alive)
                start, end = ends[parent]
                if rng.random() < 0.5:
                    piece = LinePiece(parent, end, tokens)
                    ends[parent] = start, end + len(tokens)
                else:
                    begin = rng.randrange(max(start, at), end)
                    piece = LinePiece(name, begin, tokens, parent)
                    ends[name] = begin, begin + len(tokens)
            else:
                piece = LinePiece(name, at, tokens, name)
                ends[name] = at, at + len(tokens)
            if piece.parent in (None, piece.line) or piece.parent in lines._lines:
                lines.add_pieces([piece], Text(FIRST, output))
                if piece.parent is not None or piece.line in plain.whole:
                    plain.take(piece)
            elif piece.line in ends:
                del ends[piece.line]
        else:
            output.append(rng.randrange(2))
            lines.follow(Text(FIRST, output))
        found = lines.path(FIRST + len(output))
        assert found == plain.path(output)
        num_hits += bool(found)
    assert num_hits > 10


def test_the_likeliest_spots() -> None:
    trunk = Odds(1.0, (0.9, 0.5), frozenset(), can_grow=True)
    branch = Odds(0.1, (0.4,), frozenset({0}), can_grow=True)
    choices = Choices(first=0.8, runner_up=0.5)
    chances = {(s.line, s.at): s.chance for s in spots_of([trunk, branch], choices, 0.03)}
    assert chances == {
        (0, None): pytest.approx(0.9 * 0.5 * 0.8),
        (0, 1): pytest.approx(0.9 * 0.5 * 0.5),
        (0, 0): pytest.approx(0.1 * 0.5),
        (1, None): pytest.approx(0.1 * 0.4 * 0.8),
    }
    assert {s.line for s in spots_of([trunk, branch], choices, 0.2)} == {0}
    stuck = trunk._replace(can_grow=False, left=frozenset({0, 1}))
    assert spots_of([stuck], choices, 0.0) == []


def test_a_line_more_must_be_worth_its_time() -> None:
    """By definition: right tokens a second are never more with another number of lines."""
    rng = random.Random(4)
    for _ in range(300):
        chances = sorted((rng.random() for _ in range(rng.randrange(1, 14))), reverse=True)
        rates = [sum(chances[:n]) / (1 + ROW_COST * (n - 1)) for n in range(1, len(chances) + 1)]
        assert rates[num_worth(chances) - 1] == pytest.approx(max(rates[:MAX_ROWS]))
    assert num_worth([]) == 0
    assert num_worth([0.5] * 20) == MAX_ROWS
    assert num_worth([0.9, 0.1, 0.1]) == 1
