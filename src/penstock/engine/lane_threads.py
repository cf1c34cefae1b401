"""Lanes that work at the same time: a thread for each, and turns on every model."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, TypeVar

Change = Callable[[], None]
_Result = TypeVar("_Result")


class Ended:
    """Something that will have ended, once: an event as cheap as a lock, made for every plan."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """It has ended."""
        self._lock.release()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def wait(self) -> None:
        """Until it has ended."""
        with self._lock:
            return


class Turn:
    """A plan's turn on one model: it begins when the turn before it has ended."""

    def __init__(self, before: Ended | None, changes: Iterable[Change]) -> None:
        self._before = before
        self._changes = tuple(changes)
        self.ended = Ended()

    def begin(self) -> None:
        """Wait for the turn, and apply what has changed since the one before."""
        if self._before is not None:
            self._before.wait()
        for change in self._changes:
            change()

    @property
    def is_first(self) -> bool:
        """Whether nobody is at work on the model now."""
        return self._before is None or self._before.is_set()


class Turns:
    """Plans take turns on a model in the order in which they were submitted. What must be dropped
    between two of them is dropped between them, whoever carries them out: a plan that is already
    inside keeps what it reads.

    To be used by the submitting thread alone, except for the turns that it hands out.
    """

    def __init__(self) -> None:
        self._last: Ended | None = None
        self._changes: list[Change] = []

    def change(self, change: Change) -> None:
        """To be applied before every later turn; at once if nobody is at work."""
        self._changes.append(change)
        if self._last is None or self._last.is_set():
            for waiting in self._changes:
                waiting()
            self._changes = []

    def take(self) -> Turn:
        """The next turn. It must be begun, and `ended` be set, in any thread."""
        turn = Turn(self._last, self._changes)
        self._last, self._changes = turn.ended, []
        return turn


class Wakeup:
    """Something to wait for together with sockets; any thread may give the sign."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
            weakref.finalize(self, end.close)

    def fileno(self) -> int:
        """Readable after a sign."""
        return self._reader.fileno()

    def give(self) -> None:
        """Give the sign; several before it is heard are one."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """It has been heard."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout: float | None) -> None:
        """Until the sign, at most `timeout` seconds (None: for ever)."""
        select.select([self], [], [], timeout)


class LaneThreads(Generic[_Result]):
    """A thread for every lane that is used; each does its jobs in order. Results, or what a job
    raised, come back to whoever asks. The threads end with this object."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self._jobs: dict[str, SimpleQueue[Callable[[], _Result] | None]] = {}
        self._ended: deque[tuple[str, _Result | BaseException]] = deque()
        self._num_jobs: dict[str, int] = {}

    @property
    def num_busy(self) -> int:
        """Lanes that have a job whose result nobody has taken."""
        return sum(num > 0 for num in self._num_jobs.values())

    def is_busy(self, lane: str) -> bool:
        return self._num_jobs.get(lane, 0) > 0

    def start(self, lane: str, job: Callable[[], _Result]) -> None:
        """Have a job done in the lane's thread."""
        if lane not in self._jobs:
            self._jobs[lane] = SimpleQueue()
            arguments = (lane, self._jobs[lane], self._ended, self.wakeup.give)
            weakref.finalize(self, self._jobs[lane].put, None)
            thread = threading.Thread(target=_work, args=arguments, name=lane, daemon=True)
            thread.start()
        self._num_jobs[lane] = self._num_jobs.get(lane, 0) + 1
        self._jobs[lane].put(job)

    def take(self) -> list[_Result]:
        """Results since the last call, in the order in which they came. Raises what a job
        raised."""
        if not self._jobs:
            return []
        # Before looking, so that no sign is lost; and though nobody is busy, for a result may have
        # been taken before its sign was given, which would then stay.
        self.wakeup.clear()
        results = []
        while self._ended:
            lane, result = self._ended.popleft()
            self._num_jobs[lane] -= 1
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results


def _work(
    lane: str,
    jobs: SimpleQueue[Callable[[], _Result] | None],
    ended: deque[tuple[str, _Result | BaseException]],
    wake: Callable[[], None],
) -> None:
    while (job := jobs.get()) is not None:
        try:
            ended.append((lane, job()))
        except BaseException as error:
            ended.append((lane, error))
        del job
        with contextlib.suppress(OSError):
            wake()
