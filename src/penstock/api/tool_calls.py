"""Tool calls in what a model writes, found while it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from penstock.api.written_calls import JsonCall, NamedCall, WrittenCall, XmlCall


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    call:     one of them, by itself
    closings: by opening, what may follow a call. An empty opening: an object also counts without
              any, at the start of a text and behind another call
    key:      of the arguments in a JSON object, as the model has learned it
    before, between, after: what stands around the calls where the model does as it should,
              special tokens by themselves
    is_list:  the calls are one JSON array
    id_size:  letters and digits of a call's id, where the template insists on a number
    """

    closings: Mapping[str, str]
    key: str
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    is_list: bool = False
    id_size: int | None = None
    call: type[WrittenCall] = JsonCall

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, self.closings))

    @property
    def is_bare(self) -> bool:
        return "" in self.closings

    @property
    def marks(self) -> set[str]:
        """What is part of the text, even if the vocabulary has a special token for it."""
        return {*self.closings, *self.closings.values(), *self.call.marks} - {""}

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


MISTRAL_ARGS = ToolFormat(
    {"[TOOL_CALLS]": ""},
    "arguments",
    before=("[TOOL_CALLS]",),
    between=("[TOOL_CALLS]",),
    id_size=9,
    call=NamedCall,
)
"""Since Mistral Small 3.1 and Devstral."""

QWEN_CODER = ToolFormat(
    {"<tool_call>": "</tool_call>"},
    "arguments",
    before=HERMES.before,
    between=HERMES.between,
    after=HERMES.after,
    call=XmlCall,
)


def format_of(template: str | None) -> ToolFormat | None:
    """By a chat template; None where it has no tools, or calls are written in another way."""
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        return QWEN_CODER if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
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
    FORMATTED = auto()
    """In a text that has a format."""
    OPENED = auto()
    """Behind an opening, where a call is due."""
    CALL = auto()
    CLOSED = auto()
    """Behind a call."""


class ToolCallParser:
    """Divides a growing text into calls and what is to be shown. What it finds does not depend on
    how the text is cut.

    A call has the name of a tool, and arguments. Whatever looks like one and is none stays text.

    tools: schemas of their arguments, by their names. whole: calls come in one piece, so that a
    broken one stays text, too; else their arguments come while they are written, as soon as the
    tool is known. most: calls. inside: the text begins behind an opening. formatted: text that is
    no call has a format; it is all there is, is not searched, and may stand between an opening and
    its closing, which are then not shown
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        whole: bool,
        most: int | None = None,
        inside: bool = False,
        formatted: bool = False,
    ) -> None:
        self.num_calls = 0
        """Calls that are complete."""
        self._form = form
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._tools = tools
        self._whole = whole
        self._most = most
        self._formatted = formatted
        self._state = _State.OPENED if inside or form.is_bare else _State.TEXT
        self._pending = ""
        self._opening = ""
        """Of the call that may have begun, as it was written."""
        self._blank = ""
        """White space that is shown only if text follows."""
        self._call = form.call(tools)
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
            _State.FORMATTED: self._in_formatted,
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
                self._be_text(self._call.text)
            if self._state is _State.FORMATTED and self._pending == self._closing:
                self._pending = self._blank = ""
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
        start = text.lstrip()
        if self._formatted and start and not any(map(partial(_agree, start), self._form.openings)):
            self._state, self._closing = _State.FORMATTED, ""
            return True
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

    def _in_formatted(self) -> bool:
        text, closing = self._pending, self._closing
        is_closed = closing and text.endswith(closing)
        held = len(closing) if is_closed else _overlap(text, closing)
        self._say(text[: len(text) - held])
        self._pending = text[len(text) - held :]
        return False

    def _behind_opening(self) -> bool:
        rest = self._pending.lstrip()
        if self._form.is_list and rest.startswith("[") and not self._opening.endswith("["):
            rest = rest[1:]
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest.startswith(self._form.call.begins):
            self._call, self._state = self._form.call(self._tools), _State.CALL
        elif rest:
            self._be_text("")
        return True

    def _be_text(self, written: str) -> None:
        """Treat an opening as text: no call follows. written: what was taken in of it. It may hold
        the opening of another, but not where it has a format."""
        if self._formatted:
            self._closing = self._closing if self._opening.strip() else ""
            self._state = _State.FORMATTED
        else:
            self._say(self._opening)
            self._state = _State.TEXT
        self._opening, self._pending = "", written + self._pending

    def _in_call(self) -> bool:
        call = self._call
        self._pending = self._pending[call.add(self._pending) :]
        if call.is_wrong:
            self._call = self._form.call(self._tools)
            if call.id:
                self._opening, self._state = "", _State.TEXT
            else:
                self._be_text(call.text)
            return True
        if call.is_over or not self._whole:
            self._tell(call)
        if call.is_over:
            self.num_calls += 1
            self._opening, self._state, self._call = "", _State.CLOSED, self._form.call(self._tools)
        return True

    def _tell(self, call: WrittenCall) -> None:
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


def _agree(text: str, mark: str) -> bool:
    """True if one of them begins with the other."""
    return text.startswith(mark) or mark.startswith(text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that a mark could begin with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
