"""A whole server in a thread: real socket, real engine process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from penstock.api.server import serve
from penstock.config import ServeConfig, parse_config
from tests.serving.fakes import FACTORY, TOKENIZER


def serve_config(engine: dict[str, Any] | None = None, **settings: Any) -> ServeConfig:
    """Settings of a server with the toy engine on a free port."""
    toy = {
        "target": TOKENIZER,
        "drafters": {"toy-drafter": "nowhere"},
        "allocation": {"name": "fixed"},
    }
    return parse_config({"engine": {**toy, **(engine or {})}, "port": 0, **settings})


class RunningServer:
    """Its address, and the pids behind it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def engine_pid(self) -> int:
        return engine_pids()[-1]


def engine_pids() -> list[int]:
    """Engine processes of this process, oldest first."""
    children = psutil.Process().children()
    return [p.pid for p in children if "spawn_main" in " ".join(p.cmdline())]


@contextmanager
def running_server(config: ServeConfig, factory: str = FACTORY) -> Iterator[RunningServer]:
    """Serve in a thread until the block ends."""
    started = threading.Event()
    address: list[str] = []
    stop: list[Any] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))

        def announce(url: str) -> None:
            address.append(url)
            started.set()

        try:
            await serve(config, announce, factory)
        except asyncio.CancelledError:
            pass
        finally:
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(60), "the server did not start"
    assert address, "the server failed to start"
    try:
        yield RunningServer(address[0])
    finally:
        stop[0]()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
