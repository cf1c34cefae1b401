"""Prompts for real models: eight kinds of 16, from the files and the text that come with Python.

    python -m lab.bench.real_prompts FILE.jsonl

The same Python version makes the same prompts on every machine. Half of each kind is held back:
what learns or is tuned may see the part `learn` only, figures are of the part `held`. The parts
draw on different modules and topics. An instruction is a `message`, for the chat template of
whatever model answers it; a completion is plain `text` to go on from.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, Protocol

Part = Literal["learn", "held"]
PARTS: tuple[Part, ...] = ("learn", "held")
NUM_OF_KIND = 16

# Of source: a prompt with its instruction, and an answer of 64 tokens, fit into 512 tokens.
_FEWEST_CHARS, _MOST_CHARS = 400, 1100
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"}

_EDITS = (
    "Add type hints to every parameter and to the result.",
    "Rename the function to `process` and its first parameter to `value`.",
    "Raise a ValueError with a clear message when an argument is None.",
    "Log every call with the logging module, at level DEBUG.",
    "Use early returns and keep the nesting low.",
    "Replace single-letter names by descriptive ones.",
    "Write conditions as small helper functions.",
    "Make it a method of a class `Helper`.",
)
_LANGUAGES = ("JavaScript", "Go", "Java", "Rust", "C++", "TypeScript", "C#", "Ruby")
_QUESTIONS = (
    "When would I use Python's module `{name}`, and what are its limits?",
    "I am new to Python. What is `{name}` for? Give me one everyday example.",
    "What do people get wrong most often with Python's `{name}`?",
    "Which alternatives to Python's `{name}` should I know, and when are they better?",
)
_FORMS = (
    "Write these functions as a JSON array of objects with the keys {columns}.",
    "Write an SQL table with the columns {columns}, and one INSERT statement for these rows.",
    "Write these rows as YAML, sorted by name, with the keys {columns}.",
    "Write an SQL query for a table functions({columns}) that counts functions by their number of "
    "arguments, and the result that it gives for these rows as a table.",
)


@dataclass(frozen=True, slots=True)
class RealPrompt:
    """One request: either `text` to go on from, or a user's `message`."""

    kind: str
    part: Part
    origin: str
    text: str | None = None
    message: str | None = None


class ChatTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


