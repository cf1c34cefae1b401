"""Engines of several models, of which as many run at a time as memory has room for.

A request starts the model that it names. Where memory is short the least lately used models leave:
they take no more requests, end those they have, and are stopped. Starts take turns in the order of
the requests, so that no model keeps another out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context
from typing import Any

from penstock.config import ConfigError, ServeConfig, TenantConfig
from penstock.core.types import Request
from penstock.engine.memory import LESS_MEMORY, free_memory
from penstock.serving.client import EngineClient, EngineUnavailable, OutputSink
from penstock.serving.planning import EnginePlan
from penstock.serving.process import EngineFailed

_log = logging.getLogger(__name__)


class PooledClient(EngineClient):
    """Client of one of several engines, which a request starts.

    names: of the model, its own first. num_waiting: requests for its start; num_entering: those
    between that and the engine. leaves: it takes no more. opening: its start, or, if it leaves, its
    turn to take requests again."""

    def __init__(self, pool: ModelPool, name: str, plan: EnginePlan) -> None:
        most, log_format = pool.config.max_waiting_requests, pool.config.log_format
        factory = pool.factory
        super().__init__(plan.config, max_waiting=most, factory=factory, log_format=log_format)
        self._info, self._pool = plan.info, pool
        self.names, self.plan = [name], plan
        self.keep_alive_s = pool.keep_alive_s
        self.num_waiting = self.num_entering = self.num_starts = 0
        self.is_running = self.leaves = False
        self.opening: asyncio.Task[None] | None = None
        self.used_at = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        return f"{self.names[0]} ({_gib(self.plan.num_bytes)})"

    @property
    def expires_at(self) -> float:
        """When it is to be stopped, on the event loop's clock; infinity while it is used."""
        return math.inf if self.num_used else self.used_at + self.keep_alive_s

    @property
    def num_used(self) -> int:
        return self.num_entering + self.num_open

    @property
    def is_open(self) -> bool:
        return self.is_running and not self.leaves

    async def load(self) -> None:
        if self.keep_alive_s:
            await self._pool.enter(self, None)
            self.num_entering -= 1
        elif not self.is_running:
            self.keep_alive_s = self._pool.keep_alive_s
        self._pool.rest(self)

    async def _wait_until_ready(self, within_s: float | None) -> None:
        await self._pool.enter(self, within_s)
        try:
            await super()._wait_until_ready(within_s)
        except BaseException:
            self.num_entering -= 1
            self._pool.rest(self)
            raise

    def _open(self, requests: Sequence[Request], sink: OutputSink) -> None:
        super()._open(requests, sink)
        self.num_entering -= 1

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._pool.rest(self)


