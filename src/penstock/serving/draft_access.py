"""Access of draft servers: identities, connection limits, trust."""

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
from penstock.core.types import AuditFinding
from penstock.serving.limits import network_of_host
from penstock.transport.checks import Refusal, TokenBucket

ANONYMOUS = "loopback"
"""Name of draft servers on this machine where the configuration names none."""
_BURST_S, _MAX_NETWORKS = 8.0, 4096
MAX_DISTANCE = 0.1
"""Mean total variation well above that of other rounding, or of another dtype."""
_MIN_FAILURES, _MAX_FAILURE_SHARE = 2, 0.05
"""One failure may be a rounding error; more than this share is not."""


class Peer(NamedTuple):
    """Credentials and network of a connection.

    common_name: of its certificate, signed by a configured authority; token: from the metadata;
    network: its address, of IPv6 the subscriber's /64 network."""

    common_name: str | None
    token: str | None
    network: str


def peer_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> Peer:
    """Return the peer of a connection; malformed parts count as absent."""
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
    """Return the network of a gRPC peer such as `ipv4:192.0.2.1:50100`, else the peer's kind."""
    kind, _, rest = unquote(peer).partition(":")
    return network_of_host(rest.rpartition(":")[0]) or kind


class Identity(NamedTuple):
    """Configured identity of a draft server, as `DraftServerConfig`."""

    name: str
    tenant: str
    trusted: bool = False
    max_num_seqs: int | None = None

    @property
    def client(self) -> str:
        """Key of its share of the waiting room: its tenant, or its name."""
        return self.name if self.tenant == DEFAULT_TENANT else self.tenant


class Identities:
    """Identities of the draft servers that may connect."""

    def __init__(self, config: DraftersConfig) -> None:
        self._by_token: dict[str, Identity] = {}
        self._by_common_name: dict[str, Identity] = {}
        self._is_open = not config.servers
        for name, server in config.servers.items():
            identity = Identity(name, server.tenant, server.trusted, server.max_num_seqs)
            if server.token_sha256 is not None:
                self._by_token[server.token_sha256] = identity
            if server.common_name is not None:
                self._by_common_name[server.common_name] = identity

    def identify(self, peer: Peer) -> Identity:
        """Return the identity of a peer. Raises: Refusal."""
        if self._is_open:
            return Identity(ANONYMOUS, DEFAULT_TENANT)
        identity = self._by_common_name.get(peer.common_name or "")
        if identity is None and peer.token is not None:
            # By digest, so that the time of a look-up reveals nothing about a token.
            digest = hashlib.sha256(peer.token.encode("utf-8", "surrogateescape")).hexdigest()
            identity = self._by_token.get(digest)
        if identity is None:
            raise Refusal(
                "this draft server is not known here; it needs a client certificate or the "
                "metadata authorization: Bearer TOKEN"
            )
        return identity


class ConnectionLimits:
    """Rate limits on connections, by draft server, and of unauthenticated clients by network.

    The latter never delay a draft server at the same address. refused: by draft server (empty:
    unauthenticated) and reason, `unknown` or `too_often`."""

    def __init__(self, config: DraftersConfig) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self._server_per_s = config.max_connections_per_s
        self._unauthenticated_per_s = config.max_unauthenticated_connections_per_s
        self._servers: dict[str, TokenBucket] = {}
        self._networks: OrderedDict[str, TokenBucket] = OrderedDict()

    def check_authenticated(self, name: str) -> str | None:
        """Count a draft server's connection; returns why it is refused, in one line."""
        now = time.monotonic()
        if name not in self._servers:
            self._servers[name] = _bucket(self._server_per_s, now)
        if self._servers[name].spend(1, now):
            return None
        self.refused[name, "too_often"] += 1
        return f"{name} connects too often; {_allowed(self._server_per_s)}"

    def check_unauthenticated(self, network: str) -> str | None:
        """Count a connection without an identity; returns why it gets no answer, in one line."""
        now = time.monotonic()
        bucket = self._networks.pop(network, None) or _bucket(self._unauthenticated_per_s, now)
        self._networks[network] = bucket
        if len(self._networks) > _MAX_NETWORKS:
            self._networks.popitem(last=False)
        if bucket.spend(1, now):
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
    """Recomputed drafts of one draft server, and their false draft tokens."""

    num_drafts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_false_draws: int = 0


class Audits:
    """Chooses a share of drafts at random to audit, and counts the results by draft server."""

    def __init__(self, share: float, models: Iterable[str]) -> None:
        self._share = share
        self._models = frozenset(models)
        self._random = random.SystemRandom()
        self.by_server: defaultdict[str, Audited] = defaultdict(Audited)
        self.demoted: set[str] = set()
        """Servers whose `ratio` drafts are not used any more."""

    def choose(self, model: str) -> str | None:
        """Return the local drafter to recompute the next draft of a server of `model`, or None."""
        if model not in self._models or self._random.random() >= self._share:
            return None
        return model

    def count(self, server: str, finding: AuditFinding) -> bool:
        """Count a finding; True if the server has just lost its trust."""
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
