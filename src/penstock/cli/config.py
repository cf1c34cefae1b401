"""`penstock config`: checking a file, and showing the effective settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, with_options_of
from penstock.cli.serve import serve
from penstock.cli.terminal import one_line
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.config import ConfigError, Where

app = typer.Typer(no_args_is_help=True, help="The server's settings.")

_HIDDEN = "(hidden)"
_SECRET = re.compile(r"(api|metrics)_keys|token_sha256")
_MAYBE_SECRET = re.compile(r"token|key|secret|password|auth", re.IGNORECASE)
"""Likely secrets among arguments of vLLM's engine, which Penstock does not know."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="YAML file of `penstock serve --config`.")],
) -> None:
    """List every error in a file, with its line. Exit code 2 if there are any."""
    from penstock.config import ConfigError, lines_of

    with one_line(ConfigError):
        lines = lines_of(file)
    mistakes = sorted((_line(lines, m.where), str(m)) for m in _mistakes(file))
    for line, message in mistakes:
        print(f"{file}:{line}: {' '.join(message.split())}")
    if mistakes:
        raise typer.Exit(2)
    print(f"{file}: nothing is wrong")


def _line(lines: Mapping[Where, int], where: Where) -> int:
    """Return the line of a setting, or of the mapping that lacks it."""
    found = (lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in lines)
    return next(found, 1)


def _mistakes(file: Path) -> list[ConfigError]:
    from penstock.cli.settings import assembled
    from penstock.config import ConfigError, ServeConfig, Settings, mistakes_in, read_yaml

    values = read_yaml(file)
    try:
        return mistakes_in(ServeConfig, assembled(Settings(values), download=False))
    except ConfigError as error:
        # A missing model or a wrong type: replace the models to find the other errors.
        engine = values.get("engine")
        if isinstance(engine, dict):
            values["engine"] = {"target": "", **engine}
        elif engine is None:
            values["engine"] = {"target": ""}
        others = mistakes_in(ServeConfig, values)
        return [error, *(m for m in others if m.where != error.where)]


def show(**options: Any) -> None:
    """Show the settings of `penstock serve` with the same options, and the origin of each value.

    Origins: an option, a variable, a line of the file, the bundle (policy NAME), or the default.
    Secrets are hidden."""
    from penstock.cli.settings import PARTS, with_origins
    from penstock.config import ConfigError
    from penstock.config.sources import leaves

    as_json = options.pop("as_json")
    with one_line(ConfigError):
        config, given = with_origins(options)
    rows = []
    parts = {("engine", part) for part in PARTS}
    for where, value in leaves(config.model_dump(mode="json")):
        default = f"policy {config.engine.policy}" if where[:2] in parts else "default"
        # Several models share what is not their own.
        is_shared = where[0] == "models" and given.at(where) is None
        at = ("engine", *where[2:]) if is_shared else where
        origin = (given.origin(at) if given.at(at) is not None else None) or default
        rows.append({"setting": ".".join(where), "value": _shown(where, value), "from": origin})
    if as_json:
        print(dumps(rows))
        return
    width = max(len(row["setting"]) for row in rows)
    for row in rows:
        print(f"{row['setting']:<{width}}  {dumps(row['value'])}  # {row['from']}")


def _shown(where: Where, value: Any) -> Any:
    is_foreign = where[:3] == ("engine", "vllm", "args")
    is_secret = any(map(_SECRET.fullmatch, where))
    is_secret = is_secret or (is_foreign and any(map(_MAYBE_SECRET.search, where[3:])))
    if not (is_secret and value):
        return value
    return [_HIDDEN] * len(value) if isinstance(value, list) else _HIDDEN


show.__signature__ = with_options_of(serve, as_json=JsonOption)  # type: ignore[attr-defined]
app.command()(show)
