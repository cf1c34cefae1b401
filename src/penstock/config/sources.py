"""Sources of settings: a file, and environment variables that override it.

`PENSTOCK_PORT` is `port`, and `PENSTOCK_ENGINE__KV_TOKENS` is `kv_tokens` under `engine`: two
underscores go one level down. Mappings and lists are written as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.completions import DRAFTER_KEY
from penstock.config.files import Where, lines_of, read_yaml
from penstock.config.model import ConfigError, each_once
from penstock.config.server import ServeConfig

PREFIX = "PENSTOCK_"
_DOWN = "__"

OTHER_VARIABLES = frozenset(
    PREFIX + name for name in ("API_KEY", "CONFIG", "DATA", "INSTRUCTION_SET", "TOKEN")
)
"""Variables that are not settings of a file, beside those of drafters' keys."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings before validation, and the origin of each: a variable's name, or file and line."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Where, str] = field(default_factory=dict)

    def origin(self, where: Where) -> str | None:
        """Return the origin of a setting or of its nearest given parent; None without one."""
        for end in range(len(where), 0, -1):
            if where[:end] in self.origins:
                return self.origins[where[:end]]
        return None

    def at(self, where: Where) -> Any:
        """A setting's value; None where it was not given."""
        value: Any = self.values
        for name in where:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def put(self, where: Where, value: Any, origin: str) -> None:
        """Set a value. Raises: ConfigError if a parent is not a mapping."""
        inner = self.values
        for end, name in enumerate(where[:-1], 1):
            if inner.get(name) is None:
                inner[name] = {}
            if not isinstance(inner[name], dict):
                path = where[:end]
                raise ConfigError(f"{'.'.join(path)} must be a mapping of settings", path)
            inner = inner[name]
        inner[where[-1]] = value
        for known in [known for known in self.origins if known[: len(where)] == where]:
            del self.origins[known]
        self.origins[where] = origin


def read_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read a file (None: no file) and the environment. Raises: ConfigError."""
    settings = Settings()
    if path is not None:
        lines = {where: f"{path}:{line}" for where, line in lines_of(path).items()}
        settings = Settings(read_yaml(path), lines)
    put_environment(settings, environ)
    return settings


def put_environment(settings: Settings, environ: Mapping[str, str]) -> None:
    """Put the environment's settings into `settings`. Raises: ConfigError for one given twice.

    Unknown variables with the prefix are logged: container systems set some.
    """
    given: dict[Where, str] = {}
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        where = tuple(name.removeprefix(PREFIX).lower().split(_DOWN))
        if where[0] in ServeConfig.model_fields:
            for leaf, value in leaves(_value(where, environ[name], name), where):
                _check_new(leaf, given, name)
                given[leaf] = name
                settings.put(leaf, value, name)
        elif name not in OTHER_VARIABLES and not name.startswith(DRAFTER_KEY):
            _log.warning("the variable %s is no setting, and is ignored", name)


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


def leaves(value: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Everything in mappings that is no mapping, or an empty one, with the place of it."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*where, str(name)))
    else:
        yield where, value


def _check_new(leaf: Where, given: Mapping[Where, str], name: str) -> None:
    """Raises ConfigError for a setting that another variable also gives."""
    for other, variable in given.items():
        shorter = min(len(leaf), len(other))
        if leaf[:shorter] == other[:shorter]:
            raise ConfigError(f"{name}: {variable} gives {'.'.join(leaf)}, too", leaf)
