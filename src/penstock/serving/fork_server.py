"""Imported by the process that engine processes are forked from, and by nothing else.

A service manager, or a terminal, sends its signals to every process; this one must outlive them,
or it could not tell the server what became of the engine. It ends with the server.
"""

from __future__ import annotations

import signal

for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)
