"""Reloading of tenants and keys while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextvars import Context

from penstock.api.http import ApiKeys
from penstock.config import ConfigError, EngineConfig, ServeConfig
from penstock.serving.client import EngineClient
from penstock.serving.pool import ModelPool

_log = logging.getLogger(__name__)

_KEPT = {"engine", "models", "tenants", "metrics_keys"}
"""Settings that are reloaded, and what holds them; they need no restart."""


class Reload:
    """Applies changed tenants and keys, or none of them if there is an error.

    Other settings need a restart; the log names those that changed.
    """

    def __init__(
        self,
        config: ServeConfig,
        read_again: Callable[[], ServeConfig],
        client: EngineClient | ModelPool,
        api_keys: ApiKeys,
    ) -> None:
        self._config = config
        self._read_again = read_again
        self._client = client
        self._api_keys = api_keys
        self._turn = asyncio.Lock()
        engine = config.engine
        self._counts_service = bool(engine.fairness) or _is_limited(engine)
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Reload in a task, after earlier reloads."""
        # A signal may arrive during a request; an empty context keeps its id out of the log.
        task = asyncio.create_task(self.run(), context=Context())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def run(self) -> None:
        """Reload, and log the outcome in one line."""
        async with self._turn:
            try:
                new = await asyncio.to_thread(self._read_again)
                self._check(new)
            except ConfigError as error:
                _log.error("the settings are not taken over, the old ones hold: %s", error)
                return
            waiting = [*_changed(self._config, new)]
            self._take_over(new)
        tenants = new.engine.tenants.values()
        _log.info(
            "settings read again: %d tenants, %d API keys%s",
            len(tenants),
            sum(len(t.api_keys) for t in tenants),
            f"; these wait for a restart: {', '.join(waiting)}" if waiting else "",
        )

    def _check(self, new: ServeConfig) -> None:
        if _has_keys(self._config) and not _has_keys(new):
            raise ConfigError(
                "there is no API key any more, which would open the server to all clients; "
                "restart it if that is intended"
            )
        if not self._counts_service and _is_limited(new.engine):
            raise ConfigError(
                "max_running_requests was not set when the server started without fairness; "
                "restart it"
            )

    def _take_over(self, new: ServeConfig) -> None:
        # Without await: no request sees half of it.
        tenants = new.engine.tenants
        self._client.reconfigure(tenants)
        self._api_keys.change(tenants, new.metrics_keys)
        engine = self._config.engine.model_copy(update={"tenants": tenants})
        self._config = self._config.model_copy(
            update={"engine": engine, "metrics_keys": new.metrics_keys}
        )


def _has_keys(config: ServeConfig) -> bool:
    return any(tenant.api_keys for tenant in config.engine.tenants.values())


def _is_limited(engine: EngineConfig) -> bool:
    return any(t.max_running_requests is not None for t in engine.tenants.values())


def _changed(old: ServeConfig, new: ServeConfig) -> Iterator[str]:
    """Yield the names of changed settings that need a restart."""
    for prefix, before, after in (("", old, new), ("engine.", old.engine, new.engine)):
        for name in type(before).model_fields:
            if name not in _KEPT and getattr(before, name) != getattr(after, name):
                yield prefix + name
