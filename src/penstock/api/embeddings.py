"""Embeddings: requests whose prompts are computed and pooled, and OpenAI's endpoint."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from fastapi import Depends, FastAPI, Request, Response

from penstock.api.bodies import ModelBody, each_prompt
from penstock.api.body import unless_gone
from penstock.api.choices import Delta, ResponseChoice, TextStream
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.prepare import COST_PER_TEXT, RequestBuilder
from penstock.api.responses import as_json
from penstock.api.schema import body_of
from penstock.api.service import Service
from penstock.api.token_bodies import EmbeddingBody
from penstock.core.types import NO_DRAFTER, Output
from penstock.core.types import Request as EngineRequest

Floats = npt.NDArray[np.float32]


class EmbeddingChoice(ResponseChoice):
    """One text of a response."""

    def __init__(self, index: int, request: EngineRequest, text: TextStream) -> None:
        super().__init__(index, request, text, opens_prompt=True)
        self._values: npt.NDArray[np.float64] = np.empty(0)

    def on_output(self, output: Output) -> list[Delta]:
        """Take in the embedding. Raises: as `ResponseChoice.on_output`."""
        self._check(output)
        self._values = np.frombuffer(output.embedding, dtype=np.float32).astype(np.float64)
        self.finish_reason = output.finish_reason
        self.usage.on_output(output)
        return []

    @property
    def size(self) -> int:
        return len(self._values)

    def vector(self, dimensions: int | None) -> Floats:
        """Return the first dimensions (None: all) of the embedding, of length 1."""
        values = self._values[:dimensions]
        length = float(np.linalg.norm(values)) or 1.0
        return (values / length).astype(np.float32)


async def embedded(
    service: Service,
    http: Request,
    caller: Caller,
    body: ModelBody,
    given: Sequence[str | list[int]],
    param: str = "input",
    *,
    clips: bool = False,
) -> list[EmbeddingChoice]:
    """Compute embeddings of texts or token ids, in their order. Raises: ApiError.

    param: the field that has them. clips: of too long texts the beginning counts"""
    if body.model is not None:
        service.prepare.check_model(body.model)
    choices = await _choices(service.prepare, given, caller, param, clips)
    with await service.start(http, caller, body, choices) as job:
        await unless_gone(http, job.whole())
    return choices


async def _choices(
    prepare: RequestBuilder,
    given: Sequence[str | list[int]],
    caller: Caller,
    param: str,
    clips: bool,
) -> list[EmbeddingChoice]:
    """Return the choices of a response, one for each text. Raises: ApiError."""
    engine, tokenizer, limit = prepare.engine, prepare.tokenizer, prepare.engine.max_request_tokens
    if engine.pooling is None:
        message = "this server's engine gives no embeddings"
        raise ApiError(400, message, param="model", code="unsupported_model")
    if not given:
        raise ApiError(400, f"{param}: must not be empty", param=param)
    if len(given) > (most := prepare.max_choices(caller.client)):
        message = f"{param}: {len(given)} texts are given; together at most {most} are allowed"
        raise ApiError(400, message, param=param)

    def encode(text: str | list[int]) -> list[int]:
        found: list[int] | int = text if isinstance(text, list) else []
        if isinstance(text, str) and clips:
            found = tokenizer.encode_beginning(text, limit)
        elif isinstance(text, str):
            found = tokenizer.encode_within(text, limit)
        num = found if isinstance(found, int) else len(found)
        if isinstance(found, int) or num > limit:
            message = f"{param}: {num} tokens are more than the context of {limit} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if not found:
            raise ApiError(400, f"{param}: must not be empty", param=param)
        prepare.check_ids(found, param)
        return found

    choices, job_id = list[EmbeddingChoice](), f"embd-{uuid4().hex}"
    size = sum(COST_PER_TEXT + len(text) for text in given if isinstance(text, str))
    for text in given:
        token_ids = await prepare.tokenise(size, encode, text)
        request = EngineRequest(
            id=f"{job_id}-{len(choices)}",
            prompt_len=len(token_ids),
            max_tokens=0,
            tenant=caller.tenant,
            prompt_token_ids=tuple(token_ids),
            drafter=NO_DRAFTER,
            pooling=engine.pooling,
        )
        choices.append(EmbeddingChoice(len(choices), request, TextStream(tokenizer, ())))
    return choices


def add_embeddings(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add OpenAI's endpoint."""

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingBody))
    async def embeddings(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(EmbeddingBody, http)
        choices = await embedded(service, http, caller, body, each_prompt(body.input))
        if body.dimensions is not None and body.dimensions > choices[0].size:
            message = f"dimensions: the model's embeddings have {choices[0].size}"
            raise ApiError(400, message, param="dimensions")
        vectors = [choice.vector(body.dimensions) for choice in choices]
        told: list[Any] = [vector.tolist() for vector in vectors]
        if body.encoding_format == "base64":
            told = [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors]
        num_tokens = sum(choice.request.prompt_len for choice in choices)
        answer = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(told)
            ],
            "model": body.model or service.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return Response(as_json(answer), media_type="application/json")
