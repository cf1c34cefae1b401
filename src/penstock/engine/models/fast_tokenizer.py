"""A `tokenizers` tokenizer with a chat template, without transformers until a chat is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, models


class FastTokenizer:
    """Substitute for transformers' PreTrainedTokenizerFast in `engine.tokenizer.Tokenizer`.

    The original takes a second to import and another to copy a large tokenizer. special: tokens by
    transformers' names (bos_token, …); those that the backend lacks are added."""

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: str | dict[str, str] | None,
        special: Mapping[str, str],
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(special)
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = dict.fromkeys(token for token in special.values() if token not in known)
        backend.add_special_tokens([AddedToken(token, special=True) for token in missing])

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = False,
        **options: Any,
    ) -> str:
        """Render a chat as text. Raises ValueError if asked to tokenize.

        options: as transformers' method has them, and the template's variables"""
        if tokenize:
            raise ValueError("tokenize is true; allowed: false")
        text: str = self._writer.apply_chat_template(conversation, tokenize=False, **options)
        return text

    def to_transformers(self) -> Any:
        """Return a PreTrainedTokenizerFast, which can be saved."""
        return self._in_transformers(self.backend_tokenizer)

    @cached_property
    def _writer(self) -> Any:
        """Renderer of chats, with no vocabulary but the special tokens."""
        return self._in_transformers(Tokenizer(models.BPE()))

    def _in_transformers(self, backend: Tokenizer) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self.special_tokens_map,
        )
