"""Responses of `/v1/messages`: content blocks, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from pydantic_core import from_json

from penstock.api.anthropic.bodies import MessagesBody
from penstock.api.bodies import GenerationBody
from penstock.api.choices import Delta, ResponseChoice, usage
from penstock.api.errors import ApiError
from penstock.api.responses import Form, Generation, JsonDict, event

PATH = "/v1/messages"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and their field with the new text, by the block's type."""


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


class MessagesFormat(Form):
    """One message. Its blocks are the text and the calls, in the order of their starts."""

    keep_alive: ClassVar[bytes] = _event("ping")

    def __init__(self, message_id: str, model_name: str, body: MessagesBody) -> None:
        self._head = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model_name,
        }
        self._asked_tokens = body.max_tokens
        self._blocks: list[JsonDict] = []
        self._texts: list[str] = []
        """Text of each block so far; a call's arguments."""

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        for delta in deltas:
            for _ in self._add(delta):
                pass
        for block, text in zip(self._blocks, self._texts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = from_json(text or "{}", allow_partial=True)
            else:
                block[block["type"]] = text
        return {
            **self._head,
            "content": self._blocks,
            **self._ended(choices, deltas[-1].finish_reason),
        }

    async def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        reason: str | None = None
        try:
            nothing: JsonDict = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **nothing, "usage": _usage(job.choices)}
            yield _event("message_start", message=message)
            yield self.keep_alive
            async for delta in job.deltas():
                for made in self._add(delta):
                    yield made
                reason = delta.finish_reason
            for made in self._close():
                yield made
            ended = self._ended(job.choices, reason)
            yield _event("message_delta", usage=ended.pop("usage"), delta=ended)
            yield _event("message_stop")
        except ApiError as error:
            yield event(error.body(PATH), "error")

    def _ended(self, choices: Sequence[ResponseChoice], reason: str | None) -> JsonDict:
        (choice,) = choices
        told = _STOP_REASONS[reason or "stop"]
        if choice.stop_string is not None and told == "end_turn":
            told = "stop_sequence"
        elif told == "max_tokens" and choice.request.max_tokens < self._asked_tokens:
            told = "model_context_window_exceeded"
        return {
            "stop_reason": told,
            "stop_sequence": choice.stop_string,
            "usage": _usage(choices),
        }

    def _add(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            block: JsonDict = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._say(block, delta.reasoning)
        if delta.text:
            yield from self._say({"type": "text", "text": ""}, delta.text)
        for piece in delta.calls:
            call: JsonDict = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._say(call, piece.arguments)

    def _say(self, block: JsonDict, text: str) -> Iterator[bytes]:
        """Add text to the last block, or to `block` where that is another one."""
        if not self._blocks or any(block.get(k) != self._blocks[-1].get(k) for k in ("type", "id")):
            yield from self._close()
            self._blocks.append(block)
            self._texts.append("")
            yield _event("content_block_start", index=self._last, content_block=block)
        if text:
            self._texts[-1] += text
            kind, field = _DELTAS[block["type"]]
            delta = {"type": kind, field: text}
            yield _event("content_block_delta", index=self._last, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._blocks:
            yield _event("content_block_stop", index=self._last)

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1


def _usage(choices: Sequence[ResponseChoice]) -> JsonDict:
    counted = usage(choices)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
        "speculation": counted["speculation"],
    }
