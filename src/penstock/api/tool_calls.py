"""Tool calls in what a model writes, found while it writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic_core import from_json

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: JSON objects with a name and arguments.

    closings: by opening, what may follow an object. An empty opening: an object also counts without
              any, at the start of a text and behind another call
    key:      of the arguments, as the model has learned it
    before, between, after: what stands around the objects where the model does as it should,
              special tokens by themselves
    is_list:  the objects are one JSON array
    id_size:  letters and digits of a call's id, where the template insists on a number
    """

    closings: Mapping[str, str]
    key: str
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    is_list: bool = False
    id_size: int | None = None

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, self.closings))

    @property
    def is_bare(self) -> bool:
        return "" in self.closings

    @property
    def marks(self) -> set[str]:
        """What is part of the text, even if the vocabulary has a special token for it."""
        return {*self.closings, *self.closings.values()}

    def new_id(self) -> str:
        made = uuid4().hex
        return f"call_{made[:24]}" if self.id_size is None else made[: self.id_size]


HERMES = ToolFormat(
    {"<tool_call>": "</tool_call>", "<tools>": "</tools>", "```json": "```"},
    "arguments",
    before=("<tool_call>", "\n"),
    between=("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
    after=("\n", "</tool_call>"),
)
"""As it should be, and as Qwen2.5-Coder writes it."""

LLAMA = ToolFormat({"": ";", "<|python_tag|>": ";"}, "parameters")

MISTRAL = ToolFormat(
    {"[TOOL_CALLS]": ","},
    "arguments",
    before=("[TOOL_CALLS]", " ["),
    between=(", ",),
    after=("]",),
    is_list=True,
    id_size=9,
)


def format_of(template: str | None) -> ToolFormat | None:
    """By a chat template; None where it has no tools, or calls are written in another way."""
    if template is None or "tools" not in template:
        return None
    # Qwen3-Coder has the same tags around XML.
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    # Mistral's later models write the name before their arguments.
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    return LLAMA if "ipython" in template and '"parameters"' in template else None


class CallPiece(NamedTuple):
    """What a call has more of. position: among the calls. name: with its first piece. arguments:
    JSON, perhaps part of it."""

    position: int
    id: str
    name: str | None
    arguments: str


class Found(NamedTuple):
    """What a piece of a text comes to: text to show, and calls."""

    content: str
    pieces: list[CallPiece]


class _State(Enum):
    TEXT = auto()
    OPENED = auto()
    """Behind an opening, where an object is due."""
    CALL = auto()
    CLOSED = auto()
    """Behind a call's object."""


class ToolCallParser:
    """Divides a growing text into calls and what is to be shown. What it finds does not depend on
    how the text is cut.

    A call is a JSON object with the `name` of a tool and its `arguments` (or `parameters`), an
    object. Whatever looks like one and is none stays text.

    names: of the tools. whole: calls come in one piece, so that a broken one stays text, too; else
    their arguments come while they are written, as soon as the tool is known. most: calls.
    inside: the text begins behind an opening
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        whole: bool,
        most: int | None = None,
        inside: bool = False,
    ) -> None:
        self.num_calls = 0
        """Calls that are complete."""
        self._form = form
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._names = names
        self._whole = whole
        self._most = most
        self._state = _State.OPENED if inside or form.is_bare else _State.TEXT
        self._pending = ""
        self._opening = ""
        """Of the call that may have begun, as it was written."""
        self._blank = ""
        """White space that is shown only if text follows."""
        self._call = _Call(names)
        self._closing = form.closings.get("", "")
        """What closes the call that may have begun, or the last one."""
        self._num_begun = 0
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def is_full(self) -> bool:
        """No more calls are wanted; the text is over."""
        return self._most is not None and self.num_calls >= self._most

    def add(self, text: str) -> Found:
        """Go on with the text."""
        self._pending += text
        steps = {
            _State.TEXT: self._in_text,
            _State.OPENED: self._behind_opening,
            _State.CALL: self._in_call,
            _State.CLOSED: self._behind_call,
        }
        while self._pending and not self.is_full and steps[self._state]():
            pass
        return self._take()

    def finish(self, text: str) -> Found:
        """The last of the text."""
        content, pieces = self.add(text)
        if not self.is_full:
            if self._state in (_State.OPENED, _State.CALL) and not self._call.id:
                self._say(self._opening + self._call.text)
            self._say(self._pending)
            if not self._num_begun:
                self._content.append(self._blank)
        rest = self._take()
        return Found(content + rest.content, pieces + rest.pieces)

    def _take(self) -> Found:
        found = Found("".join(self._content), self._pieces)
        self._content, self._pieces = [], []
        return found

    def _say(self, text: str) -> None:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        self._content.append(shown)

    # --- one step in each state: whether there may be another ------------------------------------

    def _in_text(self) -> bool:
        text = self._pending
        found = self._openings.search(text)
        if found is not None:
            self._say(text[: found.start()])
            self._opening, self._pending = found[0], text[found.end() :]
            self._closing, self._state = self._form.closings[found[0]], _State.OPENED
            return True
        held = max(_overlap(text, opening) for opening in self._form.openings)
        self._say(text[: len(text) - held])
        self._pending = text[len(text) - held :]
        return False

    def _behind_opening(self) -> bool:
        rest = self._pending.lstrip()
        if self._form.is_list and rest.startswith("[") and not self._opening.endswith("["):
            rest = rest[1:]
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest.startswith("{"):
            self._call, self._state = _Call(self._names), _State.CALL
        elif rest:
            self._say(self._opening)
            self._opening, self._state = "", _State.TEXT
        return True

    def _in_call(self) -> bool:
        call = self._call
        self._pending = self._pending[call.add(self._pending) :]
        if call.is_wrong:
            if not call.id:
                self._say(self._opening + call.text)
            self._opening, self._state, self._call = "", _State.TEXT, _Call(self._names)
            return True
        if call.is_over or not self._whole:
            self._tell(call)
        if call.is_over:
            self.num_calls += 1
            self._opening, self._state, self._call = "", _State.CLOSED, _Call(self._names)
        return True

    def _tell(self, call: _Call) -> None:
        """What is known of a call and has not been told."""
        arguments = call.arguments
        if call.name is None or arguments is None:
            return
        is_first = not call.id
        if is_first:
            call.id = self._form.new_id()
            call.index = self._num_begun
            self._num_begun += 1
            self._blank = ""
        more = arguments[call.num_told :]
        call.num_told = len(arguments)
        if more or is_first:
            name = call.name if is_first else None
            self._pieces.append(CallPiece(call.index, call.id, name, more))

    def _behind_call(self) -> bool:
        rest = self._pending.lstrip()
        self._blank += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        closing = self._closing
        if closing and rest.startswith(closing):
            self._pending, self._closing, self._blank = rest.removeprefix(closing), "", ""
            return True
        if closing.startswith(rest):
            return False
        if rest.startswith("{") and (self._form.is_bare or self._form.is_list):
            # Whatever opened them, calls in a row have the same between them.
            (self._closing,) = set(self._form.closings.values())
            self._state = _State.OPENED
        elif rest.startswith("]") and self._form.is_list:
            self._pending, self._state = rest[1:], _State.TEXT
        else:
            self._state = _State.TEXT
        return True


class _Call:
    """A JSON object while it is written, which may be a call."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_wrong = False
        """It can be no call."""
        self.id, self.index, self.num_told = "", 0, 0
        self._names = names
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
        """JSON, as far as it is written; None while it may be no object."""
        if self.is_over:
            return self._whole_arguments
        written = {_string(key): value for key, value in self._object.written.items()}
        value = next((written[key] for key in _ARGUMENTS if key in written), "").strip()
        return value if value.startswith("{") else None

    def add(self, text: str) -> int:
        """Take in text up to the object's end, or to where it can be no call. Returns how many
        characters that are."""
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
                if self.name not in self._names:
                    return False
        return not self.is_over or self._is_call()

    def _is_call(self) -> bool:
        """Whether the whole object is a call."""
        call = _parsed(self.text)
        if not isinstance(call, dict) or self.name is None:
            return False
        key = next((key for key in _ARGUMENTS if key in call), None)
        value = call.get(key, {}) if key else {}
        if isinstance(value, str):
            # Some models write the arguments as OpenAI's clients get them.
            self._whole_arguments = value.strip()
            return isinstance(_parsed(value), dict)
        if value is None or key is None:
            self._whole_arguments = "{}"
            return True
        written = next(v for k, v in self._object.entries.items() if _string(k) == key)
        self._whole_arguments = written.strip()
        return isinstance(value, dict)


class _Object:
    """The outermost entries of a JSON object while it is written. It may turn out to be no JSON:
    that is for a parser to say when it is over.

    entries: those that are complete, as they are written
    """

    def __init__(self) -> None:
        self.text = ""
        self.entries: dict[str, str] = {}
        self.is_over = False
        self._key: str | None = None
        self._start = 1
        """Where the key or value that is being written begins."""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def written(self) -> dict[str, str]:
        """The entries, the last of them perhaps in part. A key that comes again differs from the
        first by a space."""
        if self._key is None:
            return self.entries
        return {**self.entries, self._key: self.text[self._start :]}

    def add(self, text: str) -> int:
        """Take in text up to the end of an outermost key or value. Returns how many characters
        that are."""
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


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that a mark could begin with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def _parsed(text: str) -> Any:
    """JSON's value; None for what is none."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _string(text: str) -> str:
    """A JSON string's value; for anything else what no key and no tool is called."""
    value = _parsed(text)
    return value if isinstance(value, str) else ""
