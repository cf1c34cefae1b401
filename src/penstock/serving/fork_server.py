"""Imported by the process that engine processes are forked from, and by nothing else.

It ignores the signals that service managers and terminals send to every process: it must outlive
the engines to report their exit, and ends with the server. What every engine imports is here, so
that a restart loads nothing."""

from __future__ import annotations

import gc
import signal

for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)

# Imports make no garbage worth a tenth of their time; engines collect it once they are loaded.
gc.disable()

import penstock.serving.worker  # noqa: E402, F401
from penstock.core.policies.registry import policies  # noqa: E402

for kind in ("admission", "selection", "allocation", "pipeline"):
    policies(kind)
