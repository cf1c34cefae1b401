"""Tells a working engine process from a frozen one, by the signs of life that it sends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from penstock.serving.messages import Heartbeat

_BEATS = 20
"""Beats within the limit."""

_QUIET_BEATS = 5
"""After as many without one, the process counts as frozen until the next."""

_LONGEST_STEP_S = 600.0
"""Kernels may be compiled in a step, which takes minutes on a new machine."""


class Pulse:
    """The engine's end: beats from a thread of its own, so that a long step or the loading of
    models does not look like death, and says how long the loop's step has taken, so that a loop
    that is stuck is found out, too. A stopped process, or one that holds the interpreter's lock
    for ever, beats no more."""

    def __init__(self, limit_s: float, send: Callable[[object], None]) -> None:
        self._interval_s = limit_s / _BEATS
        self._send = send
        self._step_began_at: float | None = None
        threading.Thread(target=self._beat, daemon=True, name="penstock-pulse").start()

    def step_begins(self) -> None:
        self._step_began_at = time.monotonic()

    def step_ends(self) -> None:
        self._step_began_at = None

    def _beat(self) -> None:
        while True:
            began_at = self._step_began_at
            step_s = 0.0 if began_at is None else time.monotonic() - began_at
            try:
                self._send(Heartbeat(step_s))
            except Exception:  # The other process is gone; the main thread finds that out itself.
                return
            time.sleep(self._interval_s)


class Watchdog:
    """The other end.

    limit_s: without a beat, after which a process is given up
    on_change: called with True when the process falls silent, and with False when it beats again
    """

    def __init__(self, limit_s: float, on_change: Callable[[bool], None]) -> None:
        self._limit_s = limit_s
        self._on_change = on_change
        self._num_silent = 0
        self._step_s = 0.0
        self._has_begun = False
        self.is_silent = False

    def heard(self, beat: Heartbeat) -> None:
        self._has_begun = True
        self._num_silent = 0
        self._step_s = beat.step_s
        if self.is_silent:
            self.is_silent = False
            self._on_change(False)

    async def until_frozen(self) -> str:
        """Returns, once the process is to be given up, why.

        Counts beats that were due while this process ran, not seconds: it may have stood still
        itself, as in a machine that sleeps. Loading has begun with the first beat.
        """
        while True:
            await asyncio.sleep(self._limit_s / _BEATS)
            if self._step_s > _LONGEST_STEP_S:
                return f"is stuck in a step of {self._step_s:.0f} s"
            self._num_silent += self._has_begun
            if self._num_silent > _BEATS:
                return f"has given no sign of life for {self._limit_s:g} s"
            if self._num_silent > _QUIET_BEATS and not self.is_silent:
                self.is_silent = True
                self._on_change(True)
