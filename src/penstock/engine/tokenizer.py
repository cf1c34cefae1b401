"""Tokenization, and detokenization, also one token at a time for streams."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.engine.models.checkpoint import one_line
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.models.formats import open_checkpoint

_log = logging.getLogger(__name__)

_HEAD_CHARS = 8
"""Characters a token in the head of a text: more than usual in any language."""
_CUT_TOKENS = 16
"""Allowance for a head that ends within a word and so has more tokens."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a checkpoint's tokenizer, without a hub. Raises: CheckpointError."""
    return Tokenizer(open_checkpoint(path).tokenizer())


def unlike_tokenizers(
    target: Path, drafter: Path, loaded: Tokenizer | None = None
) -> tuple[Tokenizer, Tokenizer] | None:
    """Return the tokenizers of target and drafter; None if they are equal.

    Equal sources are not loaded. loaded: the target's, if it was. Raises: CheckpointError."""
    sources = [open_checkpoint(path).tokenizer_source() for path in (target, drafter)]
    if sources[0] == sources[1]:
        return None
    theirs, own = loaded or load_tokenizer(target), load_tokenizer(drafter)
    # Sizes first: a digest of a large vocabulary is slow.
    if own.vocab_size == theirs.vocab_size and own.digest == theirs.digest:
        return None
    return theirs, own


