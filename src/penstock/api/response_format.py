"""Responses of `/v1/responses`: items, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

from penstock.api.bodies import GenerationBody
from penstock.api.choices import Delta, ResponseChoice, usage
from penstock.api.errors import ApiError
from penstock.api.response_bodies import ResponsesBody
from penstock.api.responses import Form, Generation, JsonDict, event
from penstock.api.tool_calls import CallPiece


class ResponsesFormat(Form):
    """One response.

    Its items are the reasoning and the text, if any, and the calls, in the order of their starts.
    """

    def __init__(self, response_id: str, model_name: str, body: ResponsesBody) -> None:
        self._head = _head(response_id, model_name, body)
        self._items: list[JsonDict] = []
        self._calls: dict[str, int] = {}
        """Indices of calls in the items, by id."""
        self._texts: dict[str, int] = {}
        """Indices of the reasoning and the message in the items, by type."""
        self._num_events = 0

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        for delta in deltas:
            for _ in self._add(delta):
                pass
        reason = deltas[-1].finish_reason
        for _ in self._end(reason == "length"):
            pass
        return self._ended(choices, reason)

    async def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        reason: str | None = None
        try:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._state("in_progress"))
            async for delta in job.deltas():
                for made in self._add(delta):
                    yield made
                reason = delta.finish_reason
            for made in self._end(reason == "length"):
                yield made
            response = self._ended(job.choices, reason)
            yield self._event(f"response.{response['status']}", response=response)
        except ApiError as error:
            told = error.body()["error"]
            # OpenAI's clients read it in `error`; it is documented at the top level.
            yield self._event("error", error=told, **{k: told[k] for k in _TOLD})
            failed = {"code": "server_error", "message": error.message}
            response = {**self._state("failed"), "error": failed}
            yield self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _state(self, status: str) -> JsonDict:
        return {**self._head, "status": status, "output": self._items}

    def _ended(self, choices: Sequence[ResponseChoice], reason: str | None) -> JsonDict:
        is_cut = reason == "length"
        return {
            **self._state("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(choices),
        }

    # --- items ----------------------------------------------------------------------------------

    def _add(self, delta: Delta) -> Iterator[bytes]:
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                yield from self._begin_text(kind)
                self._items[self._texts[kind]]["content"][0]["text"] += text
                more: JsonDict = {} if kind == "reasoning" else {"logprobs": []}
                yield self._of_text(kind, f"{_PARTS[kind]}.delta", delta=text, **more)
        for piece in delta.calls:
            yield from self._add_piece(piece)

    def _begin_text(self, kind: str) -> Iterator[bytes]:
        if kind in self._texts:
            return
        self._texts[kind] = len(self._items)
        item: JsonDict = {"type": kind, "content": []}
        part: JsonDict = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            item["role"], part["annotations"] = "assistant", []
        else:
            item["summary"] = []
        yield self._begin(item, f"{_IDS[kind]}_{uuid4().hex}")
        yield self._of_text(kind, "content_part.added", part=part)
        item["content"].append(part)

    def _add_piece(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.id not in self._calls:
            self._calls[piece.id] = len(self._items)
            item = {
                "type": "function_call",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            yield self._begin(item, f"fc_{uuid4().hex}")
        place = self._calls[piece.id]
        if piece.arguments:
            self._items[place]["arguments"] += piece.arguments
            kind = "response.function_call_arguments.delta"
            yield self._of_item(kind, place, delta=piece.arguments)

    def _begin(self, item: JsonDict, item_id: str) -> bytes:
        item |= {"id": item_id, "status": "in_progress"}
        self._items.append(item)
        place = len(self._items) - 1
        return self._event("response.output_item.added", output_index=place, item=item)

    def _end(self, is_cut: bool) -> Iterator[bytes]:
        """Complete the items and yield the events. is_cut: the last item is incomplete."""
        if not self._items:
            yield from self._begin_text("message")
        for place, item in enumerate(self._items):
            if (kind := item["type"]) in self._texts:
                (part,) = item["content"]
                more: JsonDict = {} if kind == "reasoning" else {"logprobs": []}
                yield self._of_text(kind, f"{_PARTS[kind]}.done", text=part["text"], **more)
                yield self._of_text(kind, "content_part.done", part=part)
            else:
                kind = "response.function_call_arguments.done"
                told = {"name": item["name"], "arguments": item["arguments"]}
                yield self._of_item(kind, place, **told)
            is_last = place == len(self._items) - 1
            item["status"] = "incomplete" if is_cut and is_last else "completed"
            yield self._event("response.output_item.done", output_index=place, item=item)

    def _of_text(self, kind: str, event: str, **fields: Any) -> bytes:
        return self._of_item(f"response.{event}", self._texts[kind], content_index=0, **fields)

    def _of_item(self, kind: str, place: int, **fields: Any) -> bytes:
        item_id = self._items[place]["id"]
        return self._event(kind, item_id=item_id, output_index=place, **fields)


_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_IDS = {"reasoning": "rs", "message": "msg"}
_TOLD = ("code", "message", "param")


def _head(response_id: str, model_name: str, body: ResponsesBody) -> JsonDict:
    asked = body.model_dump(
        include={
            "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature",
            "reasoning", "tool_choice", "tools", "top_p",
        }
    )  # fmt: skip
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model_name,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        "text": {"format": body.text.format.as_given},
        **asked,
    }


def _usage(choices: Sequence[ResponseChoice]) -> JsonDict:
    counted = usage(choices)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
        "speculation": counted["speculation"],
    }
