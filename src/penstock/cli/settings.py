"""Settings of an engine or a server: from options, environment, file, defaults, in this order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from penstock.cli.models import (
    fetched,
    hub_name,
    label_of,
    named_drafters,
    settings_in,
    with_models,
)
from penstock.cli.options import NATIVE, VLLM
from penstock.config import (
    DEFAULT_TENANT,
    LOOK_UPS,
    ConfigError,
    EngineConfig,
    PolicyConfig,
    PolicyKind,
    ServeConfig,
    Settings,
    Where,
    default_state_folder,
    each_once,
    hash_of_key,
    parse_config,
    read_settings,
    unknown_setting,
    yaml_value,
)
from penstock.core.policies.bundles import AUTO, BUNDLES
from penstock.engine.models.hub import Progress

OPTION = "option"
"""Origin of a setting given by its own option."""

_ENGINE, _VLLM = "engine", ("engine", VLLM)
_POLICIES = get_args(PolicyKind)
PARTS = (*_POLICIES, "pipeline")
"""Settings that override parts of a bundle."""

_PLACES: dict[str, Where] = {
    **{name: (name,) for name in ("host", "port", "served_model_name")},
    **{
        name: (_ENGINE, name)
        for name in ("target", "dtype", "kv_dtype", "device", "policy", *PARTS)
    },
    **{name: (_ENGINE, name) for name in ("kv_tokens", "max_model_len")},
    "drafters_listen": ("drafters", "listen"),
    "state": (_ENGINE, "state"),
}
"""Settings by option."""


def in_force(options: Mapping[str, Any], *, download: bool = False) -> ServeConfig:
    """Return the settings of `penstock serve` with these options; None is not given.

    download: as of `with_models`. Raises: ConfigError."""
    return with_origins(options, download=download)[0]


def with_origins(
    options: Mapping[str, Any], *, download: bool = False
) -> tuple[ServeConfig, Settings]:
    """Return the effective settings, and those given with their origins. Raises: ConfigError.

    download: as of `with_models`."""
    given = read_settings(options.get("config"), os.environ)
    try:
        put_options(given, options)
        return _with_state(parse_config(assembled(given, download=download)), given), given
    except ConfigError as error:
        origin = given.origin(error.where)
        raise error if origin in (None, OPTION) else ConfigError(f"{origin}: {error}") from error


def _with_state(config: ServeConfig, given: Settings) -> ServeConfig:
    """Return settings with the default folder of what was learned, unless one was given."""
    if given.at((_ENGINE, "state")) is not None:
        return config
    folder = {"state": default_state_folder()}
    engine = config.engine.model_copy(update=folder)
    several = {name: own.model_copy(update=folder) for name, own in config.models.items()}
    return config.model_copy(update={"engine": engine, "models": several})


def engine_with(options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's settings with these options alone. Raises: ConfigError."""
    given = Settings()
    put_options(given, options)
    return parse_config(assembled(given)).engine


def assembled(given: Settings, *, download: bool = True) -> dict[str, Any]:
    """Return settings with models and derived defaults; null is absent. Raises: ConfigError.

    download: as of `with_models`."""
    settings = _without_null(given.values)
    engine = _without_null(settings_in(settings.get(_ENGINE), _ENGINE))
    if settings_in(settings.get("drafters"), "drafters"):
        bundled = BUNDLES.get(str(engine.get("policy", AUTO)), BUNDLES[AUTO])
        look_up = {name: name for name in LOOK_UPS if name == engine.get("look_up")}
        engine = {"drafters": look_up, "verification": "coupled", **bundled.engine, **engine}
    if settings_in(settings.get("models"), "models"):
        several = dict(_several(engine, settings["models"], download))
        return {**settings, "models": several, _ENGINE: next(iter(several.values()))}
    target = str(engine.get("target"))
    if hub_name(target) is not None:
        settings = {"served_model_name": target, **settings}
    return {**settings, _ENGINE: with_models(engine, download=download)}


