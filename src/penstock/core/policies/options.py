"""Option types of policies: a type and a range, declared on the dataclass field.

    watermark: Annotated[float, Range(at_least=0, below=1)] = 0.01

The registry checks values against them; `__post_init__` checks several options against each
other."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

LARGEST_COUNT = 10**9
"""Largest number of tokens, requests or steps: above any server's, safe to calculate with."""
LONGEST_DRAFT = 1024
"""Largest draft length: policies weigh every length up to it, for every request."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of an option, with at most one bound on either side; excludes NaN and infinity."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            abs(value) < float("inf")
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        has_upper = self.at_most is not None or self.below is not None
        bounds = (
            ("from" if has_upper else "of at least", self.at_least),
            ("above", self.above),
            ("to", self.at_most),
            ("to below", self.below),
        )
        return " ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


PositiveInt = Annotated[int, Range(at_least=1, at_most=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Range(at_least=0, at_most=LARGEST_COUNT)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
Probability = Annotated[float, Range(above=0, below=1)]
Share = Annotated[float, Range(at_least=0, below=1)]
Seed = Annotated[int, Range(at_least=0, below=2**64)]
MaxDraftTokens = Annotated[int, Range(at_least=0, at_most=LONGEST_DRAFT)]


def checked(value: Any, wanted: Any) -> Any:
    """Return a value as an option of a type, or raise ValueError or OverflowError.

    A list, as in YAML and JSON, becomes a tuple, a whole number may be a float, a bool is no
    number."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return _first_that_fits(value, parts)
    if origin is Annotated:
        value = checked(value, parts[0])
        fits = all(value in allowed for allowed in parts[1:])
    elif origin is Literal:
        fits = value in parts and type(value) is not bool
    elif origin is tuple:
        fits = type(value) in (tuple, list)
        value = tuple(checked(part, parts[0]) for part in value) if fits else value
    elif wanted is float and type(value) is int:
        return float(value)
    else:
        fits = type(value) is wanted
    if not fits:
        raise ValueError(f"not {described(wanted)}")
    return value


def _first_that_fits(value: Any, alternatives: tuple[Any, ...]) -> Any:
    for alternative in alternatives:
        try:
            return checked(value, alternative)
        except (ValueError, OverflowError):
            continue
    raise ValueError("none of the alternatives")


_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}


def described(wanted: Any) -> str:
    """Return a description of a declared type for error messages."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return ", or ".join(map(described, parts))
    if origin is Annotated:
        return f"{described(parts[0])} {parts[1]}"
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        return f"a list, each {described(parts[0])}"
    return _NAMES[wanted]
