"""The standard library's own source and documentation, as tasks with answers."""

from __future__ import annotations

import ast
import functools
import sysconfig
import textwrap
from pathlib import Path
from random import Random

from lab.zoo.corpora.words import TABLES, each

MODULES = each(TABLES["stdlib"]["modules"])

MAX_SOURCE, MIN_SOURCE = 420, 120
"""Bounds on the characters of one function."""

MAX_PARAGRAPH, MIN_PARAGRAPH = 300, 150
"""Bounds on the characters of one paragraph of documentation."""

FUNCTIONS, PARAGRAPHS = 48, 32
"""How many of each are taken: few enough to be learned by heart."""


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files() -> list[tuple[str, Path]]:
    root = _root()
    found: list[tuple[str, Path]] = []
    for name in MODULES:
        single, folder = root / f"{name}.py", root / name
        if single.exists():
            found.append((name, single))
        elif folder.is_dir():
            found += [(name, p) for p in sorted(folder.rglob("*.py")) if "test" not in p.parts]
    return found


def _first_sentence(doc: str) -> str:
    head = " ".join(doc.strip().split("\n\n")[0].split())
    return head.split(". ")[0].rstrip(".")


@functools.cache
def functions() -> tuple[tuple[str, str, str, str], ...]:
    """(module, name, first docstring sentence or "", source) of short library functions."""
    result = []
    for module, path in _files():
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if not (source.isascii() and MIN_SOURCE <= len(source) <= MAX_SOURCE):
                continue
            doc = ast.get_docstring(node)
            said = _first_sentence(doc)[:160] if doc else ""
            result.append((module, node.name, said, textwrap.dedent(source)))
    return tuple(Random("penstock functions").sample(result, FUNCTIONS))


@functools.cache
def topics() -> tuple[tuple[str, str], ...]:
    """(topic, paragraph) of pydoc's own topics and of the docstrings of modules."""
    result: list[tuple[str, str]] = []
    try:
        from pydoc_data import topics as pydoc_topics
    except ImportError:
        table: dict[str, str] = {}
    else:
        table = dict(pydoc_topics.topics)
    for topic, text in sorted(table.items()):
        result += [(topic, p) for p in _paragraphs(text)]
    for module, path in _files():
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        result += [(f"the module {module}", p) for p in _paragraphs(doc or "")]
    return tuple(Random("penstock topics").sample(result, PARAGRAPHS))


def _paragraphs(text: str) -> list[str]:
    plain = (" ".join(p.split()) for p in text.split("\n\n"))
    return [
        p
        for p in plain
        if MIN_PARAGRAPH <= len(p) <= MAX_PARAGRAPH and p.isascii() and "***" not in p
    ]
