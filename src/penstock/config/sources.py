"""Sources of settings: a file, and environment variables that override it.

`PENSTOCK_PORT` is `port`, and `PENSTOCK_ENGINE__KV_TOKENS` is `kv_tokens` under `engine`: two
underscores go one level down. Mappings and lists are written as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.files import Where, lines_of, read_yaml
from penstock.config.model import ConfigError, each_once
from penstock.config.server import ServeConfig

PREFIX = "PENSTOCK_"
_DOWN = "__"

OTHER_VARIABLES = frozenset(
    PREFIX + name for name in ("API_KEY", "CONFIG", "DATA", "INSTRUCTION_SET", "TOKEN")
)
"""Variables that are not settings of a file."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings before validation, and the origin of each: a variable's name, or file and line."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Where, str] = field(default_factory=dict)

    def has(self, where: Where) -> bool:
        """Return whether a setting was given."""
        value: Any = self.values
        for name in where:
            if not isinstance(value, dict):
                break
            if name not in value:
                return False
            value = value[name]
        return True

    def origin(self, where: Where) -> str | None:
        """Return the origin of a setting or of its nearest given parent; None without one."""
        for end in range(len(where), 0, -1):
            if where[:end] in self.origins:
                return self.origins[where[:end]]
        return None


def read_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the settings of a file (None: no file) and of the environment. Raises ConfigError."""
    values: dict[str, Any] = {}
    origins: dict[Where, str] = {}
    if path is not None:
        values = read_yaml(path)
        origins = {where: f"{path}:{line}" for where, line in lines_of(path).items()}
    given = from_environment(environ)
    return Settings(_merged(values, given.values), {**origins, **given.origins})


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the settings of the environment.

    Unknown variables with the prefix are logged and ignored: container systems set such. Raises
    ConfigError where a setting is given twice."""
    values: dict[str, Any] = {}
    names: dict[Where, str] = {}
    given: dict[Where, str] = {}
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        where = tuple(name.removeprefix(PREFIX).lower().split(_DOWN))
        if where[0] in ServeConfig.model_fields:
            value = _value(where, environ[name], name)
            leaves = list(_leaves(where, value))
            for leaf in leaves:
                _check_new(leaf, given, name)
            given.update(dict.fromkeys(leaves, name))
            names[where] = name
            values = _merged(values, _tree(where, value))
        elif name not in OTHER_VARIABLES:
            _log.warning("the variable %s is no setting, and is ignored", name)
    return Settings(values, names)


def _value(where: Where, text: str, name: str) -> Any:
    """Parse mappings, lists, policy options and vLLM arguments as JSON, and keep other text.

    name: of the variable. Raises ConfigError where an object repeats a name."""
    if text[:1] not in ("{", "[") and where[-2:-1] not in (("options",), ("args",)):
        return text
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: each_once(pairs, name))
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        return text


def _leaves(where: Where, value: Any) -> Iterator[Where]:
    """Yield the paths of the settings in a value."""
    if not isinstance(value, dict):
        yield where
        return
    for name, inner in value.items():
        yield from _leaves((*where, name), inner)


def _check_new(leaf: Where, given: Mapping[Where, str], name: str) -> None:
    """Raises ConfigError for a setting that another variable also gives."""
    for other, variable in given.items():
        shorter = min(len(leaf), len(other))
        if leaf[:shorter] == other[:shorter]:
            raise ConfigError(f"{name}: {variable} gives {'.'.join(leaf)}, too", leaf)


def _tree(where: Where, value: Any) -> dict[str, Any]:
    """Return one setting as nested mappings."""
    for name in reversed(where):
        value = {name: value}
    made: dict[str, Any] = value
    return made


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings recursively; other values of `high` win."""
    made = deepcopy(dict(low))
    for name, value in high.items():
        below = made.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            made[name] = _merged(below, value)
        else:
            made[name] = value
    return made
