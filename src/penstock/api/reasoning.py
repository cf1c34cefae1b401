"""Reasoning of models that think: its marks, and the parser that splits it from the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.api.tool_calls import overlap
from penstock.engine.grammar import lark_text, lark_until


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks of a model's reasoning.

    opening, closing: strings around it, special tokens apart
    before:  strings before the text that follows
    dropped: marks in texts that are not shown. If there are any, reasoning may begin anywhere in a
             text, else only at its start
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    before: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def marks(self) -> set[str]:
        """Marks that are part of the text even if they are special tokens."""
        return {*self.opening, *self.closing, *self.before, *self.dropped}

    def is_open(self, prompt: str, continued: str | None) -> bool:
        """True if the answer begins inside reasoning. continued: its beginning, if given."""
        opening = "".join(self.opening)
        if continued is None:
            return prompt.rstrip().endswith(opening)
        return continued.rfind(opening) > continued.rfind(self.closing[0])

    def parser(self, prompt: str, continued: str | None) -> ReasoningParser:
        """Return the parser of an answer. continued: its beginning, if given."""
        inside = self.is_open(prompt, continued)
        return ReasoningParser(self, inside=inside, continues=continued is not None)

    def rules(
        self, special: Mapping[str, int], prompt: str, continued: str | None, *, heads: bool
    ) -> str | None:
        """Return the Lark rules of an answer whose text, `@behind`, follows its reasoning, if any.

        None where the prompt has ended the reasoning, as templates do that turn it off. special:
        token ids by spelling. heads: `before` is not part of the text's own grammar"""
        is_open = self.is_open(prompt, continued)
        if not is_open and (continued is not None or prompt.rstrip().endswith(self.closing[0])):
            return None
        end, *more = self.closing
        opening = "" if is_open else lark_text(self.opening, special)
        before = lark_text(self.before, special) if heads else ""
        rules = [f"start: ({opening} thought){'' if is_open else '?'} {before} @behind"]
        rules.append(f"thought: inner {lark_text(more, special)}")
        rules.append(lark_until("inner", end, special))
        if not more:
            rules[1] += " /\\n*/"
        return "\n".join(rules)


THINK = ReasoningFormat(("<think>",), ("</think>",))
GRANITE = replace(THINK, dropped=("<response>", "</response>"))
MAGISTRAL = ReasoningFormat(("[THINK]",), ("[/THINK]",))
GEMMA = ReasoningFormat(("<|channel>", "thought"), ("<channel|>",))
HARMONY = ReasoningFormat(
    ("<|channel|>", "analysis", "<|message|>"),
    ("<|end|>", "<|start|>", "assistant"),
    before=("<|channel|>", "final", "<|message|>"),
    dropped=(
        "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>",
        "<|end|>", "<|return|>",
    ),
)  # fmt: skip
"""The form of gpt-oss, whose messages have channels: `analysis`, `commentary`, `final`."""


def reasoning_of(template: str | None) -> ReasoningFormat | None:
    """Return the format of the model's reasoning by its chat template; None without."""
    if template is None:
        return None
    if "<|channel|>analysis<|message|>" in template:
        return HARMONY
    if "<response></response>" in template:
        return GRANITE
    return next((form for form in (THINK, MAGISTRAL, GEMMA) if form.closing[0] in template), None)


class ReasoningParser:
    """Splits a growing text into reasoning and text, independently of its chunks.

    Line breaks around both are dropped. inside: the prompt has opened the reasoning. continues: it
    has the beginning of the reasoning or of the text"""

    def __init__(self, form: ReasoningFormat, *, inside: bool, continues: bool = False) -> None:
        self.is_thinking = inside
        self._opening, self._closing = "".join(form.opening), form.closing[0]
        self._is_anywhere = bool(form.dropped)
        marks = "|".join(map(re.escape, (self._opening, *form.dropped)))
        self._begin = re.compile(marks if form.dropped else rf"\A\s*(?:{marks})")
        self._end = re.compile(rf"\n*{re.escape(self._closing)}")
        self._marks = (self._opening, *form.dropped)
        self._may_begin = self._is_anywhere or not continues
        self._is_blank = not continues
        """True while line breaks are dropped."""
        self._pending = ""

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the text that are ready. is_last: nothing follows."""
        self._pending += text
        parts = {True: "", False: ""}
        while (found := self._mark()) is not None:
            parts[self.is_thinking] += self._taken(found.start())
            self._pending = self._pending[len(found[0]) :]
            if self.is_thinking or found[0].endswith(self._opening):
                self.is_thinking = not self.is_thinking
                self._is_blank, self._may_begin = True, self._is_anywhere
        held = 0 if is_last else self._num_held()
        parts[self.is_thinking] += self._taken(len(self._pending) - held)
        return parts[True], parts[False]

    def _mark(self) -> re.Match[str] | None:
        if self.is_thinking:
            return self._end.search(self._pending)
        return self._begin.search(self._pending) if self._may_begin else None

    def _taken(self, size: int) -> str:
        """Remove the beginning of the pending text; return what of it is shown."""
        piece, self._pending = self._pending[:size], self._pending[size:]
        if piece.strip() and not self.is_thinking:
            self._may_begin = self._is_anywhere
        if self._is_blank:
            piece = piece.lstrip("\n")
            self._is_blank = not piece
        return piece

    def _num_held(self) -> int:
        """Return the length of the pending text's end that may belong to a mark."""
        text = self._pending
        if self.is_thinking:
            shown = text[: len(text) - overlap(text, self._closing)].rstrip("\n")
            return len(text) - len(shown)
        if self._is_anywhere:
            return max(overlap(text, mark) for mark in self._marks)
        return len(text) if self._may_begin and self._opening.startswith(text.lstrip()) else 0
