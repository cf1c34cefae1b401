"""State and work shared by the endpoints: reading bodies, running choices, the model's card."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response

from penstock.api import errors
from penstock.api.bodies import ChatBody, GenerationBody, ModelBody
from penstock.api.body import unless_gone, validated
from penstock.api.choices import ResponseChoice
from penstock.api.http import EXPECTED_OUTPUT_TOKENS, Caller
from penstock.api.metrics import Metrics
from penstock.api.prepare import RequestBuilder
from penstock.api.response_bodies import ResponsesBody
from penstock.api.responses import EventStream, Form, Generation, collected, timestamp
from penstock.api.unknown_fields import header_value, ignored_fields
from penstock.config import ServeConfig
from penstock.serving.client import RequestClient

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

_Body = TypeVar("_Body", bound=ModelBody)


class Service:
    """State shared by the endpoints."""

    def __init__(self, config: ServeConfig, client: RequestClient, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model_names: Sequence[str] = config.model_names
        self.model_name = self.model_names[0]
        self.started_at = int(time.time())
        self._timeout_s = config.request_timeout_s
        self._max_wait_s = config.max_wait_s
        self.metrics = Metrics(self.model_name)
        self.prepare = RequestBuilder(
            self.model_names,
            tokenizer,
            client.info,
            config.engine.verification,
            lambda: client.drafters,
            client.room.most_of,
            client.quotas,
        )

    async def read(self, model: type[_Body], http: Request) -> _Body:
        """Validate the body of a request to the model. Raises: ApiError."""
        body = await validated(model, http)
        told = http.headers.get(EXPECTED_OUTPUT_TOKENS)
        is_untold = isinstance(body, GenerationBody) and body.expected_output_tokens is None
        if told is not None and is_untold:
            body = body.model_copy(update={"expected_output_tokens": _count(told)})
        ignored = ignored_fields(body)
        if isinstance(body, ChatBody):
            names = body.chat_template_kwargs
            ignored += self.prepare.unused_fields(body.reasoning_effort, names)
        elif isinstance(body, ResponsesBody):
            ignored += self.prepare.unused_fields(body.reasoning.effort)
        self.metrics.count_ignored_fields(ignored)
        http.state.ignored_fields = header_value(ignored)
        return body

    def model_card(self, name: str) -> dict[str, Any]:
        return model_card(self.client, name, self.started_at)

    async def answer(
        self,
        http: Request,
        caller: Caller,
        body: GenerationBody,
        choices: list[ResponseChoice],
        form: Form,
    ) -> Response:
        """Run the choices and return their response. Raises: ApiError."""
        job = await self.start(http, caller, body, choices)
        if body.stream:
            return EventStream(job, form, body)
        return await collected(job, form, http)

    async def start(
        self, http: Request, caller: Caller, body: ModelBody, choices: Sequence[ResponseChoice]
    ) -> Generation:
        """Run the choices of a response. Raises: ApiError."""
        limits = [t for t in (body.timeout, self._timeout_s) if t is not None]
        deadline = asyncio.get_running_loop().time() + min(limits) if limits else None
        start = Generation.start(
            self.client, self.metrics, choices, caller.client, deadline, self._max_wait_s
        )
        return await (start if self.client.is_open else unless_gone(http, start))


def model_card(client: RequestClient, name: str, started_at: int) -> dict[str, Any]:
    """Return an entry of `/v1/models`, with OpenAI's and Anthropic's fields."""
    engine = client.info
    card = {
        "id": name,
        "object": "model",
        "created": started_at,
        "owned_by": "penstock",
        "max_model_len": engine.max_request_tokens,
        "drafters": list(client.drafters),
        "type": "model",
        "display_name": name,
        "created_at": timestamp(started_at),
        "lifecycle": "active",
        "max_input_tokens": engine.max_request_tokens,
    }
    if engine.draft_model is not None:
        card["draft_model"] = engine.draft_model
    return card


def loaded_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer and what the first request needs of it. Raises: ValueError."""
    # The import takes seconds, during which the engine loads.
    from penstock.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    tokenizer.prepare()
    return tokenizer


def _count(told: str) -> int:
    if not (told.isascii() and told.isdigit() and len(told) < 10 and int(told) > 0):
        name = EXPECTED_OUTPUT_TOKENS
        raise errors.ApiError(400, f"{name}: must be a whole number of at least 1", param=name)
    return int(told)
