"""Configuration from YAML and flags: pydantic models that refuse unknown settings."""

from __future__ import annotations

from typing import Any

from penstock.config.completions import CompletionsServer, key_variable
from penstock.config.devices import checked_device, cores_of
from penstock.config.drafters import DraftersConfig, DraftServerConfig, TlsConfig, is_loopback
from penstock.config.engine import (
    HEADS,
    LOOK_UPS,
    NGRAM,
    SUFFIX,
    DrafterConfig,
    DrafterParts,
    DrafterWeights,
    EngineConfig,
    ModelsConfig,
    PolicyConfig,
    PolicyKind,
    VllmConfig,
    model_name,
)
from penstock.config.files import Where, lines_of, read_yaml, yaml_value
from penstock.config.model import ConfigError, each_once, mistakes_in, parsed, unknown_setting
from penstock.config.profiles import ProfilePath, read_profile
from penstock.config.server import ServeConfig, seconds_in
from penstock.config.sources import Settings, read_settings
from penstock.config.state import default_state_folder
from penstock.config.tenants import (
    DEFAULT_TENANT,
    TenantConfig,
    as_tenants,
    hash_of_key,
)

__all__ = [
    "DEFAULT_TENANT",
    "HEADS",
    "LOOK_UPS",
    "NGRAM",
    "SUFFIX",
    "CompletionsServer",
    "ConfigError",
    "DraftServerConfig",
    "DrafterConfig",
    "DrafterParts",
    "DrafterWeights",
    "DraftersConfig",
    "EngineConfig",
    "ModelsConfig",
    "PolicyConfig",
    "PolicyKind",
    "ProfilePath",
    "ServeConfig",
    "Settings",
    "TenantConfig",
    "TlsConfig",
    "VllmConfig",
    "Where",
    "as_tenants",
    "checked_device",
    "cores_of",
    "default_state_folder",
    "each_once",
    "hash_of_key",
    "is_loopback",
    "key_variable",
    "lines_of",
    "mistakes_in",
    "model_name",
    "parse_config",
    "read_profile",
    "read_settings",
    "read_yaml",
    "seconds_in",
    "unknown_setting",
    "yaml_value",
]


def parse_config(data: dict[str, Any]) -> ServeConfig:
    """Validate a server's configuration. Raises ConfigError with one line for the first mistake."""
    return parsed(ServeConfig, data)
