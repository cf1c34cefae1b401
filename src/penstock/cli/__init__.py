"""The program `penstock`. Commands import their modules when they run, so that help is fast."""

from __future__ import annotations

import sys
from functools import cache
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli import bench, config, key, lab, profile
from penstock.cli.capacity import capacity
from penstock.cli.chat import chat
from penstock.cli.doctor import doctor
from penstock.cli.draft import draft
from penstock.cli.generate import generate
from penstock.cli.plan import plan
from penstock.cli.pull import list_models, pull
from penstock.cli.serve import serve
from penstock.cli.simulate import simulate
from penstock.cli.terminal import what_to_install

app = typer.Typer(
    name="penstock",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command()(draft)
app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command("models")(list_models)
app.command()(simulate)
app.command()(capacity)
app.command()(plan)
app.command()(doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(key.app, name="key")
app.add_typer(profile.app, name="profile")
lab.add_commands(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve a large language model with speculative decoding by small ones."""


# Since 0.20 Typer has its own copy of click, whose class is needed.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


_command = cache(typer.main.get_command)  # reads every command's signature


def main() -> None:
    """Run the program. Invalid input ends it with exit code 2 and one line on standard error."""
    try:
        code = _command(app)(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Abort:
        code = 130
    except _ClickException as error:
        message = " ".join(error.format_message().split()).replace("Value error, ", "")
        if message.startswith("No such option"):
            message += " (those of llama.cpp, Ollama and vLLM: docs/coming-from.md)"
        print(f"penstock: {message}", file=sys.stderr)
        code = 2
    except ModuleNotFoundError as error:
        missing = what_to_install(error)
        if missing is None:
            raise
        print(f"penstock: {missing}", file=sys.stderr)
        code = 2
    sys.exit(code)
