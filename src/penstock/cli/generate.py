"""`penstock generate`: one completion by an engine in this process, without a server."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.terminal import one_line
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.core.types import Output, SamplingParams
    from penstock.serving.usage import Usage


def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            help="A user's message if the model has a chat template, otherwise a text to continue.",
            metavar="PROMPT",
        ),
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT without a chat template.")
    ] = False,
    target: cli.TargetOption = None,
    drafter: cli.DrafterOption = None,
    no_speculation: cli.NoSpeculationOption = False,
    engine: cli.EngineOption = None,
    dtype: cli.DtypeOption = None,
    settings: cli.SettingsOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens.")] = 128,
    temperature: cli.TemperatureOption = 0.0,
    seed: cli.TextSeedOption = None,
    stats: cli.StatsOption = False,
    as_json: cli.JsonOption = False,
) -> None:
    """Answer PROMPT with the bundled model or any target, streaming the text."""
    options = dict(locals())
    from penstock.cli.settings import engine_with
    from penstock.config import ConfigError

    with one_line(ConfigError):
        check_text(prompt)
        sampling = sampling_of(temperature, seed)
        generator = Generator(engine_with(options))
        messages = [{"role": "user", "content": prompt}]
        is_chat = generator.tokenizer.has_chat_template and not raw
        given = generator.chat(messages) if is_chat else generator.text(prompt)
        made = generator.run(
            given, max_tokens, sampling, show if not as_json else lambda text: None
        )
    print(dumps(made.report()) if as_json else "")
    if stats:
        print(made.stats(), file=sys.stderr)


def show(text: str) -> None:
    """Print a piece of streamed text."""
    print(text, end="", flush=True)


def sampling_of(temperature: float, seed: int | None) -> SamplingParams:
    """Return the sampling parameters. Raises: ConfigError.

    A given seed selects coupled verification: the text is the target's own for that seed.
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
    """Raise ConfigError for an empty or invalid text."""
    from penstock.config import ConfigError

    if not text:
        raise ConfigError("the prompt must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not valid UTF-8") from error


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Prompt tokens. previous: last token of a text to continue; None for a chat."""

    token_ids: tuple[int, ...]
    previous: int | None = None


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A completion. seconds: including prefill, without loading."""

    text: str
    token_ids: list[int]
    usage: Usage
    seconds: float

    def report(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "drafter": self.usage.drafter,
            "tokens_per_s": len(self.token_ids) / max(self.seconds, 1e-9),
            "mean_acceptance_length": self.usage.mean_acceptance_length,
        }

    def stats(self) -> str:
        """Return the line of `--stats`."""
        report = self.report()
        return (
            f"{report['tokens_per_s']:.1f} tokens/s, mean acceptance length "
            f"{report['mean_acceptance_length']:.2f}, drafter {report['drafter'] or 'none'}"
        )


class Generator:
    """An engine that completes one text at a time. Raises: ConfigError."""

    def __init__(self, config: EngineConfig) -> None:
        from penstock.config import ConfigError
        from penstock.engine.build import load_engine
        from penstock.engine.models.checkpoint import CheckpointError
        from penstock.engine.tokenizer import load_tokenizer

        try:
            with ThreadPoolExecutor(max_workers=1) as beside:
                tokenizer = beside.submit(load_tokenizer, config.target)
                self._engine = load_engine(config)
            self.tokenizer = tokenizer.result()
            if not self._engine.generates:
                raise ConfigError(f"{config.target_name} makes embeddings and no text")
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self._engine.max_model_len

    def text(self, text: str) -> EncodedText:
        """Encode a text to continue."""
        token_ids = tuple(self.tokenizer.encode(text))
        return EncodedText(token_ids, self.tokenizer.last_of_text(token_ids))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> EncodedText:
        """Encode a chat up to the assistant's turn. Raises: ConfigError."""
        from penstock.config import ConfigError

        try:
            return EncodedText(tuple(self.tokenizer.apply_chat_template(messages)))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def run(
        self,
        prompt: EncodedText,
        max_tokens: int | None,
        sampling: SamplingParams,
        on_text: Callable[[str], object],
    ) -> GeneratedText:
        """Complete a prompt, streaming to `on_text`. Raises: ConfigError.

        max_tokens: None is the rest of the context.
        """
        from penstock.config import ConfigError
        from penstock.core.types import Request
        from penstock.serving.offline import complete

        request = Request(
            id="text",
            prompt_len=len(prompt.token_ids),
            max_tokens=max_tokens or max(1, self._engine.max_model_len - len(prompt.token_ids)),
            prompt_token_ids=prompt.token_ids,
            stop_token_ids=frozenset(self._engine.eos_token_ids),
            sampling=sampling,
        )
        detokenizer = self.tokenizer.detokenizer(previous=prompt.previous)
        pieces: list[str] = []

        def take(output: Output) -> None:
            text = "".join(map(detokenizer.add, output.token_ids))
            if output.finish_reason is not None:
                text += detokenizer.finish()
            pieces.append(text)
            on_text(text)

        started_at = time.perf_counter()
        (done,) = complete(self._engine.loop, [request], 1, take)
        seconds = time.perf_counter() - started_at
        if done.error is not None:
            raise ConfigError(done.error)
        return GeneratedText("".join(pieces), done.token_ids, done.usage, seconds)
