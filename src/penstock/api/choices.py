"""One choice of a response: detokenization, stop strings, reasoning, tool calls, usage."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.api.errors import ApiError
from penstock.api.reasoning import ReasoningParser
from penstock.api.tool_calls import CallPiece, ToolCallParser
from penstock.core.types import FinishReason, Output, Request, TokenLogprob
from penstock.engine.grammar import OF_GRAMMAR
from penstock.serving.usage import Usage

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer
_NO_LOGPROB = TokenLogprob(math.nan, ())
_STATUS = {FinishReason.REFUSED: 400, FinishReason.ERROR: 500, FinishReason.CANCELLED: 503}


class Origin(NamedTuple):
    """Origin of an output token.

    accepted: a draft token. recovered: sampled by the target after a rejection. bonus: sampled
    after a wholly accepted draft. target: of a step without a draft. drafter: that of the step."""

    kind: Literal["accepted", "recovered", "bonus", "target"]
    drafter: str | None


def origins_of(output: Output) -> list[Origin]:
    """Return the origin of each token of an output."""
    num_accepted, drafter = output.num_accepted, output.drafter
    own = Origin("target", None)
    if output.num_proposed:
        is_whole = num_accepted == output.num_proposed
        own = Origin("bonus" if is_whole else "recovered", drafter)
    num_looked_up = min(output.num_looked_up, num_accepted)
    origins = [Origin("accepted", output.look_up)] * num_looked_up
    origins += [Origin("accepted", drafter)] * (num_accepted - num_looked_up)
    num_own = len(output.token_ids) - num_accepted
    return (origins + [own] * num_own)[: len(output.token_ids)]


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of a choice with log-probabilities and origin.

    raw: its bytes, which may end inside a character. start: of its text in the choice's text. end:
    of the character in which it ends; infinite until that is known. text: whole characters only.
    logprob: NaN if not requested, or of a prompt's first token."""

    token_id: int
    raw: bytes
    start: int
    end: float
    text: str
    logprob: TokenLogprob
    origin: Origin | None

    @property
    def has_logprob(self) -> bool:
        return not math.isnan(self.logprob.logprob)


