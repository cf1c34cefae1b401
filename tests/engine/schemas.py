"""JSON schemas of several sorts, made by a seeded generator and written by hand after real
interfaces. All are bounded, so that a small model comes to an end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name", "title", "city", "country", "status", "kind", "count", "price", "email", "phone",
    "color", "size", "weight", "score", "level", "active", "created_at", "updated_at",
    "owner", "comment",
    "language", "currency", "priority", "category", "latitude", "longitude", "customer_reference",
)  # fmt: skip
_VALUES = ("red", "green", "blue", "open", "closed", "pending", "low", "medium", "high", "unknown")
_PATTERNS = (r"^[A-Z]{2,3}-[0-9]{4}$", r"^[a-f0-9]{8}$", r"^\+[0-9]{6,12}$", r"^#[0-9a-fA-F]{6}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _text(rng: random.Random) -> Schema:
    return {"type": "string", "maxLength": rng.randint(4, 24)}


def _number(rng: random.Random) -> Schema:
    if rng.random() < 0.6:
        low = rng.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 5000)}
    return {"type": "number", "minimum": 0, "maximum": 1}


def _leaf(rng: random.Random) -> Schema:
    made: list[Callable[[], Schema]] = [
        lambda: _text(rng),
        lambda: _number(rng),
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": rng.sample(_VALUES, rng.randint(2, 5))},
        lambda: {"const": rng.choice(_VALUES)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
    ]
    return rng.choice(made)()


def _flat(rng: random.Random) -> Schema:
    names = rng.sample(_WORDS, rng.randint(2, 6))
    return _object({name: _leaf(rng) for name in names})


def _optional(rng: random.Random) -> Schema:
    made = _flat(rng)
    return {**made, "required": rng.sample(made["required"], len(made["required"]) // 2)}


def _nested(rng: random.Random) -> Schema:
    made = _flat(rng)
    for name in rng.sample(made["required"], 1):
        made["properties"][name] = _flat(rng)
    return made


def _list(rng: random.Random) -> Schema:
    items = _leaf(rng) if rng.random() < 0.5 else _flat(rng)
    low = rng.randint(0, 2)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(1, 2)}


def _either(rng: random.Random) -> Schema:
    kinds = [_object({"kind": {"const": kind}, **_flat(rng)["properties"]}) for kind in _VALUES[:2]]
    return {"anyOf": kinds}


def _referring(rng: random.Random) -> Schema:
    first, second = rng.sample(_WORDS, 2)
    shared = {"$ref": "#/$defs/shared"}
    return {"$defs": {"shared": _flat(rng)}, **_object({first: shared, second: shared})}


_SORTS = (_flat, _optional, _nested, _list, _either, _referring)
_BY_HAND: dict[str, Schema] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
NUM_KINDS = len(_BY_HAND) + len(_SORTS)


def schemas(num: int) -> list[Schema]:
    """Those by hand first, then all sorts in turn."""
    rng = random.Random(0)
    made = [*_BY_HAND.values()]
    while len(made) < num:
        made.append(_SORTS[len(made) % len(_SORTS)](rng))
    return made[:num]
