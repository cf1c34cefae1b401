"""Fill in the middle: prompts for the text between two others, by a model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma, later Granites
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite Code, Refact
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral, which reads the suffix first
)
"""Spellings of the tokens before prefix, suffix and middle."""

_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>",
    "<fim_pad>", "<repo_name>", "<file_sep>", "▁<EOT>",
)  # fmt: skip
"""Tokens behind the middle, where they are not the model's end of text."""
_FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
"""Tokens before a file's name."""


class FillTokens(NamedTuple):
    """A model's tokens before prefix, suffix and middle; `ends` stop the middle.

    file: before a file's name; empty where the model has no such token."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    file: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Find a tokenizer's tokens; None without."""
        find = tokenizer.token_id
        for prefix, suffix, middle in _FAMILIES:
            before, behind = find(prefix), find(suffix)
            between = None if middle is None else find(middle)
            if before is None or behind is None or (middle is not None and between is None):
                continue
            found = {find(end) for end in _ENDS} | {before, behind, between}
            ends = frozenset(token for token in found if token is not None)
            file = tuple(token for token in map(find, _FILES) if token is not None)[:1]
            return cls(before, behind, between, ends, file)
        return None

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt whose continuation is the middle."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]
