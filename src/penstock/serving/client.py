"""The engine as asyncio sees it: submit, cancel, stats; restarted when its process dies."""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self

from penstock.config import EngineConfig, TenantConfig, as_tenants
from penstock.core.types import (
    Arrive,
    AuditFinding,
    Cancel,
    Event,
    FinishReason,
    Output,
    Reconfigure,
    Request,
)
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.serving.limits import (
    NotAllowed,
    QueueFull,
    Quotas,
    RateLimited,
    RequestRejected,
    WaitingRoom,
)
from penstock.serving.logs import LogFormat
from penstock.serving.messages import (
    DraftOrders,
    EngineStats,
    Events,
    Outputs,
    Ready,
    RemoteDraft,
    StatsRequest,
)
from penstock.serving.process import Supervisor

_READY_WAIT_S = 30.0
_STOPPED = "the server was stopped before this request was finished"
_STATS_WAIT_S = 1.0
_DIED = (
    "the engine process died while it was working on this request; it is being restarted, try again"
)


class EngineUnavailable(RequestRejected):
    """The engine takes no requests now."""


class Unsupported(Exception):
    """A request that this engine can never serve; one line."""


class OutputSink(Protocol):
    """Receiver of a request's outputs."""

    def put(self, output: Output) -> None: ...


