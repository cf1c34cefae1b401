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
    opening: ClassVar[str] = "{"
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
            if text[taken] == self.opening:
                self.name = self._heads.get(self.skipped.sub("", self._head, count=1).rstrip())
            self.is_wrong = self.name is None and not self._goes_on(text[taken])
            taken += self.name is None
        while taken < len(text) and not (self.is_over or self.is_wrong):
            taken += self._object.add(text[taken:])
            self.is_wrong = not self._may_be_call()
        return taken

    def _may_be_call(self) -> bool:
        return not self.is_over or isinstance(_parsed(self._object.text), dict)

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


class KeyedCall(NamedCall):
    """A tool's name and arguments by name, in brackets and a notation near JSON's, or JSON.

    end: closing bracket. between: a name and its value. comma: between arguments, as trained.
    quote: beginning of a string. strings: whole ones, `body` with escapes or `raw` without"""

    separators = ("",)
    end: ClassVar[str]
    between: ClassVar[str]
    comma: ClassVar[str]
    quote: ClassVar[str]
    strings: ClassVar[re.Pattern[str]]

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._object = _Object(self.between, self.quote)
        self._values: dict[str, str] = {}

    @property
    def arguments(self) -> str | None:
        return None if self.name is None else _joined(self._values, self.is_over)

    def _may_be_call(self) -> bool:
        for key, written in [*self._object.entries.items()][len(self._values) :]:
            value = self._as_json(written)
            if value is None or not is_plain_key(key.strip()) or key.strip() in self._values:
                return False
            self._values[key.strip()] = value
        is_ended = not self.is_over or self._object.text[-1] == self.end
        return is_ended and not self._object.has_more

    def _as_json(self, written: str) -> str | None:
        pieces, end = [], 0
        for found in self.strings.finditer(written):
            raw = found.groupdict().get("raw")
            text = _ESCAPED.sub(_escaped, found["body"]) if raw is None else json.dumps(raw)[1:-1]
            pieces += [_plain(written[end : found.start()]), f'"{text}"']
            end = found.end()
        made = "".join((*pieces, _plain(written[end:]))).strip()
        return made if made == "null" or _parsed(made) is not None else None


class PythonCall(KeyedCall):
    """`NAME(KEY=VALUE, …)` with values in Python's notation, as LFM2 writes them."""

    opening, end, between, comma = "(", ")", "=", ", "
    quote = "['\"]"
    strings = re.compile(r"""(?s)(['"])(?P<body>(?:\\.|(?!\1).)*)\1""")


class GemmaCall(KeyedCall):
    """`call:NAME{KEY:VALUE,…}`: names are bare, strings between marks."""

    marks = ('<|"|>',)
    prefixes = ("call:",)
    end, between, comma = "}", ":", ","
    quote = r'<\|"\|>|(?<!<\|)"'
    strings = re.compile(r'(?s)<\|"\|>(?P<raw>.*?)<\|"\|>|"(?P<body>(?:[^"\\]|\\.)*)"')


_ESCAPED = re.compile(r'(?s)\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)|["\x00-\x1f]')


def _escaped(found: re.Match[str]) -> str:
    """Return in JSON what has to be escaped in it, or is in Python."""
    text = found[0]
    if len(text) == 6 or (text[0] == "\\" and text[1] in '"\\/bfnrt'):
        return text
    plain = chr(int(text[2:], 16)) if len(text) == 4 else text
    return json.dumps("'" if text == "\\'" else plain)[1:-1]


def _plain(text: str) -> str:
    """Return in JSON what stands between strings."""
    text = re.sub(r"\b(?:True|False)\b", lambda found: found[0].lower(), text)
    text = re.sub(r"\bNone\b", "null", text)
    return re.sub(r"([{,]\s*)([\w.-]+)(?=\s*:)", r'\1"\2"', text)


def is_plain_key(name: str) -> bool:
    """True if `KeyedCall` accepts the name of an argument."""
    return re.fullmatch(r"[^\s<>()\[\]{}:=,'\"]+", name) is not None


