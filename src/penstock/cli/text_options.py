"""Options of the commands that make texts without a server, and what is checked before loading."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.core.types import SamplingParams

TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="Checkpoint folder or bundled target. Default: the bundled family.",
    ),
]
OneDrafterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|NAME=PATH",
        help="Use this drafter only; a bare NAME is a bundled one or `ngram`.",
    ),
]
TemperatureOption = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text."),
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Say how fast it was, on standard error.")
]


def engine_of(
    target: str | None, drafter: str | None, dtype: str, *, speculate: bool
) -> EngineConfig:
    """Raises: ConfigError."""
    from penstock.cli.models import with_models
    from penstock.config import parse_config

    drafters = (drafter,) if drafter else ()
    engine = with_models({"dtype": dtype}, target, drafters, speculate=speculate)
    return parse_config({"engine": engine}).engine


def sampling_of(temperature: float, seed: int | None) -> SamplingParams:
    """As the server samples: with a seed the text is the target's own seeded sample.

    Raises: ConfigError.
    """
    from penstock.config import ConfigError
    from penstock.core.types import SamplingParams

    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature must be finite, not {temperature}")
    return SamplingParams(
        temperature=temperature,
        seed=secrets.randbits(64) if seed is None else seed,
        verification="ratio" if seed is None else "coupled",
    )


def check_text(text: str) -> None:
    """Raises: ConfigError for a text that no model can be given."""
    from penstock.config import ConfigError

    if not text:
        raise ConfigError("the prompt must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not valid UTF-8") from error
