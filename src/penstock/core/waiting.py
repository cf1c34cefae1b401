"""Requests that wait to be admitted, in the queues that the admission policy sorts them into."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

from penstock.core.state import RequestState


class WaitingRequests:
    """One deque for each key of the policy; a policy without keys has one queue."""

    def __init__(self, key_of: Callable[[RequestState], Hashable]) -> None:
        self._key_of = key_of
        self._queues: dict[Hashable, deque[RequestState]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the queues that are not empty."""
        return [key for key, queue in self._queues.items() if queue]

    def queue(self, key: Hashable = None) -> deque[RequestState]:
        """The queue of a key, oldest first; preempted requests before all others. Look only."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        return queue

    def append(self, state: RequestState) -> None:
        self.queue(self._key_of(state)).append(state)
        self._num += 1

    def appendleft(self, state: RequestState) -> None:
        self.queue(self._key_of(state)).appendleft(state)
        self._num += 1

    def remove(self, state: RequestState) -> None:
        """Take a request out. Raises: ValueError if it does not wait."""
        queue = self.queue(self._key_of(state))
        if queue and queue[0] is state:
            queue.popleft()
        else:
            queue.remove(state)
        self._num -= 1
