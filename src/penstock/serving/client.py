"""The engine as asyncio sees it: submit, cancel, stats; restarted when its process dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from penstock.config import EngineConfig, TenantConfig, as_tenants
from penstock.core.types import Arrive, Cancel, Event, Output, Reconfigure, Request
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.serving.intake import EngineUnavailable, RequestClient, WaitingRoom
from penstock.serving.logs import LogFormat
from penstock.serving.messages import (
    AuditFinding,
    DraftOrders,
    EngineStats,
    Events,
    Outputs,
    Ready,
    RemoteDraft,
    StatsRequest,
)
from penstock.serving.process import Supervisor
from penstock.serving.quotas import Quotas

_STATS_WAIT_S = 1.0
_DIED = (
    "the engine process died while it was working on this request; it is being restarted, try again"
)


def waiting_limits(tenants: Mapping[str, TenantConfig]) -> dict[str, int]:
    """Places in the waiting room of tenants that have a limit of their own."""
    limits = {name: t.max_waiting_requests for name, t in tenants.items()}
    return {name: most for name, most in limits.items() if most is not None}


class DraftServers(Protocol):
    """The draft servers that are connected. drafters: their names, as the scheduler has them."""

    tenants: Mapping[str, TenantConfig]

    @property
    def drafters(self) -> tuple[str, ...]: ...
    def on_outputs(self, outputs: Sequence[Output]) -> None: ...
    def on_orders(self, orders: DraftOrders) -> None: ...
    def on_finding(self, finding: AuditFinding) -> None: ...
    def on_engine_lost(self) -> None: ...
    def on_drain(self) -> None: ...


class EngineClient(RequestClient):
    """Requests of one engine process, which is kept running.

    max_waiting: requests that may be without a first output at once
    factory: what the process builds its engine with, "package.module:function"
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int,
        factory: str = LOAD_ENGINE,
        log_format: LogFormat = "text",
    ) -> None:
        super().__init__(
            WaitingRoom(max_waiting, waiting_limits(config.tenants)), Quotas(config.tenants)
        )
        self._changed: Reconfigure | None = None
        self._supervisor = Supervisor(factory, config, self, log_format)
        self._info: Ready | None = None
        self._last_failure = "the engine is not running"
        self._events: list[Event | RemoteDraft] = []
        self._draft_servers: DraftServers | None = None
        self._stats: EngineStats | None = None
        self._stats_asked: list[asyncio.Future[EngineStats | None]] = []

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the process and wait until its engine is loaded. Raises: EngineFailed."""
        await self._supervisor.start()
        return self.info

    async def drain(self, grace_s: float) -> None:
        self._stopping = True
        if self._draft_servers is not None:
            self._draft_servers.on_drain()
        self._supervisor.stop_restarting()
        await super().drain(grace_s)

    async def close(self) -> None:
        """End the process now. Requests that still run get an error."""
        await super().drain(0.0)
        await self._supervisor.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def info(self) -> Ready:
        """Raises: EngineUnavailable before the engine has been loaded for the first time."""
        if self._info is None:
            raise EngineUnavailable(self._last_failure)
        return self._info

    @property
    def drafters(self) -> tuple[str, ...]:
        """The engine's own, and the draft servers that are connected."""
        remote = () if self._draft_servers is None else self._draft_servers.drafters
        return (*self.info.drafters, *remote)

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        process = self._supervisor.process
        return None if process is None else process.pid

    @property
    def _failure(self) -> str | None:
        return None if self._ready.is_set() else self._last_failure

    # --- requests -------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self.post(Arrive(request))

    def _stop(self, request_id: str) -> None:
        self.post(Cancel(request_id))

    async def stats(self) -> EngineStats | None:
        """A fresh snapshot, the last one if the engine is slow to answer, None while it is away."""
        if not self._ready.is_set():
            return None
        answer: asyncio.Future[EngineStats | None] = asyncio.get_running_loop().create_future()
        self._stats_asked.append(answer)
        self._supervisor.send(StatsRequest())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, _STATS_WAIT_S)
        return self._stats

    def post(self, event: Event | RemoteDraft) -> None:
        """Queue an event; all of one pass of the event loop go up as one message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = tuple(self._events), []
        if events:
            self._supervisor.send(Events(events))

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Let tenants have these settings from now on; requests that run go on. The engine of one
        that is not named any more keeps its share for what it still has open."""
        self.room.change_limits(waiting_limits(tenants))
        self.quotas.change(tenants)
        self._changed = Reconfigure(tuple(as_tenants(tenants)))
        self.post(self._changed)
        if self._draft_servers is not None:
            self._draft_servers.tenants = tenants

    # --- what the engine says -------------------------------------------------------------------

    def follow(self, draft_servers: DraftServers) -> None:
        """Tell draft servers what comes from now on."""
        self._draft_servers = draft_servers

    def on_message(self, message: object) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._route(output)
            if self._draft_servers is not None:
                self._draft_servers.on_outputs(message.outputs)
        elif isinstance(message, DraftOrders):
            if self._draft_servers is not None:
                self._draft_servers.on_orders(message)
        elif isinstance(message, AuditFinding):
            if self._draft_servers is not None:
                self._draft_servers.on_finding(message)
        elif isinstance(message, EngineStats):
            self._stats = message
            self._answer_stats()

    def _answer_stats(self) -> None:
        for answer in self._stats_asked:
            if not answer.done():
                answer.set_result(self._stats)
        self._stats_asked.clear()

    # --- what becomes of its process ------------------------------------------------------------

    def on_ready(self, info: Ready, load_s: float) -> None:
        self._info = info
        self._retry_after_s = load_s
        if self._changed is not None:
            # A process that was started before is told again.
            self.post(self._changed)
        self._ready.set()

    def on_silence(self, is_silent: bool) -> None:
        """No requests are taken meanwhile. One that is only slow is ready again later."""
        if is_silent:
            self._last_failure = "the engine gives no sign of life"
            self._ready.clear()
        else:
            self._ready.set()

    def on_lost(self, failure: str) -> None:
        self._last_failure = failure
        self._ready.clear()
        self._events.clear()
        self._stats = None
        if self._draft_servers is not None:
            self._draft_servers.on_engine_lost()
        self._fail_all(_DIED)
        self._answer_stats()
