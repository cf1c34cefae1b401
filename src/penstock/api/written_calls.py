"""Incremental parsers of one tool call in each format."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic_core import from_json

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class WrittenCall(ABC):
    """A possible call while it is generated.

    begins: possible first characters; "" for any. marks: strings in it that may be special tokens.
    id, index, num_told: state of `ToolCallParser`
    """

    begins: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.is_wrong = False
        """True if it cannot be a call."""
        self.id, self.index, self.num_told = "", 0, 0
        self._tools = tools

    @property
    @abstractmethod
    def text(self) -> str:
        """Text parsed so far."""

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @property
    @abstractmethod
    def arguments(self) -> str | None:
        """JSON so far; None while it may not be an object."""

    @abstractmethod
    def add(self, text: str) -> int:
        """Parse up to the call's end, or until it cannot be a call; return the characters used."""


class JsonCall(WrittenCall):
    """A JSON object with the `name` of a tool and its `arguments` (or `parameters`), an object."""

    begins = ("{",)

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._object = _Object()
        self._whole_arguments: str | None = None

    @property
    def text(self) -> str:
        return self._object.text

    @property
    def is_over(self) -> bool:
        return self._object.is_over

    @property
    def arguments(self) -> str | None:
        if self.is_over:
            return self._whole_arguments
        written = {_string(key): value for key, value in self._object.written.items()}
        value = next((written[key] for key in _ARGUMENTS if key in written), "").strip()
        return value if value.startswith("{") else None

    def add(self, text: str) -> int:
        taken = 0
        while taken < len(text) and not (self.is_over or self.is_wrong):
            taken += self._object.add(text[taken:])
            self.is_wrong = not self._may_be_call()
        return taken

    def _may_be_call(self) -> bool:
        keys = [_string(key) for key in self._object.written]
        known = ["arguments" if key in _ARGUMENTS else key for key in keys]
        if not all(key in _KEYS for key in keys) or len(set(known)) < len(known):
            return False
        if self.name is None:
            name = next((v for k, v in self._object.entries.items() if _string(k) == "name"), None)
            if name is not None:
                self.name = _string(name)
                if self.name not in self._tools:
                    return False
        return not self.is_over or self._is_call()

    def _is_call(self) -> bool:
        call = _parsed(self.text)
        if not isinstance(call, dict) or self.name is None:
            return False
        key = next((key for key in _ARGUMENTS if key in call), None)
        value = call.get(key, {}) if key else {}
        if isinstance(value, str):
            # Some models write the arguments as a JSON string.
            self._whole_arguments = value.strip()
            return isinstance(_parsed(value), dict)
        if value is None or key is None:
            self._whole_arguments = "{}"
            return True
        written = next(v for k, v in self._object.entries.items() if _string(k) == key)
        self._whole_arguments = written.strip()
        return isinstance(value, dict)


class NamedCall(WrittenCall):
    """A tool's name, between strings of its format, and a JSON object.

    prefixes, separators: before the name and behind it. skipped: an optional part of the latter"""

    begins = ("",)
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    separators: ClassVar[tuple[str, ...]]
    skipped: ClassVar[re.Pattern[str]] = re.compile("(?!)")

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._head = ""
        self._object = _Object()
        self._heads = {
            prefix + name + separator: name
            for name in tools
            for prefix in self.prefixes
            for separator in self.separators
        }

    @property
    def text(self) -> str:
        return self._head + self._object.text

    @property
    def is_over(self) -> bool:
        return self._object.is_over

    @property
    def arguments(self) -> str | None:
        return self._object.text if self.name is not None else None

    def add(self, text: str) -> int:
        taken = 0
        while taken < len(text) and self.name is None and not self.is_wrong:
            if text[taken] == "{":
                self.name = self._heads.get(self.skipped.sub("", self._head, count=1).rstrip())
            self.is_wrong = self.name is None and not self._goes_on(text[taken])
            taken += self.name is None
        while taken < len(text) and not (self.is_over or self.is_wrong):
            taken += self._object.add(text[taken:])
            self.is_wrong = self.is_over and not isinstance(_parsed(self._object.text), dict)
        return taken

    def _goes_on(self, char: str) -> bool:
        """Add a character; True if arguments may still follow."""
        self._head += char
        head = self.skipped.sub("", self._head, count=1)
        num_blank = len(head) - len(head.rstrip())
        if head.rstrip() in self._heads and num_blank <= _MOST_BLANKS:
            return True
        return any(whole.startswith(head) for whole in self._heads)


_MOST_BLANKS = 8
"""White space before a call's arguments."""


class MistralCall(NamedCall):
    """`NAME[ARGS]{…}`, or `NAME[CALL_ID]ID[ARGS]{…}`."""

    marks = ("[ARGS]", "[CALL_ID]")
    separators = marks
    skipped = re.compile(r"\[CALL_ID\][A-Za-z0-9_-]{0,64}")


class HarmonyCall(NamedCall):
    """`NAME <|constrain|>json<|message|>{…}`, of a recipient before or behind its channel."""

    marks = ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
    separators = tuple(
        f"{channel}{kind}<|message|>"
        for channel in ("", "<|channel|>commentary", "<|channel|>analysis")
        for kind in ("", " json", " code", " <|constrain|>json", "<|constrain|>json")
    )


class DeepSeekCall(NamedCall):
    """`function<｜tool▁sep｜>NAME` and a fence of JSON, or `NAME<｜tool▁sep｜>{…}` (V3.1)."""

    marks = ("<｜tool▁sep｜>",)
    prefixes = ("", "function<｜tool▁sep｜>")
    separators = ("\n```json", "<｜tool▁sep｜>")


