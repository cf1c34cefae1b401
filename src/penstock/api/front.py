"""Several models behind one address: each has an application and an engine of its own.

The front passes a request on to the application of the model that it names, and answers what
concerns all models."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from penstock.api.app import callers, create_app
from penstock.api.errors import ApiError
from penstock.api.http import ApiKeys
from penstock.api.ollama.bodies import LATEST
from penstock.api.service import loaded_tokenizer, model_card
from penstock.config import EngineConfig, ServeConfig
from penstock.engine.models.hub import Progress, remove
from penstock.serving.planning import planned
from penstock.serving.pool import ModelPool, PooledClient

Pulled = Callable[[str, Progress], EngineConfig]
"""Fetches a model by its name and returns its settings. Raises: ConfigError."""

_FIGURES: tuple[tuple[Any, str, str, Callable[[PooledClient], float]], ...] = (
    (GaugeMetricFamily, "model_running", "Whether it runs.", lambda m: m.is_running),
    (GaugeMetricFamily, "model_requests_waiting", "Waiting for a start.", lambda m: m.num_waiting),
    (CounterMetricFamily, "model_starts", "Starts of its engine.", lambda m: m.num_starts),
)


class Front:
    """Models of a server, and the applications that answer their requests.

    pulled: None fetches nothing"""

    def __init__(self, config: ServeConfig, factory: str, pulled: Pulled | None) -> None:
        self.config = config
        self.pool = ModelPool(config, factory)
        self.pulled = pulled
        self.api_keys = ApiKeys(config.engine.tenants, config.metrics_keys)
        self.caller_of = callers(self.api_keys)
        self.started_at = int(time.time())
        self._apps: dict[PooledClient, asyncio.Task[FastAPI]] = {}

    async def add(self, name: str, engine: EngineConfig) -> None:
        """Take in a model, to be started later. Raises: ConfigError."""
        num = max(len(self.config.models), len(self.pool.each) + 1)
        plan = await asyncio.to_thread(planned, engine, num)
        if name not in self.pool.models:
            self.pool.add(name, plan)

    def delete(self, name: str) -> None:
        """Take a model's name away; without any it is stopped, and what was pulled is removed."""
        model = self.pool.remove(name)
        if model is not None:
            self._apps.pop(model, None)
            used = [other.plan.config for other in self.pool.each]
            path, kept = model.plan.config.target, [*self.config.models.values(), *used]
            if path not in {p for e in kept for p in (e.target, *e.drafter_models.values())}:
                remove(path)

    def named(self, name: str) -> PooledClient:
        """Return a model by its name, with or without Ollama's tag. Raises: ApiError."""
        models = self.pool.models
        found = models.get(name) or models.get(name.removesuffix(LATEST))
        if found is None:
            known = ", ".join(map(repr, models)) or "none"
            message = f"model {name!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the model that body or address name, or else to the first one."""
        http, models = Request(scope, receive), self.pool.models
        unread = [await http.body()]
        name = _model_in(unread[0]) or http.query_params.get("model") or next(iter(models), "")
        if name not in models:
            self.check(http)
        app = await self._app_of(self.named(name))

        async def again() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        await app(scope, again, send)

    def check(self, http: Request) -> None:
        """Raises: ApiError with 401 for a caller without a key."""
        self.caller_of(http, http.headers.get("authorization"), http.headers.get("x-api-key"))

    async def _app_of(self, model: PooledClient) -> FastAPI:
        """Return a model's application, made at its first request. Raises: ApiError."""
        if model not in self._apps:
            self._apps[model] = asyncio.create_task(self._made(model))
        try:
            return await asyncio.shield(self._apps[model])
        except (ValueError, OSError) as error:
            self._apps.pop(model, None)
            raise ApiError(503, f"{model}: {error}", code="engine_unavailable") from error

    async def _made(self, model: PooledClient) -> FastAPI:
        engine, names = model.plan.config, tuple(model.names)
        tokenizer = await asyncio.to_thread(loaded_tokenizer, engine.target)
        own = self.config.model_copy(update={"engine": engine, "served_model_name": names})
        app = create_app(own, model, tokenizer, self.api_keys)
        service = app.state.service
        service.model_names = service.prepare.model_names = model.names
        threading.Thread(target=tokenizer.prepare_chats, daemon=True).start()
        return app

    def cards(self) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`."""
        return [model_card(m, name, self.started_at) for name, m in self.pool.models.items()]

    async def metrics(self, of: PooledClient | None) -> bytes:
        """Return the exposition of one model, or of all: each family once."""
        families: dict[str, Any] = {}
        for model, task in [*self._apps.items()]:
            if of in (None, model) and task.done() and task.exception() is None:
                metrics, is_up = task.result().state.metrics, model.problem is None
                metrics.know(await model.stats(), is_up, model.num_restarts, model.refused)
                for family in metrics.registry.collect():
                    if (known := families.setdefault(family.name, family)) is not family:
                        known.samples += family.samples
        for kind, name, text, value in _FIGURES:
            families[name] = kind(f"penstock:{name}", text, labels=("model_name",))
            for model in self.pool.each:
                families[name].add_metric(model.names[:1], float(value(model)))
        return generate_latest(SimpleNamespace(collect=families.values))


def _model_in(body: bytes) -> str | None:
    """Return the model that a body names. The model's application says what is wrong in one."""
    try:
        given = from_json(body)
    except ValueError:
        return None
    found = (given.get("model") or given.get("name")) if isinstance(given, dict) else None
    return found if isinstance(found, str) else None
