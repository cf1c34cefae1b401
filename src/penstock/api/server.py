"""The server process: socket, engine, application, signals."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from penstock.api.app import create_app
from penstock.api.front import Front, Pulled
from penstock.api.front_app import front_app
from penstock.api.http import Connection
from penstock.api.metrics import Metrics, RequestMeter
from penstock.api.reload import Reload
from penstock.api.service import loaded_tokenizer
from penstock.config import ConfigError, DraftersConfig, ServeConfig
from penstock.engine.models.checkpoint import is_gguf
from penstock.serving.client import EngineClient, RequestClient
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.serving.pool import ModelPool

if TYPE_CHECKING:
    from penstock.api.tracing import Tracer
    from penstock.engine.tokenizer import Tokenizer
    from penstock.serving.verification import VerificationServer

_CLOSING_S = 5
"""After the grace period, for the responses of cancelled requests."""


async def serve(
    config: ServeConfig,
    announce: Callable[[str], None],
    factory: str = LOAD_ENGINE,
    announce_drafters: Callable[[str], None] = lambda address: None,
    tell: Callable[[str], None] = lambda line: None,
    read_again: Callable[[], ServeConfig] | None = None,
    pulled: Pulled | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends it at once.

    SIGHUP reloads the settings with read_again, or ends the server without it.

    announce: called with the address when it serves
    factory:  builds the engine in its process, "package.module:function"
    announce_drafters: called with the address of draft servers when it is open
    tell: called with lines on the model and its use, before and after the address
    read_again: reads the settings again; may raise ConfigError
    pulled: as of `Front`

    Raises: ConfigError for the address or the tokenizer, EngineFailed if the engine fails to load.
    """
    if config.models:
        await _serve_several(Front(config, factory, pulled), announce, tell, read_again)
        return
    tracer = _tracer(config)
    with bind(config.host, config.port) as sock:
        listener = None if config.drafters is None else _draft_listener(config.drafters)
        client = EngineClient(
            config.engine,
            max_waiting=config.max_waiting_requests,
            factory=factory,
            log_format=config.log_format,
        )
        try:
            tokenizer = await _start(client, config.engine.target)
            app = create_app(config, client, tokenizer)
            app.state.metrics.tracer = tracer
            if listener is not None:
                await _listen(listener, config, client, app.state.metrics, tokenizer)
                announce_drafters(listener.address)
            reload = None
            if read_again is not None:
                reload = Reload(config, read_again, client, app.state.api_keys).start

            def on_started() -> None:
                address = address_of(config.host, sock)
                for line in _facts(app.state.metrics.model_name, config, client):
                    tell(line)
                announce(address)
                tell(_trial(client, address, config, tokenizer))
                threading.Thread(target=tokenizer.prepare_chats, daemon=True).start()

            server = HttpServer(app, client, config, on_started, reload)
            # Loaded objects stay: the garbage collector need not visit them again.
            gc.collect()
            gc.freeze()
            await server.serve(sockets=[sock])
        finally:
            if listener is not None:
                await listener.close()
            await client.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


async def _serve_several(
    front: Front,
    announce: Callable[[str], None],
    tell: Callable[[str], None],
    read_again: Callable[[], ServeConfig] | None,
) -> None:
    """As `serve`, for several models. Raises: ConfigError."""
    config, pool = front.config, front.pool
    with bind(config.host, config.port) as sock:
        try:
            for name, engine in config.models.items():
                await front.add(name, engine)
            await pool.preload()
            reload = None
            if read_again is not None:
                reload = Reload(config, read_again, pool, front.api_keys).start

            def on_started() -> None:
                address = address_of(config.host, sock)
                for model in pool.each:
                    when = "at once" if model.is_running else "at its first request"
                    tell(f"{model}, KV memory of {model.plan.config.kv_tokens:,} tokens: {when}")
                announce(address)
                tell(f"try:\n  curl {address}/v1/models")

            await HttpServer(front_app(front), pool, config, on_started, reload).serve([sock])
        finally:
            await pool.close()


def _facts(model: str, config: ServeConfig, client: EngineClient) -> Iterator[str]:
    """Yield lines on the model's format, computation, memory and drafters."""
    facts = client.info.description
    told = facts["instruction_set"]
    kernels = facts["backend"] if told is None else f"kernels for {told}"
    kind = "GGUF" if is_gguf(config.engine.target) else "safetensors"
    threads = f"{facts['num_threads']} thread{'s' * (facts['num_threads'] != 1)}"
    yield f"{model}: {kind}, {facts['dtype']}, {kernels}, {threads}"
    why = "as asked" if config.drafters is None else "draft servers may connect"
    if config.engine.look_up == "none" and config.drafters is None:
        why = "none is named, and vLLM gets none by itself"
    size, most = "", f"{facts['max_model_len']:,}"
    if facts["kv_bytes"] is not None:
        size = f" ({facts['kv_bytes'] / 2**30:.2f} GiB in {facts['kv_dtype']})"
    if facts["max_model_len"] == facts["kv_tokens"]:
        most += " (all of it)"
    yield (
        f"KV memory of {facts['kv_tokens']:,} tokens{size}, at most {most} a request; "
        f"drafters: {', '.join(client.drafters) or f'none ({why})'}"
    )
    if facts.get("state_slots"):
        yield (
            f"recurrent states of {facts['state_slots']} requests at once, at most "
            f"{facts['state_bytes'] / 2**30:.2f} GiB; prompts are shared with later turns"
        )


