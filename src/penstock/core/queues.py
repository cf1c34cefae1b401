"""Queues of requests that wait to be admitted, and their order.

A queue gives its `first` request, or iterates as if each request were admitted in turn."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, NamedTuple

from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.fluid.step_profile import StepWork

OrderName = Literal["arrival", "size_aware", "slack"]
"""`arrival`: first come, first served. `size_aware`: shortest prompt first; `slack`: earliest start
for its deadline first. Both delay no request by more than the share `DELAY` of its wait in order of
arrival."""

DELAY = 0.25
"""Work that may pass a request, as a share of the work before it and of its own. Chosen by hand."""


class ArrivalQueue:
    """First come, first served; preempted requests before all others."""

    def __init__(self) -> None:
        self._by_age: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._by_age.values())

    @property
    def oldest(self) -> RequestState | None:
        return next(iter(self._by_age.values()), None)

    @property
    def first(self) -> RequestState | None:
        """Next request to admit."""
        return next(iter(self._by_age.values()), None)

    def append(self, state: RequestState) -> None:
        """Add a new request."""
        self._by_age[state.request.id] = state

    def appendleft(self, state: RequestState) -> None:
        """Add a preempted request."""
        self._by_age[state.request.id] = state
        self._by_age.move_to_end(state.request.id, last=False)

    def remove(self, state: RequestState) -> None:
        """Remove a waiting request, or raise KeyError."""
        del self._by_age[state.request.id]

    def admit(self, state: RequestState) -> None:
        """Remove an admitted request, or raise KeyError."""
        self.remove(state)


class _Entry(NamedTuple):
    """A waiting request's sort key; no two have the same `order`."""

    size: float
    order: int
    state: RequestState
    work: float


class SizeAwareQueue(ArrivalQueue):
    """The smallest first, as far as the oldest may be passed.

    While a request is the oldest, others pass it with up to `delay` times its own work; the excess
    is deducted from the next one's. So a request starts after at most 1 + `delay` times the work
    that was there before it, plus `delay` times its own and one other request. In the fluid limit
    no rule with that bound has a lower mean wait.

    size_of: sort key; work_of: seconds of service, or proportional. Both are evaluated at
    arrival."""

    def __init__(
        self,
        size_of: Callable[[RequestState], float],
        work_of: Callable[[RequestState], float],
        delay: float = DELAY,
    ) -> None:
        super().__init__()
        self._size_of = size_of
        self._work_of = work_of
        self._delay = delay
        self._by_size: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        """Entries by request id, without the preempted ones."""
        self._balance = 0.0
        """Work to deduct from what may pass the next requests: 0, or negative."""

    def __iter__(self) -> Iterator[RequestState]:
        balance, entries = self._balance, self._entries
        by_size = iter(self._by_size)
        taken: set[str] = set()
        for name, oldest in self._by_age.items():
            if name in taken:
                continue
            if name in entries:
                allowed = self._delay * entries[name].work
                while balance + allowed > 0:
                    smallest = next(by_size)
                    if smallest.state is oldest:
                        break
                    if smallest.state.request.id not in taken:
                        taken.add(smallest.state.request.id)
                        balance -= smallest.work
                        yield smallest.state
                balance = min(0.0, balance + allowed)
                taken.add(name)
            yield oldest

    @property
    def first(self) -> RequestState | None:
        oldest = self.oldest
        entry = None if oldest is None else self._entries.get(oldest.request.id)
        if entry is None:
            return oldest
        may_be_passed = self._balance + self._delay * entry.work > 0
        return self._by_size[0].state if may_be_passed else oldest

    def append(self, state: RequestState) -> None:
        super().append(state)
        entry = _Entry(self._size_of(state), state.order, state, self._work_of(state))
        self._entries[state.request.id] = entry
        bisect.insort(self._by_size, entry)

    def remove(self, state: RequestState) -> None:
        super().remove(state)
        entry = self._entries.pop(state.request.id, None)
        if entry is not None:
            del self._by_size[bisect.bisect_left(self._by_size, entry)]
        if not self._entries:
            self._balance = 0.0

    def admit(self, state: RequestState) -> None:
        entry = self._entries.get(state.request.id)
        if entry is not None:
            if state is self.oldest:
                self._balance = min(0.0, self._balance + self._delay * entry.work)
            else:
                self._balance -= entry.work
        self.remove(state)


def make_queue(order: OrderName, estimators: Estimators) -> ArrivalQueue:
    """Return an empty queue with an order."""
    if order == "arrival":
        return ArrivalQueue()

    def prompt(state: RequestState) -> float:
        return state.request.prompt_len

    def latest_start(state: RequestState) -> float:
        request = state.request
        if request.latency.deadline is None:
            return math.inf
        tokens = request.expected_output_tokens or estimators.lengths.mean_ended
        seconds = estimators.times.step_seconds
        prefill = seconds(StepWork(request.prompt_len, 0.5 * request.prompt_len**2))
        decode = seconds(StepWork(num_decodes=1, num_kv_tokens=request.prompt_len))
        return request.arrival_time + request.latency.deadline - prefill - tokens * decode

    def work(state: RequestState) -> float:
        profile, lengths = estimators.times.profile, estimators.lengths
        return profile.request_seconds(state.request.prompt_len, lengths.mean_ended)

    return SizeAwareQueue(latest_start if order == "slack" else prompt, work)


class WaitingRequests:
    """One queue per key of the policy, evaluated when a request begins to wait."""

    def __init__(
        self,
        key_of: Callable[[RequestState], Hashable],
        new_queue: Callable[[], ArrivalQueue] = ArrivalQueue,
    ) -> None:
        self._key_of = key_of
        self._new_queue = new_queue
        self._queues: dict[Hashable, ArrivalQueue] = {}
        self._queue_of: dict[str, ArrivalQueue] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    def queue(self, key: Hashable = None) -> ArrivalQueue:
        """Return the queue of a key, for reading only."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._new_queue()
        return queue

    @property
    def queues(self) -> Iterable[ArrivalQueue]:
        return self._queues.values()

    def append(self, state: RequestState) -> None:
        self._new_queue_of(state).append(state)

    def appendleft(self, state: RequestState) -> None:
        self._new_queue_of(state).appendleft(state)

    def remove(self, state: RequestState) -> None:
        """Remove a waiting request, or raise KeyError."""
        self._queue_of.pop(state.request.id).remove(state)

    def admit(self, state: RequestState) -> None:
        self._queue_of.pop(state.request.id).admit(state)

    def _new_queue_of(self, state: RequestState) -> ArrivalQueue:
        queue = self._queue_of[state.request.id] = self.queue(self._key_of(state))
        return queue
