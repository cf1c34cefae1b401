"""Registry of policies by name, one file each with its Options, or by the path of a file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.policies.declared import Gauge
from penstock.core.policies.options import checked, described

_BASES = {
    "admission": "AdmissionPolicy",
    "selection": "SelectionPolicy",
    "allocation": "AllocationPolicy",
    "pipeline": "Pipeline",
}
_NAME = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"$', re.MULTILINE)


class PolicyError(ValueError):
    """A policy or an option does not exist or does not fit."""


@functools.cache
def policy_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind's policies, read from their files without importing them."""
    folder = Path(__file__).parent / kind
    texts = (file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    names = (_NAME.search(text) for text in texts if "\nPOLICY = " in text)
    return tuple(sorted(found[1] for found in names if found))


@functools.cache
def policies(kind: str) -> dict[str, type[Any]]:
    """Return name to class for "admission", "selection", "allocation" or "pipeline"."""
    package = importlib.import_module(f"penstock.core.policies.{kind}")
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        policy = getattr(importlib.import_module(module_info.name), "POLICY", None)
        if policy is not None:
            found[policy.name] = _complete(kind, policy)
    return dict(sorted(found.items()))


def known_gauges() -> Iterator[Gauge]:
    """Yield what all registered policies declare for `/metrics`."""
    for kind in _BASES:
        for policy in policies(kind).values():
            yield from policy.metrics


def register(kind: str, policy: type[Any], name: str | None = None) -> None:
    """Register a policy under its name, or another; raise PolicyError if it is incomplete."""
    policies(kind)[name or policy.name] = _complete(kind, policy)


def _complete(kind: str, policy: Any) -> type[Any]:
    """Return the policy, or raise PolicyError if it lacks what its kind needs."""
    # Imported here: the names of policies are needed without NumPy.
    base = getattr(importlib.import_module("penstock.core.policies.base"), _BASES[kind])
    label = f"{kind} policy {getattr(policy, 'name', policy)!r}"
    if not (inspect.isclass(policy) and issubclass(policy, base)):
        raise PolicyError(f"{label} is no {base.__name__}")
    missing = sorted(getattr(policy, "__abstractmethods__", ()))
    missing += [name for name in ("name", "Options") if not hasattr(policy, name)]
    if missing:
        raise PolicyError(f"{label} lacks {', '.join(missing)}")
    return policy


def policy_class(kind: str, name: str) -> type[Any]:
    """Return a policy's class by its name or file, or raise PolicyError."""
    known = policies(kind)
    if name in known:
        return known[name]
    if name.endswith(".py"):
        return _from_file(kind, Path(name).resolve())
    choices = ", ".join(known)
    raise PolicyError(f"unknown {kind} policy {name!r}; choose from {choices}, or name a .py file")


@functools.cache
def _from_file(kind: str, path: Path) -> type[Any]:
    spec = importlib.util.spec_from_file_location(f"penstock_{kind}_{path}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PolicyError(f"there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look there for what annotations written as text mean.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PolicyError(f"{path}: {type(error).__name__}: {error}") from error
    return _complete(kind, getattr(module, "POLICY", None))


def option_types(kind: str, name: str) -> dict[str, Any]:
    """Return the types of a policy's options by name, or raise PolicyError."""
    return typing.get_type_hints(policy_class(kind, name).Options, include_extras=True)


def make_policy(kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
    """Build a policy from its name and options (YAML or JSON), or raise PolicyError."""
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
    policy = policy_class(kind, name)
    try:
        return policy(policy.Options(**fitting))
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{kind} policy {name!r}: {error}") from error


def make_pipeline(text: str) -> Any:
    """Build a pipeline from its name, file, or number of micro-batches, or raise PolicyError.

    P%: as many micro-batches as lower the target's throughput by less than this (Spin)."""
    counts = typing.get_args(option_types("pipeline", "micro_batches")["num"])[1]
    if text == "off":
        return make_policy("pipeline", "micro_batches", {"num": 1})
    if text.isascii() and text.isdecimal() and int(text) > 1 and int(text) in counts:
        return make_policy("pipeline", "micro_batches", {"num": int(text)})
    if re.fullmatch(r"[1-9]\d?%", text, re.ASCII):
        return make_policy("pipeline", "auto", {"drop": int(text[:-1]) / 100})
    if text in policies("pipeline") or text.endswith(".py"):
        return make_policy("pipeline", text)
    choices = ", ".join((*policies("pipeline"), "off"))
    raise PolicyError(
        f"unknown pipeline {text!r}; choose from {choices}, a number of micro-batches from 2 to "
        f"{counts.at_most}, 1% to 99% of the target's throughput for them, or name a .py file"
    )
