"""How large the project is, and whether it keeps its budget: `python -m lab.size [--json]`.

Counts lines of Python by folder (code, docstrings and comments, blank) and the package's lines of
other languages, words of documentation, options of commands, policies and their options, and
numbers (`lab.constants` says which). `size.toml` has a budget for some of these; exit code 1 where
one is exceeded. `make size` shows the report, `make check` compares. `--numbers src` shows which
files have most numbers, `--numbers FILE` each number of one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import constants

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "size.toml"
FOLDERS = (
    *("src/penstock", "src/penstock/core", "src/penstock/core/policies", "src/penstock/engine"),
    *("src/penstock/serving", "src/penstock/api", "src/penstock/sim", "src/penstock/fluid"),
    *("src/penstock/cli", "lab", "lab/bench", "lab/papers", "lab/common", "lab/zoo", "tests"),
)
LANGUAGES = {
    "lines of C++": ("*.cpp", "*.h"),
    "lines of HTML, CSS and JS": ("*.html", "*.css", "*.js"),
}


@dataclasses.dataclass
class Lines:
    """Lines of Python: all, and of those what is prose (docstrings, comments) and what is blank."""

    total: int = 0
    prose: int = 0
    blank: int = 0

    def add(self, other: Lines) -> None:
        self.total += other.total
        self.prose += other.prose
        self.blank += other.blank

    @property
    def code(self) -> int:
        return self.total - self.prose - self.blank


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    told_of = "each number of a file, or how many each file of a folder has"
    parser.add_argument("--numbers", type=Path, metavar="PATH", help=told_of)
    given = parser.parse_args(arguments)
    if given.numbers is not None:
        _show_numbers(given.numbers)
        return 0
    numbers = constants.by_file(ROOT / "src")
    lines = {folder: lines_in(ROOT / folder) for folder in FOLDERS}
    counts = {folder: found.total for folder, found in lines.items()} | other_counts()
    counts |= number_counts(numbers)
    over = exceeded(counts, tomllib.loads(BUDGET.read_text(encoding="utf-8")))
    if given.json:
        told = {name: dataclasses.asdict(found) for name, found in lines.items()}
        files = {str(path.relative_to(ROOT)): found for path, found in numbers.items() if found}
        print(json.dumps({"lines": told, "counts": counts, "numbers": files, "exceeded": over}))
    else:
        _show(lines, counts)
    for line in over:
        print(f"size: {line}", file=sys.stderr)
    return int(bool(over))


def exceeded(counts: dict[str, int], budget: dict[str, int]) -> list[str]:
    """A line for each budget that is exceeded. Raises: KeyError for a budget of nothing counted."""
    return [
        f"{name}: {counts[name]:,} is more than the budget of {allowed:,} (size.toml)"
        for name, allowed in budget.items()
        if counts[name] > allowed
    ]


def lines_in(folder: Path) -> Lines:
    """Lines of the Python files below a folder, generated ones left out."""
    found = Lines()
    for path in sorted(folder.rglob("*.py")):
        if not path.name.endswith(constants.GENERATED):
            found.add(lines_of(path.read_text(encoding="utf-8")))
    return found


def lines_of(text: str) -> Lines:
    """Lines of one module."""
    lines = text.splitlines()
    prose = set()
    for node in ast.walk(ast.parse(text)):
        # A string that is a statement: a docstring, or one below a constant.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            prose.add(token.start[0])
    blank = {n for n, line in enumerate(lines, 1) if not line.strip()} - prose
    return Lines(len(lines), len(prose), len(blank))


def other_counts() -> dict[str, int]:
    """All that is counted beside lines, by the names that `size.toml` uses."""
    from penstock.core.policies.registry import policies

    classes = [
        policy
        for kind in ("admission", "selection", "allocation", "pipeline")
        for policy in policies(kind).values()
    ]
    options = dict(_options())
    manual = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "adr"]
    package = ROOT / "src" / "penstock"
    return {
        **{name: text_lines(package, patterns) for name, patterns in LANGUAGES.items()},
        "words of README and docs": _words([ROOT / "README.md", *manual]),
        "words of ADRs": _words((ROOT / "docs" / "adr").glob("*.md")),
        "options of serve": options["serve"],
        "options of all commands": sum(options.values()),
        "policies": len(classes),
        "policy options": sum(len(dataclasses.fields(policy.Options)) for policy in classes),
    }


def number_counts(numbers: dict[Path, Counter[str]]) -> dict[str, int]:
    """The constants of all files, and all their numbers: constants, in tuples and in lines."""
    found = sum(numbers.values(), Counter[str]())
    return {"constants": found[constants.CONSTANT], "numbers": found.total()}


def text_lines(folder: Path, patterns: tuple[str, ...]) -> int:
    """All lines of the files below a folder whose names match a pattern."""
    paths = [path for pattern in patterns for path in folder.rglob(pattern)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _words(paths: Any) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def _options() -> Iterator[tuple[str, int]]:
    """Each command with the number of options that its help shows."""
    from typer.main import get_command

    from penstock.cli import app

    commands: list[tuple[str, Any]] = [("", get_command(app))]
    for name, command in commands:
        below = getattr(command, "commands", None)
        if below is None:
            shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
            yield name, len(shown)
        else:
            commands += [(f"{name} {key}".strip(), each) for key, each in below.items()]


def _show_numbers(path: Path) -> None:
    if path.is_file():
        for number in constants.numbers_in(path):
            print(f"{path}:{number.line}: {number.text} ({number.kind})")
        return
    found = constants.by_file(path)
    print("".join(f"{kind:>11}" for kind in constants.KINDS))
    for name, counts in {path: sum(found.values(), Counter[str]()), **found}.items():
        if counts:
            print("".join(f"{counts[kind]:11,}" for kind in constants.KINDS) + f"  {name}")


def _show(lines: dict[str, Lines], counts: dict[str, int]) -> None:
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    print(f"{'lines of Python':28}{'code':>9}{'prose':>9}{'blank':>9}{'total':>9}{'budget':>9}")
    for name, found in lines.items():
        allowed = f"{budget[name]:,}" if name in budget else ""
        shown = "".join(f"{n:9,}" for n in (found.code, found.prose, found.blank, found.total))
        print(f"{name:28}{shown}{allowed:>9}")
    print()
    for name in (name for name in counts if name not in lines):
        allowed = f"{budget[name]:,}" if name in budget else ""
        print(f"{name:28}{counts[name]:9,}{allowed:>9}")


if __name__ == "__main__":
    sys.exit(main())
