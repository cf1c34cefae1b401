"""Context that CPU engines are forked from. Imports nothing heavy, for a quick start."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

LOAD_ENGINE = "penstock.engine.build:load_engine"
"""The factory of the real engine; a name, so that only its own process imports torch."""


def fork_context(factory: str) -> ForkServerContext:
    """Return a context with preloaded libraries. factory: "package.module:function"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.serving.fork_server", factory.partition(":")[0]])
    return context


def preload() -> None:
    """Begin to import the real engine's libraries in the background."""
    fork_context(LOAD_ENGINE)
    forkserver.ensure_running()
