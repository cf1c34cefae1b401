"""Configuration: pydantic models that refuse what they do not know, from YAML and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.core.registry import make_policy
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, TARGET

NGRAM = "ngram"
"""Path of the drafter that has none: n-gram lookup in the request's own text."""

PolicyKind = Literal["admission", "selection", "allocation"]


class ConfigError(ValueError):
    """One line: what was wrong, and what is allowed."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Says what is allowed, which `extra="forbid"` does not."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ValueError(f"unknown setting {name!r}; settings: {known}")
        return data


class PolicyConfig(_Model):
    """A policy by name, and its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def make(self, kind: PolicyKind) -> Any:
        """Build the policy. Raises: PolicyError."""
        return make_policy(kind, self.name, self.options)


class TenantConfig(_Model):
    """A tenant: the API keys that stand for it, and its weight in every fair share."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    api_keys: tuple[str, ...] = ()


class EngineConfig(_Model):
    """One target, its drafters, and the policies that rule them.

    kv_tokens: KV memory of the target in tokens; None takes a share of what is free.
    verification: None is `coupled` for requests with a seed and `ratio` for the others.
    """

    target: Path
    drafters: dict[str, str] = Field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    backend: Literal["auto", "native", "eager"] = "auto"
    attention: str = "packed"
    num_threads: int | None = Field(default=None, ge=1)
    kv_tokens: int | None = Field(default=None, ge=16)
    block_size: int = Field(default=16, ge=1, le=256)
    max_model_len: int | None = Field(default=None, ge=2)
    prefix_caching: bool = True
    verification: Literal["coupled", "ratio"] | None = None
    admission: PolicyConfig = PolicyConfig(name="vllm_v1")
    selection: PolicyConfig = PolicyConfig(name="single")
    allocation: PolicyConfig = PolicyConfig(name="throughput")
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)

    @field_validator("drafters")
    @classmethod
    def _names(cls, drafters: dict[str, str]) -> dict[str, str]:
        for name in drafters:
            if name in (AUTO_DRAFTER, NO_DRAFTER, TARGET) or not name:
                raise ValueError(f"a drafter cannot be called {name!r}")
        return drafters

    @field_validator("tenants")
    @classmethod
    def _one_tenant_a_key(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        keys = [key for tenant in tenants.values() for key in tenant.api_keys]
        if not all(keys) or len(set(keys)) < len(keys):
            raise ValueError("API keys must not be empty, and each must belong to one tenant only")
        return tenants

    @model_validator(mode="after")
    def _policies(self) -> Self:
        kinds: tuple[PolicyKind, ...] = ("admission", "selection", "allocation")
        for kind in kinds:
            getattr(self, kind).make(kind)
        drafter = self.selection.options.get("drafter")
        if drafter is not None and drafter not in self.drafters:
            known = ", ".join(self.drafters) or "none is configured"
            raise ValueError(f"selection names an unknown drafter {drafter!r}; drafters: {known}")
        return self


class ServeConfig(_Model):
    """The whole server: engine, address, limits.

    max_waiting_requests: requests without a first token at once; more get HTTP status 429.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    served_model_name: str | None = None
    max_waiting_requests: int = Field(default=4096, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    shutdown_grace_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)


def parse_config(data: dict[str, Any]) -> ServeConfig:
    """Validate a configuration. Raises: ConfigError with one line for the first mistake."""
    try:
        return ServeConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {message}" if where else message) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises: ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    return data
