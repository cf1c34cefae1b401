"""The engine as asyncio sees it: submit, cancel, stats; restarted when its process dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from penstock.config import EngineConfig
from penstock.core.types import Arrive, Cancel, Event, FinishReason, Output, Request
from penstock.serving.messages import (
    AuditFinding,
    DraftOrders,
    EngineStats,
    Events,
    Heartbeat,
    Outputs,
    Ready,
    RemoteDraft,
    StatsRequest,
)
from penstock.serving.ports import RequestClient
from penstock.serving.process import EngineProcess
from penstock.serving.refusals import EngineUnavailable, NotTaken
from penstock.serving.waiting_room import WaitingRoom
from penstock.serving.watchdog import Watchdog

LOAD_ENGINE = "penstock.engine.build:load_engine"
"""The factory of the real engine; named, so that only its own process imports torch."""

_RESTART_WAIT_S = 30.0
_STATS_WAIT_S = 1.0
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0
_STABLE_S = 60.0

_DIED = (
    "the engine process died while it was working on this request; it is being restarted, try again"
)
_SILENT = "the engine gives no sign of life"
_STOPPED = "the server was stopped before this request was finished"

_log = logging.getLogger(__name__)


class EngineFailed(Exception):
    """The engine could not be loaded; one line."""


class OutputSink(Protocol):
    """Where a request's outputs go."""

    def put(self, output: Output) -> None: ...


class EngineListener(Protocol):
    """Follows the engine for the draft servers."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that are connected."""
        ...

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """Outputs of one turn, after each has gone to its request's sink."""
        ...

    def on_orders(self, orders: DraftOrders) -> None: ...

    def on_finding(self, finding: AuditFinding) -> None: ...

    def on_engine_lost(self) -> None:
        """All that the engine knew is gone."""
        ...

    def on_drain(self) -> None:
        """No more requests are taken."""
        ...


