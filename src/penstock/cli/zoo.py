"""`penstock zoo`: the bundled family, trained and looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import one_line

app = typer.Typer(no_args_is_help=True, help="The bundled family of models.")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for the weights.")] = Path("zoo-weights"),
    only: Annotated[
        list[str] | None, typer.Option(help="Train only this model; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A smoke version of a few minutes.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train the family from text that the trainer makes; an interrupted run continues."""
    from penstock.config import ConfigError
    from penstock.zoo.recipe import FULL

    known = [spec.name for spec in FULL.models]
    unknown = [name for name in only or () if name not in known]
    with one_line(ConfigError):
        if unknown:
            raise ConfigError(f"unknown model {unknown[0]!r}; choose from {', '.join(known)}")

    from penstock.zoo.train import train as run

    run(out, only, quick, threads=threads)


@app.command()
def info(
    target: Annotated[str, typer.Option(help="The target that verifies.")] = "target-large",
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens a request makes.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Acceptance, speed and the worth of choosing, for every domain and drafter."""
    from penstock.config import ConfigError

    with one_line(ConfigError, FileNotFoundError):
        _check_target(target)

    from penstock.zoo.report import report

    report(target=target, per_domain=per_domain, limit=new_tokens, as_json=as_json)


@app.command()
def fit(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    target: Annotated[str, typer.Option(help="The target that verifies.")] = "target-large",
    per_domain: Annotated[int, typer.Option(min=2, help="Prompts of each domain.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=16, help="Most tokens a request makes.")] = 256,
) -> None:
    """Fit how requests of each domain differ in acceptance, for the simulator; takes minutes."""
    from penstock.cli.terminal import progress
    from penstock.config import ConfigError
    from penstock.zoo.registry import DOMAINS

    with one_line(ConfigError, FileNotFoundError):
        _check_target(target)

    from penstock.zoo.fit import measure_acceptance, write_acceptance

    with progress(2 * len(DOMAINS), "measuring") as advance, one_line(ValueError):
        fits = measure_acceptance(target, per_domain, new_tokens, on_domain=lambda: advance(1))
    origin = (
        f"penstock zoo fit --target {target} --per-domain {per_domain} --new-tokens {new_tokens}: "
        "bundled drafters along the target's own text, sampled at temperature 1 and greedily"
    )
    with one_line(OSError):
        write_acceptance(out, origin, fits)
    print(f"{out}: {len(DOMAINS)} domains, {', '.join(fits['sampled'].drafters)}")


def _check_target(target: str) -> None:
    from penstock.config import ConfigError
    from penstock.zoo.registry import bundled_models

    targets = [name for name, card in bundled_models().items() if card.role == "target"]
    if target not in targets:
        raise ConfigError(f"unknown target {target!r}; choose from {', '.join(targets)}")
