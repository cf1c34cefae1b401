"""Engine process for asyncio: start, connection, watchdog, restart."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import pickle
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Protocol, Self

from penstock.config import EngineConfig
from penstock.serving.fork_context import fork_context
from penstock.serving.logs import LogFormat
from penstock.serving.messages import HEADER, Failed, Heartbeat, Ready, Stop, frame
from penstock.serving.worker import HEARTBEATS_PER_TIMEOUT, run_engine

_EXIT_S = 3.0
"""Seconds before a process is killed that was told to stop, or has closed its socket."""
_EXIT_WITH_WORKERS_S = 15.0
"""The same with vLLM's workers, which vLLM gives 5 s, and 4 s after SIGTERM."""
_SILENT_BEATS = 5
"""Missed heartbeats after which the process counts as silent."""
_LONGEST_STEP_S = 600.0
"""Compilation of kernels in a step takes minutes on a new machine."""

# Delays between restarts, and the life of a process that resets them; conventions.
_FIRST_DELAY_S, _LONGEST_DELAY_S, _STABLE_S = 0.2, 30.0, 60.0

_log = logging.getLogger(__name__)


class EngineFailed(Exception):
    """The engine could not be loaded. The message is one line."""


def is_forked(config: EngineConfig) -> bool:
    """Return whether an engine's process is forked from one that has loaded the libraries.

    Not with a GPU, since a process that has touched the driver must not be forked, nor with vLLM,
    which starts its own processes."""
    devices = [config.device, *(d.device or "" for d in config.drafters.values())]
    return config.vllm is None and not any(name.startswith("cuda") for name in devices)


def _exit_seconds(config: EngineConfig) -> float:
    return _EXIT_S if config.vllm is None else _EXIT_WITH_WORKERS_S


def _context(factory: str, config: EngineConfig) -> SpawnContext | ForkServerContext:
    return fork_context(factory) if is_forked(config) else multiprocessing.get_context("spawn")


