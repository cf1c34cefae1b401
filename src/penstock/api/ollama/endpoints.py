"""Ollama's endpoints, over the one model of the server."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import Depends, FastAPI, Request, Response, params

from penstock.api.bodies import ChatBody
from penstock.api.body import unless_gone, validated
from penstock.api.embeddings import EmbeddingChoice, embedded
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.ollama.bodies import (
    LATEST,
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
    OllamaRequest,
    OllamaShow,
)
from penstock.api.ollama.format import OllamaFormat, nanoseconds
from penstock.api.responses import as_api_errors, as_json, timestamp
from penstock.api.schema import body_of, refusals
from penstock.api.service import Service
from penstock.api.tool_calls import format_of
from penstock.engine.fill import FillTokens
from penstock.engine.memory import model_bytes
from penstock.zoo.registry import bundled_models

_VERSION = "0.13.0"
"""The version of Ollama whose endpoints these are: clients refuse older ones."""
_REFUSED = {
    "pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE",
}  # fmt: skip
"""Methods of Ollama's endpoints that a server of one model has not."""
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "penstock",
    "families": ["penstock"],
    "parameter_size": "",
    "quantization_level": "",
}


def add_ollama(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add the endpoints under `/api`."""
    errors = refusals("OllamaError")
    checked = [Depends(caller_of)]

    async def answer(http: Request, caller: Caller, body: OllamaBody) -> Response:
        tokenizer = service.tokenizer if body.logprobs else None
        form = OllamaFormat(body.model, tokenizer, is_chat=isinstance(body, OllamaChat))
        _keep_alive(service, body)
        job_id, asked = f"ollama-{uuid4().hex}", body.asked()
        if asked is None:
            await _load(service, http, body)
            loaded = form.loaded("load" if body.keep_alive != 0 else "unload")
            return Response(as_json(loaded), media_type="application/json")
        if isinstance(asked, ChatBody):
            choices = await service.prepare.chat(asked, caller, job_id, clips=True)
        else:
            choices = await service.prepare.completion(asked, caller, job_id, clips=True)
        return await service.answer(http, caller, body, choices, form)

    @app.post("/api/chat", openapi_extra=body_of(OllamaChat), responses=errors)
    async def chat(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        return await answer(http, caller, await service.read(OllamaChat, http))

    @app.post("/api/generate", openapi_extra=body_of(OllamaGenerate), responses=errors)
    async def generate(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        return await answer(http, caller, await service.read(OllamaGenerate, http))

    _add_embeddings(app, service, caller_of)
    _add_model(app, service, checked)


def _keep_alive(service: Service, body: OllamaRequest) -> None:
    if body.keep_alive is not None:
        service.client.keep_alive_s = body.keep_alive


async def _load(service: Service, http: Request, body: OllamaRequest) -> None:
    """Load the model that a request without a prompt names. Raises: ApiError."""
    service.prepare.check_model(body.model)
    with as_api_errors():
        await unless_gone(http, service.client.load())


def _add_embeddings(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    errors = refusals("OllamaError")

    async def asked(http: Request, caller: Caller, body: OllamaEmbed) -> list[EmbeddingChoice]:
        _keep_alive(service, body)
        if body.texts:
            return await embedded(service, http, caller, body, body.texts, clips=body.truncate)
        await _load(service, http, body)
        return []

    @app.post("/api/embed", openapi_extra=body_of(OllamaEmbed), responses=errors)
    async def embed(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        started_at, body = time.perf_counter(), await service.read(OllamaEmbed, http)
        choices = await asked(http, caller, body)
        told = {
            "model": body.model,
            "embeddings": [c.vector(body.dimensions or None).tolist() for c in choices],
            "total_duration": nanoseconds(time.perf_counter() - started_at),
            "load_duration": 0,
            "prompt_eval_count": sum(c.request.prompt_len for c in choices),
        }
        return Response(as_json(told), media_type="application/json")

    @app.post("/api/embeddings", openapi_extra=body_of(OllamaEmbed), responses=errors)
    async def embed_one(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        choices = await asked(http, caller, await service.read(OllamaEmbed, http))
        told = {"embedding": choices[0].vector(None).tolist() if choices else []}
        return Response(as_json(told), media_type="application/json")


def _add_model(app: FastAPI, service: Service, checked: Sequence[params.Depends]) -> None:
    """Add the read-only endpoints on the one model, and refuse those that would change it."""
    errors = refusals("OllamaError")

    @app.get("/api/tags", dependencies=checked, responses=errors)
    async def tags() -> dict[str, Any]:
        return {"models": _cards(service)}

    @app.get("/api/ps", dependencies=checked, responses=errors)
    async def running() -> dict[str, Any]:
        loaded = running_card(service.client.info.max_request_tokens, math.inf)
        return {"models": [{**card, **loaded} for card in _cards(service)]}

    @app.post(
        "/api/show", dependencies=checked, openapi_extra=body_of(OllamaShow), responses=errors
    )
    async def show(http: Request) -> dict[str, Any]:
        body = await validated(OllamaShow, http)
        service.prepare.check_model(body.model.removesuffix(LATEST))
        template, path = service.tokenizer.tool_template, service.client.info.tokenizer_path
        context = service.client.info.max_request_tokens
        return {
            "modelfile": "",
            "parameters": "",
            "template": template or "",
            "details": _details(path),
            "model_info": {
                "general.architecture": "penstock",
                "general.parameter_count": _num_parameters(path) or None,
                "penstock.context_length": context,
            },
            "capabilities": [
                "completion" if service.client.info.generates else "embedding",
                *(["tools"] if format_of(template) else []),
                *(["insert"] if FillTokens.of(service.tokenizer) else []),
            ],
            "modified_at": timestamp(service.started_at),
        }

    @app.get("/api/version", responses=errors)
    async def version() -> dict[str, str]:
        return {"version": _VERSION}

    for name, method in _REFUSED.items():
        app.add_api_route(
            f"/api/{name}", _refuse, methods=[method], dependencies=checked, include_in_schema=False
        )


async def _refuse(http: Request) -> None:
    """Raises: ApiError with 501."""
    path = http.url.path
    raise ApiError(501, f"{path} is not offered: this server has one model, which makes text")


def _cards(service: Service) -> list[dict[str, Any]]:
    path = service.client.info.tokenizer_path
    return [card(path, name, service.started_at) for name in service.model_names]


def running_card(context: int, left_s: float) -> dict[str, Any]:
    """Return what `/api/ps` adds for a loaded model. left_s: until it is unloaded."""
    told = "9999-12-31T23:59:59Z" if left_s == math.inf else timestamp(time.time() + left_s)
    return {"expires_at": told, "size_vram": 0, "context_length": context}


def card(path: Path, name: str, started_at: int) -> dict[str, Any]:
    """Return an entry of `/api/tags`."""
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": timestamp(started_at),
        "size": model_bytes(path),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(path),
    }


def _details(path: Path) -> dict[str, Any]:
    num = _num_parameters(path)
    return {**_DETAILS, "parameter_size": f"{num / 1e6:.1f}M" if num else ""}


def _num_parameters(path: Path) -> int:
    """Return the parameters of a bundled model, else 0."""
    path = path.resolve()
    with suppress(FileNotFoundError):
        return next(
            (card.parameters for card in bundled_models().values() if card.path.resolve() == path),
            0,
        )
    return 0
