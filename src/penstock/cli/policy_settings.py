"""`--set OPTION=VALUE`: options of policies, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KINDS = ("admission", "allocation", "selection")


def typed_settings(names: dict[str, str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--set` texts as options of each kind of policy, with the types that the policies declare.

    Raises: PolicyError.
    """
    from penstock.core.registry import PolicyError, make_policy, option_types

    options: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for text in settings:
        key, given, value = text.partition("=")
        kind, dot, option = key.partition(".")
        if not dot:
            kind, option = "admission", key
        if not given or kind not in names:
            raise PolicyError(
                f"--set takes OPTION=VALUE, with a prefix {' or '.join(f'{k}.' for k in _KINDS)} "
                f"or none, not {text!r}"
            )
        wanted = option_types(kind, names[kind]).get(option)
        try:
            options[kind][option] = parse_value(value.strip(), wanted)
        except ValueError:
            # The policy says what it should have been.
            options[kind][option] = value
    for kind, name in names.items():
        make_policy(kind, name, options[kind])
    return options


def parse_value(text: str, wanted: Any) -> Any:
    """Text as a value of a declared type: bool, int, float, str, None, a tuple of such, a Literal,
    or the first of a union that fits. Raises: ValueError where it is none."""
    from types import NoneType, UnionType
    from typing import Annotated, Literal, Union, get_args, get_origin

    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return parse_value(text, inner[0])
    if origin in (UnionType, Union):
        # A number before a text, None before both.
        for kind in sorted(inner, key=lambda t: (t is str, t is not NoneType)):
            try:
                return parse_value(text, kind)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is tuple:
        listed = text.removeprefix("[").removesuffix("]")
        return tuple(parse_value(part.strip(), inner[0]) for part in listed.split(",") if part)
    choices: dict[str, Any] = {}
    if origin is Literal:
        choices = {str(choice): choice for choice in inner}
    elif wanted is bool:
        choices = {"true": True, "false": False}
    elif wanted is NoneType:
        choices = {"none": None, "null": None}
    if choices:
        if text.lower() not in choices and text not in choices:
            raise ValueError(text)
        return choices[text] if text in choices else choices[text.lower()]
    if wanted not in (int, float, str):
        raise ValueError(text)
    return wanted(text)
