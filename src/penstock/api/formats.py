"""What responses look like: completions and chat completions, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.api.choices import Choice, Delta, usage
from penstock.api.text import TokenText

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

JsonDict = dict[str, Any]


class Format(Protocol):
    """Builds the JSON of one response, or of the chunks of its stream."""

    def opening(self, choice: Choice) -> JsonDict | None:
        """A chunk before a choice's first text, if there is one."""
        ...

    def chunk(self, delta: Delta) -> JsonDict: ...

    def response(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> JsonDict:
        """`deltas`: one for each choice, with all of its text."""
        ...

    def usage_chunk(self, choices: Sequence[Choice]) -> JsonDict: ...


class _Envelope:
    def __init__(self, job_id: str, model_name: str, tokenizer: Tokenizer, *, logprobs: bool):
        self._head = {"id": job_id, "created": int(time.time()), "model": model_name}
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def _body(self, kind: str, choices: list[JsonDict]) -> JsonDict:
        return {**self._head, "object": kind, "choices": choices}


class CompletionFormat(_Envelope):
    """`text_completion`, for both."""

    def opening(self, choice: Choice) -> JsonDict | None:
        return None

    def chunk(self, delta: Delta) -> JsonDict:
        return self._body("text_completion", [self._choice(delta)])

    def response(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> JsonDict:
        body = self._body("text_completion", [self._choice(delta) for delta in deltas])
        return {**body, "usage": usage(choices)}

    def usage_chunk(self, choices: Sequence[Choice]) -> JsonDict:
        return {**self._body("text_completion", []), "usage": usage(choices)}

    def _choice(self, delta: Delta) -> JsonDict:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs_of(delta.tokens) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs_of(self, tokens: Sequence[TokenText]) -> JsonDict:
        return {
            "tokens": [_text(t.raw) for t in tokens],
            "token_logprobs": [t.logprob.logprob for t in tokens],
            "top_logprobs": [
                {_text(self._tokenizer.token_bytes(i, None)): value for i, value in t.logprob.top}
                for t in tokens
            ],
            "text_offset": [t.start for t in tokens],
        }


class ChatFormat(_Envelope):
    """`chat.completion` and `chat.completion.chunk`."""

    def opening(self, choice: Choice) -> JsonDict | None:
        return self._chunk(choice.index, {"role": "assistant", "content": ""}, (), None)

    def chunk(self, delta: Delta) -> JsonDict:
        content = {"content": delta.text} if delta.text else {}
        return self._chunk(delta.index, content, delta.tokens, delta.finish_reason)

    def response(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> JsonDict:
        made = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text},
                "logprobs": self._logprobs_of(delta.tokens) if self._logprobs else None,
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return {**self._body("chat.completion", made), "usage": usage(choices)}

    def usage_chunk(self, choices: Sequence[Choice]) -> JsonDict:
        return {**self._body("chat.completion.chunk", []), "usage": usage(choices)}

    def _chunk(
        self, index: int, content: JsonDict, tokens: Sequence[TokenText], finish_reason: str | None
    ) -> JsonDict:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs_of(tokens) if self._logprobs and tokens else None,
            "finish_reason": finish_reason,
        }
        return self._body("chat.completion.chunk", [choice])

    def _logprobs_of(self, tokens: Sequence[TokenText]) -> JsonDict:
        return {
            "content": [
                {
                    **_entry(t.raw, t.logprob.logprob),
                    "top_logprobs": [
                        _entry(self._tokenizer.token_bytes(i, None), value)
                        for i, value in t.logprob.top
                    ],
                }
                for t in tokens
            ]
        }


def _text(raw: bytes) -> str:
    """A token as a string; parts of characters as OpenAI writes them, so that they stay apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _entry(raw: bytes, logprob: float) -> JsonDict:
    return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}
