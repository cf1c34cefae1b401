"""HTTP client of an OpenAI-compatible server that completes texts. Its answers are untrusted."""

from __future__ import annotations

import time
from typing import NamedTuple

import httpx
from pydantic import BaseModel, Field

from penstock.config import CompletionsServer, ConfigError

MOST_CALLS = 8
"""Calls of one server at a time."""
_MOST_BYTES = 1 << 16
"""Bytes of an answer that are read."""
_MOST_CHARS_A_TOKEN = 64


class ServerError(Exception):
    """A call failed. In one line, without anything that the server wrote."""


class Completion(NamedTuple):
    """Text that follows a prompt. has_ended: the model has ended it, not the limit."""

    text: str
    has_ended: bool


class _Choice(BaseModel):
    text: str
    finish_reason: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class CompletionsClient:
    """Client for several threads. Redirects are not followed; a loopback server gets no proxy."""

    def __init__(self, server: CompletionsServer, key: str | None, variable: str) -> None:
        """key: of the API, from an environment variable. Raises ConfigError."""
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ConfigError(f"{variable}: a key has printable ASCII characters only")
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=MOST_CALLS + 1)
        self._url = f"{server.url}/completions"
        self._fixed: dict[str, object] = {"temperature": 0, "stream": False, "cache_prompt": True}
        if server.model is not None:
            self._fixed["model"] = server.model
        self._http = httpx.Client(headers=headers, limits=limits, trust_env=not server.is_here)

    def complete(self, prompt: str, max_tokens: int, seconds: float) -> Completion:
        """Complete greedily. Raises ServerError, also after `seconds`."""
        asked = {**self._fixed, "prompt": prompt, "max_tokens": max_tokens}
        try:
            choice = _Answer.model_validate_json(self._post(asked, seconds)).choices[0]
        except httpx.HTTPError as error:
            detail = f": {error}" if isinstance(error, httpx.ConnectError) else ""
            raise ServerError(f"{type(error).__name__}{detail}") from error
        except ValueError as error:
            raise ServerError("its answer is no completion") from error
        text = choice.text[: max_tokens * _MOST_CHARS_A_TOKEN]
        return Completion(text, choice.finish_reason == "stop")

    def close(self) -> None:
        self._http.close()

    def _post(self, asked: dict[str, object], seconds: float) -> bytes:
        end, body = time.monotonic() + seconds, b""
        with self._http.stream("POST", self._url, json=asked, timeout=seconds) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ServerError(f"HTTP status {answer.status_code}")
            for part in answer.iter_raw():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ServerError(f"its answer has more than {_MOST_BYTES} bytes")
                if time.monotonic() > end:
                    raise ServerError("its answer is late")
        return body
