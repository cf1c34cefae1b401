"""A whole server: real socket, real engine process; in a thread, or in a process of its own."""

import asyncio
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from tests.serving.fakes import FACTORY, TOKENIZER

from penstock.api.server import serve
from penstock.config import ServeConfig, parse_config
from penstock.serving.fork_context import LOAD_ENGINE


def serve_config(engine: dict[str, Any] | None = None, **settings: Any) -> ServeConfig:
    """Settings of a server with the toy engine on a free port."""
    toy = {
        "target": TOKENIZER,
        "drafters": {"toy-drafter": "nowhere"},
        "allocation": {"name": "fixed"},
    }
    return parse_config({"engine": {**toy, **(engine or {})}, "port": 0, **settings})


def engine_pid(url: str) -> int:
    """Of a server whose engine is up."""
    answer = httpx.get(f"{url}/health", timeout=20)
    return int(answer.json()["engine"]["pid"]) if answer.is_success else 0


def eventually(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Wait until `condition` is true; returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


class RunningServer:
    """`url`, and the engine's pid."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def engine_pid(self) -> int:
        return int(eventually(lambda: engine_pid(self.url)))


@contextmanager
def running_server(
    config: ServeConfig, factory: str = FACTORY, **several: Any
) -> Iterator[RunningServer]:
    """Serve in a thread until the block ends. several: arguments for several models."""
    started = threading.Event()
    address: list[str] = []
    stop: list[Callable[[], object]] = []

    def announce(url: str) -> None:
        address.append(url)
        started.set()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            with suppress(asyncio.CancelledError):
                await serve(config, announce, factory, **several)
        finally:
            started.set()

    load_libraries_once()
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(300), "the server did not start"
    assert address, "the server failed to start"
    try:
        yield RunningServer(address[0])
    finally:
        stop[0]()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def model_server(
    target: Path,
    drafters: Mapping[str, Path | str],
    engine: dict[str, Any] | None = None,
    /,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve real models on one thread, in float32. engine, settings: others, in their place."""
    models = {
        "target": target,
        "drafters": {name: str(path) for name, path in drafters.items()},
        "dtype": "float32",
        "num_threads": 1,
        "kv_tokens": 4096,
        "allocation": {"name": "fixed"},
    }
    config = {"engine": {**models, **(engine or {})}, "port": 0, **settings}
    with running_server(parse_config(config), LOAD_ENGINE) as running:
        yield running


@contextmanager
def server_process(factory: str, **settings: Any) -> Iterator[tuple[BaseProcess, str]]:
    """Serve in a process of its own; yields it and its address."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(theirs, factory, settings))
    load_libraries_once()
    process.start()
    theirs.close()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, factory: str, settings: dict[str, Any]) -> None:
    # As in a process that was not forked: the one behind it may be that of an engine.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asyncio.run(serve(serve_config(**settings), pipe.send, factory))


FORKS = multiprocessing.get_context("forkserver")


def load_libraries_once() -> None:
    """In the process from which servers and engines are forked: importing takes each seconds."""
    tokenizers = "transformers.tokenization_utils_tokenizers"
    loaded = ["penstock.serving.fork_server", "penstock.engine.build", tokenizers, __name__]
    FORKS.set_forkserver_preload(loaded)
    forkserver.ensure_running()
