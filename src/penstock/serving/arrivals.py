"""How often anybody may connect: draft servers by their name, strangers by where they come from."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict

from penstock.config import DraftersConfig
from penstock.transport.checks import Quota

_AT_ONCE_S = 8.0
_MAX_NETWORKS = 4096


class Arrivals:
    """Counts connections that begin. A draft server that is known is never held up by strangers,
    not even by those from its own address; what is kept of strangers is bounded.

    refused: connections that were refused, by draft server (empty: a stranger) and by reason:
             `unknown`, or `too_often`
    """

    def __init__(self, config: DraftersConfig) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self._server_per_s = config.max_connections_per_s
        self._stranger_per_s = config.max_strangers_per_s
        self._servers: dict[str, Quota] = {}
        self._networks: OrderedDict[str, Quota] = OrderedDict()

    def of_server(self, name: str) -> str | None:
        """A draft server connects; returns why it may not, in one line."""
        now = time.monotonic()
        if name not in self._servers:
            self._servers[name] = _quota(self._server_per_s, now)
        if self._servers[name].take(1, now):
            return None
        self.refused[name, "too_often"] += 1
        return f"{name} connects too often; {_allowed(self._server_per_s)}"

    def of_stranger(self, network: str) -> str | None:
        """Somebody unknown is about to be told so; returns why that is refused, too."""
        now = time.monotonic()
        quota = self._networks.pop(network, None) or _quota(self._stranger_per_s, now)
        self._networks[network] = quota
        if len(self._networks) > _MAX_NETWORKS:
            self._networks.popitem(last=False)
        if quota.take(1, now):
            self.refused["", "unknown"] += 1
            return None
        self.refused["", "too_often"] += 1
        return (
            f"too many connections without a known identity from {network}; "
            f"{_allowed(self._stranger_per_s)}"
        )


def _quota(per_s: float, now: float) -> Quota:
    return Quota(per_s, now, seconds=max(_AT_ONCE_S, 1 / per_s))


def _allowed(per_s: float) -> str:
    return f"at most {per_s:g} a second, and {max(_AT_ONCE_S * per_s, 1):g} at once"
