"""Grammars of outputs: masks of allowed tokens, and forced tokens.

A grammar, in llguidance's form, is compiled for one vocabulary, in a thread and within limits,
since clients write grammars. A request's state follows its text, and a draft there and back."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from penstock.core.types import Request
from penstock.engine.closed_schema import closed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from penstock.engine.tokenizer import Tokenizer

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]

_MAX_FORCED = 32
"""Most forced tokens that are drafted."""
# Limits of a client's grammar: characters, lexer states (of one or two kilobytes), symbols, and
# characters of an error message.
_MAX_LENGTH = 1 << 18
_MAX_LEXER_STATES, _MAX_SYMBOLS = 20_000, 100_000
_MAX_MESSAGE = 600
_MAX_COMPILED = 32
"""Grammars cached beside those in use."""
OF_GRAMMAR = "the grammar: "
"""Beginning of the reason why a request's grammar ended it."""
_SPECIAL = b"\xff"
"""First byte of special tokens in llguidance: no byte of UTF-8."""
_JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""As Python writes it: white space is finite, and more tokens are forced. A schema's own
`x-guidance` has precedence."""

_IN_WORDS = dict.fromkeys(
    ("NoExtension", "NoExtensionBias"),
    "it matches no text: it refers to itself without an end, or excludes every character",
)
"""Messages for llguidance's errors that are only names."""


class KnownTokens(Protocol):
    """Prompt and output of a request so far. length: of both, in tokens."""

    request: Request
    length: int

    def tokens(self, start: int, end: int) -> list[int]: ...


class GrammarError(ValueError):
    """A grammar cannot be used. The message is one line."""


def grammar_of(kind: GrammarKind, value: Any) -> str:
    """Return a grammar in llguidance's form. Raises: GrammarError.

    value: a JSON schema (an object, a boolean, or its text), which is `closed`; a regular
    expression; a list of strings; or a grammar in Lark's or llama.cpp's (GBNF) notation."""
    from llguidance import LLMatcher, grammar_from

    if value is False:
        raise GrammarError("Unsatisfiable schema: it is false")
    if kind == "json":
        value = closed(value)
    text = value if isinstance(value, str) else json.dumps({} if value is True else value)
    if len(text) > _MAX_LENGTH:
        raise GrammarError(f"has {len(text)} characters; at most {_MAX_LENGTH} are allowed")
    try:
        if kind == "json":
            return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)
        if kind == "lark":
            return LLMatcher.grammar_from_lark(text)
        if kind == "choice":
            # Not as alternatives of a rule: llguidance allows 2,000 of them.
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, value)))
        return grammar_from(kind, text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_one_line(str(error))) from error


