"""Configuration from files: values, and the line that each stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.config.model import ConfigError

Where = tuple[str, ...]
"""The names that lead to a setting, as in ("engine", "kv_tokens")."""


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises: ConfigError."""
    return _read(path)[0]


def lines_of(path: Path) -> dict[Where, int]:
    """The line of every setting in a YAML file, from 1 on. Raises: ConfigError."""
    lines: dict[Where, int] = {}
    _walk(_read(path)[1], (), lines)
    return lines


def _read(path: Path) -> tuple[dict[str, Any], yaml.Node]:
    """Raises: ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if node is None or not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    _check_once(node, path)
    return data, node


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


def _check_once(node: yaml.Node, path: Path) -> None:
    """YAML's reader lets the last of several equal names win. Raises: ConfigError."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                raise ConfigError(f"{path}, line {line}: {key.value!r} is there twice")
            seen.add(str(key.value))
            _check_once(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_once(value, path)