class XmlCall(WrittenCall):
    """Arguments as `<parameter=KEY>VALUE</parameter>` in `<function=NAME>` and `</function>`.

    A value is text, or of its schema's type."""

    begins = ("<",)

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._text = ""
        self._is_over = False
        self._start = 0
        """Start of the current tag or value."""
        self._key: str | None = None
        self._entries: dict[str, str] = {}

    @property
    def text(self) -> str:
        return self._text

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def arguments(self) -> str | None:
        if self.name is None:
            return None
        entries = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in self._entries.items())
        return "{" + ", ".join(entries) + ("}" if self.is_over else "")

    def add(self, text: str) -> int:
        for taken, char in enumerate(text, 1):
            self._text += char
            if self._key is None:
                self.is_wrong = not self._in_tag(char)
            elif char == ">" and self._text.endswith(_END_OF_VALUE):
                value = self._text[self._start : -len(_END_OF_VALUE)]
                self._entries[self._key] = self._as_json(self._key, value)
                self._key, self._start = None, len(self._text)
            if self.is_wrong or self.is_over:
                return taken
        return len(text)

    def _in_tag(self, char: str) -> bool:
        """Add a character; False if this is not a valid tag."""
        if char.isspace() and self._start == len(self._text) - 1:
            self._start += 1
            return True
        tag = self._text[self._start :]
        if self.name is None:
            expected = {f"<function={name}>": name for name in self._tools}
            self.name = expected.get(tag)
            if self.name is None:
                return any(one.startswith(tag) for one in expected)
        elif tag == _END_OF_CALL:
            self._is_over = True
        elif tag.startswith(_PARAMETER) and char == ">":
            self._key = tag[len(_PARAMETER) : -1]
            if not self._key or self._key in self._entries:
                return False
        else:
            is_key = tag.startswith(_PARAMETER) and is_xml_key(tag[len(_PARAMETER) :])
            return is_key or _PARAMETER.startswith(tag) or _END_OF_CALL.startswith(tag)
        self._start = len(self._text)
        return True

    def _as_json(self, key: str, value: str) -> str:
        value = value.removeprefix("\n").removesuffix("\n")
        schema = self._tools[self.name or ""]
        known = schema.get("properties")
        types = _types(known.get(key), schema) if isinstance(known, Mapping) else set()
        written = value.strip()
        if "boolean" in types and written in ("True", "False"):
            written = written.lower()
        if "null" in types and written in ("null", "None"):
            return "null"
        read = _parsed(written)
        is_read = any(name in types and isinstance(read, kind) for name, kind in _TYPES.items())
        if is_read and (type(read) is not bool or "boolean" in types):
            return written
        return json.dumps(value, ensure_ascii=False)


_PARAMETER, _END_OF_VALUE, _END_OF_CALL = "<parameter=", "</parameter>", "</function>"
LONGEST_XML_KEY = 288
_XML_KEY = re.compile(rf"[^<>\n]{{1,{LONGEST_XML_KEY}}}")


def is_xml_key(name: str) -> bool:
    """True if `XmlCall` accepts the name of a parameter."""
    return _XML_KEY.fullmatch(name) is not None


def is_xml_value(text: str) -> bool:
    """True if `XmlCall` accepts the text as a value."""
    return _END_OF_VALUE not in text


_TYPES: dict[str, Any] = {
    "boolean": bool, "integer": int, "number": (int, float), "object": dict, "array": list,
}  # fmt: skip


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    return {name for part in alternatives(schema, root) for name in types_of(part)}


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema itself names."""
    own = schema.get("type")
    return [t for t in (own if isinstance(own, list) else [own]) if isinstance(t, str)]


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas it refers to or consists of. root: of references."""
    pending, seen = deque([schema]), set[int]()
    while pending:
        part = pending.popleft()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(reference := part.get("$ref"), str):
            pending.append(_referred(reference, root))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = part.get(key)
            pending += parts if isinstance(parts, list) else ()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve a reference such as `#/$defs/name`; None if it is missing."""
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


class _Object:
    """Top-level entries of a JSON object while it is generated, without validation.

    entries: complete ones, as written
    """

    def __init__(self) -> None:
        self.text = ""
        self.entries: dict[str, str] = {}
        self.is_over = False
        self._key: str | None = None
        self._start = 1
        """Start of the current key or value."""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def written(self) -> dict[str, str]:
        """Entries, the last perhaps incomplete. A repeated key has a space before it."""
        if self._key is None:
            return self.entries
        return {**self.entries, self._key: self.text[self._start :]}

    def add(self, text: str) -> int:
        """Parse up to the end of a top-level key or value; return the characters used."""
        for taken, char in enumerate(text, 1):
            self.text += char
            if self._ends_with(char):
                return taken
        return len(text)

    def _ends_with(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\" and self._in_string:
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += (char in "{[") - (char in "]}")
            if self._depth == 1 and char == ":" and self._key is None:
                key = self.text[self._start : -1]
                self._key = key if key not in self.entries else f" {key}"
                self._start = len(self.text)
                return True
            if self._depth == 0 or (self._depth == 1 and char == ","):
                self._end_entry()
                self.is_over = self._depth == 0
                return True
        return False

    def _end_entry(self) -> None:
        if self._key is not None:
            self.entries[self._key] = self.text[self._start : -1]
        self._key, self._start = None, len(self.text)


def _parsed(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _string(text: str) -> str:
    """Return the value of a JSON string, or "", which names no key or tool."""
    value = _parsed(text)
    return value if isinstance(value, str) else ""