class EngineProcess:
    """Starts the process, exchanges messages with it, and notices its end.

    exit_s: time to end after being told to stop, or after closing its socket. ready: result of
    loading; always resolved in the end. gone: set when the process has closed its socket."""

    def __init__(self, process: multiprocessing.process.BaseProcess, exit_s: float) -> None:
        self.ready: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._process = process
        self._exit_s = exit_s
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls,
        factory: str,
        config: EngineConfig,
        on_message: Callable[[object], None],
        log_format: LogFormat = "text",
    ) -> Self:
        """Start a process that builds its engine with `factory` ("package.module:function")."""
        ours, theirs = socket.socketpair()
        with Connection(theirs.detach()) as connection:
            process = _context(factory, config).Process(
                target=run_engine,
                args=(connection, factory, config, log_format),
                name="penstock-engine",
            )
            # The first start waits for the libraries.
            await asyncio.to_thread(process.start)
        # At exit multiprocessing joins its children forever, a forgotten one too.
        atexit.register(process.kill)
        self = cls(process, _exit_seconds(config))
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            raise
        self._reading = asyncio.create_task(self._read(reader, on_message))
        return self

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def stop(self) -> None:
        """Tell the process to stop, and kill it if it does not."""
        self.send(Stop())
        await self.reap()

    def kill(self) -> None:
        self._process.kill()

    async def reap(self) -> int | None:
        """Wait for the process to end, or kill it; returns its exit code."""
        await asyncio.to_thread(self._process.join, self._exit_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        atexit.unregister(self._process.kill)
        if self._writer is not None:
            self._writer.close()
        return self._process.exitcode

    async def _read(
        self, reader: asyncio.StreamReader, on_message: Callable[[object], None]
    ) -> None:
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                message = pickle.loads(await reader.readexactly(size))
                if isinstance(message, Ready | Failed):
                    self._resolve(message)
                else:
                    on_message(message)
        except (EOFError, OSError):
            """The process has closed its socket."""
        except Exception:
            _log.exception("an error ends the connection to the engine process")
        finally:
            if self._writer is not None:
                self._writer.close()
            self._resolve(Failed("the engine process ended while it was loading"))
            self.gone.set()

    def _resolve(self, answer: Ready | Failed) -> None:
        if not self.ready.done():
            self.ready.set_result(answer)


class Watchdog:
    """Detects a frozen engine process by its heartbeats.

    limit_s: time without a beat after which a process is given up. on_change: called with True when
    the process falls silent, and with False when it beats again."""

    def __init__(self, limit_s: float, on_change: Callable[[bool], None]) -> None:
        self._limit_s = limit_s
        self._on_change = on_change
        self._num_silent = 0
        self._step_s = 0.0
        self._has_begun = False
        self.is_silent = False

    def heard(self, beat: Heartbeat) -> None:
        self._has_begun = True
        self._num_silent = 0
        self._step_s = beat.step_s
        if self.is_silent:
            self.is_silent = False
            self._on_change(False)

    async def until_frozen(self) -> str:
        """Return why the process is to be given up, once it is.

        Counts the beats due while this process ran, not seconds: a sleeping machine stops both.
        Loading has begun with the first beat."""
        while True:
            await asyncio.sleep(self._limit_s / HEARTBEATS_PER_TIMEOUT)
            if self._step_s > _LONGEST_STEP_S:
                return f"is stuck in a step of {self._step_s:.0f} s"
            self._num_silent += self._has_begun
            if self._num_silent > HEARTBEATS_PER_TIMEOUT:
                return f"has given no sign of life for {self._limit_s:g} s"
            if self._num_silent > _SILENT_BEATS and not self.is_silent:
                self.is_silent = True
                self._on_change(True)


class EngineListener(Protocol):
    """Listener of an engine process: messages and state changes."""

    def on_message(self, message: object) -> None: ...
    def on_ready(self, info: Ready, load_s: float) -> None: ...
    def on_silence(self, is_silent: bool) -> None: ...
    def on_lost(self, failure: str) -> None: ...


class Supervisor:
    """Keeps one engine process running: restarts a dead one, kills a frozen one."""

    def __init__(
        self,
        factory: str,
        config: EngineConfig,
        listener: EngineListener,
        log_format: LogFormat = "text",
    ) -> None:
        self._log_format: LogFormat = log_format
        self.process: EngineProcess | None = None
        self.num_restarts = 0
        self._factory = factory
        self._config = config
        self._listener = listener
        self._watchdog = Watchdog(config.heartbeat_timeout_s, self._on_silence)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the process and wait until its engine is loaded. Raises: EngineFailed."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._task = asyncio.create_task(self._supervise(loaded))
        await asyncio.wait((loaded, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            await self._task
        loaded.result()

    def send(self, message: object) -> None:
        if self.process is not None:
            self.process.send(message)

    def stop_restarting(self) -> None:
        """Restart no more, and kill a silent process, as the server is about to end."""
        self._stopping = True
        if self.process is not None and self._watchdog.is_silent:
            self.process.kill()

    async def close(self) -> None:
        """End the process now; `start` begins another."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.process is not None:
            await self.process.stop()
            self.process = None

    def _on_message(self, message: object) -> None:
        if isinstance(message, Heartbeat):
            self._watchdog.heard(message)
        else:
            self._listener.on_message(message)

    def _on_silence(self, is_silent: bool) -> None:
        if self.process is None or not self.process.ready.done():
            return
        if is_silent and self._stopping:
            self.process.kill()
        else:
            self._listener.on_silence(is_silent)

    async def _supervise(self, loaded: asyncio.Future[None]) -> None:
        """Keep a process running. Only a failure of the very first start is final."""
        clock = asyncio.get_running_loop().time
        delay = _FIRST_DELAY_S
        while True:
            started_at = clock()
            failure = await self._run_process(loaded)
            if not loaded.done():
                loaded.set_exception(EngineFailed(failure))
                return
            if self._stopping:
                return
            if clock() - started_at > _STABLE_S:
                delay = _FIRST_DELAY_S
            _log.error("%s; restarting it in %.1f s", failure, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)
            self.num_restarts += 1

    async def _run_process(self, loaded: asyncio.Future[None]) -> str:
        """Run one process from start to end; returns why it ended."""
        started_at = asyncio.get_running_loop().time()
        self._watchdog = Watchdog(self._config.heartbeat_timeout_s, self._on_silence)
        try:
            process = await EngineProcess.spawn(
                self._factory, self._config, self._on_message, self._log_format
            )
        except (OSError, EOFError) as error:
            return f"the engine process cannot be started: {error}"
        self.process = process
        watch = asyncio.create_task(self._kill_when_frozen(process, self._watchdog))
        try:
            answer = await process.ready
            if isinstance(answer, Failed):
                self._listener.on_lost(f"the engine cannot be restarted: {answer.message}")
                is_killed = await process.reap() == -signal.SIGKILL
                # By Linux, mostly.
                return f"{answer.message}{', killed as if memory ran out' * is_killed}"
            self._listener.on_ready(answer, asyncio.get_running_loop().time() - started_at)
            if not loaded.done():
                loaded.set_result(None)
            await process.gone.wait()
            self._listener.on_lost("the engine process died and is being restarted")
            return f"the engine process died (exit code {await process.reap()})"
        finally:
            watch.cancel()

    async def _kill_when_frozen(self, process: EngineProcess, watchdog: Watchdog) -> None:
        _log.error("the engine %s; killing it", await watchdog.until_frozen())
        process.kill()
