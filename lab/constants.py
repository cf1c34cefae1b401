"""The numbers in Python sources: those with a name, those in tuples and those in lines.

A number is a literal, or arithmetic of literals (`64 << 20` is one).

- *Constants*: `NAME = 3` of a module, of any value.
- *In tuples*: each of `A, B = 2, 16` of a module; a table under a name, `SIZES = (1, 8, 64)`, once.
- *In lines*: all others: in functions, defaults, fields of classes, arguments; a table once.

What nobody chose does not count in lines: 0, 1, 2 and a half of either sign; indices and slices;
factors that change a unit (100, 1e3, 1e6, 1e9, 2**10, 2**20, 2**30); values of an enumeration;
in the HTTP API, statuses of errors. Digits of a format are part of a string.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path

CONSTANT, IN_TUPLE, IN_LINE = KINDS = ("constants", "in tuples", "in lines")
GENERATED = ("_pb2.py", "_pb2_grpc.py")

_PLAIN = frozenset({0, 1, 2, 0.5})
_STATUSES = frozenset(int(status) for status in HTTPStatus if status >= 400)
_UNITS = ("100", "1000", "1000.0", "1000000.0", "1000000000.0", "1024", "2 ** 20", "2 ** 30")


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of a module: its line, its kind (of `KINDS`) and how it is written."""

    line: int
    kind: str
    text: str


def by_file(folder: Path) -> dict[Path, Counter[str]]:
    """How many numbers of each kind the Python files below a folder have, most first."""
    paths = [path for path in folder.rglob("*.py") if not path.name.endswith(GENERATED)]
    counts = {path: Counter(number.kind for number in numbers_in(path)) for path in sorted(paths)}
    return dict(sorted(counts.items(), key=lambda item: -item[1].total()))


def numbers_in(path: Path) -> list[Number]:
    """The numbers of a file."""
    plain = _PLAIN | _STATUSES if "/penstock/api/" in path.as_posix() else _PLAIN
    return numbers_of(path.read_text(encoding="utf-8"), plain)


def numbers_of(text: str, plain: frozenset[float] = _PLAIN) -> list[Number]:
    """The numbers of a module; `plain` do not count in lines."""
    found = []
    for statement in ast.parse(text).body:
        for node, kind in _kinds(statement):
            is_named = kind != IN_LINE
            parts: Iterable[ast.stmt | ast.expr] = [node] if is_named else _in_lines(node, plain)
            found += [Number(part.lineno, kind, ast.unparse(part)) for part in parts]
    return found


def _kinds(statement: ast.stmt) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """A statement of a module in parts: its named numbers and tables, and all that is left."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if value is None:
        yield statement, IN_LINE
    elif _is_number(value):
        yield value, CONSTANT
    else:
        for part in _unpacked(statement) or [value]:
            is_named = _is_number(part) or _is_table(part)
            yield part, IN_TUPLE if is_named else IN_LINE


def _in_lines(node: ast.AST, plain: frozenset[float]) -> Iterator[ast.expr]:
    if isinstance(node, ast.expr) and (_is_number(node) or _is_table(node)):
        literals = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        if not plain.issuperset(literals):
            yield node
        return
    for part in _unpacked(node) or ast.iter_child_nodes(node):
        if not _is_given(node, part):
            yield from _in_lines(part, plain)


def _is_given(node: ast.AST, part: ast.AST) -> bool:
    """Whether a part of a node is an index, a unit or a value of an enumeration."""
    if isinstance(node, ast.Subscript):
        # `Annotated[int, Field(le=8)]` is no index.
        return part is node.slice and not any(isinstance(n, ast.Call) for n in ast.walk(part))
    if isinstance(node, ast.BinOp | ast.AugAssign):
        scales = isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)
        return scales and ast.unparse(part) in _UNITS
    if isinstance(node, ast.ClassDef) and isinstance(part, ast.Assign):
        return _is_number(part.value) and any(
            ast.unparse(base).endswith(("Enum", "Flag")) for base in node.bases
        )
    return False


def _unpacked(node: ast.AST) -> list[ast.expr]:
    """The values of `A, B = 2, 16`; none of another node."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return []
    is_unpacked = any(isinstance(target, ast.Tuple) for target in node.targets)
    return node.value.elts if is_unpacked else []


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.BinOp) and _is_number(node.left) and _is_number(node.right)


def _is_table(node: ast.expr) -> bool:
    if not isinstance(node, ast.Tuple | ast.List | ast.Set):
        return False
    return bool(node.elts) and all(map(_is_number, node.elts))
