"""Texts by an engine in this process, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config import ConfigError, EngineConfig
from penstock.core.types import Output, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.models.config import CheckpointError
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.serving.speculated import Speculated


@dataclass(frozen=True, slots=True)
class Prompt:
    """previous: the last token of the text that is gone on from; None where a new one begins."""

    token_ids: tuple[int, ...]
    previous: int | None = None


@dataclass(slots=True)
class Generated:
    """One text. seconds: with the prompt's time, without loading."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    speculated: Speculated = field(default_factory=Speculated)

    def report(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "drafter": self.speculated.drafter,
            "tokens_per_s": len(self.token_ids) / max(self.seconds, 1e-9),
            "mean_acceptance_length": self.speculated.mean_acceptance_length,
        }

    def stats(self) -> str:
        """What `--stats` says."""
        report = self.report()
        return (
            f"{report['tokens_per_s']:.1f} tokens/s, mean acceptance length "
            f"{report['mean_acceptance_length']:.2f}, drafter {report['drafter'] or 'none'}"
        )


class Generator:
    """Loads an engine, and makes texts with it.

    Raises: ConfigError for anything that the user can mend.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            self._engine = load_engine(config)
            self._tokenizer = load_tokenizer(self._engine.tokenizer_path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.has_chat_template

    def text(self, text: str) -> Prompt:
        """A text to go on from."""
        token_ids = tuple(self._tokenizer.encode(text))
        return Prompt(token_ids, self._tokenizer.last_of_text(token_ids))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """A conversation, for the assistant's turn. Raises: ConfigError."""
        try:
            return Prompt(tuple(self._tokenizer.apply_chat_template(messages)))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def run(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        sampling: SamplingParams,
        on_text: Callable[[str], object],
    ) -> Generated:
        """Make a text; `on_text` gets it as it comes. max_tokens: None is what the context holds.

        Raises: ConfigError.
        """
        request = Request(
            id="text",
            prompt_len=len(prompt.token_ids),
            max_tokens=max_tokens or max(1, self._engine.max_model_len - len(prompt.token_ids)),
            prompt_token_ids=prompt.token_ids,
            stop_token_ids=frozenset(self._engine.eos_token_ids),
            sampling=sampling,
        )
        detokenizer = self._tokenizer.detokenizer(previous=prompt.previous)
        made = Generated()
        started_at = time.perf_counter()

        def take(output: Output) -> None:
            made.seconds = time.perf_counter() - started_at
            made.speculated.observe(output)
            made.token_ids += output.token_ids
            text = "".join(map(detokenizer.add, output.token_ids))
            if output.finish_reason is not None:
                text += detokenizer.finish()
            made.text += text
            on_text(text)

        (completion,) = complete(self._engine.loop, [request], 1, take)
        if completion.error is not None:
            raise ConfigError(completion.error)
        return made
