"""Policies by name: one file each, found by its folder, configured by its Options dataclass."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import types
import typing
from typing import Any, Literal


class PolicyError(ValueError):
    """A policy, or an option of one, that does not exist or does not fit."""


@functools.cache
def policies(kind: str) -> dict[str, type[Any]]:
    """Name to class for a kind: "admission", "allocation" or "selection"."""
    package = importlib.import_module(f"penstock.core.{kind}")
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        policy = getattr(module, "POLICY", None)
        if policy is not None:
            found[policy.name] = policy
    return dict(sorted(found.items()))


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value has an option's type; a whole number is a float too, a bool is no number.
    What is inside a container is for the policy to check."""
    alternatives = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return any(_fits(value, alternative) for alternative in alternatives)
    if typing.get_origin(wanted) is Literal:
        return value in alternatives
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is (typing.get_origin(wanted) or wanted)


def make_policy(kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
    """Build a policy from its name and options.

    Raises: PolicyError naming what was wrong and what is allowed.
    """
    known = policies(kind)
    if name not in known:
        raise PolicyError(f"unknown {kind} policy {name!r}; choose from {', '.join(known)}")
    options = options or {}
    fields = {f.name: f.type for f in dataclasses.fields(known[name].Options)}
    hints = typing.get_type_hints(known[name].Options)
    for option, value in options.items():
        if option not in fields:
            allowed = ", ".join(fields) or "none"
            raise PolicyError(
                f"{kind} policy {name!r} has no option {option!r}; options: {allowed}"
            )
        if not _fits(value, hints[option]):
            raise PolicyError(
                f"{kind} policy {name!r}: {option} must be {fields[option]}, not {value!r}"
            )
    try:
        return known[name](known[name].Options(**options))
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{kind} policy {name!r}: {error}") from error
