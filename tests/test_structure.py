"""How the package's modules import each other: never in a circle."""

import ast
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for type checkers count, too: they only hide a circle."""
    assert circles(imports_of(PACKAGE)) == []


def test_circles_are_found(tmp_path: Path) -> None:
    """The control, on a made-up package with a circle of each kind, and imports that are none."""
    package = tmp_path / "made_up"
    files = {
        "__init__": "from made_up import alone",
        "alone": "import json",
        "a": "from made_up.b import f",
        "b": "def f():\n    import made_up.c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_up import a",
        "sub/__init__": "from made_up.sub.d import D",
        "sub/d": "class D:\n    from made_up import sub",
        "above": "from made_up.a import f\nfrom made_up.sub import D",
    }
    for name, text in files.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    imports = imports_of(package)
    assert circles(imports) == [
        ["made_up.a", "made_up.b", "made_up.c"],
        ["made_up.sub", "made_up.sub.d"],
    ]
    imports["made_up.b"].clear()
    imports["made_up.sub.d"].clear()
    assert circles(imports) == []


def imports_of(package: Path) -> dict[str, set[str]]:
    """Of each module of a package, by its name, the modules of the package that it imports."""
    files = {_name(file, package): file for file in package.rglob("*.py")}
    imports: dict[str, set[str]] = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert not node.level, f"{file}: imports are written in full"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found.update(i if i in files else node.module for i in inner)
        imports[name] = (found & files.keys()) - {name}
    return imports


def _name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group, sorted."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Modules that come with a module's imports, and theirs."""
    reached: set[str] = set()
    left = set(imports[name])
    while left:
        reached |= left
        left = {inner for one in left for inner in imports[one]} - reached
    return reached
