"""Tenants: who fairness is between, and what each may do."""

from __future__ import annotations

from pydantic import Field

from penstock.config.model import Model

DEFAULT_TENANT = "default"
"""The tenant of requests without an API key of another."""


class TenantShare(Model):
    """A tenant's weight in every fair share.

    max_running_requests: so many of its requests run at once, the others wait.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_running_requests: int | None = Field(default=None, ge=1)


class TenantConfig(TenantShare):
    """A tenant of Penstock's server: its share, and the API keys that stand for it.

    share_prompts: draft servers of other tenants may draft for its requests, and so see them.
    max_waiting_requests: without a first token at once; None is the share of any client.
    """

    api_keys: tuple[str, ...] = ()
    share_prompts: bool = False
    max_waiting_requests: int | None = Field(default=None, ge=1)
