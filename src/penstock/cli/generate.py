"""`penstock generate`: one text, without a server."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.engine_options import DtypeOption, NoSpeculationOption
from penstock.cli.failures import one_line
from penstock.cli.text_options import (
    OneDrafterOption,
    SeedOption,
    StatsOption,
    TargetOption,
    TemperatureOption,
    check_text,
    engine_of,
    sampling_of,
)


def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            help="A user's message where the model has a chat template, else a text to go on from.",
            metavar="PROMPT",
        ),
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from PROMPT as it is, without a chat template.")
    ] = False,
    target: TargetOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to make.")] = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    drafter: OneDrafterOption = None,
    no_speculation: NoSpeculationOption = False,
    stats: StatsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer PROMPT with the bundled family or any target, as the tokens come."""
    import json
    import sys

    from penstock.config import ConfigError

    with one_line(ConfigError):
        check_text(prompt)
        sampling = sampling_of(temperature, seed)
        config = engine_of(target, drafter, dtype, speculate=not no_speculation)

        from penstock.cli.generation import Generator

        generator = Generator(config)
        messages = [{"role": "user", "content": prompt}]
        is_chat = generator.has_chat_template and not raw
        given = generator.chat(messages) if is_chat else generator.text(prompt)
        made = generator.run(given, max_tokens, sampling, _ignore if as_json else _show)
    print(json.dumps(made.report()) if as_json else "")
    if stats:
        print(made.stats(), file=sys.stderr)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    """JSON has the whole text at the end."""
