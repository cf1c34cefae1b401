"""`penstock generate`: one completion, without a server."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.engine_options import DtypeOption, NoSpeculationOption
from penstock.cli.failures import one_line


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.", metavar="PROMPT")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: DtypeOption = "auto",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|NAME=PATH",
            help="Use this drafter only; a bare NAME is a bundled one or `ngram`.",
        ),
    ] = None,
    no_speculation: NoSpeculationOption = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say how fast it was, on standard error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Complete PROMPT with the bundled family, as the tokens come."""
    import json
    import sys

    from penstock.cli.generation import Generation
    from penstock.cli.models import with_models
    from penstock.config import ConfigError, parse_config

    with one_line(ConfigError):
        engine = with_models(
            {"dtype": dtype}, None, (drafter,) if drafter else (), speculate=not no_speculation
        )
        generation = Generation(parse_config({"engine": engine}).engine)
        generation.run(prompt, max_tokens, temperature, _ignore if as_json else _show)
    report = generation.report()
    print(json.dumps(report) if as_json else "")
    if stats:
        print(
            f"{report['tokens_per_s']:.1f} tokens/s, mean acceptance length "
            f"{report['mean_acceptance_length']:.2f}, drafter {report['drafter'] or 'none'}",
            file=sys.stderr,
        )


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    """JSON has the whole text at the end."""
