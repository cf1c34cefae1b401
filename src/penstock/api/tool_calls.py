"""Incremental parser of tool calls in a model's output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from penstock.api.written_calls import (
    DeepSeekCall,
    GemmaCall,
    GlmCall,
    HarmonyCall,
    JsonCall,
    MistralCall,
    PythonCall,
    ShortGlmCall,
    WrittenCall,
    XmlCall,
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's format of tool calls.

    closings: closing mark by opening mark. An empty opening: an object is a call without a mark,
              at the start of a text and after another call
    key:      of the arguments in a JSON object
    before, between, after: strings around the calls in the trained format, special tokens apart
    behind_name: strings between a call's name and its arguments, where they are apart
    before_text: strings before a text
    dropped:  marks behind calls that are not shown
    is_list:  the calls are a list in brackets
    id_size:  length of a call's id, if the template requires one
    call:     parser of one call
    """

    closings: Mapping[str, str]
    key: str
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    behind_name: tuple[str, ...] = ()
    before_text: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    is_list: bool = False
    id_size: int | None = None
    call: type[WrittenCall] = JsonCall

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, self.closings))

    @property
    def is_single(self) -> bool:
        """True if a text has one call at most."""
        return bool(self.before) and not self.between

    @property
    def is_bare(self) -> bool:
        return "" in self.closings

    @property
    def marks(self) -> set[str]:
        """Marks that are part of the text even if they are special tokens."""
        closings = (*self.closings.values(), *self.dropped)
        return {*self.closings, *closings, *self.before, *self.call.marks} - {""}

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
"""The trained format, and the variants of Qwen2.5-Coder."""

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


GRANITE = replace(
    MISTRAL,
    closings={"<|tool_call|>": ",", "<tool_call>": ","},
    before=("<|tool_call|>", "["),
    id_size=None,
)
"""Format of Granite 3; Granite 4's is Hermes'."""

LFM2 = replace(
    GRANITE,
    closings={"<|tool_call_start|>": ","},
    before=("<|tool_call_start|>", "["),
    after=("]", "<|tool_call_end|>"),
    dropped=("<|tool_call_end|>",),
    call=PythonCall,
)

MISTRAL_ARGS = ToolFormat(
    {"[TOOL_CALLS]": ""},
    "arguments",
    before=("[TOOL_CALLS]",),
    between=("[TOOL_CALLS]",),
    behind_name=("[ARGS]",),
    id_size=9,
    call=MistralCall,
)
"""Format since Mistral Small 3.1 and Devstral, Ministral 3's, too."""

QWEN_CODER = ToolFormat(
    {"<tool_call>": "</tool_call>"},
    "arguments",
    before=HERMES.before,
    between=HERMES.between,
    after=HERMES.after,
    call=XmlCall,
)

GLM = ToolFormat(
    {"<tool_call>": ""},
    "arguments",
    before=("<tool_call>",),
    between=("\n", "<tool_call>"),
    call=GlmCall,
)
SHORT_GLM = replace(GLM, between=GLM.before, call=ShortGlmCall)

GEMMA = ToolFormat(
    {"<|tool_call>": "<tool_call|>"},
    "arguments",
    before=("<|tool_call>",),
    between=("<tool_call|>", "<|tool_call>"),
    after=("<tool_call|>",),
    call=GemmaCall,
)
"""Gemma 4's."""


_CHANNELS = ("<|channel|>commentary", "<|channel|>analysis")
GPT_OSS = ToolFormat(
    {f"{channel} to=functions.": "" for channel in ("", *_CHANNELS)},
    "arguments",
    before=("<|channel|>", "commentary to=functions."),
    behind_name=(" ", "<|constrain|>", "json", "<|message|>"),
    before_text=("<|channel|>", "final", "<|message|>"),
    dropped=("<|call|>",),
    call=HarmonyCall,
)
"""Harmony: a call is a message to a recipient."""