def _trial(client: EngineClient, address: str, config: ServeConfig, tokenizer: Tokenizer) -> str:
    """Return where to chat in a browser, if the model can, and on another line a `curl` command."""
    has_keys = any(tenant.api_keys for tenant in config.engine.tenants.values())
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    asked: dict[str, Any] = {"prompt": "Once", "max_tokens": 16}
    path = "completions"
    if tokenizer.has_chat_template:
        asked, path = {"messages": [{"role": "user", "content": "Hello"}]}, "chat/completions"
    if not client.info.generates:
        asked, path = {"input": "Hello"}, "embeddings"
    body = shlex.quote(json.dumps({"model": config.model_names[0], **asked}))
    told = f"-H 'Content-Type: application/json' -d {body}"
    chat = f"chat at {address}/dashboard#playground, or" if client.info.generates else "try"
    return f"{chat}:\n  curl {address}/v1/{path}{key} {told}"


def _tracer(config: ServeConfig) -> Tracer | None:
    """Raises: ModuleNotFoundError without `penstock[otel]`."""
    if config.otlp_traces_endpoint is None:
        return None
    from penstock.api.tracing import Tracer

    return Tracer.to(config.otlp_traces_endpoint, config.model_names[0])


def _draft_listener(config: DraftersConfig) -> VerificationServer:
    # Imported here: gRPC is slow to import, and most servers have no draft servers.
    from penstock.serving.verification import VerificationServer

    return VerificationServer(config)


async def _listen(
    listener: VerificationServer,
    config: ServeConfig,
    client: EngineClient,
    metrics: Metrics,
    tokenizer: Tokenizer,
) -> None:
    from penstock.serving.verification import DraftHub

    hub = DraftHub(
        client,
        metrics.model_name,
        tokenizer.digest,
        config.engine.tenants,
        listener.config,
        partial(RequestMeter, metrics),
    )
    metrics.follow(hub)
    await listener.start(hub)


async def _start(client: EngineClient, path: Path) -> Tokenizer:
    """Load the engine and the tokenizer concurrently. Raises: as `serve`."""
    engine, tokenizer = await asyncio.gather(
        client.start(), asyncio.to_thread(loaded_tokenizer, path), return_exceptions=True
    )
    if isinstance(engine, BaseException):
        raise engine
    if isinstance(tokenizer, ValueError):
        raise ConfigError(str(tokenizer)) from tokenizer
    if isinstance(tokenizer, BaseException):
        raise tokenizer
    return tokenizer


class HttpServer(uvicorn.Server):
    """HTTP server of uvicorn that drains the engine's requests on shutdown."""

    def __init__(
        self,
        app: FastAPI,
        client: RequestClient | ModelPool,
        config: ServeConfig,
        on_started: Callable[[], None],
        reload: Callable[[], None] | None = None,
    ) -> None:
        settings = uvicorn.Config(
            app,
            log_config=None,
            http=Connection.with_timeouts(config.header_timeout_s, config.write_timeout_s),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(config.shutdown_grace_s) + _CLOSING_S,
        )
        super().__init__(settings)
        self._client = client
        self._grace_s = config.shutdown_grace_s
        self._on_started = on_started
        self._reload = reload
        self._had_terminal = _has_terminal()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises: ConfigError if the address is in use."""
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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # A closed terminal ends the server, except under nohup.
        with super().capture_signals(), on_hang_up(self._hang_up):
            yield

    def _hang_up(self, sig: int, frame: FrameType | None) -> None:
        if self._reload is None or (self._had_terminal and not _has_terminal()):
            self.handle_exit(sig, frame)
        else:
            asyncio.get_running_loop().call_soon_threadsafe(self._reload)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            asyncio.get_running_loop().call_soon_threadsafe(self._abort)
        self.should_exit = True

    def _abort(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _has_terminal() -> bool:
    """True if this process has an open terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def on_hang_up(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP, except if it is ignored or this is not the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises: ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    except ValueError as error:
        # Not a valid host name: empty labels, wrong characters.
        raise ConfigError(f"cannot listen on {host}:{port}: that is no host's name") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def address_of(host: str, sock: socket.socket) -> str:
    """Return the URL of a bound socket."""
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
