"""What `penstock serve` runs with: options, environment, file, defaults, in this order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from penstock.cli.engines import with_engine
from penstock.cli.models import settings_in, with_models
from penstock.cli.options import DRAFT_SERVERS_ALLOCATION
from penstock.config import (
    DEFAULT_TENANT,
    ConfigError,
    ServeConfig,
    Settings,
    hash_of_key,
    parse_config,
    read_settings,
)

_WITH_DRAFT_SERVERS = {
    "drafters": {},
    "pipeline": "async",
    "verification": "coupled",
    "allocation": {"name": DRAFT_SERVERS_ALLOCATION},
}
"""Settings of the engine where draft servers may connect, unless others are given."""


def in_force(options: Mapping[str, Any]) -> ServeConfig:
    """The settings of a server with these options of `penstock serve`, by their names there; None
    is not given. Raises: ConfigError."""
    given = read_settings(options["config"], os.environ)
    try:
        return parse_config(assembled(given, options))
    except ConfigError as error:
        origin = given.origin(error.where)
        raise error if origin is None else ConfigError(f"{origin}: {error}") from error


def assembled(given: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with options in their place, models found, and all that follows from it. Raises:
    ConfigError."""
    settings = deepcopy(given.values)

    def of(*names: str) -> dict[str, Any]:
        return {name: options.get(name) for name in names}

    models = _given(
        settings_in(settings.pop("engine", None), "engine"),
        **of("fairness", "verification", "dtype", "device", "max_model_len", "kv_tokens"),
        **of("drafter_weights", "profile", "pipeline"),
    )
    tls = {name: options.get(f"tls_{name}") for name in ("certificate", "key", "client_ca")}
    drafters = settings_in(settings.pop("drafters", None), "drafters")
    drafters = _given(
        drafters, listen=options.get("drafters_listen"), tls=_given({}, **tls) or None
    )
    _name_policies(models, **of("admission", "selection", "allocation"))
    _add_keys(models, options.get("api_key") or ())
    if drafters:
        settings["drafters"] = drafters
        models = {**_WITH_DRAFT_SERVERS, **models}
    models = with_engine(
        models,
        options.get("engine"),
        options.get("engine_arg"),
        **of("tensor_parallel", "pipeline_parallel", "distributed_backend", "nodes", "node_rank"),
        **of("master", "quantization"),
    )
    models = with_models(
        models,
        options.get("target"),
        options.get("drafter") or (),
        speculate=not options.get("no_speculation"),
    )
    origins = options.get("cors_origin") or None
    settings = _given(
        settings,
        **of("host", "port", "served_model_name", "log_format", "otlp_traces_endpoint"),
        cors_origins=origins,
    )
    return {**settings, "engine": models}


def _given(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Settings, with the options that were given in their place. Null is as if it were absent."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: value for name, value in {**settings, **given}.items() if value is not None}


def _name_policies(engine: dict[str, Any], **names: str | None) -> None:
    """Put the policies that were given in their places; one of the same name keeps its options.

    Raises: ConfigError.
    """
    for kind, name in names.items():
        if name is None:
            continue
        if settings_in(engine.get(kind), f"engine.{kind}").get("name") != name:
            engine[kind] = {"name": name}


def _add_keys(engine: dict[str, Any], keys: Sequence[str]) -> None:
    """Let these keys stand for the default tenant. Raises: ConfigError."""
    if not all(keys):
        raise ConfigError("--api-key must not be empty")
    if keys:
        tenants = settings_in(engine.get("tenants"), "engine.tenants")
        default = settings_in(tenants.get(DEFAULT_TENANT), f"engine.tenants.{DEFAULT_TENANT}")
        own = {**default, "api_keys": [*default.get("api_keys", ()), *map(hash_of_key, keys)]}
        engine["tenants"] = {**tenants, DEFAULT_TENANT: own}
