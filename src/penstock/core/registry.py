"""Policies by name: one file each, called like it, found by its folder, configured by its Options
dataclass."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import typing
from pathlib import Path
from typing import Any

from penstock.core.options import checked, described

_NAME = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"$', re.MULTILINE)


class PolicyError(ValueError):
    """A policy, or an option of one, that does not exist or does not fit."""


@functools.cache
def policy_names(kind: str) -> tuple[str, ...]:
    """Names of a kind's policies, from their files: none is imported."""
    folder = Path(__file__).parent / "policies" / kind
    texts = (file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    names = (_NAME.search(text) for text in texts if "\nPOLICY = " in text)
    return tuple(sorted(found[1] for found in names if found))


@functools.cache
def policies(kind: str) -> dict[str, type[Any]]:
    """Name to class for a kind: "admission", "selection", "allocation" or "pipeline"."""
    package = importlib.import_module(f"penstock.core.policies.{kind}")
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(module_info.name)
        policy = getattr(module, "POLICY", None)
        if policy is not None:
            found[policy.name] = policy
    return dict(sorted(found.items()))


def option_types(kind: str, name: str) -> dict[str, Any]:
    """What a policy's options may be, by their names (`core/options.py`).

    Raises: PolicyError for a policy that does not exist.
    """
    known = policies(kind)
    if name not in known:
        raise PolicyError(f"unknown {kind} policy {name!r}; choose from {', '.join(known)}")
    return typing.get_type_hints(known[name].Options, include_extras=True)


def make_policy(kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
    """Build a policy from its name and options, which may come from YAML or JSON.

    Raises: PolicyError naming what was wrong and what is allowed.
    """
    allowed = option_types(kind, name)
    fitting: dict[str, Any] = {}
    for option, value in (options or {}).items():
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            raise PolicyError(f"{kind} policy {name!r} has no option {option!r}; options: {known}")
        try:
            fitting[option] = checked(value, allowed[option])
        except (ValueError, OverflowError) as error:
            raise PolicyError(
                f"{kind} policy {name!r}: {option} must be {described(allowed[option])}, "
                f"not {value!r}"
            ) from error
    policy = policies(kind)[name]
    try:
        return policy(policy.Options(**fitting))
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{kind} policy {name!r}: {error}") from error


def make_pipeline(text: str) -> Any:
    """A pipeline by its name, or a number of micro-batches. Raises: PolicyError."""
    if text.isdecimal():
        return make_policy("pipeline", "micro_batches", {"num": int(text)})
    known = sorted(set(policies("pipeline")) - {"micro_batches"})
    if text not in known:
        names = ", ".join(known)
        raise PolicyError(
            f"unknown pipeline {text!r}; choose from {names}, or a number of micro-batches"
        )
    return make_policy("pipeline", text)
