"""Formats of responses, and the serving of one HTTP request: streamed or collected."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.api.bodies import GenerationBody
from penstock.api.body import unless_gone
from penstock.api.choices import Delta, ResponseChoice, TokenText, usage
from penstock.api.errors import ApiError
from penstock.api.metrics import Metrics, RequestMeter, count_response
from penstock.api.tool_calls import CallPiece
from penstock.core.types import FinishReason
from penstock.serving.client import EngineUnavailable, OutputStream, RequestClient, Unsupported
from penstock.serving.limits import NotAllowed, QueueFull, RateLimited

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

JsonDict = dict[str, Any]
_KEEP_ALIVE_S = 5.0
"""Well below the idle timeouts of proxies (nginx: 60 s)."""


class Form(ABC):
    """Format of one response. keep_alive: what a silent stream sends."""

    media_type: ClassVar[str] = "text/event-stream"
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    @abstractmethod
    def response(
        self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]
    ) -> JsonDict | list[JsonDict]:
        """Build the whole response. deltas: all of the choices', in order."""

    @abstractmethod
    def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream, including errors."""


class Format(Form):
    """Format of completions and chats: one JSON object, or chunks of a stream."""

    def __init__(self, job_id: str, model_name: str, tokenizer: Tokenizer, *, logprobs: bool):
        self._head = {"id": job_id, "created": int(time.time()), "model": model_name}
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, choice: ResponseChoice) -> JsonDict | None:
        """Return a chunk that precedes a choice's first text, or None."""
        return None

    @abstractmethod
    def chunk(self, delta: Delta) -> JsonDict: ...

    def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        return _chunks(job, self, body)

    @abstractmethod
    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> JsonDict: ...

    def _body(self, kind: str, choices: list[JsonDict]) -> JsonDict:
        return {**self._head, "object": kind, "choices": choices}


class CompletionFormat(Format):
    """Format `text_completion`, of responses and chunks."""

    def chunk(self, delta: Delta) -> JsonDict:
        return self._body("text_completion", [self._choice(delta)])

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        body = self._body("text_completion", [self._choice(delta) for delta in by_choice(deltas)])
        return {**body, "usage": usage(choices)}

    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> JsonDict:
        return {**self._body("text_completion", []), "usage": usage(choices)}

    def _choice(self, delta: Delta) -> JsonDict:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs_of(delta.tokens) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **_origins(delta.tokens),
        }

    def _logprobs_of(self, tokens: Sequence[TokenText]) -> JsonDict:
        return {
            "tokens": [_text(t.raw) for t in tokens],
            "token_logprobs": [t.logprob.logprob if t.has_logprob else None for t in tokens],
            "top_logprobs": [
                {_text(self._tokenizer.token_bytes(i, None)): v for i, v in t.logprob.top}
                if t.has_logprob
                else None
                for t in tokens
            ],
            "text_offset": [t.start for t in tokens],
        }


class ChatFormat(Format):
    """Formats `chat.completion` and `chat.completion.chunk`."""

    def opening(self, choice: ResponseChoice) -> JsonDict | None:
        return self._chunk(choice.index, {"role": "assistant", "content": ""}, (), None)

    def chunk(self, delta: Delta) -> JsonDict:
        content: JsonDict = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text:
            content["content"] = delta.text
        if delta.calls:
            content["tool_calls"] = [_called_piece(piece) for piece in _merged(delta.calls)]
        return self._chunk(delta.index, content, delta.tokens, delta.finish_reason)

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        made = [
            {
                "index": delta.index,
                "message": _message(delta),
                "logprobs": self._logprobs_of(delta.tokens) if self._logprobs else None,
                "finish_reason": delta.finish_reason,
                **_origins(delta.tokens),
            }
            for delta in by_choice(deltas)
        ]
        return {**self._body("chat.completion", made), "usage": usage(choices)}

    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> JsonDict:
        return {**self._body("chat.completion.chunk", []), "usage": usage(choices)}

    def _chunk(
        self, index: int, content: JsonDict, tokens: Sequence[TokenText], finish_reason: str | None
    ) -> JsonDict:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs_of(tokens) if self._logprobs and tokens else None,
            "finish_reason": finish_reason,
            **_origins(tokens),
        }
        return self._body("chat.completion.chunk", [choice])

    def _logprobs_of(self, tokens: Sequence[TokenText]) -> JsonDict:
        return {"content": logprob_entries(tokens, self._tokenizer)}


