"""Responses of Ollama's endpoints: one JSON object, or a line of JSON for each new text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic_core import from_json

from penstock.api import responses
from penstock.api.bodies import GenerationBody
from penstock.api.choices import Delta, ResponseChoice, usage
from penstock.api.errors import ApiError
from penstock.api.responses import Form, Generation, JsonDict, as_json, by_choice, timestamp
from penstock.api.tool_calls import CallPiece

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

PATH = "/api/"
_NOTHING = Delta(0, "", (), None)


class OllamaFormat(Form):
    """One answer, of a chat or of `/api/generate`. tokenizer: of log-probabilities, if asked for.

    A silent stream sends blanks, which may precede a line of JSON."""

    media_type: ClassVar[str] = "application/x-ndjson"
    keep_alive: ClassVar[bytes] = b" "

    def __init__(self, model_name: str, tokenizer: Tokenizer | None, *, is_chat: bool) -> None:
        self._model = model_name
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._started_at = time.perf_counter()

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        (delta,) = by_choice(deltas)
        return self._ended(choices, delta)

    async def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        last = _NOTHING
        try:
            async for delta in job.deltas():
                last = delta
                if delta.text or delta.calls or delta.reasoning or self._logprobs_of(delta):
                    yield _line({**self._said(delta), "done": False})
            rest = replace(_NOTHING, finish_reason=last.finish_reason)
            yield _line(self._ended(job.choices, rest))
        except ApiError as error:
            yield _line(error.body(PATH))

    def loaded(self, reason: str) -> JsonDict:
        """Return the answer to a request without a prompt."""
        return {**self._said(_NOTHING), "done": True, "done_reason": reason}

    def _logprobs_of(self, delta: Delta) -> JsonDict:
        if self._tokenizer is None or not delta.tokens:
            return {}
        return {"logprobs": responses.logprob_entries(delta.tokens, self._tokenizer)}

    def _said(self, delta: Delta) -> JsonDict:
        head: JsonDict = {"model": self._model, "created_at": timestamp(time.time())}
        head |= self._logprobs_of(delta)
        thought = {"thinking": delta.reasoning} if delta.reasoning else {}
        if not self._is_chat:
            return {**head, "response": delta.text, **thought}
        message: JsonDict = {"role": "assistant", "content": delta.text, **thought}
        if delta.calls:
            message["tool_calls"] = [_called(piece) for piece in delta.calls]
        return {**head, "message": message}

    def _ended(self, choices: Sequence[ResponseChoice], delta: Delta) -> JsonDict:
        (choice,) = choices
        now, counted = time.perf_counter(), usage(choices)
        first = choice.first_output_at or now
        return {
            **self._said(delta),
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(now - self._started_at),
            "load_duration": 0,
            "prompt_eval_count": counted["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(first - self._started_at),
            "eval_count": counted["completion_tokens"],
            "eval_duration": nanoseconds(now - first),
            "speculation": counted["speculation"],
        }


def _called(piece: CallPiece) -> JsonDict:
    arguments = from_json(piece.arguments or "{}")
    return {"id": piece.id, "function": {"name": piece.name, "arguments": arguments}}


def nanoseconds(seconds: float) -> int:
    """Return a time as Ollama's answers have it."""
    return round(seconds * 1e9)


def _line(data: JsonDict) -> bytes:
    return as_json(data) + b"\n"
