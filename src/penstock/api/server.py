"""The server process from start to end: socket, engine, application, signals."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from penstock.api.app import create_app
from penstock.config import ConfigError, ServeConfig
from penstock.serving.client import LOAD_ENGINE, EngineClient

_CLOSING_S = 5
"""After the grace period: for cancelled requests to say so to their clients."""


async def serve(
    config: ServeConfig, announce: Callable[[str], None], factory: str = LOAD_ENGINE
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends it at once.

    announce: called with the address when requests are taken
    factory:  what the engine process builds its engine with, "package.module:function"

    Raises: ConfigError where the address cannot be had, EngineFailed where the engine cannot be
    loaded.
    """
    with _bind(config.host, config.port) as sock:
        client = EngineClient(
            config.engine, max_waiting=config.max_waiting_requests, factory=factory
        )
        try:
            # The tokenizer's library takes seconds to import; the engine loads meanwhile.
            library = asyncio.to_thread(importlib.import_module, "penstock.engine.tokenizer")
            engine, tokenizers = await asyncio.gather(client.start(), library)
            app = create_app(config, client, tokenizers.load_tokenizer(engine.tokenizer_path))
            server = _Server(app, client, config, lambda: announce(_address(config.host, sock)))
            # As in the engine process: what is loaded stays, and need not be walked again.
            gc.collect()
            gc.freeze()
            await server.serve(sockets=[sock])
        finally:
            await client.close()


class _Server(uvicorn.Server):
    """uvicorn, with the engine's requests drained while it waits for connections to close."""

    def __init__(
        self,
        app: FastAPI,
        client: EngineClient,
        config: ServeConfig,
        on_started: Callable[[], None],
    ) -> None:
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(config.shutdown_grace_s) + _CLOSING_S,
        )
        super().__init__(settings)
        self._client = client
        self._grace_s = config.shutdown_grace_s
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises: ConfigError where somebody else listens on the address by now."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror}") from error
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._client.drain(self._grace_s))
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            asyncio.get_running_loop().call_soon_threadsafe(self._abort)
        self.should_exit = True

    def _abort(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything is loaded. Raises: ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def _address(host: str, sock: socket.socket) -> str:
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