def by_choice(deltas: Sequence[Delta]) -> list[Delta]:
    """Return one delta per choice, with all of its text."""
    own: dict[int, list[Delta]] = {}
    for delta in deltas:
        own.setdefault(delta.index, []).append(delta)
    return [Delta.joined(own[index]) for index in sorted(own)]


def _message(delta: Delta) -> JsonDict:
    message: JsonDict = {"role": "assistant", "content": delta.text}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["content"] = delta.text or None
        message["tool_calls"] = [_called(piece) for piece in _merged(delta.calls)]
    return message


def _merged(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    found: dict[int, CallPiece] = {}
    for piece in pieces:
        first = found.get(piece.position)
        arguments = piece.arguments if first is None else first.arguments + piece.arguments
        found[piece.position] = (first or piece)._replace(arguments=arguments)
    return list(found.values())


def _called(piece: CallPiece) -> JsonDict:
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.id, "type": "function", "function": function}


def _called_piece(piece: CallPiece) -> JsonDict:
    if piece.name is None:
        return {"index": piece.position, "function": {"arguments": piece.arguments}}
    return {"index": piece.position, **_called(piece)}


def _text(raw: bytes) -> str:
    """Return a token as a string; incomplete characters as OpenAI writes them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _origins(tokens: Sequence[TokenText]) -> JsonDict:
    told = [
        {"text": t.text, "origin": t.origin.kind, "drafter": t.origin.drafter}
        for t in tokens
        if t.origin is not None
    ]
    return {"origins": told} if told else {}


def logprob_entries(tokens: Sequence[TokenText], tokenizer: Tokenizer) -> list[JsonDict]:
    """Return tokens with log-probabilities and alternatives, as chats and Ollama's clients do."""
    return [
        {
            **_entry(token.raw, token.logprob.logprob),
            "top_logprobs": [
                _entry(tokenizer.token_bytes(i, None), value) for i, value in token.logprob.top
            ],
        }
        for token in tokens
    ]


def _entry(raw: bytes, logprob: float) -> JsonDict:
    return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}


