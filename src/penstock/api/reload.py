"""Settings of tenants that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextvars import Context

from penstock.api.prepare import ApiKeys
from penstock.config import ConfigError, EngineConfig, ServeConfig
from penstock.serving.client import EngineClient

_log = logging.getLogger(__name__)

_KEPT = {"engine", "tenants", "metrics_keys"}
"""Settings that are not compared: those that are taken over, and what holds them."""


class Reload:
    """Takes over tenants and keys from settings that are read again: all of them or, where a
    mistake is found, none. Other settings need a restart, and the log says which ones wait for it.

    config: in force now
    """

    def __init__(
        self,
        config: ServeConfig,
        read_again: Callable[[], ServeConfig],
        client: EngineClient,
        api_keys: ApiKeys,
    ) -> None:
        self._config = config
        self._read_again = read_again
        self._client = client
        self._api_keys = api_keys
        self._turn = asyncio.Lock()
        engine = config.engine
        self._counts_service = engine.fairness or _is_limited(engine)
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin; what was begun before is finished first."""
        # A signal may come amid a request, whose id must not be in the log for this.
        task = asyncio.create_task(self.run(), context=Context())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def run(self) -> None:
        """Read, and take over. Says in one line of the log what came of it."""
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
        """Raises: ConfigError."""
        if _has_keys(self._config) and not _has_keys(new):
            raise ConfigError(
                "there is no API key any more, which would open the server to everybody; restart "
                "it if that is meant"
            )
        if not self._counts_service and _is_limited(new.engine):
            raise ConfigError(
                "max_running_requests was not set when the server started without fairness; "
                "restart it"
            )

    def _take_over(self, new: ServeConfig) -> None:
        """In one pass of the event loop: no request sees half of it."""
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
    """Settings that differ, and are not taken over."""
    for prefix, before, after in (("", old, new), ("engine.", old.engine, new.engine)):
        for name in type(before).model_fields:
            if name not in _KEPT and getattr(before, name) != getattr(after, name):
                yield prefix + name
