"""Each thing is decided, or worked out, in the one place that docs/extend.md names."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"


class Row(NamedTuple):
    """A row of the table. callers: the files that may call it; empty: any."""

    thing: str
    name: str
    file: str
    callers: str


def rows() -> list[Row]:
    section = (ROOT / "docs" / "extend.md").read_text().split("## One place for each thing")[1]
    table = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[2:]]
    return [Row(*row) for row in cells]


class Names(NamedTuple):
    """Functions and classes that a file defines, and what it calls, methods by their names."""

    defined: set[str]
    called: set[str]

    @classmethod
    def of(cls, path: Path) -> "Names":
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        return cls(
            {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)},
            {f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls},
        )


@pytest.fixture(scope="module")
def files() -> dict[str, Names]:
    return {str(path.relative_to(PACKAGE)): Names.of(path) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_it_stands_where_the_table_says(files: dict[str, Names], row: Row) -> None:
    homes = [file for file, names in files.items() if row.name in names.defined]
    if row.name != "allocate":  # each allocation policy has its own
        assert homes == [row.file]
    assert row.file in homes
    assert f"{row.name}_" not in files[row.file].defined, "a control: what is not there"


@pytest.mark.parametrize("row", [r for r in rows() if r.callers], ids=lambda row: row.name)
def test_only_one_file_asks(files: dict[str, Names], row: Row) -> None:
    asks = {file for file, names in files.items() if row.name in names.called}
    found = {file for file in asks if file.startswith("core/")} - {row.file}
    if row.name == "allocate":  # a pool of KV blocks has a method of that name, too
        found.remove("core/kv.py")
    assert found == {row.callers}


def test_survival_is_worked_out_nowhere_else(files: dict[str, Names]) -> None:
    products = {file for file, names in files.items() if "cumprod" in names.called}
    # Of outputs' lengths, not of drafts.
    assert products == {"core/learn/acceptance.py", "core/learn/traffic.py"}