class XmlCall(WrittenCall):
    """Arguments as `<parameter=KEY>VALUE</parameter>` in `<function=NAME>` and `</function>`.

    A value is text, or of its schema's type. heads: of a call, by its name; `<` is the next tag's.
    before_key, behind_key, end_of_value, end: marks. margin: around a value, no part of it. gap:
    between marks, as trained"""

    begins = ("<",)
    heads: ClassVar[tuple[str, ...]] = ("<function={}>",)
    before_key: ClassVar[str] = "<parameter="
    behind_key: ClassVar[str] = ">"
    end_of_value: ClassVar[str] = "</parameter>"
    end: ClassVar[str] = "</function>"
    margin: ClassVar[str] = "\n"
    gap: ClassVar[str] = "\n"

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._heads = {head.format(name): name for name in tools for head in self.heads}
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
        return None if self.name is None else _joined(self._entries, self.is_over)

    def add(self, text: str) -> int:
        for taken, char in enumerate(text, 1):
            self._text += char
            if self._key is None:
                self.is_wrong = not self._in_tag(char)
            elif char == ">" and self._text.endswith(self.end_of_value):
                value = self._text[self._start : -len(self.end_of_value)]
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
            self.name = self._heads.get(tag)
            if self.name is None:
                return any(head.startswith(tag) for head in self._heads)
            self._start = len(self._text) - (char == "<")
            return True
        self._is_over = tag == self.end
        if not tag.startswith(self.before_key):
            return self.before_key.startswith(tag) or self.end.startswith(tag)
        key, *behind = re.split("(?=[<>])", tag[len(self.before_key) :], maxsplit=1)
        marks = "".join("".join(behind).split())
        if marks == self.behind_key:
            self._key, self._start = key, len(self._text)
            return is_xml_key(key) and key not in self._entries
        is_short = len(tag) <= 2 * LONGEST_XML_KEY
        return is_short and (not key or is_xml_key(key)) and self.behind_key.startswith(marks)

    def _as_json(self, key: str, value: str) -> str:
        value = value.removeprefix(self.margin).removesuffix(self.margin)
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


class GlmCall(XmlCall):
    """`NAME`, and `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument."""

    begins = ("",)
    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
    heads, margin = ("{}<", "{}\n"), ""
    before_key, behind_key, end_of_value, end = marks[0], marks[1] + marks[2], marks[3], marks[4]


class ShortGlmCall(GlmCall):
    """As since GLM-4.7, without line breaks."""

    gap = ""


LONGEST_XML_KEY = 288
_XML_KEY = re.compile(rf"[^<>\n]{{1,{LONGEST_XML_KEY}}}")


def is_xml_key(name: str) -> bool:
    """True if `XmlCall` accepts the name of a parameter."""
    return _XML_KEY.fullmatch(name) is not None


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


def _joined(values: Mapping[str, str], is_over: bool) -> str:
    entries = (f"{json.dumps(key, ensure_ascii=False)}: {v}" for key, v in values.items())
    return "{" + ", ".join(entries) + ("}" if is_over else "")


class _Object:
    """Top-level entries of a JSON object while it is generated, without validation.

    entries: complete ones, as written. has_more: there is something beside them. between, quote: of
    other notations, where a string's end is its beginning"""

    def __init__(self, between: str = ":", quote: str = '"') -> None:
        self.text = ""
        self.entries: dict[str, str] = {}
        self.is_over = self.has_more = False
        self._between, self._quotes = between, re.compile(rf"(?:{quote})\Z")
        self._key: str | None = None
        self._start = 1
        """Start of the current key or value."""
        self._depth = 0
        self._quote, self._string = "", 0
        """Quote of the current string, and where its text begins."""
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
        elif self._quote:
            self._is_escaped = char == "\\" and len(self._quote) == 1
            if self.text.endswith(self._quote, self._string):
                self._quote = ""
        elif found := self._quotes.search(self.text[-8:]):
            self._quote, self._string = found[0], len(self.text)
        else:
            self._depth += (char in "{[(") - (char in ")]}")
            if self._depth == 1 and char == self._between and self._key is None:
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
        written = self.text[self._start : -1]
        if self._key is not None:
            self.entries[self._key] = written
        self.has_more |= self._key is None and bool(written.strip())
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
