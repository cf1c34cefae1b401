"""API keys stand for tenants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.api.errors import ApiError
from penstock.config import DEFAULT_TENANT, TenantConfig


class Caller(NamedTuple):
    """tenant: whose requests they are. client: who shares the server with others: a tenant where
    there are keys, else a network."""

    tenant: str
    client: str


class Keyring:
    """Who a request is from. Without any key configured, everybody is the default tenant.

    operators: keys for what is said of all tenants; without any, every tenant's key is one
    """

    def __init__(self, tenants: Mapping[str, TenantConfig], operators: Iterable[str] = ()) -> None:
        # Looked up by digest, so that the time of a look-up says nothing about a key.
        self._tenants = {
            _digest(key): name for name, tenant in tenants.items() for key in tenant.api_keys
        }
        self._operators = frozenset(map(_digest, operators)) or self._tenants.keys()

    def caller(self, authorization: str | None, network: str) -> Caller:
        """Who an `Authorization` header from a network stands for. Raises: ApiError with 401."""
        if not self._tenants:
            return Caller(DEFAULT_TENANT, network)
        tenant = self._tenants.get(_digest_in(authorization))
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return Caller(tenant, tenant)

    def check_operator(self, authorization: str | None) -> None:
        """Raises: ApiError with 401."""
        if self._operators and _digest_in(authorization) not in self._operators:
            raise ApiError(401, "this API key is none for metrics", code="invalid_api_key")


def _digest_in(authorization: str | None) -> bytes:
    """Of the key in an `Authorization` header. Raises: ApiError with 401."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        message = "an API key is required: send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="missing_api_key")
    return _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
