"""`penstock chat`: a chat in the terminal, without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options as cli
from penstock.cli.generate import EncodedText, Generator, check_text, sampling_of, show
from penstock.cli.terminal import one_line

if TYPE_CHECKING:
    from rich.console import Console

_ANSWER_SHARE = 4
"""Without --max-tokens a quarter of the context is kept free for the answer."""

_HELP = "/clear starts a new conversation, /exit or Ctrl-D ends."


def chat(
    target: cli.TargetArgument = None,
    drafter: cli.DrafterOption = None,
    no_speculation: cli.NoSpeculationOption = False,
    dtype: cli.DtypeOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer. Default: the rest of the context."),
    ] = None,
    temperature: cli.TemperatureOption = 0.0,
    seed: cli.TextSeedOption = None,
    stats: cli.StatsOption = False,
) -> None:
    """Chat with the bundled model or any target with a chat template.

    Each line is a message; input may be piped.
    """
    options = dict(locals())
    from rich.console import Console

    from penstock.cli.settings import engine_with
    from penstock.config import ConfigError

    console = Console(highlight=False, soft_wrap=True)
    with one_line(ConfigError):
        sampling = sampling_of(temperature, seed)
        config = engine_with(options)
        with Console(stderr=True).status("loading the models"):
            generator = Generator(config)
        if not generator.tokenizer.has_chat_template:
            raise ConfigError(f"{config.target} has no chat template; use penstock generate")
        if generator.tokenizer.template_fault is not None:
            raise ConfigError(f"{config.target}: {generator.tokenizer.template_fault}")
        conversation: list[dict[str, str]] = []
        for line in _lines(console):
            if line == "/clear":
                conversation.clear()
                continue
            try:
                check_text(line)
                messages, prompt = _fitting(
                    generator, [*conversation, {"role": "user", "content": line}], max_tokens
                )
                made = generator.run(prompt, max_tokens, sampling, show)
            except ConfigError as error:
                if not console.is_terminal:
                    raise
                print(f"penstock: {error}", file=sys.stderr)
                continue
            print()
            conversation = [*messages, {"role": "assistant", "content": made.text}]
            if stats:
                print(made.stats(), file=sys.stderr)


def _fitting(
    generator: Generator, messages: list[dict[str, str]], max_tokens: int | None
) -> tuple[list[dict[str, str]], EncodedText]:
    """Drop the oldest turns until the answer fits, and encode the rest. Raises: ConfigError."""
    room = generator.context - (max_tokens or generator.context // _ANSWER_SHARE)
    prompt = generator.chat(messages)
    while len(prompt.token_ids) > room and len(messages) > 1:
        messages = messages[2:]
        prompt = generator.chat(messages)
        print(
            f"penstock: the context of {generator.context} tokens is full; "
            "the oldest turn has left the conversation",
            file=sys.stderr,
        )
    return messages, prompt


def _lines(console: Console) -> Iterator[str]:
    for line in _asked(console) if sys.stdin.isatty() else sys.stdin:
        said = line.strip()
        if said == "/exit":
            return
        if said:
            yield said


def _asked(console: Console) -> Iterator[str]:
    import readline  # noqa: F401  (line editing and history)

    console.print(_HELP, style="dim")
    while True:
        try:
            yield console.input("[bold cyan]>[/] ")
        except EOFError:
            print()
            return
