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

_FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
"""Tokens before the name of a file."""
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<fim_pad>", "<repo_name>", "▁<EOT>", *_FILES,
)  # fmt: skip
"""Tokens behind the middle, where they are not the model's end of text."""


class FillTokens(NamedTuple):
    """A model's tokens before prefix, suffix, middle and a file's name; `ends` stop the middle."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    file: list[int]

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
            file = [token for token in map(find, _FILES) if token is not None][:1]
            return cls(before, behind, between, ends, file)
        return None

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt whose continuation is the middle."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]