def lark_json(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression of JSON by a schema, which is `closed`."""
    style = {**_JSON_STYLE, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**closed(schema), 'x-guidance': style})}"


def behind(lark: str, grammar: str) -> str:
    """Return a grammar of `lark`, in which `@behind` stands for another, both of `grammar_of`."""
    try:
        parts = json.loads(grammar)["grammars"]
    except ValueError:
        parts = [{"lark_grammar": grammar}]
    parts[0]["name"] = "behind"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})


def lark_text(pieces: Sequence[str], special: Mapping[str, int]) -> str:
    """Return the Lark expression of strings in a row. special: token ids by spelling."""
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in pieces)


def lark_until(rule: str, end: str, special: Mapping[str, int]) -> str:
    """Return the Lark rule of any text up to a string. special: token ids by spelling."""
    if end in special:
        return f"{rule}: /(?s:.*)/ <[{special[end]}]>"
    return f"{rule}[suffix={json.dumps(end)}]: /(?s:.*)/"


class GrammarCompiler:
    """Compiles grammars for one vocabulary, one at a time, with a cache.

    tokenizer: loads it, in the thread. vocab_size: of the model, which may have more rows than the
    tokenizer has tokens. eos_token_ids: one of them ends an output where its grammar allows it."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "penstock-grammar")
        self._lately: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._held: WeakValueDictionary[str, Future[LLMatcher]] = WeakValueDictionary()
        self._used_up: set[str] = set()

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Compile a grammar of `grammar_of`; fails with GrammarError. For one thread only."""
        found = self._held.get(grammar)
        if found is None or grammar in self._used_up:
            self._used_up.discard(grammar)
            found = self._held[grammar] = self._thread.submit(self._compile, grammar)
        self._lately[grammar] = found
        self._lately.move_to_end(grammar)
        if len(self._lately) > _MAX_COMPILED:
            self._lately.popitem(last=False)
        return found

    def begin(self, grammar: str) -> GrammarState:
        """Return the state of a request before its first token."""
        return GrammarState(self.compile(grammar), self._vocab_size, partial(self._renew, grammar))

    def _renew(self, grammar: str) -> LLMatcher:
        """Compile at once, for one request. From any thread."""
        self._used_up.add(grammar)
        return self._compile(grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_SYMBOLS,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        # Some limits are met with the first token only.
        trial = matcher.deep_copy()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        trial.try_consume_tokens(trial.compute_ff_tokens() or allowed[:1].tolist())
        if trial.is_error():
            problem = _one_line(trial.get_error())
            raise GrammarError(_IN_WORDS.get(problem.partition(" ")[0], problem))
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Built in the thread: it takes up to two seconds."""
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise GrammarError("the model has no token that ends a text, which a grammar needs")
        made: Any = _Vocabulary(self._load(), self._vocab_size, self._eos_token_ids)
        try:
            return LLTokenizer(made, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer: {_one_line(str(error))}") from error


class _Vocabulary:
    """Tokenizer for llguidance (its TokenizerWrapper): bytes of every token, and tokenization.

    llguidance's own reader of tokenizer.json takes every added token spelt <...> for a special one,
    and tokenizes text to special tokens, which it then refuses as text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        special = {*tokenizer.special_tokens, *eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < num_tokens)
        self.tokens = tokenizer.vocabulary_bytes(num_tokens)
        for token in self.special_token_ids:
            self.tokens[token] = _SPECIAL + self.tokens[token]
        self._tokenizer = tokenizer
        spellings = sorted(tokenizer.special_tokens.values(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, filter(None, spellings))) or r"(?!)")

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text within another one, byte by byte, without special tokens."""
        cuts = [match.start() + 1 for match in self._special.finditer(text)]
        parts = pairwise((0, *cuts, len(text)))
        return [token for begin, end in parts for token in self._cut(text[begin:end])]

    def _cut(self, text: str) -> list[int]:
        raw = text.encode()
        # Many vocabularies add a space before a text, but not before its second line.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            spelt = [self.tokens[i] if i < len(self.tokens) else _SPECIAL for i in ids]
            ends = accumulate(map(len, reversed(spelt)), initial=0)
            count = next((n for n, end in enumerate(ends) if end >= len(raw)), 0)
            if b"".join(spelt[len(ids) - count :]) == raw:
                return ids[len(ids) - count :]
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        """Tokenize greedily, for a text that the tokenizer would normalise or drop parts of."""
        found: list[int] = []
        while raw:
            sizes = range(min(len(raw), self._longest), 0, -1)
            size = next((n for n in sizes if raw[:n] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[raw[:size]])
            raw = raw[size:]
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {raw: i for i, raw in enumerate(self.tokens) if not raw.startswith(_SPECIAL)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


class GrammarState:
    """State of one request's text in its grammar. Drafter and target may use it at once."""

    def __init__(
        self, compiled: Future[LLMatcher], vocab_size: int, renew: Callable[[], LLMatcher]
    ) -> None:
        self._renew: Callable[[], LLMatcher] | None = renew
        self.problem: str | None = None
        """Reason why it cannot go on, or None."""
        self._compiled = compiled
        self._num_words = -(-vocab_size // 32)
        self._num_read = 0
        self._forced: list[int] | None = None
        """Forced tokens behind the read ones, if known; computed again when they are used up."""
        self._lock = threading.Lock()

    @cached_property
    def _matcher(self) -> LLMatcher:
        """Copy of the compiled grammar; waits for it."""
        return self._compiled.result().deep_copy()

    def masks(
        self, text: KnownTokens, draft: Sequence[int], num_rows: int
    ) -> npt.NDArray[np.int32]:
        """Return masks of allowed tokens behind a text and the last prefixes of a draft.

        Bits of shape [num_rows, words], the last row behind the whole draft; all set behind a
        forbidden draft token."""
        rows = np.full((num_rows, self._num_words), -1, dtype=np.int32)
        self.fill(text, draft, num_rows, rows.ctypes.data, rows.strides[0])
        return rows

    def fill(
        self, text: KnownTokens, draft: Sequence[int], num_rows: int, place: int, row_bytes: int
    ) -> None:
        """Fill masks at an address whose bits are all set. row_bytes: of one row."""
        with self._lock:
            self._fill(text, draft, num_rows, place, row_bytes)
            if self._renew is not None and self.problem is not None:
                # Copies share a lexer's states, of which others may have used up the limit.
                renew, self._renew = self._renew, None
                try:
                    self._matcher, self._num_read, self._forced = renew(), 0, None
                except GrammarError:
                    return
                self.problem = None
                self._fill(text, draft, num_rows, place, row_bytes)

    def _fill(
        self, text: KnownTokens, draft: Sequence[int], num_rows: int, place: int, row_bytes: int
    ) -> None:
        first = len(draft) + 1 - num_rows
        try:
            matcher = self._follow(text)
        except ValueError as error:
            self.problem = OF_GRAMMAR + str(error)
            return
        num_consumed = 0
        forced = self._forced or []
        for i, token in enumerate((*draft, None)):
            row = place + (i - first) * row_bytes
            if i >= first and forced[i : i + 1]:
                # llguidance would tokenize all of the forced text for it.
                ctypes.memset(row, 0, row_bytes)
                ctypes.c_uint8.from_address(row + forced[i] // 8).value = 1 << forced[i] % 8
            elif i >= first:
                matcher.unsafe_compute_mask_ptr(row, row_bytes)
            if token is None or not matcher.try_consume_tokens([token]):
                break
            num_consumed += 1
            forced = forced if forced[i : i + 1] == [token] else []
        if matcher.is_error():
            self._fail()
        elif num_consumed:
            matcher.rollback(num_consumed)

    def settle(self, text: KnownTokens, draft: Sequence[int], samples: list[int]) -> int | None:
        """Follow a text, and the target's samples behind it as far as they match the draft.

        samples: drawn without the grammar behind the text and behind each draft token; forced
        tokens replace them. Another allowed sample equals the constrained draw, as the likeliest
        token of all is the likeliest of some. Returns the index of the first forbidden sample, or
        None."""
        with self._lock:
            try:
                matcher = self._follow(text)
            except ValueError as error:
                self.problem = OF_GRAMMAR + str(error)
                return None
            forced = self._forced
            for i, token in enumerate(samples):
                if forced is None:
                    forced = matcher.compute_ff_tokens()
                if forced:
                    # The mask is this token, though others may spell the same.
                    token = samples[i] = forced[0]
                if not matcher.try_consume_tokens([token]):
                    return i
                self._num_read += 1
                self._forced = forced = forced[1:] or None
                if i == len(draft) or token != draft[i]:
                    break
        return None

    def forced(self, text: KnownTokens) -> tuple[int, ...]:
        """Return the forced tokens behind a text, in the usual tokenization."""
        with self._lock:
            matcher = self._follow(text)
            if self._forced is None:
                self._forced = matcher.compute_ff_tokens()
            return tuple(self._forced[:_MAX_FORCED])

    def _follow(self, text: KnownTokens) -> LLMatcher:
        """Read the new tokens of a text, or roll back those that are not in it yet."""
        matcher, num_known = self._matcher, text.length - text.request.prompt_len
        forced, self._forced = self._forced, None
        if self._num_read == num_known:
            self._forced = forced
        elif self._num_read < num_known:
            tokens = text.tokens(text.length - num_known + self._num_read, text.length)
            num_taken = matcher.try_consume_tokens(tokens)
            if num_taken < len(tokens) and not matcher.is_stopped():
                place = self._num_read + num_taken
                self._fail(f"token {tokens[num_taken]} is not allowed at position {place}")
            if forced and forced[: len(tokens)] == tokens:
                self._forced = forced[len(tokens) :] or None
        else:
            matcher.rollback(self._num_read - num_known)
        self._num_read = num_known
        return matcher

    def _fail(self, otherwise: str = "cannot be followed") -> None:
        """Set the problem. otherwise: the reason where llguidance has none."""
        self.problem = OF_GRAMMAR + _one_line(self._matcher.get_error() or otherwise)


def _one_line(text: str) -> str:
    text = text.replace("<non-verbose/>", "")  # llguidance's mark of a short message
    return " ".join(text.split())[:_MAX_MESSAGE] or "cannot be used"
