"""In which order waiting requests are tried: one queue for each order.

A queue is asked for its `first` request, or iterated, which is what `first` would come to if every
request were admitted in turn. It is told who is admitted, in whatever order that happens.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Literal

from penstock.core.estimators import Estimators
from penstock.core.state import RequestState
from penstock.core.types import Status

OrderName = Literal["arrival", "size_aware"]
"""`arrival`: first come, first served. `size_aware`: shortest prompt first, as far as it delays
nobody by more than `DELAY` of what it would wait in order of arrival."""

DELAY = 0.25
"""Share of the work ahead of a request, and of its own, that may be put before it besides."""


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
        """Who is to be admitted next."""
        return next(iter(self._by_age.values()), None)

    def append(self, state: RequestState) -> None:
        """A request arrives."""
        self._by_age[state.request.id] = state

    def appendleft(self, state: RequestState) -> None:
        """A running request is preempted."""
        self._by_age[state.request.id] = state
        self._by_age.move_to_end(state.request.id, last=False)

    def remove(self, state: RequestState) -> None:
        """A request gives up. Raises: KeyError if it does not wait."""
        del self._by_age[state.request.id]

    def admit(self, state: RequestState) -> None:
        """A request is admitted. Raises: KeyError if it does not wait."""
        self.remove(state)


class SizeAwareQueue(ArrivalQueue):
    """The smallest first, as long as the oldest may be passed: while a request is the oldest,
    others may pass it with up to `delay` times its own work, and what was more is made up for
    before the next is passed.

    Whoever waits is therefore delayed, beyond the work that was there before it, by at most `delay`
    times that work and its own, and one request: in a lasting queue nobody waits for longer than
    1 + `delay` times what it would in order of arrival. Among all rules with that bound this one
    comes near to the least mean wait, which gives a share delay / (1 + delay) of the capacity to
    the smallest requests, where it serves most of them, and the rest to the oldest.

    size_of: what is small, not changing while a request waits. work_of: what it costs to serve.
    """

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
        self._by_size: list[tuple[float, int, RequestState]] = []
        self._balance = 0.0
        """Work by which the oldest requests may still be delayed, less that by which they were."""

    def __iter__(self) -> Iterator[RequestState]:
        balance = self._balance
        by_size = iter(self._by_size)
        taken: set[str] = set()
        for oldest in self._by_age.values():
            if oldest.request.id in taken:
                continue
            if oldest.status is not Status.PREEMPTED:
                while self._may_be_passed(oldest, balance):
                    smallest = next(s for _, _, s in by_size if s.request.id not in taken)
                    taken.add(smallest.request.id)
                    if smallest is oldest:
                        break
                    balance -= self._work_of(smallest)
                    yield smallest
                balance = self._balance_after(oldest, balance)
                taken.add(oldest.request.id)
            yield oldest

    @property
    def first(self) -> RequestState | None:
        oldest = self.oldest
        if oldest is None or oldest.status is Status.PREEMPTED:
            return oldest
        return self._by_size[0][2] if self._may_be_passed(oldest, self._balance) else oldest

    def append(self, state: RequestState) -> None:
        super().append(state)
        bisect.insort(self._by_size, (self._size_of(state), state.order, state))

    def remove(self, state: RequestState) -> None:
        super().remove(state)
        if state.status is not Status.PREEMPTED:
            del self._by_size[bisect.bisect_left(self._by_size, self._entry(state))]
        if not self._by_size:
            self._balance = 0.0

    def admit(self, state: RequestState) -> None:
        if state.status is not Status.PREEMPTED:
            if state is self.oldest:
                self._balance = self._balance_after(state, self._balance)
            else:
                self._balance -= self._work_of(state)
        self.remove(state)

    def _entry(self, state: RequestState) -> tuple[float, int, RequestState]:
        return self._size_of(state), state.order, state

    def _may_be_passed(self, oldest: RequestState, balance: float) -> bool:
        return balance + self._delay * self._work_of(oldest) > 0

    def _balance_after(self, oldest: RequestState, balance: float) -> float:
        return min(0.0, balance + self._delay * self._work_of(oldest))


def shortest_output_first() -> SizeAwareQueue:
    """By expected output tokens, however long others wait for it. A request whose client expects
    nothing counts with its `max_tokens`."""

    def output(state: RequestState) -> float:
        return state.request.expected_output_tokens or state.request.max_tokens

    return SizeAwareQueue(output, output, math.inf)


def make_queue(order: OrderName, estimators: Estimators) -> ArrivalQueue:
    """An empty queue."""
    if order == "arrival":
        return ArrivalQueue()
    lengths = estimators.lengths

    def prompt(state: RequestState) -> float:
        return state.request.prompt_len

    def tokens(state: RequestState) -> float:
        return state.request.prompt_len + lengths.mean

    return SizeAwareQueue(prompt, tokens)
