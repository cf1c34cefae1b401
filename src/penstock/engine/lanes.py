"""Concurrent lanes: a thread for each, and a queue at every model."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

Change = Callable[[], None]
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


class Ticket:
    """Turn of a plan on one model; it begins when the one before has ended."""

    __slots__ = ("_before", "_changes", "_ended")

    def __init__(self, before: Ticket | None, changes: Iterable[Change]) -> None:
        self._before = before
        self._changes = tuple(changes)
        # A lock is the cheapest event.
        self._ended = threading.Lock()
        self._ended.acquire()

    def begin(self) -> None:
        """Wait for the turn, and apply the changes since the one before."""
        before, self._before = self._before, None
        if before is not None:
            with before._ended:
                pass
        for change in self._changes:
            change()

    def end(self) -> None:
        self._ended.release()

    @property
    def has_ended(self) -> bool:
        return not self._ended.locked()


class TicketQueue:
    """Order of plans on a model, as submitted, with changes applied between two of them.

    A plan under way keeps what it reads. Not thread-safe, except for the tickets."""

    def __init__(self) -> None:
        self._last: Ticket | None = None
        self._changes: list[Change] = []

    def change(self, change: Change) -> None:
        """Apply a change before every later turn; at once if the model is idle."""
        self._changes.append(change)
        if self._last is None or self._last.has_ended:
            for waiting in self._changes:
                waiting()
            self._changes = []

    def next_ticket(self) -> Ticket:
        """Return the next turn. It must be begun and ended, in any thread."""
        self._last = Ticket(self._last, self._changes)
        self._changes = []
        return self._last


class Wakeup:
    """Signal from any thread, which can be waited for together with sockets."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
            weakref.finalize(self, end.close)

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._reader.fileno()

    def give(self) -> None:
        """Signal; several before a `clear` are one."""
        with contextlib.suppress(OSError):  # full, or closed with the program
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Reset the signal."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout: float | None) -> None:
        """Wait for the signal, at most `timeout` seconds (None: forever)."""
        select.select([self], [], [], timeout)


class Lanes(Generic[_Result]):
    """Threads of lanes, which do their jobs in order.

    models: shared, each with a queue. cores: of lanes that have their own."""

    def __init__(
        self,
        models: Iterable[str] = (),
        cores: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.wakeup = Wakeup()
        self.models = {name: TicketQueue() for name in models}
        self._cores = cores
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._ended: deque[tuple[str, Future[_Result]]] = deque()
        self._num_jobs: Counter[str] = Counter()

    @property
    def num_busy(self) -> int:
        """Number of lanes with a job whose result was not taken."""
        return sum(num > 0 for num in self._num_jobs.values())

    @property
    def num_sharing(self) -> int:
        """Number of busy lanes without cores of their own."""
        return sum(num > 0 and lane not in self._cores for lane, num in self._num_jobs.items())

    def is_busy(self, lane: str) -> bool:
        return self._num_jobs[lane] > 0

    def start(self, lane: str, job: Callable[[], _Result]) -> None:
        """Run a job in the lane's thread."""
        self._num_jobs[lane] += 1
        future = self._thread(lane).submit(job)
        future.add_done_callback(partial(_report, lane, self._ended, self.wakeup))

    def call(self, lane: str, function: Callable[[], _Value]) -> _Value:
        """Return a function's result, called on the lane's own cores, if it has some."""
        if lane not in self._cores:
            return function()
        return self._thread(lane).submit(function).result()

    def _thread(self, lane: str) -> ThreadPoolExecutor:
        if lane not in self._threads:
            pin = partial(use_cores, self._cores.get(lane, ()))
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=lane, initializer=pin)
        return self._threads[lane]

    def pop_results(self) -> list[_Result]:
        """Return results since the last call, in order of completion. Raises a job's exception."""
        # First, so that no signal is lost; also when idle, since a result may be taken before its
        # signal is given.
        self.wakeup.clear()
        results = []
        while self._ended:
            lane, future = self._ended.popleft()
            self._num_jobs[lane] -= 1
            results.append(future.result())
        return results


def use_cores(cores: Collection[int]) -> None:
    """Keep this thread, and those that it starts, on some cores. None: as they are."""
    if cores:
        os.sched_setaffinity(0, cores)


def _report(
    lane: str,
    ended: deque[tuple[str, Future[_Result]]],
    wakeup: Wakeup,
    future: Future[_Result],
) -> None:
    ended.append((lane, future))
    wakeup.give()
