"""Requests that wait to be admitted, in the queues that the admission policy sorts them into."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from penstock.core.order import ArrivalQueue
from penstock.core.state import RequestState


class WaitingRequests:
    """One queue for each key of the policy; a policy without keys has one queue. What the order is
    within a queue is the queue's own affair."""

    def __init__(
        self,
        key_of: Callable[[RequestState], Hashable],
        new_queue: Callable[[], ArrivalQueue] = ArrivalQueue,
    ) -> None:
        self._key_of = key_of
        self._new_queue = new_queue
        self._queues: dict[Hashable, ArrivalQueue] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    def queue(self, key: Hashable = None) -> ArrivalQueue:
        """The queue of a key. Look only."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._new_queue()
        return queue

    @property
    def queues(self) -> Iterable[ArrivalQueue]:
        return self._queues.values()

    def append(self, state: RequestState) -> None:
        """A request arrives."""
        self.queue(self._key_of(state)).append(state)
        self._num += 1

    def appendleft(self, state: RequestState) -> None:
        """A running request is preempted."""
        self.queue(self._key_of(state)).appendleft(state)
        self._num += 1

    def remove(self, state: RequestState) -> None:
        """A request gives up. Raises: KeyError if it does not wait."""
        self.queue(self._key_of(state)).remove(state)
        self._num -= 1

    def admit(self, state: RequestState) -> None:
        """A request is admitted. Raises: KeyError if it does not wait."""
        self.queue(self._key_of(state)).admit(state)
        self._num -= 1
