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


def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def defined(tree: ast.Module, name: str) -> bool:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and node.name == name for node in ast.walk(tree))


def called(tree: ast.Module, name: str) -> bool:
    """Whether the name, or a method of that name, is called."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [f.id if isinstance(f, ast.Name) else getattr(f, "attr", None) for f in calls]
    return name in found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_it_stands_where_the_table_says(row: Row) -> None:
    files = trees()
    homes = [file for file, tree in files.items() if defined(tree, row.name)]
    if row.name != "allocate":  # each allocation policy has its own
        assert homes == [row.file]
    assert row.file in homes
    assert not defined(files[row.file], f"{row.name}_"), "a control: what is not there is not found"


@pytest.mark.parametrize("row", [r for r in rows() if r.callers], ids=lambda row: row.name)
def test_only_one_file_asks(row: Row) -> None:
    found = {
        file
        for file, tree in trees().items()
        if file.startswith("core/") and called(tree, row.name) and file != row.file
    }
    # A pool of KV blocks has a method of that name, too.
    found -= {f for f in found if row.name == "allocate" and f in ("core/kv.py",)}
    assert found == {row.callers}


def test_survival_is_worked_out_nowhere_else() -> None:
    products = {file for file, tree in trees().items() if called(tree, "cumprod")}
    # Of outputs' lengths, not of drafts.
    assert products == {"core/learn/acceptance.py", "core/learn/traffic.py"}
