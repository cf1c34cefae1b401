"""Tokenizer of a GGUF file, as the model's publisher would have written it.

The file has tokens, merges or scores, and a name of the pre-tokenizer. The pre-tokenizer and the
normalisation are those of the tokenizer with that name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf.constants import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.config import each_once
from penstock.engine.models.checkpoint import CheckpointError, one_line
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.models.gguf.file import GgufFile

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template, and beginning of the keys of named ones."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_REST_WITH_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
# Words by case: capitals followed by small letters, or capitals alone.
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{'|'.join(_CASES)}|\p{{N}}|{_REST_WITH_SLASHES}"
_GPT4O = rf"{'|'.join(x + _SHORT_FORMS for x in _CASES)}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """Pre-tokenizer of a byte-level tokenizer: single digits if set, then `pattern`."""

    pattern: str = _GPT2
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Cut(single_digits=True)),
    "qwen2": _Cut(_QWEN2, nfc=True),
    "qwen35": _Cut(_QWEN35, nfc=True),
    "deepseek-r1-qwen": _Cut(_QWEN2),
    "dbrx": _Cut(_LLAMA3),
    "glm4": _Cut(_LLAMA3, ignore_merges=True),
    "gpt-4o": _Cut(_GPT4O),
    "tekken": _Cut(_TEKKEN, ignore_merges=True, adds_bos=True),
    "smaug-bpe": _Cut(_LLAMA3),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2"),
        _Cut(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
}
"""Pre-tokenizers by tokenizer.ggml.pre. `default`, llama.cpp's for unknown ones, is no model's."""

_SPACES = ("llama", "gemma4")
"""Kinds of tokenizers whose tokens spell spaces as SentencePiece does; gemma4's have merges."""
SPM_IDS = {"bos": 1, "eos": 2, "unk": 0}
"""Special tokens of SentencePiece that a file need not name."""


def fast_tokenizer(file: GgufFile) -> FastTokenizer:
    """Build the tokenizer. Raises CheckpointError for an unsupported kind, or an incomplete one."""
    tokens = file.strings(f"{_PREFIX}tokens")
    if not tokens:
        raise file.error("has no tokenizer.ggml.tokens")
    kind = str(file.metadata.get(f"{_PREFIX}model"))
    build = {"gpt2": _byte_level, **dict.fromkeys(_SPACES, _sentencepiece)}.get(kind)
    if build is None:
        raise file.error(f"{_PREFIX}model is {kind!r}; allowed: gpt2, {', '.join(_SPACES)}")
    kinds = _per_token(file, "token_type", len(tokens))
    # Unused tokens pad the matrices; a text that spells one is ordinary text.
    pairs = ((t, i) for i, t in enumerate(tokens) if kinds[i] != TokenType.UNUSED)
    used = each_once(pairs, f"{_PREFIX}tokens", file.error)
    try:
        tokenizer = build(file, used)
        _add_tokens(tokenizer, tokens, kinds)
        special = _special_tokens(file, tokens)
        _add_bos(file, tokenizer, special)
        return FastTokenizer(tokenizer, _chat_template(file), special)
    except CheckpointError:
        raise
    except Exception as error:
        raise file.error(f"its tokenizer cannot be used ({one_line(error)})") from error


def _per_token(file: GgufFile, name: str, count: int) -> Any:
    values = file.metadata.get(f"{_PREFIX}{name}")
    found = len(values) if isinstance(values, tuple) else 0
    if found != count:
        raise file.error(f"{_PREFIX}{name} has {found} entries for {count} tokens")
    return values


def _chat_template(file: GgufFile) -> Any:
    """Return the chat template, or several by name, as transformers has them."""
    usual, prefix = file.metadata.get(_TEMPLATE), f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): file.metadata.get(key) for key in file.keys(prefix)}
    if named and usual is not None:
        named["default"] = usual
    return named or usual


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    name = file.metadata.get(f"{_PREFIX}pre", "missing")
    cut = _CUTS.get(name)
    if cut is None:
        raise file.error(f"{_PREFIX}pre is {name!r}; allowed: {', '.join(_CUTS)}")
    merges = [_pair(file, merge) for merge in file.strings(f"{_PREFIX}merges")]
    if not merges and len(vocab) > 256:  # a token for each byte needs none
        raise file.error(f"has no {_PREFIX}merges")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=cut.ignore_merges))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern == _GPT2:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        parts.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise file.error(f"{_PREFIX}merges holds {merge!r}; two tokens are expected")
    return left, right


def _sentencepiece(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    tokens = file.strings(f"{_PREFIX}tokens")
    merges = [_pair(file, merge) for merge in file.strings(f"{_PREFIX}merges")]
    if file.metadata[f"{_PREFIX}model"] == "llama":
        merges = _merges_by_score(vocab, _per_token(file, "scores", len(tokens)))
    unknown = _special_tokens(file, tokens).get("unk_token", "<unk>")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get(f"{_PREFIX}add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair that makes a token, the token of the highest score first."""
    found = []
    for token, index in vocab.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the tokens that are matched before splitting: special and user-defined ones."""
    whole = [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN]
    found = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in whole
    ]
    tokenizer.add_tokens(found)


def _special_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    usual = SPM_IDS if file.metadata.get(f"{_PREFIX}model") == "llama" else {}
    ids = {
        name: _token_id(file, f"{theirs}_token_id", len(tokens), usual.get(name))
        for name, theirs in names.items()
    }
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _token_id(file: GgufFile, name: str, count: int, default: int | None = None) -> Any:
    index = file.metadata.get(f"{_PREFIX}{name}", default)
    if index is not None and not (isinstance(index, int) and 0 <= index < count):
        raise file.error(f"{_PREFIX}{name} is {index!r}; allowed: 0..{count - 1}")
    return index


def _add_bos(file: GgufFile, tokenizer: Tokenizer, special: dict[str, str]) -> None:
    """Add a first and a last token to texts where the file or its kind asks for them."""
    usual = (
        file.metadata[f"{_PREFIX}model"] in _SPACES
        or _CUTS[file.metadata[f"{_PREFIX}pre"]].adds_bos
    )
    ends = []
    for name, default in (("bos", usual), ("eos", False)):
        is_added = file.metadata.get(f"{_PREFIX}add_{name}_token", default)
        if is_added and f"{name}_token" not in special:
            raise file.error(f"has no {_PREFIX}{name}_token_id, which is added to texts")
        ends.append(is_added and special[f"{name}_token"])
    before, after = ends
    used = [token for token in (before, after) if token]
    if used:
        one = [token for token in (before, "$A", after) if token]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=one,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
        )
