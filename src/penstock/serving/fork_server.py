"""Imported by the process that engine processes are forked from, and by nothing else.

It ignores the signals that service managers and terminals send to every process: it must outlive
the engines to report their exit, and ends with the server."""

from __future__ import annotations

import gc
import signal

for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)

# Imports make no garbage worth a tenth of their time; engines collect it once they are loaded.
gc.disable()
