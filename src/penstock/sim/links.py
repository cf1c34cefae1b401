"""Simulated draft servers: drafting speed, and network links."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.types import DrafterUp, DraftOrder, DraftReady, VerifyItem

_BYTES_AHEAD = 60
"""Message size without its tokens: framing, ids, the prefix's digest."""
_BYTES_PER_TOKEN = 4
_RETRANSMISSION_S = 0.2
"""Least retransmission timeout of TCP in common systems (RFC 6298 allows a second)."""


@dataclass(frozen=True, slots=True)
class Link:
    """Link between a draft server and the verification server, alike in both directions.

    latency: seconds. jitter: mean of an exponential extra delay, in seconds. loss: probability that
    a message is sent again. bandwidth: bytes a second."""

    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, num_tokens: int, rng: np.random.Generator) -> float:
        """Return the time that one message takes."""
        seconds = self.latency + (_BYTES_AHEAD + _BYTES_PER_TOKEN * num_tokens) / self.bandwidth
        if self.jitter:
            seconds += float(rng.exponential(self.jitter))
        if self.loss:
            resent = int(rng.geometric(1 - self.loss)) - 1
            seconds += sum(max(_RETRANSMISSION_S, 2 * self.latency) * 2**i for i in range(resent))
        return seconds


@dataclass(frozen=True, slots=True)
class DraftServer:
    """Machine with a small model that drafts for one request at a time, in order of arrival.

    draft_ahead: tokens drafted on, as if all were accepted, while a draft is sent and verified.
    tenant: only its requests are drafted for (None: all tenants')."""

    name: str
    seconds_per_token: float
    link: Link = Link()
    max_draft_tokens: int = 16
    draft_ahead: int = 0
    tenant: str | None = None

    def up(self) -> DrafterUp:
        """Return its registration, with the mean round trip of an empty message."""
        one_way = self.link.latency + self.link.jitter + _BYTES_AHEAD / self.link.bandwidth
        return DrafterUp(self.name, self.max_draft_tokens, self.tenant, round_trip_s=2 * one_way)


@dataclass(slots=True)
class _Server:
    spec: DraftServer
    rng: np.random.Generator
    free_at: float = 0.0
    sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Length of each request's last draft, and when it was sent."""
    confirmed: dict[str, int] = field(default_factory=dict)
    """Round whose draft was all right, the guess of the next token included, by request."""


class RemoteDrafting:
    """Simulated draft servers, which answer orders after their time."""

    def __init__(self, servers: Iterable[DraftServer], seed: int = 0) -> None:
        self._servers = {
            s.name: _Server(s, np.random.default_rng((seed, i))) for i, s in enumerate(servers)
        }
        self.next_time = math.inf
        """Time of the next draft's arrival; infinity if there is none."""
        self._coming: list[tuple[float, int, DraftReady]] = []
        self._count = itertools.count()

    def serves(self, lane: str) -> bool:
        """Return whether a lane is a draft server's."""
        return lane in self._servers

    def order(self, orders: Sequence[DraftOrder], now: float) -> None:
        """Send orders to their servers. Reading a text takes them no time."""
        for order in (o for o in orders if o.max_draft_tokens):
            server = self._servers[order.drafter]
            spec = server.spec
            heard_at = now + spec.link.seconds(0, server.rng)
            num = order.max_draft_tokens
            missing = num - min(num, self._kept(server, order, heard_at))
            made_at = max(heard_at, server.free_at) + missing * spec.seconds_per_token
            server.free_at = made_at
            server.sent[order.request_id] = (num, made_at)
            ready = DraftReady(order.request_id, order.epoch, order.round, order.drafter, num)
            arrives_at = made_at + spec.link.seconds(num, server.rng)
            heapq.heappush(self._coming, (arrives_at, next(self._count), ready))
        self._look_ahead()

    def _kept(self, server: _Server, order: DraftOrder, heard_at: float) -> int:
        """Return the drafted-ahead tokens that are used; the first one guessed the bonus token."""
        _, sent_at = server.sent.get(order.request_id, (0, math.inf))
        if server.confirmed.pop(order.request_id, -1) != order.round - 1:
            return 0
        ahead = int(max(0.0, heard_at - sent_at) / server.spec.seconds_per_token)
        return max(0, min(ahead, server.spec.draft_ahead) - 1)

    def verified(self, item: VerifyItem, num_right: int) -> None:
        """Note how many tokens of a draft one longer than the item's would be right."""
        server = self._servers.get(item.drafter or "")
        if server is not None and num_right == item.num_draft_tokens + 1:
            server.confirmed[item.request_id] = item.round

    def pop_due(self, now: float) -> list[DraftReady]:
        """Return what has arrived."""
        arrived = []
        while self._coming and self._coming[0][0] <= now:
            arrived.append(heapq.heappop(self._coming)[2])
        self._look_ahead()
        return arrived

    def _look_ahead(self) -> None:
        self.next_time = self._coming[0][0] if self._coming else math.inf
