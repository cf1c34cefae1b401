"""YAML configuration files: their values, and the line of each setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from penstock.config.model import ConfigError

Where = tuple[str, ...]
"""Path of names to a setting, as in ("engine", "kv_tokens")."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file's mapping. Raises ConfigError."""
    return _read(path)[0]


def lines_of(path: Path) -> dict[Where, int]:
    """Return the line of every setting in a YAML file, from 1. Raises ConfigError."""
    lines: dict[Where, int] = {}
    _walk(_read(path)[1], (), lines)
    return lines


def _read(path: Path) -> tuple[dict[str, Any], yaml.Node]:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        data, node = _parsed(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if node is None or not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    for twice in _given_twice(node):
        line = twice.start_mark.line + 1
        raise ConfigError(f"{path}, line {line}: {twice.value!r} is given twice")
    return data, node


def yaml_value(text: str, where: str) -> Any:
    """Parse a YAML value. Raises ConfigError."""
    try:
        data, node = _parsed(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: {text!r} is not a value of YAML") from error
    for twice in _given_twice(node):
        raise ConfigError(f"{where}: {twice.value!r} is given twice")
    return data


def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """Raises YAMLError, RecursionError or ValueError."""
    return yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)


def _walk(node: yaml.Node, where: Where, lines: dict[Where, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*where, str(key.value))
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*where, str(i))] = value.start_mark.line + 1
            _walk(value, (*where, str(i)), lines)


def _given_twice(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Yield names that repeat in a mapping: YAML's reader silently keeps the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                yield key
            seen.add(str(key.value))
            yield from _given_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _given_twice(value)
