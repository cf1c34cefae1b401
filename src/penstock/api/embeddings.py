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
from penstock.api.conversation import COST_PER_TEXT
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.prepare import RequestBuilder
from penstock.api.responses import as_json
from penstock.api.schema import body_of
from penstock.api.service import Service
from penstock.api.token_bodies import EmbeddingBody
from penstock.core.types import NO_DRAFTER, Output
from penstock.core.types import Request as EngineRequest


class EmbeddingChoice(ResponseChoice):
    """One text of a response. embedding: float32."""

    embedding = b""

    def on_output(self, output: Output) -> list[Delta]:
        """Take in the embedding. Raises: as `ResponseChoice.on_output`."""
        self.embedding = output.embedding
        return super().on_output(output)

    def vector(self, dimensions: int | None) -> npt.NDArray[np.float32]:
        """Return the first dimensions (None: all) of the embedding, of length 1."""
        values = np.frombuffer(self.embedding, np.float32)[:dimensions].astype(np.float64)
        length = float(np.linalg.norm(values)) or 1.0
        return (values / length).astype(np.float32)


async def embedded(
    service: Service,
    http: Request,
    caller: Caller,
    body: ModelBody,
    given: Sequence[str | list[int]],
    *,
    clips: bool = False,
) -> list[EmbeddingChoice]:
    """Compute embeddings of texts or token ids, in their order. Raises: ApiError.

    clips: of too long texts the beginning counts"""
    if body.model is not None:
        service.prepare.check_model(body.model)
    choices = await _choices(service.prepare, given, caller, clips)
    with await service.start(http, caller, body, choices) as job:
        await unless_gone(http, job.whole())
    return choices


async def _choices(
    prepare: RequestBuilder, given: Sequence[str | list[int]], caller: Caller, clips: bool
) -> list[EmbeddingChoice]:
    """Return the choices of a response, one for each text. Raises: ApiError."""
    engine, tokenizer, limit = prepare.engine, prepare.tokenizer, prepare.engine.max_request_tokens
    if engine.pooling is None:
        message = "this server's engine gives no embeddings"
        raise ApiError(400, message, param="model", code="unsupported_model")
    if len(given) > (most := prepare.max_choices(caller.client)):
        message = f"input: {len(given)} texts are given; together at most {most} are allowed"
        raise ApiError(400, message, param="input")

    def encode(text: str | list[int]) -> list[int]:
        ids: list[int] | int
        if isinstance(text, list):
            ids = text if len(text) <= limit else len(text)
        else:
            encoded = tokenizer.encode_beginning if clips else tokenizer.encode_within
            ids = encoded(text, limit)
        if isinstance(ids, int):
            message = f"input: {ids} tokens are more than the context of {limit} tokens"
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        return ids

    choices, job_id = list[EmbeddingChoice](), f"embd-{uuid4().hex}"
    size = sum(COST_PER_TEXT + len(text) for text in given if isinstance(text, str))
    for text in given:
        token_ids = await prepare.tokenise(size, encode, text)
        prepare.check_ids(token_ids, "input")
        request = EngineRequest(
            id=f"{job_id}-{len(choices)}",
            prompt_len=len(token_ids),
            max_tokens=0,
            tenant=caller.tenant,
            prompt_token_ids=tuple(token_ids),
            drafter=NO_DRAFTER,
            pooling=engine.pooling,
        )
        text_stream = TextStream(tokenizer, ())
        choices.append(EmbeddingChoice(len(choices), request, text_stream, opens_prompt=True))
    if not all(choice.request.prompt_len for choice in choices) or not choices:
        raise ApiError(400, "input: must not be empty", param="input")
    return choices


def add_embeddings(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add OpenAI's endpoint."""

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingBody))
    async def embeddings(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(EmbeddingBody, http)
        choices = await embedded(service, http, caller, body, each_prompt(body.input))
        vectors = [choice.vector(body.dimensions) for choice in choices]
        if body.dimensions is not None and body.dimensions > len(vectors[0]):
            message = f"dimensions: the model's embeddings have {len(vectors[0])}"
            raise ApiError(400, message, param="dimensions")
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
