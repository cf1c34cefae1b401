"""Tenants: parties of fair sharing, and their limits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.config.model import Model
from penstock.core.types import Tenant

_HASH = "sha256:"

DEFAULT_TENANT = "default"
"""Tenant of requests without an API key of another."""


def hash_of_key(key: str) -> str:
    """Return the form of an API key in configuration files."""
    return _HASH + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _is_hash(text: str) -> str:
    """Raises ValueError without the text, which may be a key."""
    if not re.fullmatch(_HASH + "[0-9a-f]{64}", text):
        raise ValueError(
            f"an API key is kept as {_HASH} and what `printf %s KEY | sha256sum` prints, never as "
            "it is; `penstock key new` makes a new one"
        )
    return text


KeyHash = Annotated[str, AfterValidator(_is_hash)]


class TenantConfig(Model):
    """Tenant of Penstock's server: its share, limits and API keys. A limit of None is none.

    weight: in every fair share
    max_running_requests: further ones wait
    api_keys: hashes, as `hash_of_key` makes them
    share_prompts: draft servers of other tenants, and drafters on servers of other machines, may
        draft for its requests, and so see them
    max_waiting_requests: requests without a first token; None is the share of any client
    requests_per_minute: each choice of a request counts; so many may come at once
    tokens_per_minute: prompt tokens, and the allowed output tokens until a request ends
    max_prompt_tokens, max_output_tokens: of one request
    allowed_drafters: names of drafters that may draft for its requests
    save_outputs: the `suffix` drafter's memory of its outputs may be written to the state folder"""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_running_requests: int | None = Field(default=None, ge=1)
    api_keys: tuple[KeyHash, ...] = ()
    share_prompts: bool = False
    max_waiting_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    allowed_drafters: tuple[str, ...] | None = None
    save_outputs: bool = False


def as_tenants(tenants: Mapping[str, TenantConfig]) -> list[Tenant]:
    """Return the tenants in the scheduler's form."""
    return [
        Tenant(
            name,
            t.weight,
            t.share_prompts,
            t.max_running_requests,
            None if t.allowed_drafters is None else frozenset(t.allowed_drafters),
            t.save_outputs,
        )
        for name, t in tenants.items()
    ]
