"""HTTP client of an OpenAI-compatible server that completes texts. Its answers are untrusted."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
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
    """Client for several threads. Redirects are not followed; a loopback server gets no proxy.

    An event loop in a thread of its own bounds the time of a whole call: a blocking client bounds
    that of each read, and a server may send one byte at a time."""

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
        self._http = httpx.AsyncClient(headers=headers, limits=limits, trust_env=not server.is_here)
        runner, self._closed = asyncio.Runner(), asyncio.Event()
        self._loop = runner.get_loop()
        threading.Thread(target=self._run, args=(runner,), daemon=True).start()

    def complete(self, prompt: str, max_tokens: int, seconds: float) -> Completion:
        """Complete greedily. Raises ServerError, also after `seconds`."""
        asked = {**self._fixed, "prompt": prompt, "max_tokens": max_tokens}
        call = self._post(asked, seconds)
        try:
            body = asyncio.run_coroutine_threadsafe(call, self._loop).result()
            choice = _Answer.model_validate_json(body).choices[0]
        except TimeoutError as error:
            raise ServerError("its answer is late") from error
        except httpx.HTTPError as error:
            detail = f" to {self._url}: {error}" if isinstance(error, httpx.ConnectError) else ""
            raise ServerError(f"{type(error).__name__}{detail}") from error
        except (RuntimeError, CancelledError) as error:
            call.close()
            raise ServerError("the client is closed") from error
        except ValueError as error:
            raise ServerError("its answer is no completion") from error
        text = choice.text[: max_tokens * _MOST_CHARS_A_TOKEN]
        return Completion(text, choice.finish_reason == "stop")

    def close(self) -> None:
        """End all calls."""
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._closed.set)

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        async with self._http:
            await self._closed.wait()

    async def _post(self, asked: dict[str, object], seconds: float) -> bytes:
        if self._closed.is_set():
            raise ServerError("the client is closed")
        body, streamed = b"", self._http.stream("POST", self._url, json=asked, timeout=None)
        async with asyncio.timeout(seconds), streamed as answer:
            if answer.status_code != httpx.codes.OK:
                raise ServerError(f"HTTP status {answer.status_code}")
            async for part in answer.aiter_raw():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ServerError(f"its answer has more than {_MOST_BYTES} bytes")
        return body