class Tokenizer:
    """Fast transformers tokenizer, reduced to the needs of serving."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self.special_tokens: dict[int, str] = {
            token_id: token.content
            for token_id, token in fast.added_tokens_decoder.items()
            if token.special
        }
        """Spellings by id."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model may have more rows."""
        return len(self._fast)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the definition of encoding and decoding.

        It is of tokenizer.json without layout, run-time settings and irrelevant spellings: equal
        for equal tokenizers, from a folder and from a GGUF file."""
        content = _essentials(self._definition)
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_behind(self, token_ids: Sequence[int], text: str) -> list[int] | None:
        """Encode a text behind others; None where a token would belong to both."""
        if not token_ids:
            return self.encode(text, add_special_tokens=False)
        before = self.bytes_of(token_ids).decode(errors="ignore")
        ids = self.encode(before + text, add_special_tokens=False)
        # From the end: many vocabularies spell the beginning of a text in another way.
        num_bytes, begin = len(text.encode()), len(ids)
        while num_bytes > 0 and begin > 0:
            begin -= 1
            num_bytes -= len(self.token_bytes(ids[begin], ids[begin - 1] if begin else None))
        return ids[begin:] if num_bytes == 0 else None

    def encode_within(
        self, text: str, limit: int, add_special_tokens: bool = True
    ) -> list[int] | int:
        """Encode a text; of more than `limit` tokens return a number that it has at least.

        It is found without encoding all of it. A text of more characters than the longest tokens
        could spell counts as too long, even if the tokenizer drops some, such as repeated spaces.
        """
        if len(text) > limit * self._longest_token:
            return -(-len(text) // self._longest_token)
        if len(text) > limit * _HEAD_CHARS:
            head = self.encode(text[: limit * _HEAD_CHARS], add_special_tokens)
            if len(head) > limit + _CUT_TOKENS:
                return len(head) - _CUT_TOKENS
        ids = self.encode(text, add_special_tokens)
        return ids if len(ids) <= limit else len(ids)

    def encode_beginning(self, text: str, limit: int) -> list[int]:
        """Encode a text; of more than `limit` tokens the first ones, with the special ones around.

        Those are the ones that the tokenizer adds to every text, as the end of an embedding's."""
        ids = self.encode(text[: limit * self._longest_token])
        if len(ids) <= limit:
            return ids
        around = self.encode("")
        ends = (around[n:] for n in range(len(around)) if ids[:n] == around[:n])
        after = next((end for end in ends if ids[-len(end) :] == end), [])
        return ids[: limit - len(after)] + after

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped: Collection[int] = self.special_tokens if skip_special_tokens else ()
        shown = [token_id for token_id in token_ids if token_id not in skipped]
        if self._is_byte_level or not self._verbatim.keys().isdisjoint(shown):
            return self.bytes_of(shown).decode(errors="replace")
        return self._decode(shown)

    @property
    def has_chat_template(self) -> bool:
        return self._fast.chat_template is not None

    def prepare(self) -> None:
        """Compute what the first request would wait for."""
        _ = self._longest_token, self._verbatim

    def prepare_chats(self) -> None:
        """Compute what the first chat would wait for: imports that take a second."""
        if self.template_fault is not None:
            _log.warning("%s; chats are refused", self.template_fault)

    @cached_property
    def template_fault(self) -> str | None:
        """Reason in one line why the chat template is unusable; None if it works or is absent."""
        template = self._fast.chat_template
        templates = template if isinstance(template, Mapping) else {"": template}
        for name, text in templates.items() if self.has_chat_template else ():
            problem = self._syntax_error(text)
            if problem is not None:
                where = f"{name}: " if name else ""
                return f"the model's chat template cannot be used: {where}{problem}"
        return None

    def _syntax_error(self, template: Any) -> str | None:
        from jinja2 import TemplateSyntaxError

        if not isinstance(template, str):
            return "it is no text"
        messages = [{"role": "user", "content": ""}]
        try:
            self._fast.apply_chat_template(messages, chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {one_line(error)}"
        except Exception:  # one that refuses these messages may take others
            return None
        return None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return token ids of a conversation. Raises: ValueError without a fitting template."""
        # The template writes special tokens itself.
        return self.encode(self.chat_text(messages, add_generation_prompt), False)

    @property
    def tool_template(self) -> str | None:
        """Chat template for conversations with tools."""
        template = self._fast.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use", template.get("default"))
        return None if template is None else str(template)

    def has_variable(self, name: str) -> bool:
        """Return whether the chat template may read a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.tool_template or "") is not None

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation's text. Raises: ValueError.

        tools: in OpenAI's form. continue_final_message: the text ends within the last message.
        variables: of the template, besides its usual ones."""
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template; send a text prompt instead")
        if self.template_fault is not None:
            raise ValueError(f"{self.template_fault}; send a text prompt instead")
        try:
            text: str = self._fast.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                tools=list(tools) or None,
                **(variables or {}),
            )
        except Exception as error:
            raise ValueError(
                f"the chat template refuses the messages: {one_line(error)}"
            ) from error
        return text

    def info(self) -> dict[str, Any]:
        """Return special tokens by role (`eos_token`), and the chat template if there is one."""
        found: dict[str, Any] = {
            role: str(token)
            for role, token in self._fast.special_tokens_map.items()
            if not isinstance(token, list)
        }
        if self.has_chat_template:
            found["chat_template"] = self._fast.chat_template
        return found

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; an unknown id is empty."""
        spelt = self._fast.backend_tokenizer.id_to_token
        return [spelt(token_id) or "" for token_id in token_ids]

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        previous: int | None = None,
        shown: Collection[int] = (),
    ) -> IncrementalDetokenizer:
        """Return a stream of text behind `previous`. shown: special tokens that are not skipped."""
        return IncrementalDetokenizer(self, skip_special_tokens, previous, shown)

    def last_of_text(self, token_ids: Sequence[int]) -> int | None:
        """Return the last token that is neither special nor unknown."""
        known = self._fast.backend_tokenizer.id_to_token
        text = (t for t in reversed(token_ids) if not self.is_special(t) and known(t) is not None)
        return next(text, None)

    def special_ids(self, spellings: Collection[str]) -> frozenset[int]:
        """Return the special tokens among some spellings."""
        return frozenset(i for i, text in self.special_tokens.items() if text in spellings)

    def token_id(self, spelling: str) -> int | None:
        """Return the token that the vocabulary spells so."""
        found: int | None = self._fast.backend_tokenizer.token_to_id(spelling)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_tokens

    def token_bytes(self, token_id: int, previous: int | None) -> bytes:
        """Return a token's UTF-8 bytes behind `previous` (None: first); empty for an unknown id."""
        token = self._fast.backend_tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._verbatim:
            return self._verbatim[token_id]
        if self._is_byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return str(token).encode()
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        context = [] if previous is None else [previous]
        before, after = self._decode(context), self._decode([*context, token_id])
        return after[len(before) :].encode()

    def bytes_of(self, token_ids: Sequence[int], previous: int | None = None) -> bytes:
        """Return the UTF-8 bytes that tokens add to a text after token `previous`."""
        before = [previous, *token_ids]
        return b"".join(self.token_bytes(t, p) for t, p in zip(token_ids, before, strict=False))

    def vocabulary_bytes(self, num_tokens: int) -> list[bytes]:
        """Return the bytes that each of the first tokens adds within a text, by id."""
        inside = self.encode("a", add_special_tokens=False)[-1:]
        return [self.token_bytes(i, inside[0] if inside else None) for i in range(num_tokens)]

    def _decode(self, token_ids: list[int]) -> str:
        """Decode by the vocabulary's own decoder, which misreads added tokens."""
        text: str = self._fast.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    @cached_property
    def _verbatim(self) -> dict[int, bytes]:
        """Text of added tokens, which are matched before tokenization, by id.

        Not of those that a tokenizer.json's vocabulary spells in its alphabet (Gemma's for several
        spaces); a GGUF file's are text."""
        added = self._fast.added_tokens_decoder
        are_text = self._is_byte_level or isinstance(self._fast, FastTokenizer)
        own = {} if are_text else self._fast.backend_tokenizer.get_vocab(False)
        return {i: t.content.encode() for i, t in added.items() if t.content not in own}

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; a byte-level vocabulary has one for each byte."""
        return max(map(len, self._fast.get_vocab()))

    @cached_property
    def _definition(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._fast.backend_tokenizer.to_str())
        for run_time_setting in ("truncation", "padding"):
            content.pop(run_time_setting, None)
        return content

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        # The decoder alone: the whole definition of a large vocabulary takes half a second.
        state = self._fast.backend_tokenizer.decoder
        decoder = {} if state is None else json.loads(state.__getstate__())
        parts = decoder.get("decoders", [decoder])
        return frozenset(part["type"] for part in parts if "type" in part)

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in self._decoder_types

    @property
    def _has_byte_tokens(self) -> bool:
        return "ByteFallback" in self._decoder_types


class IncrementalDetokenizer:
    """Text of a growing sequence of token ids, in constant time for each token.

    `tokenizers.decoders.DecodeStream` does not serve: it has no end of a stream, and raises where
    byte tokens spell invalid UTF-8.

    Bytes of an incomplete character are held back until it is complete, invalid (then U+FFFD) or
    the stream ends. The pieces together are the text of `Tokenizer.decode`, except that decode
    turns a whole run of byte tokens into U+FFFD if one character in it is broken.

    Many vocabularies drop the space before a text's first word. For a stream that continues a text
    `previous` is that text's last token, and no space is dropped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        previous: int | None = None,
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._previous = previous
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_amid_character(self) -> bool:
        """True while bytes are held back."""
        return bool(self._utf8.getstate()[0])

    def copy(self) -> IncrementalDetokenizer:
        """Return an independent stream in the same state."""
        other = self._tokenizer.detokenizer(self._skip_special_tokens, self._previous, self._shown)
        other._utf8.setstate(self._utf8.getstate())
        return other

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        is_special = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if is_special and token_id not in self._shown:
            return ""
        piece = self._tokenizer.token_bytes(token_id, self._previous)
        self._previous = token_id
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """End the stream; return the text held back."""
        return self._utf8.decode(b"", final=True)


