"""Where engines on the CPU are forked from. Nothing heavy is imported here, so that a server can
let the libraries load while it reads its own settings."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

LOAD_ENGINE = "penstock.engine.build:load_engine"
"""The factory of the real engine; named, so that only its own process imports torch."""


def fork_context(factory: str) -> ForkServerContext:
    """Importing the libraries is most of an engine's start: they are imported once, in a process
    from which each engine is forked. factory: "package.module:function", which builds it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.serving.fork_server", factory.partition(":")[0]])
    return context


def preload() -> None:
    """Begin to import the real engine's libraries, beside what this process does until it starts
    one."""
    fork_context(LOAD_ENGINE)
    forkserver.ensure_running()
