"""One incarnation of the engine process, as asyncio sees it."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Self, cast

from penstock.config import EngineConfig
from penstock.serving.messages import Deframer, Failed, Ready, Stop, frame
from penstock.serving.worker import run_engine

_EXIT_S = 3.0
"""A process that has been told to stop, or has closed its socket, is killed after this long."""


def _context(factory: str, config: EngineConfig) -> SpawnContext | ForkServerContext:
    """Where processes come from. Importing the libraries is most of an engine's start: they are
    imported once, in a process from which each engine is forked. On a GPU each imports its own,
    since no library that has touched the driver may be forked.
    """
    if config.device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.serving.fork_server", factory.partition(":")[0]])
    return context


class EngineProcess(asyncio.Protocol):
    """Starts the process, sends to it, hands on what it says, and notices its end.

    ready: what became of loading; always resolved in the end
    gone:  set when the process has closed its socket, for whatever reason
    """

    def __init__(self, on_message: Callable[[object], None]) -> None:
        self.ready: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._on_message = on_message
        self._deframer = Deframer()
        self._transport: asyncio.Transport | None = None
        self._process: multiprocessing.process.BaseProcess | None = None

    @classmethod
    async def spawn(
        cls, factory: str, config: EngineConfig, on_message: Callable[[object], None]
    ) -> Self:
        """Start a process that builds its engine with `factory` ("package.module:function")."""
        self = cls(on_message)
        ours, theirs = socket.socketpair()
        process = _context(factory, config).Process(
            target=run_engine, args=(theirs, factory, config), name="penstock-engine"
        )
        # The first one waits for the libraries.
        await asyncio.to_thread(process.start)
        theirs.close()
        # At exit multiprocessing joins its children for ever; a forgotten one must not hang that.
        atexit.register(process.kill)
        self._process = process
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException:
            process.kill()
            raise
        return self

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send(self, message: object) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    async def stop(self) -> None:
        """Tell the process to stop, and see to it that it does."""
        self.send(Stop())
        await self.reap()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def reap(self) -> int | None:
        """Wait for the process to end, killing it if it does not; returns its exit code."""
        process = self._process
        if process is None:
            return None
        await asyncio.to_thread(process.join, _EXIT_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)
        atexit.unregister(process.kill)
        if self._transport is not None:
            self._transport.close()
        return process.exitcode

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._deframer.feed(data):
            if isinstance(message, Ready | Failed):
                self._resolve(message)
            else:
                self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._resolve(Failed("the engine process ended while it was loading"))
        self.gone.set()

    def _resolve(self, answer: Ready | Failed) -> None:
        """Settle `ready`, unless it is settled or whoever awaited it was cancelled."""
        if not self.ready.done():
            self.ready.set_result(answer)
