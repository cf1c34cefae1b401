"""Taking requests in: who may have how many waiting, why one is not taken, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol, Self

from penstock.core.types import FinishReason, Output, Request
from penstock.serving.messages import EngineStats, Ready
from penstock.serving.quotas import NotAllowed, Quotas, RateLimited

_READY_WAIT_S = 30.0
_STOPPED = "the server was stopped before this request was finished"
_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_RATE_S = 30.0
"""Time over which the rate of first outputs is counted."""
_FEW = 8
"""Fewer say little about the rate."""


class RequestRejected(Exception):
    """One line. retry_after_s: seconds after which a request may be taken."""

    def __init__(self, message: str, retry_after_s: float = _SHORTEST_S) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(retry_after_s, _SHORTEST_S), _LONGEST_S)


class EngineUnavailable(RequestRejected):
    """The engine takes no requests now."""


class QueueFull(RequestRejected):
    """Too many requests wait already."""


class Unsupported(Exception):
    """A request that can never be made here; one line."""


def network_of_host(host: str) -> str:
    """Whose requests share one limit where there are no API keys: the address, or of IPv6 the /64
    network, which is one subscriber's. Empty for what is no address; brackets and a zone may be
    there."""
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    if not isinstance(address, IPv6Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ip_network((address, 64), strict=False))


class Shares:
    """Places of some kind: for requests in a queue, for bytes in memory.

    A client with a limit of its own may hold that many. Any other may hold no more than it leaves
    free: half of all if it is alone, a third each where two want all. So whoever comes next always
    finds room. (Dynamic thresholds with α = 1: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998.)

    limits: by client
    """

    def __init__(self, size: int, limits: Mapping[str, int] | None = None) -> None:
        self.size = size
        self.num_taken = 0
        self.limits = limits or {}
        self._held: Counter[str] = Counter()

    def held_by(self, client: str) -> int:
        return self._held.get(client, 0)

    def most_of(self, client: str) -> int:
        """What a client may hold while nobody else holds anything."""
        return min(self.limits.get(client, max(self.size // 2, 1)), self.size)

    def take(self, client: str, num: int) -> bool:
        """Take places, or none if there are not enough for this client."""
        held, free = self.held_by(client) + num, self.size - self.num_taken - num
        if free < 0 or held > self.limits.get(client, max(free, 1)):
            return False
        self._held[client] = held
        self.num_taken += num
        return True

    def release(self, client: str, num: int) -> None:
        self.num_taken -= num
        self._held[client] -= num
        if not self._held[client]:
            del self._held[client]


class WaitingRoom:
    """Requests that have had no output yet. size: most of them at once; limits: by client; clock:
    in seconds.

    Clients that are refused are told when to come again, at the rate at which requests have lately
    had their first output, one after the other.
    """

    def __init__(
        self,
        size: int,
        limits: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = Shares(size, limits)
        self._client_of: dict[str, str] = {}
        self._num_of: Counter[str] = Counter()
        self._clock = clock
        self._busy_since = 0.0
        """Since when the room has not been empty."""
        self._answered: deque[float] = deque()
        """When requests had their first output since then, of the last `_RATE_S`."""
        self._num_refused = 0
        """Requests that were refused, less those that have left since."""

    def most_of(self, client: str) -> int:
        """Requests of a client that can ever wait at once."""
        return self._places.most_of(client)

    def change_limits(self, limits: Mapping[str, int]) -> None:
        """Other limits by client. Who holds more than that keeps it, and gets no more."""
        self._places.limits = limits

    def enter(self, client: str, request_ids: Sequence[str], within_s: float | None = None) -> None:
        """within_s: how long they may wait; those that would wait longer, if clients take turns,
        are refused at once. Raises: QueueFull."""
        num, waiting = len(request_ids), self._num_of.get(client, 0)
        if not self._client_of:
            self._busy_since, self._num_refused = self._clock(), 0
            self._answered.clear()
        rate = self._rate()
        if within_s is not None and waiting and rate is not None:
            ahead = min((waiting + num) * len(self._num_of), len(self._client_of) + num)
            if ahead > within_s * rate:
                raise QueueFull(
                    f"a request would begin after about {ahead / rate:.1f} s, and this one may not "
                    f"wait longer than {within_s:.3g} s; try again later",
                    ahead / rate - within_s,
                )
        if not self._places.take(client, num):
            self._num_refused += num
            # All that are told the same second need places then.
            at_most = max(self._places.size // 2, 1)
            raise QueueFull(
                f"{len(self._client_of)} requests are waiting already, of at most "
                f"{self._places.size}, {waiting} of them from this client; try again later",
                self._num_refused / min(rate or math.inf, at_most),
            )
        self._client_of.update(dict.fromkeys(request_ids, client))
        self._num_of[client] += num

    def _rate(self) -> float | None:
        """First outputs a second, lately and while requests waited; None while there are few."""
        now = self._clock()
        while self._answered and self._answered[0] < now - _RATE_S:
            self._answered.popleft()
        seconds = min(now - self._busy_since, _RATE_S)
        return len(self._answered) / seconds if len(self._answered) >= _FEW and seconds else None

    def answered(self, request_id: str) -> None:
        """A request has an output; it need not be its first."""
        if request_id in self._client_of:
            self._answered.append(self._clock())
            self.leave([request_id])

    def leave(self, request_ids: Iterable[str]) -> None:
        """Requests that are no longer wanted, or are not here any more."""
        for request_id in request_ids:
            client = self._client_of.pop(request_id, None)
            if client is not None:
                self._places.release(client, 1)
                self._num_refused = max(self._num_refused - 1, 0)
                self._num_of[client] -= 1
                if not self._num_of[client]:
                    del self._num_of[client]


class OutputSink(Protocol):
    """Where a request's outputs go."""

    def put(self, output: Output) -> None: ...


