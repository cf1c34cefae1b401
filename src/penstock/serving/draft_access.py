"""Which draft servers may connect, how often, and which ones keep their trust."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

import grpc.aio

from penstock.config import DEFAULT_TENANT, DraftersConfig
from penstock.serving.limits import network_of_host
from penstock.serving.messages import AuditFinding
from penstock.transport.checks import Refusal, TokenBucket

ANONYMOUS = "loopback"
"""Name of draft servers on this machine where the configuration names none."""

_BURST_S = 8.0
_MAX_NETWORKS = 4096
MAX_DISTANCE = 0.1
"""Mean total variation between a reported and a recomputed distribution. Machines that round
differently, or compute in another dtype, stay well below."""

_MIN_FAILURES = 2

_MAX_FAILURE_SHARE = 0.05


class Peer(NamedTuple):
    """Who is at the other end, as far as it has proven or said so.

    common_name: of its certificate, which an authority of ours has signed; token: from the metadata
    network: the address that it comes from; of IPv6 the /64 network, which is one subscriber's
    """

    common_name: str | None
    token: str | None
    network: str


def peer_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> Peer:
    """Raises: nothing; what is malformed counts as absent."""
    names = tuple(context.auth_context().get("x509_common_name", ()))
    name = names[0].decode(errors="replace") if names else None
    network = network_of(context.peer())
    metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
    authorization = metadata.get("authorization", "")
    if isinstance(authorization, bytes):
        return Peer(name, None, network)
    scheme, _, token = authorization.partition(" ")
    is_token = scheme.lower() == "bearer" and token.strip()
    return Peer(name, token.strip() if is_token else None, network)


def network_of(peer: str) -> str:
    """Of gRPC's words for a peer, as in `ipv4:192.0.2.1:50100`; what is no such address is one
    network with all of its kind."""
    kind, _, rest = unquote(peer).partition(":")
    return network_of_host(rest.rpartition(":")[0]) or kind


class Identity(NamedTuple):
    """A draft server as the operator knows it. `trusted`: its `ratio` drafts are taken."""

    name: str
    tenant: str
    trusted: bool = False

    @property
    def client(self) -> str:
        """Who shares the waiting room with others: its tenant, if it has one."""
        return self.name if self.tenant == DEFAULT_TENANT else self.tenant


class Identities:
    """Which draft servers may connect."""

    def __init__(self, config: DraftersConfig) -> None:
        self._by_token: dict[str, Identity] = {}
        self._by_common_name: dict[str, Identity] = {}
        self._is_open = not config.servers
        for name, server in config.servers.items():
            identity = Identity(name, server.tenant, server.trusted)
            if server.token_sha256 is not None:
                self._by_token[server.token_sha256] = identity
            if server.common_name is not None:
                self._by_common_name[server.common_name] = identity

    def of(self, peer: Peer) -> Identity:
        """Raises: Refusal."""
        if self._is_open:
            return Identity(ANONYMOUS, DEFAULT_TENANT)
        identity = self._by_common_name.get(peer.common_name or "")
        if identity is None and peer.token is not None:
            # Looked up by digest, so that the time of a look-up says nothing about a token.
            digest = hashlib.sha256(peer.token.encode("utf-8", "surrogateescape")).hexdigest()
            identity = self._by_token.get(digest)
        if identity is None:
            raise Refusal(
                "this draft server is not known here; it needs a client certificate or the "
                "metadata authorization: Bearer TOKEN"
            )
        return identity


class ConnectionLimits:
    """Rate limits on connections: of each draft server by its name, and of unauthenticated clients
    by their network. The latter never hold up a draft server, not even one at the same address.

    refused: connections that were refused, by draft server (empty: unauthenticated) and by reason:
             `unknown`, or `too_often`
    """

    def __init__(self, config: DraftersConfig) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self._server_per_s = config.max_connections_per_s
        self._unauthenticated_per_s = config.max_unauthenticated_connections_per_s
        self._servers: dict[str, TokenBucket] = {}
        self._networks: OrderedDict[str, TokenBucket] = OrderedDict()

    def check_authenticated(self, name: str) -> str | None:
        """A draft server connects; returns why it may not, in one line."""
        now = time.monotonic()
        if name not in self._servers:
            self._servers[name] = _bucket(self._server_per_s, now)
        if self._servers[name].take(1, now):
            return None
        self.refused[name, "too_often"] += 1
        return f"{name} connects too often; {_allowed(self._server_per_s)}"

    def check_unauthenticated(self, network: str) -> str | None:
        """A client without an identity connects; returns why it gets no answer, in one line."""
        now = time.monotonic()
        bucket = self._networks.pop(network, None) or _bucket(self._unauthenticated_per_s, now)
        self._networks[network] = bucket
        if len(self._networks) > _MAX_NETWORKS:
            self._networks.popitem(last=False)
        if bucket.take(1, now):
            self.refused["", "unknown"] += 1
            return None
        self.refused["", "too_often"] += 1
        return (
            f"too many connections without a known identity from {network}; "
            f"{_allowed(self._unauthenticated_per_s)}"
        )


def _bucket(per_s: float, now: float) -> TokenBucket:
    return TokenBucket(per_s, now, seconds=max(_BURST_S, 1 / per_s))


def _allowed(per_s: float) -> str:
    return f"at most {per_s:g} a second, and {max(_BURST_S * per_s, 1):g} at once"


@dataclass(slots=True)
class Audited:
    """Drafts of one draft server that were recomputed, and draft tokens that were false."""

    num_drafts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_false_draws: int = 0


class Audits:
    """Chooses drafts at random, and counts by the operator's name of the draft server.

    share: of the drafts whose model is among `models`
    """

    def __init__(self, share: float, models: Iterable[str]) -> None:
        self._share = share
        self._models = frozenset(models)
        self._random = random.SystemRandom()
        self.by_server: defaultdict[str, Audited] = defaultdict(Audited)
        self.demoted: set[str] = set()
        """Servers whose `ratio` drafts are not taken any more."""

    def choose(self, model: str) -> str | None:
        """The drafter of this machine by which to recompute the next draft of a server of `model`,
        or None."""
        if model not in self._models or self._random.random() >= self._share:
            return None
        return model

    def count(self, server: str, finding: AuditFinding) -> bool:
        """Take in a finding. True where the server has just lost its trust: one failure may be a
        rounding, a row of them is not."""
        audited = self.by_server[server]
        audited.num_drafts += 1
        audited.num_tokens += finding.num_tokens
        audited.num_false_draws += finding.num_false_draws
        if not finding.weighted:
            return False
        audited.num_failed += finding.num_false_draws > 0 or finding.distance > MAX_DISTANCE
        fails = audited.num_failed >= max(_MIN_FAILURES, _MAX_FAILURE_SHARE * audited.num_drafts)
        if not fails or server in self.demoted:
            return False
        self.demoted.add(server)
        return True
