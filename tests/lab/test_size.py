"""The size report: what it counts, and that a budget can be exceeded."""

import pytest

from lab.size import Lines, exceeded, lines_of

TEXT = '''"""What it is."""

import os  # not a comment line

# A comment.
LIMIT = 3
"""Why it is three."""


def name() -> str:
    """Its name.

    Raises: nothing.
    """
    return "# no comment"
'''


def test_lines_are_code_prose_or_blank() -> None:
    found = lines_of(TEXT)
    assert found == Lines(total=15, prose=7, blank=4)
    assert found.code == 4


def test_a_budget_is_kept_or_exceeded() -> None:
    assert exceeded({"src": 10}, {"src": 10}) == []
    (line,) = exceeded({"src": 11, "lab": 5}, {"src": 10})
    assert line.startswith("src: 11 is more than the budget of 10")


def test_a_budget_of_nothing_that_is_counted_is_an_error() -> None:
    with pytest.raises(KeyError):
        exceeded({"src": 1}, {"scr": 1})
