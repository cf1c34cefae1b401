"""What each tenant may ask for: in a minute, at once, of one request, and of which drafters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.config import TenantConfig
from penstock.core.types import Request
from penstock.transport.checks import TokenBucket

_MINUTE_S = 60.0


class RateLimited(Exception):
    """A tenant has asked for its share of a minute already. retry_after_s: seconds after which what
    it asked for would be taken, unless it has asked for more by then."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotAllowed(Exception):
    """A tenant may never ask for this. param: the field of a request that says it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class _Rates(NamedTuple):
    """A tenant's limits as they are filled up again; None is no limit."""

    requests: TokenBucket | None
    tokens: TokenBucket | None


class _Reserved(NamedTuple):
    """Tokens that a request was taken for."""

    bucket: TokenBucket
    num_tokens: int


class Quotas:
    """Takes requests in by their tenants' limits. A request takes its prompt and all that it may
    put out from its tenant's tokens; what it did not put out is given back when it ends."""

    def __init__(self, tenants: Mapping[str, TenantConfig] | None = None) -> None:
        self._tenants: Mapping[str, TenantConfig] = {}
        self._rates: dict[str, _Rates] = {}
        self._reserved: dict[str, _Reserved] = {}
        self.change(tenants or {})

    def change(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Other limits from now on. What is used of one that stays the same remains used."""
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

    def of(self, tenant: str) -> TenantConfig:
        """A tenant's settings; those by default for one that has none."""
        return self._tenants.get(tenant, _DEFAULT)

    def most_output(self, tenant: str, prompt_len: int) -> int | None:
        """Output tokens that a tenant's request with such a prompt may ask for; None: any."""
        limits = self.of(tenant)
        most = [] if limits.max_output_tokens is None else [limits.max_output_tokens]
        if limits.tokens_per_minute is not None:
            most.append(max(limits.tokens_per_minute - prompt_len, 1))
        return min(most, default=None)

    def take(self, requests: Sequence[Request]) -> None:
        """Requests of one tenant, all or none. Raises: NotAllowed, RateLimited."""
        tenant = requests[0].tenant
        limits, rates = self.of(tenant), self._rates.get(tenant)
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
            rates.requests.take(len(requests), now)
        if rates.tokens is not None:
            rates.tokens.take(num_tokens, now)
            for r in requests:
                self._reserved[r.id] = _Reserved(rates.tokens, r.max_tokens)

    def put_out(self, request_id: str, num_tokens: int) -> None:
        """A request has put out so many tokens."""
        reserved = self._reserved.get(request_id)
        if reserved is not None:
            left = reserved._replace(num_tokens=reserved.num_tokens - num_tokens)
            self._reserved[request_id] = left

    def end(self, request_id: str) -> None:
        """A request puts nothing more out."""
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