class TextStream:
    """Incremental detokenizer of one choice, which holds back the beginnings of stop strings.

    The engine decides if a stop string ended the text.

    previous: the last token of the text being continued
    shown: special tokens that are part of the text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        previous: int | None = None,
        shown: Collection[int] = (),
    ) -> None:
        self.stop_string: str | None = None
        """The one that ended the text."""
        self._is_over = False
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest_hold = max((len(stop) - 1 for stop in stops), default=0)
        self._detokenizer = tokenizer.detokenizer(previous=previous, shown=shown)
        self._pending = ""
        self._length = 0
        self._tokens: list[TokenText] = []
        self._previous = previous

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        origins: Sequence[Origin] = (),
    ) -> None:
        """Append tokens. logprobs, origins: one per token, or empty."""
        for place, token_id in enumerate(token_ids):
            start = self._length + len(self._pending)
            text = self._detokenizer.add(token_id)
            self._pending += text
            if logprobs or origins:
                logprob = logprobs[place] if logprobs else _NO_LOGPROB
                self._note(token_id, start, text, logprob, origins[place] if origins else None)

    def finish(self, num_stop_chars: int = 0) -> None:
        """End the text. num_stop_chars: length of the end to cut, from a stop string's start."""
        rest = self._detokenizer.finish()
        self._pending += rest
        if rest and self._tokens:
            # An incomplete character belongs to the last token.
            last = self._tokens[-1]
            self._tokens[-1] = replace(last, text=last.text + rest)
        if num_stop_chars:
            cut = self._pending[-num_stop_chars:]
            self.stop_string = next(filter(cut.startswith, self._stops), None)
            self._pending = self._pending[:-num_stop_chars]
            end = self._length + len(self._pending)
            self._tokens = [
                replace(t, text=t.text[: end - t.start])
                for t in self._tokens
                if t.start < end or t.end <= end
            ]
        self._is_over = True

    def pop_text(self) -> tuple[str, list[TokenText]]:
        """Return the text that is ready and not yet taken, and the tokens that it completes."""
        ready = len(self._pending) - (0 if self._is_over else self._num_held_back())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        self._length += ready
        shown = [t for t in self._tokens if self._is_over or t.end <= self._length]
        self._tokens = self._tokens[len(shown) :]
        return text, shown

    def _note(
        self, token_id: int, start: int, text: str, logprob: TokenLogprob, origin: Origin | None
    ) -> None:
        raw = self._tokenizer.token_bytes(token_id, self._previous)
        end = math.inf if self._detokenizer.is_amid_character else start + len(text)
        # Tokens of one character are shown or cut together, in however many steps they came.
        first = len(self._tokens)
        while first and self._tokens[first - 1].end == math.inf:
            first -= 1
        self._tokens[first:] = [replace(t, end=end) for t in self._tokens[first:]]
        self._tokens.append(TokenText(token_id, raw, start, end, text, logprob, origin))
        self._previous = token_id

    def _num_held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for size in range(min(self._longest_hold, len(self._pending)), 0, -1):
            tail = self._pending[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice, with its tokens, tool calls, and finish reason if it has ended.

    reasoning: text of the model's thinking, which precedes `text`. tokens: of both"""

    index: int
    text: str
    tokens: Sequence[TokenText]
    finish_reason: FinishReason | Literal["tool_calls"] | None
    calls: Sequence[CallPiece] = ()
    reasoning: str = ""

    def kind(self) -> object:
        """Return what is equal for deltas that may be joined without a change of order."""
        parts = [bool(part) for part in (self.reasoning, self.text, self.calls)]
        return parts if sum(parts) < 2 else id(self)

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """Return consecutive deltas of a choice as one."""
        return cls(
            deltas[-1].index,
            "".join(d.text for d in deltas),
            [token for d in deltas for token in d.tokens],
            deltas[-1].finish_reason,
            [piece for d in deltas for piece in d.calls],
            "".join(d.reasoning for d in deltas),
        )


class ResponseChoice:
    """One choice of a response, built from the outputs of one engine request.

    opens_prompt: the first choice of its prompt, whose tokens count once. echo: the text begins
    with the prompt. adds_text: False hides and does not count the generated tokens."""

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream,
        *,
        opens_prompt: bool,
        tells_origins: bool = False,
        reasoning: ReasoningParser | None = None,
        calls: ToolCallParser | None = None,
        echo: bool = False,
        adds_text: bool = True,
    ) -> None:
        self.index = index
        self.request = request
        self.opens_prompt = opens_prompt
        self.tells_origins = tells_origins
        self.finish_reason: FinishReason | None = None
        self.usage = Usage()
        self.ends_line_after_s = math.inf
        """Seconds since the first output after which a text with a line break ends."""
        self.has_line_break = False
        self.first_output_at: float | None = None
        """Time of `time.perf_counter`."""
        self._text = text
        self._reasoning = reasoning
        self._calls = calls
        self._echo = echo
        self._adds_text = adds_text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.stop_string

    def on_output(self, output: Output) -> list[Delta]:
        """Add an output; return what there is to show, in its order.

        Raises: ApiError if the engine ended the request without completing it.
        """
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
        if output.finish_reason in _STATUS:
            self.finish_reason = output.finish_reason
            status = _STATUS[output.finish_reason]
            message = output.error or str(output.finish_reason)
            if message.startswith(OF_GRAMMAR):
                raise ApiError(400, message, code="invalid_grammar")
            if status == 503:
                raise ApiError(status, message, code="engine_unavailable", retry_after_s=1.0)
            raise ApiError(status, message, code="engine_error")
        if self._echo:
            is_scored = self.request.sampling.num_prompt_logprobs is not None
            logprobs = (_NO_LOGPROB, *output.prompt_logprobs) if is_scored else ()
            self._text.add(self.request.prompt_token_ids or (), logprobs)
            self._echo = False
        if not self._adds_text:
            nothing = Output(output.request_id, finish_reason=FinishReason.LENGTH)
            output = nothing._replace(num_cached_tokens=output.num_cached_tokens)
        deltas = filter(None, self._read(output))
        return [Delta.joined(list(alike)) for _, alike in groupby(deltas, Delta.kind)]

    def _read(self, output: Output) -> Iterator[Delta | None]:
        """Yield what each token of an output adds, and its end.

        One by one, whatever a step brought: what is shown and counted does not depend on it."""
        shown, num = output.token_ids, len(output.token_ids)
        if output.finish_reason is FinishReason.STOP:
            stops = self.request.stop_token_ids
            shown = tuple(token for token in shown if token not in stops)
        origins = origins_of(output) if self.tells_origins else ()
        for place in range(num or 1):
            part = slice(place, place + 1)
            self._text.add(shown[part], output.logprobs[part], origins[part])
            is_last = place + 1 >= num
            if is_last and output.finish_reason is not None:
                self._text.finish(output.num_stop_chars)
                self.finish_reason = output.finish_reason
            yield self._delta(len(shown[part]))
            if self.finish_reason is not None and not is_last:
                # The choice's own end, in the middle of a step.
                num = place + 1
                proposed, accepted = min(num, output.num_proposed), min(num, output.num_accepted)
                output = output._replace(token_ids=shown[:num])
                output = output._replace(num_proposed=proposed, num_accepted=accepted)
                break
        self.usage.on_output(output)

    def _delta(self, num_tokens: int) -> Delta | None:
        """Return what is ready, with so many new tokens."""
        text, tokens = self._text.pop_text()
        reasoning, text = self._split(text, num_tokens)
        reason: FinishReason | Literal["tool_calls"] | None = self.finish_reason
        pieces: Sequence[CallPiece] = ()
        self.has_line_break |= "\n" in text
        elapsed = time.perf_counter() - (self.first_output_at or math.inf)
        if self.has_line_break and elapsed > self.ends_line_after_s and reason is None:
            self.finish_reason = reason = FinishReason.LENGTH
        if self._calls is not None:
            is_last = self.finish_reason is not None
            text, pieces = self._calls.finish(text) if is_last else self._calls.add(text)
            if self._calls.is_full:
                self.finish_reason = reason = FinishReason.STOP
            if reason is FinishReason.STOP and self._calls.num_calls:
                reason = "tool_calls"
        if reasoning or text or tokens or pieces or reason is not None:
            return Delta(self.index, text, tokens, reason, pieces, reasoning)
        return None

    def _split(self, text: str, num_tokens: int) -> tuple[str, str]:
        """Return the reasoning and the rest of a text."""
        if self._reasoning is None:
            return "", text
        was_thinking = self._reasoning.is_thinking
        parts = self._reasoning.add(text, is_last=self.finish_reason is not None)
        if was_thinking or self._reasoning.is_thinking:
            self.usage.num_reasoning_tokens += num_tokens
        return parts


def usage(choices: Sequence[ResponseChoice]) -> dict[str, Any]:
    """Return the usage of a response so far. A prompt counts once for all of its choices."""
    prompt_tokens = sum(c.request.prompt_len for c in choices if c.opens_prompt)
    cached_tokens = sum(c.usage.num_cached_tokens for c in choices if c.opens_prompt)
    total = Usage()
    for choice in choices:
        total.add(choice.usage)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": total.num_tokens,
        "total_tokens": prompt_tokens + total.num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": total.num_reasoning_tokens,
            **total.prediction(),
        },
        "speculation": total.speculation(),
    }