class OutputStream:
    """Outputs of some requests as they come, until all have finished. Leaving cancels the rest.

    Iteration raises: QueueFull, EngineUnavailable where the requests were handed on, and whoever
    they went to says so; TimeoutError after `expire`.
    """

    def __init__(self, client: RequestClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[Output | NotTaken | TimeoutError] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    def expire(self) -> None:
        """Cancel what is still open; there was no more time."""
        for request_id in self._open:
            self._client.cancel(request_id)
        self.fail(TimeoutError())

    def fail(self, error: NotTaken | TimeoutError) -> None:
        """A request was not taken after all, or will not be finished."""
        self._outputs.put_nowait(error)

    def cancel(self, request_id: str) -> None:
        """No more of this request; its blocks are freed."""
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for request_id in tuple(self._open):
            self.cancel(request_id)


class EngineClient:
    """Keeps one engine process running and routes its outputs.

    max_waiting: requests that may be without a first output at once
    factory: what the process builds its engine with, "package.module:function"
    """

    def __init__(
        self, config: EngineConfig, *, max_waiting: int, factory: str = LOAD_ENGINE
    ) -> None:
        limits = {name: t.max_waiting_requests for name, t in config.tenants.items()}
        self.room = WaitingRoom(max_waiting, {n: most for n, most in limits.items() if most})
        self._config = config
        self._factory = factory
        self._info: Ready | None = None
        self._failure = "the engine is not running"
        self._process: EngineProcess | None = None
        self._watchdog = Watchdog(config.heartbeat_timeout_s, self._on_silence)
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._streams: dict[str, OutputSink] = {}
        self._load_s = 0.0
        self._events: list[Event | RemoteDraft] = []
        self._listener: EngineListener | None = None
        self._stats: EngineStats | None = None
        self._stats_asked: list[asyncio.Future[EngineStats | None]] = []
        self.num_restarts = 0

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the process and wait until its engine is loaded. Raises: EngineFailed."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(loaded))
        await asyncio.wait((loaded, self._supervisor), return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            await self._supervisor
        loaded.result()
        return self.info

    async def drain(self, grace_s: float) -> None:
        """Take no more requests; cancel what still runs after `grace_s` seconds."""
        self._stopping = True
        if self._listener is not None:
            self._listener.on_drain()
        if self._process is not None and self._watchdog.is_silent:
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._fail_streams(FinishReason.CANCELLED, _STOPPED)

    async def close(self) -> None:
        """End the process now. Requests that still run get an error."""
        self._stopping = True
        self._fail_streams(FinishReason.CANCELLED, _STOPPED)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._process is not None:
            await self._process.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def info(self) -> Ready:
        """Raises: EngineUnavailable before the engine has been loaded for the first time."""
        if self._info is None:
            raise EngineUnavailable(self._failure)
        return self._info

    @property
    def drafters(self) -> tuple[str, ...]:
        """The engine's own, and the draft servers that are connected."""
        remote = () if self._listener is None else self._listener.drafters
        return (*self.info.drafters, *remote)

    @property
    def problem(self) -> str | None:
        """Why no requests can be served now, or None."""
        if self._stopping:
            return "the server is shutting down"
        return None if self._ready.is_set() else self._failure

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process is not None else None

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    # --- requests -------------------------------------------------------------------------------

    async def submit(self, client: str, requests: Sequence[Request]) -> OutputStream:
        """Hand requests to the engine, after waiting a while for it if it is being restarted.

        Raises: QueueFull, EngineUnavailable.
        """
        ids = [request.id for request in requests]
        self.room.enter(client, ids)
        try:
            await self._wait_until_ready()
        except BaseException:
            self.room.leave(ids)
            raise
        stream = OutputStream(self, ids)
        self._open(requests, stream)
        return stream

    def submit_now(self, client: str, request: Request, sink: OutputSink) -> None:
        """Hand a request to an engine that is ready. Raises: QueueFull, EngineUnavailable."""
        if self.problem is not None:
            raise EngineUnavailable(self.problem, self._load_s)
        self.room.enter(client, [request.id])
        self._open([request], sink)

    def _open(self, requests: Sequence[Request], sink: OutputSink) -> None:
        self._streams.update((request.id, sink) for request in requests)
        self._idle.clear()
        for request in requests:
            self.post(Arrive(request))

    def cancel(self, request_id: str) -> None:
        """Forget a request, and let the engine free its blocks."""
        if request_id in self._streams:
            self._forget(request_id)
            self.post(Cancel(request_id))

    def sink_of(self, request_id: str) -> OutputSink | None:
        """Where an unfinished request's outputs go; None if there is no such request."""
        return self._streams.get(request_id)

    async def stats(self) -> EngineStats | None:
        """A fresh snapshot, the last one if the engine is slow to answer, None while it is away."""
        if not self._ready.is_set() or self._process is None:
            return None
        answer: asyncio.Future[EngineStats | None] = asyncio.get_running_loop().create_future()
        self._stats_asked.append(answer)
        self._process.send(StatsRequest())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, _STATS_WAIT_S)
        return self._stats

    async def _wait_until_ready(self) -> None:
        if self.problem is not None and not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _RESTART_WAIT_S)
        if self.problem is not None:
            raise EngineUnavailable(self.problem, self._load_s)

    def post(self, event: Event | RemoteDraft) -> None:
        """Queue an event; all of one pass of the event loop go up as one message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = tuple(self._events), []
        if events and self._process is not None:
            self._process.send(Events(events))

    # --- what the engine says -------------------------------------------------------------------

    def follow(self, listener: EngineListener) -> None:
        """Tell `listener` what comes from now on."""
        self._listener = listener

    def _on_message(self, message: object) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._route(output)
            if self._listener is not None:
                self._listener.on_outputs(message.outputs)
        elif isinstance(message, DraftOrders):
            if self._listener is not None:
                self._listener.on_orders(message)
        elif isinstance(message, AuditFinding):
            if self._listener is not None:
                self._listener.on_finding(message)
        elif isinstance(message, Heartbeat):
            self._watchdog.heard(message)
        elif isinstance(message, EngineStats):
            self._stats = message
            self._answer_stats()

    def _route(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        self.room.answered(output.request_id)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        stream.put(output)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        self.room.leave([request_id])
        if not self._streams:
            self._idle.set()

    def _answer_stats(self) -> None:
        for answer in self._stats_asked:
            if not answer.done():
                answer.set_result(self._stats)
        self._stats_asked.clear()

    # --- supervision ----------------------------------------------------------------------------

    async def _supervise(self, loaded: asyncio.Future[None]) -> None:
        """Keep a process running. Only a failure of the very first start is final."""
        delay = _FIRST_DELAY_S
        while True:
            started_at = asyncio.get_running_loop().time()
            failure = await self._run_process(loaded)
            if not loaded.done():
                loaded.set_exception(EngineFailed(failure))
                return
            if self._stopping:
                return
            if asyncio.get_running_loop().time() - started_at > _STABLE_S:
                delay = _FIRST_DELAY_S
            _log.error("%s; restarting it in %.1f s", failure, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)
            self.num_restarts += 1

    async def _run_process(self, loaded: asyncio.Future[None]) -> str:
        """One process from start to end; returns why it ended."""
        started_at = asyncio.get_running_loop().time()
        self._watchdog = Watchdog(self._config.heartbeat_timeout_s, self._on_silence)
        try:
            process = await EngineProcess.spawn(self._factory, self._config, self._on_message)
        except (OSError, EOFError) as error:
            return f"the engine process cannot be started: {error}"
        self._process = process
        watch = asyncio.create_task(self._watch(process, self._watchdog))
        try:
            return await self._attend(process, loaded, started_at)
        finally:
            watch.cancel()

    async def _attend(
        self, process: EngineProcess, loaded: asyncio.Future[None], started_at: float
    ) -> str:
        answer = await process.ready
        if isinstance(answer, Ready):
            self._info = answer
            self._load_s = asyncio.get_running_loop().time() - started_at
            self._ready.set()
            if not loaded.done():
                loaded.set_result(None)
            await process.gone.wait()
            self._lose_engine("the engine process died and is being restarted")
            return f"the engine process died (exit code {await process.reap()})"
        self._lose_engine(f"the engine cannot be restarted: {answer.message}")
        await process.reap()
        return answer.message

    async def _watch(self, process: EngineProcess, watchdog: Watchdog) -> None:
        """Kill a process that is frozen."""
        _log.error("the engine %s; killing it", await watchdog.until_frozen())
        process.kill()

    def _on_silence(self, is_silent: bool) -> None:
        """No requests are taken meanwhile. One that is only slow is ready again later; at the end
        there is no time for that."""
        if self._info is None or self._process is None or not self._process.ready.done():
            return
        if is_silent and self._stopping:
            self._process.kill()
        elif is_silent:
            self._failure = _SILENT
            self._ready.clear()
        else:
            self._ready.set()

    def _lose_engine(self, failure: str) -> None:
        self._failure = failure
        self._ready.clear()
        self._events.clear()
        self._stats = None
        if self._listener is not None:
            self._listener.on_engine_lost()
        self._fail_streams(FinishReason.CANCELLED, _DIED)
        self._answer_stats()

    def _fail_streams(self, reason: FinishReason, error: str) -> None:
        """End every open request; where the engine lives it is told so."""
        for request_id, stream in list(self._streams.items()):
            self.cancel(request_id)
            stream.put(Output(request_id, finish_reason=reason, error=error))