def _several(
    engine: dict[str, Any], several: dict[str, Any], download: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and settings of several models, that of `engine` first. Raises: ConfigError."""
    pairs, target = [*several.items()], engine.get("target")
    if target is not None:
        pairs.insert(0, (label_of(str(target)), engine))
    for name, given in each_once(pairs, "models").items():
        own = _without_null(settings_in(given, f"models.{name}"))
        if given is not engine and {"tenants", "state"} & own.keys():
            raise ConfigError(
                f"models.{name}: tenants and state are under engine", ("models", name)
            )
        try:
            yield name, with_models({**_shared(engine), **own}, download=download)
        except ConfigError as error:
            where = ("models", name, *error.where[1:])
            raise ConfigError(f"models.{name}: {error}", where) from error


def _shared(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what several models share of `engine`: not what is of its own target."""
    own = ("target", "drafters", "profile") if engine.get("target") is not None else ()
    return {name: value for name, value in engine.items() if name not in own or not value}


def of_pulled(options: Mapping[str, Any], name: str, progress: Progress) -> EngineConfig:
    """Return the settings of a model that is fetched, or bundled. Raises: ConfigError."""
    given = read_settings(options.get("config"), os.environ)
    put_options(given, options)
    engine = _shared(_without_null(settings_in(given.values.get(_ENGINE), _ENGINE)))
    engine["target"] = str(fetched(name, progress))
    return _with_state(parse_config({_ENGINE: with_models(engine, download=False)}), given).engine


def _without_null(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def put_options(settings: Settings, options: Mapping[str, Any]) -> None:
    """Put options of `penstock serve` into settings. Raises: ConfigError."""
    for name, where in _PLACES.items():
        if options.get(name) is not None:
            _put(settings, where, options[name], OPTION)
    first, *more = options.get("targets") or [None]
    if first is not None:
        settings.put((_ENGINE, "target"), first, OPTION)
    for name, target in each_once(((label_of(t), t) for t in more), "models").items():
        settings.put(("models", name), {"target": target}, OPTION)
    drafters = options.get("drafter")
    if options.get("no_speculation"):
        settings.put((_ENGINE, "drafters"), {}, OPTION)
    elif drafters:
        paths = {name: {"path": path} for name, path in named_drafters(drafters).items()}
        settings.put((_ENGINE, "drafters"), paths, OPTION)
    _put_keys(settings, options.get("api_key") or ())
    pairs = map(_pair, options.get("settings") or ())
    for key, (value, origin) in each_once(pairs, "--set").items():
        _put(settings, tuple(key.split(".")), value, origin)
    _choose_engine(settings, options.get("engine"))


def _put(settings: Settings, where: Where, value: Any, origin: str) -> None:
    """Put one setting. Raises: ConfigError.

    The name of the same policy keeps its options, as do options without a name."""
    is_policy = len(where) == 2 and where[0] == _ENGINE and where[1] in _POLICIES
    if is_policy and isinstance(value, str):
        name = settings.at((*where, "name"))
        if name == value:
            return
        if name is None and settings.at((*where, "options")):
            where = (*where, "name")
        else:
            value = {"name": value}
    settings.put(where, value, origin)


def _put_keys(settings: Settings, keys: Sequence[str]) -> None:
    """Add API keys of the default tenant. Raises: ConfigError."""
    if not all(keys):
        raise ConfigError("--api-key must not be empty")
    if keys:
        where = (_ENGINE, "tenants", DEFAULT_TENANT, "api_keys")
        settings.put(where, [*(settings.at(where) or ()), *map(hash_of_key, keys)], OPTION)


def _pair(text: str) -> tuple[str, tuple[Any, str]]:
    """Return key, value and origin of a `--set` text. Raises: ConfigError."""
    key, is_given, value = text.partition("=")
    if not (key and is_given):
        raise ConfigError(f"--set takes KEY=VALUE, as in vllm.tensor_parallel=2, not {text!r}")
    origin = f"--set {key}"
    where = key.split(".")
    own, engine = ServeConfig.model_fields, EngineConfig.model_fields
    if where[0] not in own:
        if where[0] not in engine:
            raise ConfigError(f"{origin}: {unknown_setting(where[0], [*own, *engine])}")
        where.insert(0, _ENGINE)
    if len(where) == 3 and where[1] in _POLICIES and where[2] not in PolicyConfig.model_fields:
        where.insert(2, "options")
    return ".".join(where), (yaml_value(value, origin), origin)


def _choose_engine(settings: Settings, engine: str | None) -> None:
    if engine not in (None, NATIVE, VLLM):
        raise ConfigError(f"--engine is {engine!r}; allowed: {NATIVE}, {VLLM}")
    if engine == VLLM and settings.at(_VLLM) is None:
        settings.put(_VLLM, {}, OPTION)
    if engine == NATIVE:
        sets = [o for where, o in settings.origins.items() if where[:2] == _VLLM and "--" in o]
        if sets:
            raise ConfigError(f"{sets[0]}: for vLLM's engine alone, not with --engine native")
        settings.put(_VLLM, None, OPTION)