class OutputStream:
    """Outputs of some requests as they come, until all have finished. Leaving cancels the rest.

    Iteration raises: QueueFull, EngineUnavailable where the requests were handed on, and whoever
    they went to says so; TimeoutError after `expire`.
    """

    def __init__(self, client: RequestClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[Output | RequestRejected | TimeoutError] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    def expire(self) -> None:
        """Cancel what is still open; there was no more time."""
        for request_id in self._open:
            self._client.cancel(request_id)
        self.fail(TimeoutError())

    def fail(self, error: RequestRejected | TimeoutError) -> None:
        """A request was not taken after all, or will not be finished."""
        self._outputs.put_nowait(error)

    def cancel(self, request_id: str) -> None:
        """No more of this request; its blocks are freed."""
        self._open.discard(request_id)
        self._client.cancel(request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while self._open:
            output = await self._outputs.get()
            if not isinstance(output, Output):
                raise output
            if output.request_id not in self._open:
                continue
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
            return output
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for request_id in tuple(self._open):
            self.cancel(request_id)


class RequestClient(ABC):
    """Takes requests, and routes their outputs: the intake of an engine, or of a link to one."""

    def __init__(self, room: WaitingRoom, quotas: Quotas | None = None) -> None:
        self.room = room
        self.quotas = quotas or Quotas()
        self.refused: Counter[tuple[str, str]] = Counter()
        """Requests that were not taken, by tenant and by reason: `queue_full`, `rate_limit` (come
        again) or `tenant_limit` (never)."""
        self._retry_after_s = 0.0
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._sinks: dict[str, OutputSink] = {}

    @property
    @abstractmethod
    def info(self) -> Ready:
        """Raises: EngineUnavailable before it is known."""

    @property
    @abstractmethod
    def drafters(self) -> tuple[str, ...]:
        """Names that a request may ask for."""

    @property
    @abstractmethod
    def num_restarts(self) -> int:
        """How often the engine, or the link to it, had to be made again."""

    @property
    @abstractmethod
    def _failure(self) -> str | None:
        """Why no requests can be served now, but for shutting down."""

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Have a request made whose outputs have a sink."""

    @abstractmethod
    def _stop(self, request_id: str) -> None:
        """Have a request made no further; its sink is gone already."""

    def _fault_of(self, request: Request) -> str | None:
        """Why a request could never be made here, if it could not. Asked where requests can be
        served."""
        return None

    def _check(self, requests: Iterable[Request]) -> None:
        """Raises: Unsupported."""
        for fault in filter(None, map(self._fault_of, requests)):
            raise Unsupported(fault)

    @property
    def problem(self) -> str | None:
        """Why no requests can be served now, or None."""
        return "the server is shutting down" if self._stopping else self._failure

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        return len(self._sinks)

    async def submit(
        self, client: str, requests: Sequence[Request], within_s: float | None = None
    ) -> OutputStream:
        """Have requests made, after waiting a while for an engine that is away. client: whose
        places in the waiting room they take; within_s: as there. Raises: QueueFull,
        EngineUnavailable, RateLimited, NotAllowed, Unsupported."""
        ids = [request.id for request in requests]
        self._enter(client, requests, within_s)
        try:
            await self._wait_until_ready()
            self._check(requests)
        except BaseException:
            self._leave(ids)
            raise
        stream = OutputStream(self, ids)
        self._open(requests, stream)
        return stream

    def submit_now(self, client: str, request: Request, sink: OutputSink) -> None:
        """Have a request made by an engine that is ready. Raises: as `submit`."""
        self._check_ready()
        self._check([request])
        self._enter(client, [request])
        self._open([request], sink)

    def cancel(self, request_id: str) -> None:
        """Forget a request, and let the engine free its blocks."""
        if request_id in self._sinks:
            self._forget(request_id)
            self._stop(request_id)

    def sink_of(self, request_id: str) -> OutputSink | None:
        """Where an unfinished request's outputs go; None if there is no such request."""
        return self._sinks.get(request_id)

    async def stats(self) -> EngineStats | None:
        """A snapshot, or None while there is none."""
        return None

    async def drain(self, grace_s: float) -> None:
        """Take no more requests; cancel what still runs after `grace_s` seconds."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._fail_all(_STOPPED)

    def _enter(
        self, client: str, requests: Sequence[Request], within_s: float | None = None
    ) -> None:
        """Raises: QueueFull, RateLimited, NotAllowed."""
        ids = [request.id for request in requests]
        reason = "queue_full"
        try:
            self.room.enter(client, ids, within_s)
            reason = "rate_limit"
            self.quotas.take(requests)
        except (QueueFull, RateLimited, NotAllowed) as error:
            self.room.leave(ids)
            if isinstance(error, NotAllowed):
                reason = "tenant_limit"
            self.refused[requests[0].tenant, reason] += len(requests)
            raise

    def _leave(self, request_ids: Iterable[str]) -> None:
        """Requests that are not made, or no more."""
        self.room.leave(request_ids)
        for request_id in request_ids:
            self.quotas.end(request_id)

    async def _wait_until_ready(self) -> None:
        if self.problem is not None and not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _READY_WAIT_S)
        self._check_ready()

    def _check_ready(self) -> None:
        if self.problem is not None:
            raise EngineUnavailable(self.problem, self._retry_after_s)

    def _open(self, requests: Sequence[Request], sink: OutputSink) -> None:
        self._sinks.update((request.id, sink) for request in requests)
        self._idle.clear()
        for request in requests:
            self._start(request)

    def _route(self, output: Output) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return
        self.room.answered(output.request_id)
        self.quotas.put_out(output.request_id, len(output.token_ids))
        if output.finish_reason is not None:
            self._forget(output.request_id)
        sink.put(output)

    def _forget(self, request_id: str) -> None:
        del self._sinks[request_id]
        self._leave([request_id])
        if not self._sinks:
            self._idle.set()

    def _fail_all(self, error: str) -> None:
        """End every open request; the engine is told to cancel them."""
        for request_id, sink in list(self._sinks.items()):
            self.cancel(request_id)
            sink.put(Output(request_id, finish_reason=FinishReason.CANCELLED, error=error))