_SEPARATED = ("function", "<｜tool▁sep｜>")
_DEEPSEEK_MARKS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = ToolFormat(
    {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>": "", "<｜tool▁call▁begin｜>": ""},
    "arguments",
    before=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", *_SEPARATED),
    between=("\n```", "<｜tool▁call▁end｜>", "\n", "<｜tool▁call▁begin｜>", *_SEPARATED),
    after=("\n```", *_DEEPSEEK_MARKS),
    behind_name=("\n```json\n",),
    dropped=("```", *_DEEPSEEK_MARKS),
    call=DeepSeekCall,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK,
    before=DEEPSEEK.before[:2],
    between=("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>"),
    after=_DEEPSEEK_MARKS,
    behind_name=("<｜tool▁sep｜>",),
)


def format_of(template: str | None) -> ToolFormat | None:
    """Return the format of a chat template's tool calls; None if it has none or another one."""
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return SHORT_GLM if "</arg_key><arg_value>" in template else GLM
        return QWEN_CODER if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<|channel|>commentary" in template:
        return GPT_OSS
    if "<｜tool▁call▁begin｜>" in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_V31
    marks = {"<|tool_call>": GEMMA, "<|tool_call|>": GRANITE, "List of tools: ": LFM2}
    if (
        found := next((form for mark, form in marks.items() if mark in template), None)
    ) is not None:
        return found
    return LLAMA if "ipython" in template and '"parameters"' in template else None


class CallPiece(NamedTuple):
    """New part of a call. position: of the call. name: in its first piece only."""

    position: int
    id: str
    name: str | None
    arguments: str


class Found(NamedTuple):
    """Text to show and pieces of calls."""

    content: str
    pieces: list[CallPiece]


class _State(Enum):
    TEXT = auto()
    FORMATTED = auto()
    """In a text with a response_format."""
    OPENED = auto()
    """After an opening."""
    CALL = auto()
    CLOSED = auto()
    """After a call."""


class ToolCallParser:
    """Splits a growing text into tool calls and text to show, independently of its chunks.

    A call has the name of a tool and arguments; malformed calls stay text.

    tools: schemas of their arguments, by name. whole: calls are returned in one piece, so that a
    broken one stays text; else arguments are streamed once the tool is known. most: calls. inside:
    the text begins after an opening. formatted: a text with a response_format, which is not
    searched for calls; an opening and closing around it are not shown
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
        """Complete calls."""
        self._form = form
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._tools = tools
        self._whole = whole
        self._most = most
        self._formatted = formatted
        self._state = _State.OPENED if inside or form.is_bare else _State.TEXT
        self._pending = ""
        self._opening = ""
        """Opening of the current call, as written."""
        self._blank = ""
        """White space, shown only if text follows."""
        self._call = form.call(tools)
        self._closing = form.closings.get("", "")
        """Closing mark of the current or last call."""
        self._num_begun = 0
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def is_full(self) -> bool:
        """True when the limit of calls is reached, which ends the text."""
        return self._most is not None and self.num_calls >= self._most

    def add(self, text: str) -> Found:
        """Parse more text."""
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
        """Parse the end of the text."""
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

    # --- one step in each state; True if another may follow --------------------------------------

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
        held = max(overlap(text, opening) for opening in self._form.openings)
        self._say(text[: len(text) - held])
        self._pending = text[len(text) - held :]
        return False

    def _in_formatted(self) -> bool:
        text, closing = self._pending, self._closing
        is_closed = closing and text.endswith(closing)
        held = len(closing) if is_closed else overlap(text, closing)
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
        """Treat an opening, and `written` after it, as text, in which another call may begin."""
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
        mark = next((m for m in self._form.dropped if rest.startswith(m)), None)
        if mark is not None:
            self._pending, self._blank = rest.removeprefix(mark), ""
            return True
        if any(m.startswith(rest) for m in (closing, *self._form.dropped)):
            return False
        is_next = rest.startswith("{") if self._form.call is JsonCall else not closing
        if is_next and (self._form.is_bare or self._form.is_list):
            # Calls in a row have the same separator after any opening.
            (self._closing,) = set(self._form.closings.values())
            self._state = _State.OPENED
        elif rest.startswith("]") and self._form.is_list:
            self._pending = rest[1:]
            self._state = _State.CLOSED if self._form.dropped else _State.TEXT
        else:
            self._state = _State.TEXT
        return True


def _agree(text: str, mark: str) -> bool:
    return text.startswith(mark) or mark.startswith(text)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
