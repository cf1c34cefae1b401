"""A draft server's process: model, link, and HTTP for its own users."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.api.app import create_app
from penstock.api.server import HttpServer, address_of, bind
from penstock.config import EngineConfig, ServeConfig
from penstock.serving.draft_server import DraftService
from penstock.serving.drafting import DrafterOptions, LoadedDrafter, load_drafter
from penstock.serving.edge import EdgeClient
from penstock.serving.link import Endpoint
from penstock.serving.messages import Ready


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of a draft server. listen: host and port for its own users, or None."""

    endpoint: Endpoint
    drafter: DrafterOptions
    listen: tuple[str, int] | None = None


async def serve_drafts(settings: DraftSettings, announce: Callable[[str], None]) -> None:
    """Draft, and serve own users if a port is given, until SIGTERM, SIGINT or SIGHUP.

    announce: called with a line when the verification server has accepted this one, and a line when
    users are served. Raises: ConfigError if the address cannot be bound, CheckpointError for the
    model's folder, LinkRefused if the verification server rejects this one.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, stopped.set)
    with nullcontext() if settings.listen is None else bind(*settings.listen) as sock:
        drafter = await asyncio.to_thread(load_drafter, settings.drafter)
        if sock is not None:
            await asyncio.to_thread(drafter.tokenizer.prepare)
            await asyncio.to_thread(drafter.tokenizer.prepare_chats)
        server = DraftService(settings.endpoint, drafter.hello, drafter.sessions)
        running = asyncio.create_task(server.run())
        stopping = asyncio.create_task(stopped.wait())
        try:
            await _first(running, stopping, server.welcome)
            if server.welcome.done():
                name = server.limits.drafter
                announce(f"drafting for {settings.endpoint.address} as {name}")
                if sock is None:
                    await _first(running, stopping)
                else:
                    await _serve_users(settings, drafter, server, running, sock, announce)
            if running.done():
                running.result()
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)


async def _serve_users(
    settings: DraftSettings,
    drafter: LoadedDrafter,
    server: DraftService,
    running: asyncio.Task[None],
    sock: socket.socket,
    announce: Callable[[str], None],
) -> None:
    config = ServeConfig(
        engine=EngineConfig(target=settings.drafter.model),
        served_model_name=(server.limits.target,),
    )
    client = EdgeClient(server, _ready(settings, server), max_waiting=config.max_waiting_requests)
    app = create_app(config, client, drafter.tokenizer)
    host = settings.listen[0] if settings.listen is not None else ""
    http = HttpServer(app, client, config, lambda: announce(f"serving on {address_of(host, sock)}"))
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    await _first(serving, running)
    # Without the link, open requests cannot complete.
    http.should_exit, http.force_exit = True, running.done()
    await serving


def _ready(settings: DraftSettings, server: DraftService) -> Ready:
    limits = server.limits
    return Ready(
        tokenizer_path=settings.drafter.model,
        max_request_tokens=limits.max_request_tokens,
        vocab_size=limits.vocab_size,
        eos_token_ids=frozenset(limits.eos_token_ids),
        drafters=(limits.drafter,),
        description={
            "verification_server": settings.endpoint.address,
            "target": limits.target,
            "drafter": limits.drafter,
        },
        draft_model=settings.drafter.name,
    )


async def _first(*awaited: asyncio.Future[Any]) -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
