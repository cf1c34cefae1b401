"""`penstock pull` and `penstock models`: models of the Hugging Face hub, and those at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.options import JsonOption
from penstock.cli.terminal import note, one_line, print_table
from penstock.json_text import dumps


def pull(
    name: Annotated[
        str, typer.Argument(help="owner/name[@revision], owner/name:QUANT or owner/name/FILE.gguf.")
    ],
) -> None:
    """Download a model of the Hugging Face hub into its cache, and print where it is."""
    from penstock.config import ConfigError
    from penstock.engine.models.hub import HubName, fetch

    with one_line(ConfigError):
        parsed = HubName.parse(name)
        if parsed is None:
            raise ConfigError(
                f"{name!r} is no name on the hub; allowed: owner/name[@revision], "
                "owner/name:QUANT, owner/name/FILE.gguf"
            )
        print(fetch(parsed, note))


def list_models(as_json: JsonOption = False) -> None:
    """List the models in the hub's cache and the bundled ones, with size, format and drafters."""
    rows = list(_rows())
    if as_json:
        print(dumps(rows))
        return
    print_table(
        None,
        ("model", "format", "size", "drafters"),
        (
            (row["model"], row["format"], _size(row["bytes"]), ", ".join(row["drafters"]))
            for row in rows
        ),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _rows() -> Iterator[dict[str, Any]]:
    from penstock.cli.drafters import cached_drafter
    from penstock.engine.models.checkpoint import model_bytes
    from penstock.engine.models.hub import cached_models
    from penstock.zoo.registry import bundled_models

    def row(name: str, kind: str, num_bytes: int, drafters: list[str]) -> dict[str, Any]:
        return {"model": name, "format": kind, "bytes": num_bytes, "drafters": drafters}

    for model in cached_models():
        found = cached_drafter(model.path, model.name)
        yield row(
            model.name, model.format, model.num_bytes, [] if found is None else [found[0].name]
        )
    cards = bundled_models().values()
    small = [card.name for card in cards if card.role == "drafter"]
    for card in cards:
        drafters = small if card.role == "target" else []
        yield row(card.name, "bundled", model_bytes(card.path), drafters)
