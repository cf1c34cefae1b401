"""`penstock pull` and `penstock models`: models of the Hugging Face hub, and those at hand."""

from __future__ import annotations

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
    rows = [*_cached(), *_bundled()]
    if as_json:
        print(dumps(rows))
        return
    print_table(
        None,
        ("model", "format", "size, GB", "drafters"),
        (
            (row["model"], row["format"], f"{row['bytes'] / 1e9:.2f}", ", ".join(row["drafters"]))
            for row in rows
        ),
    )


def _cached() -> list[dict[str, Any]]:
    from penstock.cli.drafters import cached_drafter
    from penstock.engine.models.hub import cached_models

    rows = []
    for model in cached_models():
        found = cached_drafter(model.path, model.name)
        drafters = [] if found is None else [found[0].name]
        rows.append(_row(model.name, model.format, model.num_bytes, drafters))
    return rows


def _bundled() -> list[dict[str, Any]]:
    from penstock.cli.memory import model_bytes
    from penstock.zoo.registry import bundled_models

    cards = bundled_models().values()
    small = [card.name for card in cards if card.role == "drafter"]
    return [
        _row(card.name, "bundled", model_bytes(card.path), small if card.role == "target" else [])
        for card in cards
    ]


def _row(name: str, kind: str, num_bytes: int, drafters: list[str]) -> dict[str, Any]:
    return {"model": name, "format": kind, "bytes": num_bytes, "drafters": drafters}
