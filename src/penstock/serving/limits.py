"""Limits of requests: places in the waiting room, and quotas of tenants."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple

from penstock.config import TenantConfig
from penstock.core.types import Request
from penstock.transport.checks import TokenBucket

_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_RATE_S = 30.0
"""Seconds over which the rate of first outputs is counted."""
_FEW = 8
"""First outputs below which the rate is unknown."""
_MINUTE_S = 60.0


class RequestRejected(Exception):
    """A request that was not taken; one line. retry_after_s: seconds until it may be."""

    def __init__(self, message: str, retry_after_s: float = _SHORTEST_S) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(retry_after_s, _SHORTEST_S), _LONGEST_S)


class QueueFull(RequestRejected):
    """Too many requests wait already."""


def network_of_host(host: str) -> str:
    """Return the network that shares one limit where there are no API keys.

    It is the address, or of IPv6 the /64 network, which is one subscriber's; empty for what is no
    address. Brackets and a zone are allowed."""
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
    free: half of all if it is alone, a third each where two want all. So the next one always finds
    room. (Dynamic thresholds with α = 1: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998.)

    limits: by client"""

    def __init__(self, size: int, limits: Mapping[str, int] | None = None) -> None:
        self.size = size
        self.num_taken = 0
        self.limits = limits or {}
        self._held: Counter[str] = Counter()

    def held_by(self, client: str) -> int:
        return self._held.get(client, 0)

    def most_of(self, client: str) -> int:
        """Return the places that a client may hold while no other holds any."""
        return min(self.limits.get(client, max(self.size // 2, 1)), self.size)

    def reserve(self, client: str, num: int) -> bool:
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
    """Requests that have had no output yet.

    A refused client is told when to come again, by the recent rate of first outputs. size: limit of
    requests; limits: by client; clock: in seconds."""

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
        """Time since when the room has not been empty."""
        self._answered: deque[float] = deque()
        """Times of first outputs since then, of the last `_RATE_S`."""
        self._num_refused = 0
        """Refused requests, less those that have left since."""

    def most_of(self, client: str) -> int:
        """Return the largest number of a client's requests that can wait at once."""
        return self._places.most_of(client)

    def change_limits(self, limits: Mapping[str, int]) -> None:
        """Replace limits by client. A client above its new limit keeps its places."""
        self._places.limits = limits

    def enter(self, client: str, request_ids: Sequence[str], within_s: float | None = None) -> None:
        """Take places. Raises: QueueFull.

        within_s: longest wait; requests that would wait longer, if clients take turns, are refused
        at once."""
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
        if not self._places.reserve(client, num):
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
        """Return recent first outputs per second while requests waited; None if there are few."""
        now = self._clock()
        while self._answered and self._answered[0] < now - _RATE_S:
            self._answered.popleft()
        seconds = min(now - self._busy_since, _RATE_S)
        return len(self._answered) / seconds if len(self._answered) >= _FEW and seconds else None

    def answered(self, request_id: str) -> None:
        """Note an output of a request, which need not be its first."""
        if request_id in self._client_of:
            self._answered.append(self._clock())
            self.leave([request_id])

    def leave(self, request_ids: Iterable[str]) -> None:
        """Free the places of requests."""
        for request_id in request_ids:
            client = self._client_of.pop(request_id, None)
            if client is not None:
                self._places.release(client, 1)
                self._num_refused = max(self._num_refused - 1, 0)
                self._num_of[client] -= 1
                if not self._num_of[client]:
                    del self._num_of[client]


class RateLimited(Exception):
    """A tenant has used its share of a minute.

    retry_after_s: seconds until the request would be taken, unless the tenant sends others."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotAllowed(Exception):
    """A request beyond a tenant's limits. param: the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class _Rates(NamedTuple):
    """Refilling limits of a tenant; None is no limit."""

    requests: TokenBucket | None
    tokens: TokenBucket | None


class _Reserved(NamedTuple):
    """Tokens that a request has reserved."""

    bucket: TokenBucket
    num_tokens: int


class Quotas:
    """Admits requests within their tenants' quotas.

    A request reserves its prompt and its `max_tokens` from its tenant's tokens; unused output
    tokens are given back when it ends."""

    def __init__(self, tenants: Mapping[str, TenantConfig] | None = None) -> None:
        self._tenants: Mapping[str, TenantConfig] = {}
        self._rates: dict[str, _Rates] = {}
        self._reserved: dict[str, _Reserved] = {}
        self.change(tenants or {})

    def change(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Replace limits. The use of an unchanged limit is kept."""
        before, kept = self._tenants, self._rates
        self._tenants, self._rates = tenants, {}
        now = time.monotonic()
        for name, new in tenants.items():
            old, rates = before.get(name), kept.get(name)
            requests, tokens = _bucket(new.requests_per_minute, now), None
            if old is not None and rates is not None:
                if old.requests_per_minute == new.requests_per_minute:
                    requests = rates.requests
                if old.tokens_per_minute == new.tokens_per_minute:
                    tokens = rates.tokens
            self._rates[name] = _Rates(requests, tokens or _bucket(new.tokens_per_minute, now))

    def config_of(self, tenant: str) -> TenantConfig:
        """Return a tenant's settings; the defaults for one that has none."""
        return self._tenants.get(tenant, _DEFAULT)

    def most_output(self, tenant: str, prompt_len: int) -> int | None:
        """Return the limit of output tokens of a tenant's request; None: no limit."""
        limits = self.config_of(tenant)
        most = [] if limits.max_output_tokens is None else [limits.max_output_tokens]
        if limits.tokens_per_minute is not None:
            most.append(max(limits.tokens_per_minute - prompt_len, 1))
        return min(most, default=None)

    def charge(self, requests: Sequence[Request]) -> None:
        """Admit requests of one tenant, all or none. Raises: NotAllowed, RateLimited."""
        tenant = requests[0].tenant
        limits, rates = self.config_of(tenant), self._rates.get(tenant)
        _check_lengths(limits, requests)
        if rates is None:
            return
        num_tokens = sum(r.prompt_len + r.max_tokens for r in requests)
        _check_most(limits.requests_per_minute, len(requests), "requests", "n")
        _check_most(limits.tokens_per_minute, num_tokens, "tokens", "max_tokens")
        now = time.monotonic()
        for bucket, num, what, most in (
            (rates.requests, len(requests), "requests", limits.requests_per_minute),
            (rates.tokens, num_tokens, "tokens", limits.tokens_per_minute),
        ):
            wait_s = 0.0 if bucket is None else bucket.seconds_until(num, now)
            if wait_s > 0:
                raise RateLimited(
                    f"this tenant may ask for {most} {what} a minute, and has done so; this "
                    f"request can be taken in {wait_s:.0f} s",
                    wait_s,
                )
        if rates.requests is not None:
            rates.requests.spend(len(requests), now)
        if rates.tokens is not None:
            rates.tokens.spend(num_tokens, now)
            for r in requests:
                self._reserved[r.id] = _Reserved(rates.tokens, r.max_tokens)

    def put_out(self, request_id: str, num_tokens: int) -> None:
        """Count output tokens of a request."""
        reserved = self._reserved.get(request_id)
        if reserved is not None:
            left = reserved._replace(num_tokens=reserved.num_tokens - num_tokens)
            self._reserved[request_id] = left

    def end(self, request_id: str) -> None:
        """Give back what an ended request has reserved and not used."""
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            reserved.bucket.give_back(reserved.num_tokens)


_DEFAULT = TenantConfig()


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute / _MINUTE_S, now, _MINUTE_S)


def _check_lengths(limits: TenantConfig, requests: Sequence[Request]) -> None:
    """Raises: NotAllowed."""
    for request in requests:
        most = limits.max_prompt_tokens
        if most is not None and request.prompt_len > most:
            raise NotAllowed(
                f"prompt: {request.prompt_len} tokens are more than the {most} that this tenant's "
                "prompts may have",
                "prompt",
            )
        most = limits.max_output_tokens
        if most is not None and request.max_tokens > most:
            raise NotAllowed(
                f"max_tokens: {request.max_tokens} are more than the {most} that this tenant may "
                "ask for",
                "max_tokens",
            )


def _check_most(most: int | None, num: int, what: str, param: str) -> None:
    """Raises: NotAllowed."""
    if most is not None and num > most:
        raise NotAllowed(
            f"{param}: the request needs {num} {what}, and this tenant has {most} a minute; it "
            "can never be taken",
            param,
        )
