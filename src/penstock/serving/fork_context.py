"""Context that CPU engines are forked from.

It imports nothing heavy, so a server can load the libraries while it reads its settings."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

LOAD_ENGINE = "penstock.engine.build:load_engine"
"""The factory of the real engine; a name, so that only its own process imports torch."""


def fork_context(factory: str) -> ForkServerContext:
    """Return the context of a process with preloaded libraries, for fast starts of engines.

    factory: "package.module:function", which builds an engine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.serving.fork_server", factory.partition(":")[0]])
    return context


def preload() -> None:
    """Begin to import the real engine's libraries in the background."""
    fork_context(LOAD_ENGINE)
    forkserver.ensure_running()