class Generation(AbstractContextManager["Generation"]):
    """The choices of one response, fed by the engine. Its exit cancels running requests."""

    def __init__(
        self,
        choices: Sequence[ResponseChoice],
        stream: OutputStream,
        meters: Sequence[RequestMeter],
        deadline: float | None,
    ) -> None:
        self.choices = choices
        self._expiry: asyncio.TimerHandle | None = None
        if deadline is not None:
            self._expiry = asyncio.get_running_loop().call_at(deadline, stream.expire)
        self._stream = stream
        self._by_request = {
            choice.request.id: (choice, meter)
            for choice, meter in zip(choices, meters, strict=True)
        }

    @classmethod
    async def start(
        cls,
        client: RequestClient,
        metrics: Metrics,
        choices: Sequence[ResponseChoice],
        asker: str,
        deadline: float | None,
        max_wait_s: float | None,
    ) -> Self:
        """Submit the choices' requests to the engine.

        asker: the client. deadline: on the event loop's clock. max_wait_s: seconds until they
        start. Raises: ApiError if they are rejected."""
        left_s = None if deadline is None else deadline - asyncio.get_running_loop().time()
        limits = [limit for limit in (left_s, max_wait_s) if limit is not None]
        requests = [choice.request for choice in choices]
        meters = [RequestMeter(metrics, request) for request in requests]
        with as_api_errors():
            async with asyncio.timeout_at(deadline):
                stream = await client.submit(asker, requests, min(limits, default=None))
        return cls(choices, stream, meters, deadline)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._stream.__exit__(exc_type, exc, traceback)
        for choice, meter in self._by_request.values():
            meter.finish(choice.finish_reason or FinishReason.CANCELLED)
        count_response([meter for _, meter in self._by_request.values()])

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the new text of choices. Raises: ApiError."""
        with as_api_errors():
            async for output in self._stream:
                choice, meter = self._by_request[output.request_id]
                meter.on_output(output)
                deltas = choice.on_output(output)
                if choice.finish_reason is not None:
                    meter.finish(choice.finish_reason)
                    if output.finish_reason is None:
                        self._stream.cancel(output.request_id)
                for delta in deltas:
                    yield delta

    async def whole(self) -> list[Delta]:
        """Return all deltas at the end. Raises: ApiError."""
        return [delta async for delta in self.deltas()]


@contextmanager
def as_api_errors() -> Iterator[None]:
    """Turn rejections and timeouts into ApiError."""
    try:
        yield
    except NotAllowed as error:
        raise ApiError(400, str(error), param=error.param, code="tenant_limit") from error
    except Unsupported as error:
        raise ApiError(400, str(error), code="unsupported_value") from error
    except RateLimited as error:
        after = error.retry_after_s
        raise ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=after) from error
    except QueueFull as error:
        after = error.retry_after_s
        raise ApiError(429, str(error), code="queue_full", retry_after_s=after) from error
    except EngineUnavailable as error:
        after = error.retry_after_s
        raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=after) from error
    except TimeoutError as error:
        late = "the request took longer than it may, and was cancelled"
        raise ApiError(504, late, code="timeout") from error


class EventStream(StreamingResponse):
    """Streamed response of a job; a client that disconnects ends it.

    The headers are sent at once, so later errors are sent as events."""

    def __init__(self, job: Generation, form: Form, body: GenerationBody) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(form.events(job, body), headers=headers, media_type=form.media_type)
        self._job = job
        self._keep_alive = form.keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        kept_alive = _KeepAliveSender(send, self._keep_alive)
        signs = asyncio.create_task(kept_alive.run())
        try:
            await super().stream_response(kept_alive.send)
        finally:
            signs.cancel()


class _KeepAliveSender:
    """Sends `sign` after _KEEP_ALIVE_S of silence: proxies close idle connections."""

    def __init__(self, send: Send, sign: bytes) -> None:
        self._send = send
        self._sign = sign
        self._turn = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._is_over = False

    async def send(self, message: Message) -> None:
        async with self._turn:
            if not self._is_over:
                self._is_over = not message.get("more_body", True)
                await self._send(message)
                self._sent_at = self._clock()

    async def run(self) -> None:
        sign = {"type": "http.response.body", "body": self._sign, "more_body": True}
        while not self._is_over:
            quiet_until = self._sent_at + _KEEP_ALIVE_S
            if self._clock() < quiet_until:
                await asyncio.sleep(quiet_until - self._clock())
            else:
                await self.send(sign)


async def _chunks(job: Generation, form: Format, body: GenerationBody) -> AsyncIterator[bytes]:
    is_open = False
    try:
        async for delta in job.deltas():
            if not is_open:
                for opening in filter(None, map(form.opening, job.choices)):
                    yield event(_with_usage(opening, job, body))
                is_open = True
            yield event(_with_usage(form.chunk(delta), job, body))
        if body.usage_at_end:
            yield event(form.usage_chunk(job.choices))
    except ApiError as error:
        yield event(error.body())
    yield b"data: [DONE]\n\n"


def _with_usage(chunk: JsonDict, job: Generation, body: GenerationBody) -> JsonDict:
    if body.usage_in_chunks:
        chunk["usage"] = usage(job.choices)
    elif body.usage_at_end:
        chunk["usage"] = None
    return chunk


def event(data: JsonDict, kind: str | None = None) -> bytes:
    """Encode a server-sent event. kind: its type, if any."""
    named = b"" if kind is None else f"event: {kind}\n".encode()
    return b"%sdata: %s\n\n" % (named, as_json(data))


def as_json(body: JsonDict | list[JsonDict]) -> bytes:
    """Encode without white space; NaN is null."""
    return to_json(body, inf_nan_mode="null")


def timestamp(seconds: float) -> str:
    """Return a time since the epoch as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def collected(job: Generation, form: Form, http: HttpRequest) -> Response:
    """Return the whole response. Raises: ApiError, also if the client disconnects before."""
    with job:
        body = form.response(job.choices, await unless_gone(http, job.whole()))
    return Response(as_json(body), media_type="application/json")
