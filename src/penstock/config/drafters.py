"""Settings of the endpoint that draft servers connect to."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from penstock.config.model import Model, address_in
from penstock.config.tenants import DEFAULT_TENANT
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, PREDICTION, TARGET


class DraftServerConfig(Model):
    """Draft server that may connect.

    It is identified by the SHA-256 (hexadecimal) of its token, or by the common name of its client
    certificate. tenant: its owner. trusted: its `ratio` drafts are accepted; drafts of others are
    compared with the target's own sample. max_num_seqs: most requests that one of its streams
    drafts for at once (Spin's B_j)."""

    tenant: str = Field(default=DEFAULT_TENANT, min_length=1)
    token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    common_name: str | None = Field(default=None, min_length=1)
    trusted: bool = False
    max_num_seqs: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_identity(self) -> Self:
        if (self.token_sha256 is None) == (self.common_name is None):
            raise ValueError("needs token_sha256 or common_name, and only one of them")
        return self


class TlsConfig(Model):
    """PEM files. client_ca: authority that must have signed every client's certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class DraftersConfig(Model):
    """Endpoint of draft servers and its limits.

    Without TLS and named servers only draft servers of this machine may connect, as servers of the
    default tenant.

    listen: HOST:PORT; port 0 takes a free one
    max_open_requests: requests of a draft server's own users, per stream
    max_messages_per_s: messages of one stream; bursts of twice as many
    max_connections_per_s: new streams of one named draft server; bursts of eight times as many.
        `penstock draft` needs at most one per second for each open stream
    max_unauthenticated_connections_per_s: connections from one address without a known identity
        that are answered with the reason; bursts of eight times as many
    audit_share: share of drafts recomputed here, for models that are also local drafters; a
        trusted server that fails loses its trust"""

    listen: str
    servers: dict[str, DraftServerConfig] = Field(default_factory=dict)
    tls: TlsConfig | None = None
    max_open_requests: int = Field(default=64, ge=1)
    max_messages_per_s: float = Field(default=1000.0, gt=0, allow_inf_nan=False)
    max_connections_per_s: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    max_unauthenticated_connections_per_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    audit_share: float = Field(default=0.02, ge=0, le=1)

    @field_validator("listen")
    @classmethod
    def _is_address(cls, listen: str) -> str:
        return address_in(listen)

    @field_validator("servers")
    @classmethod
    def _server_names(cls, servers: dict[str, DraftServerConfig]) -> dict[str, DraftServerConfig]:
        for name in servers:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
                raise ValueError(
                    f"a draft server cannot be called {name!r}; use 1 to 64 letters, digits, dots, "
                    "hyphens and underscores"
                )
            if name in (AUTO_DRAFTER, NO_DRAFTER, PREDICTION, TARGET):
                raise ValueError(f"a draft server cannot be called {name!r}")
        return servers

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not is_loopback(self.listen.rpartition(":")[0]):
            if self.tls is None:
                raise ValueError(
                    f"{self.listen} is not a loopback address, so `tls` is needed: drafts and "
                    "tokens would cross the network in the clear"
                )
            if not self.servers:
                raise ValueError(
                    f"{self.listen} is not a loopback address, so `servers` must name the draft "
                    "servers that may connect"
                )
        certified = any(s.common_name is not None for s in self.servers.values())
        if certified and (self.tls is None or self.tls.client_ca is None):
            raise ValueError("a server's common_name needs `tls` with `client_ca`")
        return self


def is_loopback(host: str) -> bool:
    """Return whether a host, as written in an address, is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
