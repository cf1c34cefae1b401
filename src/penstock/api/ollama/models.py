"""Ollama's endpoints on the models of a server that has several."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response, params
from starlette.responses import StreamingResponse

from penstock.api.body import validated
from penstock.api.errors import ApiError
from penstock.api.front import Front
from penstock.api.ollama.bodies import LATEST, OllamaCopy, OllamaPull, OllamaShow
from penstock.api.ollama.endpoints import card, running_card
from penstock.api.responses import as_json
from penstock.config import ConfigError, EngineConfig

_Event = dict[str, Any]


def add_models(app: FastAPI, front: Front, checked: Sequence[params.Depends]) -> None:
    """Add the endpoints that list, fetch, name and remove models."""
    models = front.pool.models

    def card_of(name: str) -> dict[str, Any]:
        return card(models[name].plan.config.target, name, front.started_at)

    @app.get("/api/tags", dependencies=checked)
    async def tags() -> dict[str, Any]:
        return {"models": [*map(card_of, models)]}

    @app.get("/api/ps", dependencies=checked)
    async def running() -> dict[str, Any]:
        now, found = asyncio.get_running_loop().time(), []
        for name in [name for model in front.pool.running for name in model.names[:1]]:
            model, context = models[name], models[name].info.max_request_tokens
            loaded = running_card(context, model.expires_at - now)
            found.append({**card_of(name), **loaded, "size": model.plan.num_bytes})
        return {"models": found}

    @app.post("/api/pull")
    async def pull(http: Request) -> Response:
        _check(front, http)
        body = await validated(OllamaPull, http)
        events = _pulled(front, body.name)
        if body.stream:
            lines = (as_json(event) + b"\n" async for event in events)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        last = [event async for event in events][-1]
        return Response(as_json(last), 500 if "error" in last else 200)

    @app.post("/api/copy")
    async def copy(http: Request) -> None:
        _check(front, http)
        body = await validated(OllamaCopy, http)
        model, name = front.named(body.source), body.destination.removesuffix(LATEST)
        if models.setdefault(name, model) is not model:
            raise ApiError(409, f"{name!r} names another model")
        if name not in model.names:
            model.names.append(name)

    @app.delete("/api/delete")
    async def delete(http: Request) -> None:
        _check(front, http)
        name = (await validated(OllamaShow, http)).model.removesuffix(LATEST)
        front.named(name)
        front.delete(name)


def _check(front: Front, http: Request) -> None:
    """Let operators alone change the models, and no web page of elsewhere. Raises: ApiError."""
    front.api_keys.check_operator(http.headers.get("authorization"))
    origin = http.headers.get("origin")
    allowed = {"*", origin} & {*front.config.cors_origins}
    if origin is not None and urlsplit(origin).netloc != http.headers.get("host") and not allowed:
        raise ApiError(403, f"{origin} is none of cors_origins")


async def _pulled(front: Front, name: str) -> AsyncIterator[_Event]:
    """Fetch a model, and yield what Ollama's client shows."""
    assert front.pulled is not None
    pull = front.pulled
    yield {"status": "pulling manifest"}
    events, loop = asyncio.Queue[_Event | EngineConfig | Exception](), asyncio.get_running_loop()

    def progress(file: str, done: int, total: int) -> None:
        digest = f"sha256:{hashlib.sha256(file.encode()).hexdigest()}"
        told = {"status": f"pulling {file}", "digest": digest, "total": total, "completed": done}
        loop.call_soon_threadsafe(events.put_nowait, told)

    def fetch() -> None:
        try:
            found: EngineConfig | Exception = pull(name, progress)
        except Exception as error:
            found = error
        loop.call_soon_threadsafe(events.put_nowait, found)

    if name not in front.pool.models:
        # The end of the server does not wait for a download.
        threading.Thread(target=fetch, daemon=True).start()
        while isinstance(event := await events.get(), dict):
            yield event
        try:
            if isinstance(event, Exception):
                raise event
            await front.add(name, event)
        except ConfigError as error:
            yield {"error": f"pull model manifest: {error}"}
            return
    yield {"status": "success"}
