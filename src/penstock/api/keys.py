"""API keys stand for tenants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from penstock.api.errors import ApiError
from penstock.config import DEFAULT_TENANT, TenantConfig


class Keyring:
    """Who a request is from. Without any key configured, everybody is the default tenant."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        # Looked up by digest, so that the time of a look-up says nothing about a key.
        self._tenants = {
            _digest(key): name for name, tenant in tenants.items() for key in tenant.api_keys
        }

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header. Raises: ApiError with 401."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "an API key is required: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="missing_api_key")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