def token_ids(prompt: RealPrompt, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """As the model of `tokenizer` wants them; a message in the form of its own chat template."""
    if prompt.text is not None:
        return tuple(tokenizer.encode(prompt.text))
    messages = [{"role": "user", "content": prompt.message or ""}]
    return tuple(tokenizer.apply_chat_template(messages))


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the standard library, with its module's text before it."""

    module: str
    name: str
    source: str
    without_docstring: str
    before: str


@dataclass(frozen=True, slots=True)
class _Module:
    """A module: its functions that fit into a prompt, and name, line and arguments of all."""

    name: str
    functions: tuple[_Function, ...]
    rows: tuple[tuple[str, int, int], ...]
    docstring: str


def real_prompts() -> list[RealPrompt]:
    """All prompts, kind by kind, the part `learn` first."""
    made: list[RealPrompt] = []
    modules = [_read(*found) for found in _files()]
    for part in PARTS:
        mine = sorted(
            (m for m in modules if m and _part(m.name) == part), key=lambda m: _key(m.name)
        )
        made += _of_part(part, mine)
    kinds = dict.fromkeys(p.kind for p in made)
    return [p for kind in kinds for p in made if p.kind == kind]


def source_texts() -> list[str]:
    """The standard library's modules, whole, in an order without meaning."""
    paths = [path for _, path in sorted(_files(), key=lambda found: _key(found[0]))]
    return [text for path in paths if (text := path.read_text("utf-8", errors="ignore").strip())]


def _of_part(part: Part, modules: list[_Module]) -> Iterator[RealPrompt]:
    num = NUM_OF_KIND // len(PARTS)
    # One function of a module, so that no kind is all about one subject.
    functions = (min(m.functions, key=lambda f: _key(f.name)) for m in modules if m.functions)
    for function in itertools.islice(functions, num):
        text = (function.before + function.source)[-_MOST_CHARS:]
        cut = len(text) - len(function.source) * 2 // 3
        yield RealPrompt("completion", part, _origin(function), text=text[:cut])

    def ask(kind: str, instructions: Sequence[str], bare: bool = False) -> Iterator[RealPrompt]:
        # The parts begin at different instructions of the list, too.
        first = PARTS.index(part) * num
        for i, function in enumerate(itertools.islice(functions, num)):
            source = function.without_docstring if bare else function.source
            instruction = instructions[(first + i) % len(instructions)]
            message = f"{instruction}\n\n```python\n{source}\n```"
            yield RealPrompt(kind, part, _origin(function), message=message)

    yield from ask("edit", [f"{edit} Answer with the whole function." for edit in _EDITS])
    yield from ask("docstring", ["Write a docstring for this function."], bare=True)
    yield from ask("explanation", ["Explain what this function does, step by step."])
    yield from ask("translation", [f"Translate this function into {name}." for name in _LANGUAGES])
    yield from itertools.islice(_chats(part, modules), num)
    yield from itertools.islice(_summaries(part), num)
    yield from itertools.islice(_tables(part, modules), num)


def _chats(part: Part, modules: list[_Module]) -> Iterator[RealPrompt]:
    public = [m for m in modules if m.docstring and not m.name.rpartition(".")[2].startswith("_")]
    for module, question in zip(public, itertools.cycle(_QUESTIONS), strict=False):
        yield RealPrompt("chat", part, module.name, message=question.format(name=module.name))


def _summaries(part: Part) -> Iterator[RealPrompt]:
    """Of Python's own language reference, as `help()` shows it."""
    for name in sorted(topics, key=_key):
        text = topics[name].strip()
        if _part(name) == part and len(text) >= _FEWEST_CHARS:
            whole = text[:_MOST_CHARS].rpartition("\n\n")[0]
            cut = whole if len(whole) >= _FEWEST_CHARS else text[:_MOST_CHARS]
            message = f"Summarise this text in three sentences.\n\n{cut}"
            yield RealPrompt("summary", part, f"topic {name}", message=message)


def _tables(part: Part, modules: list[_Module]) -> Iterator[RealPrompt]:
    columns = "name, line, arguments"
    long = [m for m in modules if len(m.rows) >= 8]
    for module, form in zip(long, itertools.cycle(_FORMS), strict=False):
        lines = "\n".join(", ".join(map(str, row)) for row in module.rows[:10])
        message = f"{form.format(columns=columns)}\n\n{columns}\n{lines}"
        yield RealPrompt("structured", part, module.name, message=message)


def _files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(found):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        if (
            name
            and _SKIPPED.isdisjoint(parts)
            and not name.startswith(("_sysconfigdata", "config-"))
        ):
            yield name, path


def _read(name: str, path: Path) -> _Module | None:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeError, SyntaxError):
        return None
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = [_function(name, text, node) for node in found]
    rows = tuple((n.name, n.lineno, len(n.args.args) + len(n.args.kwonlyargs)) for n in found)
    fitting = tuple(f for f in functions if _FEWEST_CHARS <= len(f.source) <= _MOST_CHARS)
    return _Module(name, fitting, rows, ast.get_docstring(tree) or "")


def _function(module: str, text: str, node: ast.FunctionDef) -> _Function:
    lines = text.splitlines(keepends=True)
    source = "".join(lines[node.lineno - 1 : node.end_lineno])
    bare = source
    if ast.get_docstring(node) is not None and len(node.body) > 1:
        head, rest = node.body[0], node.body[1]
        bare = "".join(
            lines[node.lineno - 1 : head.lineno - 1] + lines[rest.lineno - 1 : node.end_lineno]
        )
    return _Function(
        module, node.name, source.rstrip(), bare.rstrip(), "".join(lines[: node.lineno - 1])
    )


def _origin(function: _Function) -> str:
    return f"{function.module}.{function.name}"


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _part(name: str) -> Part:
    """By the package's first name, so that kindred modules fall to one part."""
    return PARTS[int(_key("part " + name.partition(".")[0])[:8], 16) % len(PARTS)]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lab.bench.real_prompts FILE.jsonl")
    prompts = real_prompts()
    lines = [json.dumps({k: v for k, v in asdict(p).items() if v is not None}) for p in prompts]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{sys.argv[1]}: {len(prompts)} prompts of Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
