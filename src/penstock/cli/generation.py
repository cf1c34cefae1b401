"""One completion by an engine in this process."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Any

from penstock.config import ConfigError, EngineConfig
from penstock.core.types import Output, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.models.config import CheckpointError
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete
from penstock.serving.speculated import Speculated


class Generation:
    """Loads an engine, makes one completion, and keeps account of it.

    Raises: ConfigError for anything that the user can mend.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            self._engine = load_engine(config)
            self._tokenizer = load_tokenizer(self._engine.tokenizer_path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._speculated = Speculated()
        self._seconds = 0.0

    def run(
        self, prompt: str, max_tokens: int, temperature: float, on_text: Callable[[str], object]
    ) -> None:
        """Make the completion; `on_text` gets its text as it comes. Raises: ConfigError."""
        request = self._request(prompt, max_tokens, temperature)
        previous = self._tokenizer.last_of_text(request.prompt_token_ids or ())
        detokenizer = self._tokenizer.detokenizer(previous=previous)
        started_at = time.perf_counter()

        def take(output: Output) -> None:
            self._seconds = time.perf_counter() - started_at
            self._speculated.observe(output)
            self._token_ids += output.token_ids
            text = "".join(map(detokenizer.add, output.token_ids))
            if output.finish_reason is not None:
                text += detokenizer.finish()
            self._pieces.append(text)
            on_text(text)

        (completion,) = complete(self._engine.loop, [request], 1, take)
        if completion.error is not None:
            raise ConfigError(completion.error)

    def report(self) -> dict[str, Any]:
        """What `--json` prints. The rate counts the prompt's time, but not loading."""
        return {
            "text": "".join(self._pieces),
            "token_ids": self._token_ids,
            "drafter": self._speculated.drafter,
            "tokens_per_s": len(self._token_ids) / max(self._seconds, 1e-9),
            "mean_acceptance_length": self._speculated.mean_acceptance_length,
        }

    def _request(self, prompt: str, max_tokens: int, temperature: float) -> Request:
        if not 0 <= temperature < math.inf:
            raise ConfigError(f"--temperature must be 0 or more, not {temperature}")
        if max_tokens < 1:
            raise ConfigError(f"--max-tokens must be at least 1, not {max_tokens}")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError("the prompt is not valid UTF-8") from error
        token_ids = tuple(self._tokenizer.encode(prompt))
        if not token_ids:
            raise ConfigError("the prompt must not be empty")
        return Request(
            id="generate",
            prompt_len=len(token_ids),
            max_tokens=max_tokens,
            prompt_token_ids=token_ids,
            stop_token_ids=frozenset(self._engine.eos_token_ids),
            sampling=SamplingParams(
                temperature=temperature, seed=secrets.randbits(64), verification="ratio"
            ),
        )
