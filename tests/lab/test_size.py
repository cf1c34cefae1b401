"""The size report: what it counts, and that a budget can be exceeded."""

from collections import Counter
from pathlib import Path

import pytest

from lab import constants
from lab.constants import CONSTANT, IN_LINE, IN_TUPLE, numbers_of
from lab.size import LANGUAGES, Lines, exceeded, lines_of, main, number_counts, text_lines

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


def numbers(text: str, kind: str) -> list[str]:
    return [number.text for number in numbers_of(text) if number.kind == kind]


def test_a_number_under_a_name_is_a_constant() -> None:
    text = 'A = 2\nB: float = 3 * 0.5\nC = 64 << 20\nD = "3"\nE = True\nF = min(A, B)\n'
    assert numbers(text, CONSTANT) == ["2", "3 * 0.5", "64 << 20"]
    assert len(numbers_of(text)) == 3


def test_numbers_of_a_tuple_count_each_and_a_table_once() -> None:
    text = 'A, B = 2, 16\nC, D = "x", 1\nSIZES = (1, 8, 64)\nTWO, MORE = (1, 2), [3, 4]\n'
    assert numbers(text, IN_TUPLE) == ["2", "16", "1", "(1, 8, 64)", "(1, 2)", "[3, 4]"]
    assert len(numbers_of(text)) == 6


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return 3 * x + 0.25 - x**4", ["3", "0.25", "4"]),
        ("return f(x, keep=0.9)", ["0.9"]),
        ("a, b = 3, 7", ["3", "7"]),
        ("return x in (3, 7)", ["(3, 7)"]),
        ("return x + 1 - 0.5 * x / 2.0 - 1.0", []),
        ("return (1, 2), -1", []),
        ("return x[3] + x[:4] + x[i - 5]", []),
        ("return cast(Annotated[int, Field(le=8)], x)", ["8"]),
        ("return 1e3 * x / 2**20 + 100 * x", []),
        ("return x + 100", ["100"]),
        ('return f"{x:8.3f}"', []),
    ],
)
def test_numbers_in_a_line_are_those_that_somebody_chose(line: str, found: list[str]) -> None:
    assert numbers(f"def f(x):\n    {line}\n", IN_LINE) == found


def test_defaults_are_numbers_and_values_of_an_enumeration_are_none() -> None:
    assert numbers("def f(x, keep=0.9): ...", IN_LINE) == ["0.9"]
    assert numbers("class A:\n    x: int = 8\n    y = 9\n", IN_LINE) == ["8", "9"]
    assert numbers("class A(enum.IntEnum):\n    X = 8\n    Y = f(9)\n", IN_LINE) == ["9"]


def test_statuses_of_errors_are_names_in_the_api(tmp_path: Path) -> None:
    text = "def f():\n    raise Error(404, 77)\n"
    for folder in ("api", "core"):
        (tmp_path / "penstock" / folder).mkdir(parents=True)
        (tmp_path / "penstock" / folder / "a.py").write_text(text)
    found = constants.by_file(tmp_path)
    assert [(path.parent.name, number[IN_LINE]) for path, number in found.items()] == [
        ("core", 2),
        ("api", 1),
    ]
    assert number_counts(found | {Path("b"): Counter({CONSTANT: 4})}) == {
        "constants": 4,
        "numbers": 7,
    }


def test_the_numbers_of_a_file_and_of_a_folder_are_shown(tmp_path, capsys) -> None:
    (tmp_path / "few.py").write_text("A = 3\n")
    (tmp_path / "many.py").write_text("A, B = 3, 4\nC = f(5)\n")
    assert main(["--numbers", str(tmp_path / "few.py")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'few.py'}:1: 3 (constants)\n"
    assert main(["--numbers", str(tmp_path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["1", "2", "1", str(tmp_path)],
        ["0", "2", "1", str(tmp_path / "many.py")],
        ["1", "0", "0", str(tmp_path / "few.py")],
    ]


def test_lines_of_other_languages_count(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("int a;\n\n")
    (tmp_path / "b.cpp").write_text("int b;\n")
    (tmp_path / "c.css").write_text("p {}\n")
    found = {name: text_lines(tmp_path, patterns) for name, patterns in LANGUAGES.items()}
    assert found == {"lines of C++": 3, "lines of HTML, CSS and JS": 1}