_ADDED = ("content", "lstrip", "normalized", "rstrip", "single_word")


def _essentials(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that decides encoding and decoding.

    Without added tokens' special flag (it only hides them) and their listing, and without
    offsets."""
    added = definition["added_tokens"]
    model, decoder = dict(definition["model"]), definition["decoder"] or {}
    if isinstance(model["vocab"], dict):
        model["vocab"] = model["vocab"] | {token["content"]: token["id"] for token in added}
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[name] = model.get(name) or None
    return {
        "model": model,
        "added_tokens": sorted([token[name] for name in _ADDED] for token in added),
        "normalizer": definition["normalizer"],
        "pre_tokenizer": _without_offsets(definition["pre_tokenizer"]),
        "post_processor": _processors(definition["post_processor"]),
        # Its other settings are those of the pre-tokenizer of the same name.
        "decoder": "ByteLevel" if decoder.get("type") == "ByteLevel" else decoder,
    }


def _without_offsets(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _without_offsets(v) for k, v in part.items() if k != "trim_offsets"}
    return [_without_offsets(x) for x in part] if isinstance(part, list) else part


def _processors(processor: dict[str, Any] | None) -> list[Any]:
    """Return the processors that add tokens; a template as the tokens around one text."""
    if processor is None or processor["type"] == "ByteLevel":
        return []
    if processor["type"] == "Sequence":
        return [found for part in processor["processors"] for found in _processors(part)]
    if processor["type"] == "TemplateProcessing":
        around = [part.get("SpecialToken", {}).get("id") for part in processor["single"]]
        return [around] if any(around) else []
    return [processor]


def _byte_of_char() -> dict[str, int]:
    """Return the byte-level alphabet: visible Latin-1 is itself, the rest follows from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    by_char = {chr(byte): byte for byte in visible}
    by_char.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return by_char


_BYTE_OF_CHAR = _byte_of_char()
