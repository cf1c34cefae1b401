"""JSON schemas whose objects have the properties that they name, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COMBINED = frozenset({"allOf", "anyOf", "oneOf"})
_LISTS = _COMBINED | {"prefixItems"}
_SINGLE = frozenset({"items", "additionalProperties"})
_NAMING = frozenset({"properties", "required"})
_OPENING = frozenset({"additionalProperties", "patternProperties"})
_MAX_SIZE = 100_000
"""Most schemas, and names in combinations: these may grow faster than what is given."""


def closed(schema: Any) -> Any:
    """Return a schema, or its text, whose objects have no other properties than those it names.

    As with `unevaluatedProperties: false`, which llguidance does not know, where a schema has no
    `additionalProperties`; likewise arrays end behind their `prefixItems`. An object without any
    names stays free. A schema that is malformed or has too large combinations stays as it is."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        return _Closer(read).closed(read)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return schema  # malformed ones are for llguidance to refuse


def with_parts(schema: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a schema with changed parts. change: of a keyword and a schema that it has."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            made[keyword] = {name: change(keyword, part) for name, part in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            made[keyword] = [change(keyword, part) for part in value]
        elif keyword in _SINGLE:
            made[keyword] = change(keyword, value)
    return made


class _Closer:
    """Closes the schemas of a root."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._size = 0

    def closed(self, schema: Any, beside: tuple[str, ...] = (), is_open: bool = False) -> Any:
        """Return a schema that is closed.

        beside: names in what describes the same object: by `allOf`, or beside `anyOf` or `$ref`.
        is_open: only the objects inside it are closed. Raises: ValueError if too large."""
        self._size += 1
        schema = {} if schema is True and beside else schema
        if not isinstance(schema, Mapping):
            return schema
        fork = next((key for key in ("anyOf", "oneOf") if key in schema), None)
        names, required = dict.fromkeys(beside, True), list[str]()
        # One part, or a reference alone, is closed itself; in combinations it cannot be.
        num_parts = len(schema.get("allOf", ())) + ("$ref" in schema)
        is_alone = num_parts == 1 and not (_NAMING & schema.keys() or beside or fork or is_open)
        if not is_alone:
            is_open |= self._gather(schema, fork, names, required, set())
        names |= dict.fromkeys(required, True)
        self._size += len(names) if num_parts or beside else 0
        if self._size > _MAX_SIZE:
            raise ValueError
        is_open |= (
            "additionalProperties" in schema
            or (fork is not None and "patternProperties" in schema)
            or schema.get("minProperties", 0) > len(names)
        )

        def change(keyword: str, part: Any) -> Any:
            if keyword in _COMBINED or keyword == "$ref":
                return self.closed(part, tuple(names), is_open or fork not in (None, keyword))
            return self.closed(part)

        made: dict[str, Any] = with_parts(schema, change)
        if "$ref" in made and not is_alone:
            made["$ref"] = [change("$ref", self._target(made["$ref"])), *made.pop("allOf", ())]
            made = {"allOf" if key == "$ref" else key: part for key, part in made.items()}
        if not (is_open or fork) and (names or "properties" in schema):
            made["properties"] = names | made.get("properties", {})
            made["additionalProperties"] = False
        if 0 < len(schema.get("prefixItems", ())) >= schema.get("minItems", 0) and not is_open:
            made.setdefault("items", False)
        return made

    def _gather(
        self,
        schema: Any,
        fork: str | None,
        names: dict[str, bool],
        required: list[str],
        seen: set[str],
    ) -> bool:
        """Add the names for an object, without those of the schema's `fork`.

        required: names that may come last. Returns whether any part but itself allows others."""
        allows = False
        for keyword, value in schema.items():
            parts = value if keyword in _COMBINED and keyword != fork else []
            if keyword == "properties":
                names |= dict.fromkeys(value, True)
            elif keyword == "required":
                required += value
            elif keyword == "$ref" and value not in seen:
                seen.add(value)
                parts = [self._target(value)]
            for part in parts:
                self._size += 1
                if isinstance(part, Mapping):
                    inside = self._gather(part, None, names, required, seen)
                    allows |= inside or not _OPENING.isdisjoint(part)
        return allows

    def _target(self, ref: str) -> Any:
        """Return what a reference refers to. Raises: LookupError if that is not in the root."""
        if not ref.startswith("#"):
            raise LookupError
        found = self._root
        for part in unquote(ref).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
        return found