class OutputStream:
    """Outputs of some requests as they come, until all have finished. Leaving cancels the rest.

    Iteration raises: QueueFull, EngineUnavailable from an engine that requests were forwarded to;
    TimeoutError after `expire`."""

    def __init__(self, client: RequestClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[Output | RequestRejected | TimeoutError] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    def expire(self) -> None:
        """Cancel unfinished requests after their time limit."""
        for request_id in self._open:
            self._client.cancel(request_id)
        self.fail(TimeoutError())

    def fail(self, error: RequestRejected | TimeoutError) -> None:
        """Pass on that a request was refused late, or will not be finished."""
        self._outputs.put_nowait(error)

    def cancel(self, request_id: str) -> None:
        """Cancel a request, which frees its blocks."""
        self._open.discard(request_id)
        self._client.cancel(request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while self._open:
            output = await self._outputs.get()
            if not isinstance(output, Output):
                raise output
            if output.request_id not in self._open:
                continue
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
            return output
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for request_id in tuple(self._open):
            self.cancel(request_id)


class RequestClient(ABC):
    """Submits requests to an engine, or over a link to one, and routes their outputs."""

    def __init__(self, room: WaitingRoom, quotas: Quotas | None = None) -> None:
        self.room = room
        self.quotas = quotas or Quotas()
        self.refused: Counter[tuple[str, str]] = Counter()
        """Refused requests by (tenant, reason): `queue_full`, `rate_limit` or `tenant_limit`.

        The first two may be sent again, the last one never."""
        self._retry_after_s = 0.0
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._sinks: dict[str, OutputSink] = {}
        self.keep_alive_s = math.inf
        """Time without a request after which the engine is stopped, if it may be."""

    @property
    @abstractmethod
    def info(self) -> Ready:
        """Description of the engine. Raises: EngineUnavailable before it is known."""

    @property
    @abstractmethod
    def drafters(self) -> tuple[str, ...]:
        """Names that a request may give."""

    @property
    @abstractmethod
    def num_restarts(self) -> int:
        """Restarts of the engine, or of the link to it."""

    @property
    @abstractmethod
    def _failure(self) -> str | None:
        """Reason why no requests can be served now, apart from shutting down."""

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Send a request whose outputs have a sink."""

    @abstractmethod
    def _stop(self, request_id: str) -> None:
        """Cancel a request in the engine; its sink is gone already."""

    def _fault_of(self, request: Request) -> str | None:
        """Return the reason why a request can never be served here, if so."""
        return None

    def _check(self, requests: Iterable[Request]) -> None:
        """Raises: Unsupported."""
        for fault in filter(None, map(self._fault_of, requests)):
            raise Unsupported(fault)

    @property
    def problem(self) -> str | None:
        """Reason why no requests can be served now, or None."""
        return "the server is shutting down" if self._stopping else self._failure

    @property
    def is_open(self) -> bool:
        """True if a request can be submitted without waiting."""
        return self.problem is None

    @property
    def num_open(self) -> int:
        """Unfinished requests."""
        return len(self._sinks)

    async def submit(
        self, client: str, requests: Sequence[Request], within_s: float | None = None
    ) -> OutputStream:
        """Submit requests, after waiting a while for an engine that is away.

        client: holder of their places in the waiting room; within_s: as in `WaitingRoom.enter`.
        Raises: QueueFull, EngineUnavailable, RateLimited, NotAllowed, Unsupported."""
        ids = [request.id for request in requests]
        self._enter(client, requests, within_s)
        try:
            await self._wait_until_ready(within_s)
            self._check(requests)
        except BaseException:
            self._leave(ids)
            raise
        stream = OutputStream(self, ids)
        self._open(requests, stream)
        return stream

    def submit_now(self, client: str, request: Request, sink: OutputSink) -> None:
        """Submit a request to an engine that is ready. Raises: as `submit`."""
        self._check_ready()
        self._check([request])
        self._enter(client, [request])
        self._open([request], sink)

    def cancel(self, request_id: str) -> None:
        """Forget a request, and let the engine free its blocks."""
        if request_id in self._sinks:
            self._forget(request_id)
            self._stop(request_id)

    def sink_of(self, request_id: str) -> OutputSink | None:
        """Return the sink of an unfinished request, if there is such a request."""
        return self._sinks.get(request_id)

    async def stats(self) -> EngineStats | None:
        """Return a snapshot, or None while there is none."""
        return None

    async def load(self) -> None:
        """Wait until the engine runs. Raises: EngineUnavailable."""
        await self._wait_until_ready(None)

    async def drain(self, grace_s: float) -> None:
        """Take no more requests; cancel unfinished ones after `grace_s` seconds."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._fail_all(_STOPPED)

    def _enter(
        self, client: str, requests: Sequence[Request], within_s: float | None = None
    ) -> None:
        """Raises: QueueFull, RateLimited, NotAllowed."""
        ids = [request.id for request in requests]
        reason = "queue_full"
        try:
            self.room.enter(client, ids, within_s)
            reason = "rate_limit"
            self.quotas.charge(requests)
        except (QueueFull, RateLimited, NotAllowed) as error:
            self.room.leave(ids)
            if isinstance(error, NotAllowed):
                reason = "tenant_limit"
            self.refused[requests[0].tenant, reason] += len(requests)
            raise

    def _leave(self, request_ids: Iterable[str]) -> None:
        """Return the places and quota of requests that were refused or have ended."""
        self.room.leave(request_ids)
        for request_id in request_ids:
            self.quotas.end(request_id)

    async def _wait_until_ready(self, within_s: float | None) -> None:
        if self.problem is not None and not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _READY_WAIT_S)
        self._check_ready()

    def _check_ready(self) -> None:
        if self.problem is not None:
            raise EngineUnavailable(self.problem, self._retry_after_s)

    def _open(self, requests: Sequence[Request], sink: OutputSink) -> None:
        self._sinks.update((request.id, sink) for request in requests)
        self._idle.clear()
        for request in requests:
            self._start(request)

    def _route(self, output: Output) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return
        self.room.answered(output.request_id)
        self.quotas.put_out(output.request_id, len(output.token_ids))
        if output.finish_reason is not None:
            self._forget(output.request_id)
        sink.put(output)

    def _forget(self, request_id: str) -> None:
        del self._sinks[request_id]
        self._leave([request_id])
        if not self._sinks:
            self._idle.set()

    def _fail_all(self, error: str) -> None:
        """End every open request; the engine is told to cancel them."""
        for request_id, sink in list(self._sinks.items()):
            self.cancel(request_id)
            sink.put(Output(request_id, finish_reason=FinishReason.CANCELLED, error=error))


def waiting_limits(tenants: Mapping[str, TenantConfig]) -> dict[str, int]:
    """Return places in the waiting room of tenants that have a limit of their own."""
    limits = {name: t.max_waiting_requests for name, t in tenants.items()}
    return {name: most for name, most in limits.items() if most is not None}


class DraftServers(Protocol):
    """Connected draft servers. drafters: their names in the scheduler."""

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

    max_waiting: limit of requests without a first output
    factory: "package.module:function" that builds the engine in its process"""

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

    async def stop(self) -> None:
        """End the process, which has no requests; `start` begins another."""
        await self._supervisor.close()
        self.on_lost("the engine is not running")

    async def drain(self, grace_s: float) -> None:
        self._stopping = True
        if self._draft_servers is not None:
            self._draft_servers.on_drain()
        self._supervisor.stop_restarting()
        await super().drain(grace_s)

    async def close(self) -> None:
        """End the process now. Unfinished requests get an error."""
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
        """The engine's own drafters and the connected draft servers."""
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
        """Return a fresh snapshot, the last one if the engine is slow, None while it is away."""
        if not self._ready.is_set():
            return None
        answer: asyncio.Future[EngineStats | None] = asyncio.get_running_loop().create_future()
        self._stats_asked.append(answer)
        self._supervisor.send(StatsRequest())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, _STATS_WAIT_S)
        return self._stats

    def post(self, event: Event | RemoteDraft) -> None:
        """Queue an event; all of one pass of the event loop are sent as one message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = tuple(self._events), []
        if events:
            self._supervisor.send(Events(events))

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Change the settings of tenants; unfinished requests go on.

        In the engine, a tenant that is no longer named keeps its share for its open requests."""
        self.room.change_limits(waiting_limits(tenants))
        self.quotas.change(tenants)
        self._changed = Reconfigure(tuple(as_tenants(tenants)))
        self.post(self._changed)
        if self._draft_servers is not None:
            self._draft_servers.tenants = tenants

    # --- what the engine says -------------------------------------------------------------------

    def follow(self, draft_servers: DraftServers) -> None:
        """Pass messages on to draft servers from now on."""
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
        """Take no requests while the engine is silent; a slow one is ready again later."""
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
