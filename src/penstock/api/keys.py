"""API keys stand for tenants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from penstock.api.errors import ApiError
from penstock.config import DEFAULT_TENANT, TenantConfig


class Caller(NamedTuple):
    """tenant: whose requests they are. client: who shares the server with others: a tenant where
    there are keys, else a network."""

    tenant: str
    client: str


class Keyring:
    """Who a request is from. Without any key configured, everybody is the default tenant."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        # Looked up by digest, so that the time of a look-up says nothing about a key.
        self._tenants = {
            _digest(key): name for name, tenant in tenants.items() for key in tenant.api_keys
        }

    def caller(self, authorization: str | None, network: str) -> Caller:
        """Who an `Authorization` header from a network stands for. Raises: ApiError with 401."""
        if not self._tenants:
            return Caller(DEFAULT_TENANT, network)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "an API key is required: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="missing_api_key")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return Caller(tenant, tenant)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