class ModelPool:
    """Starts and stops models. It also stands for all where tenants change, or the server ends.

    memory: bytes that all may take together; free: bytes that this machine has free now"""

    def __init__(
        self, config: ServeConfig, factory: str, free: Callable[[], int] = free_memory
    ) -> None:
        self.config, self.factory = config, factory
        self.keep_alive_s = math.inf if config.keep_alive is None else config.keep_alive
        self.memory = config.memory_bytes or free()
        self.models: dict[str, PooledClient] = {}
        """Models by each of their names."""
        self.running: list[PooledClient] = []
        self.is_ending = False
        self._free = free
        self._turn = asyncio.Lock()
        """Held by what starts or stops a model."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def each(self) -> list[PooledClient]:
        """All models, once each."""
        return [*dict.fromkeys(self.models.values())]

    def add(self, name: str, plan: EnginePlan) -> None:
        """Take in a model. Raises: ConfigError for one that could never start."""
        if plan.num_bytes > self.memory:
            need = plan.need._replace(free=self.memory)
            raise ConfigError(f"model {name!r}: {need}: {LESS_MEMORY}")
        self.models[name] = PooledClient(self, name, plan)

    def remove(self, name: str) -> PooledClient | None:
        """Take a name away; returns the model if it was its last one, to be stopped when idle."""
        model = self.models.pop(name)
        model.names.remove(name)
        if model.names:
            return None
        model.names.append(name)
        model.keep_alive_s = 0.0
        self.rest(model)
        return model

    async def preload(self) -> None:
        """Start the models that start with the server. Raises: ConfigError."""
        models = [self.models[name] for name in self.config.preload]
        if _sum(models) > self.memory:
            told = f"preload: {' and '.join(map(str, models))} do not fit together into"
            raise ConfigError(f"{told} {_gib(self.memory)}: one of them would have to leave")
        for model in models:
            try:
                await model.load()
            except EngineUnavailable as error:
                raise ConfigError(str(error)) from error

    async def enter(self, model: PooledClient, within_s: float | None) -> None:
        """Wait until a model takes a request. Raises: EngineUnavailable, after `within_s` too."""
        if model.is_open:
            model.num_entering += 1
            return
        if model.opening is None:
            model.opening = self._do(self._open(model))
        opening = model.opening
        model.num_waiting += 1
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(opening)
        except BaseException as error:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                model.num_entering -= 1
            else:
                model.num_waiting -= 1
            self.rest(model)
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(self._why(model)) from error
            raise

    def rest(self, model: PooledClient) -> None:
        """Count the time without a request from now on."""
        loop = asyncio.get_running_loop()
        model.used_at = loop.time()
        if model.timer is not None:
            model.timer.cancel()
        if model.is_running and model.expires_at < math.inf:
            model.timer = loop.call_at(model.expires_at, lambda: self._do(self._expire(model)))
        self._changed.set()

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """As `EngineClient.reconfigure`, for all models."""
        for model in self.each:
            model.reconfigure(tenants)

    async def drain(self, grace_s: float) -> None:
        """Start nothing more, and end requests as `EngineClient.drain` does."""
        self.is_ending = True
        self._changed.set()
        await asyncio.gather(*(model.drain(grace_s) for model in self.each))

    async def close(self) -> None:
        """End all processes now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.close() for model in {*self.each, *self.running}))

    # --- starting and stopping ------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In an empty context: the log's lines are about no request alone.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _why(self, model: PooledClient) -> str:
        """Return what a request waits for."""
        others = [f"{o}, with {o.num_used} requests," for o in self.running if o.leaves]
        if not others:
            return f"model {model} is not started yet"
        return f"model {model} waits for memory: {' and '.join(others)} would have to leave"

    async def _open(self, model: PooledClient) -> None:
        """Start a model in its turn, and let in what waits for it. Raises: EngineUnavailable."""
        try:
            async with self._turn:
                if not model.is_running and await self._has_room(model):
                    await self._start(model)
                if model.is_running:
                    model.num_entering += model.num_waiting
                    model.num_waiting = 0
        except EngineFailed as error:
            raise EngineUnavailable(f"model {model} cannot be started: {error}") from error
        finally:
            model.opening = None
            self.rest(model)

    async def _has_room(self, model: PooledClient) -> bool:
        """Make room for a model; False once nothing waits for it. Raises: EngineUnavailable."""
        is_told = False
        try:
            while model.num_waiting:
                if self.is_ending:
                    raise EngineUnavailable("the server is shutting down")
                leaving = self._leaving_for(model)
                for other in self.running:
                    other.leaves = other in leaving
                if not leaving:
                    return True
                idle = [other for other in leaving if not other.num_used]
                if idle:
                    await self._stop(idle[0])
                    continue
                if not is_told:
                    _log.info("%s", self._why(model))
                is_told = True
                self._changed.clear()
                await self._changed.wait()
        finally:
            for other in self.running:
                other.leaves = False
        return False

    def _leaving_for(self, model: PooledClient) -> list[PooledClient]:
        """Return running models that make room for another: idle ones first, then by last use.

        Raises: EngineUnavailable."""
        # KV memory is taken from the system as it is used.
        free = min(self._free() + model.plan.need.kv, self.memory - _sum(self.running))
        missing, chosen = model.plan.num_bytes - free, list[PooledClient]()
        for other in sorted(self.running, key=lambda o: (o.num_used > 0, o.used_at)):
            if _sum(chosen) < missing:
                chosen.append(other)
        if _sum(chosen) < missing:
            raise EngineUnavailable(f"model {model} does not fit into {_gib(free + _sum(chosen))}")
        return chosen

    async def _start(self, model: PooledClient) -> None:
        _log.info("model %s starts; %d requests wait for it", model, model.num_waiting)
        model.num_starts += 1
        try:
            await model.start()
        except BaseException:
            await model.stop()
            raise
        model.is_running = True
        self.running.append(model)

    async def _expire(self, model: PooledClient) -> None:
        async with self._turn:
            if model.is_running and model.expires_at <= asyncio.get_running_loop().time():
                await self._stop(model)

    async def _stop(self, model: PooledClient) -> None:
        model.leaves = True
        await model.stop()
        self.running.remove(model)
        model.is_running = model.leaves = False
        model.keep_alive_s = self.keep_alive_s
        _log.info("model %s was stopped", model)


def _sum(models: Iterable[PooledClient]) -> int:
    return sum(model.plan.num_bytes for model in models)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
