"""Bodies of `/v1/embeddings`, and of vLLM's and llama.cpp's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, WrapValidator, model_validator

from penstock.api.bodies import (
    MAX_TOOLS,
    ChatMessage,
    ModelBody,
    Prompt,
    TokenId,
    TokenIds,
    Tool,
)
from penstock.api.body import Body
from penstock.api.errors import PROMPT_SHAPES

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer


class TokenizeBody(Body):
    """Body of `/tokenize`: a prompt or messages as in vLLM, or llama.cpp's `content`.

    add_special_tokens: default true for a prompt; chat templates add their own. content: a text,
    or texts and tokens in a row; add_special, parse_special and with_pieces are of it."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    content: str | Annotated[list[TokenId | str], Field(fail_fast=True)] | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is not None) + bool(self.messages) + (self.content is not None) != 1:
            raise ValueError("give one of prompt, messages and content")
        return self


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: TokenIds


def pieces(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return llama.cpp's form of tokens: each with its text, or its bytes if these are no text."""
    found = []
    for token_id, previous in zip(token_ids, [None, *token_ids], strict=False):
        raw = tokenizer.token_bytes(token_id, previous)
        try:
            piece: str | list[int] = raw.decode()
        except UnicodeDecodeError:
            piece = list(raw)
        found.append({"id": token_id, "piece": piece})
    return found


def _in_shape(given: Any, validate: Callable[[Any], Any]) -> Any:
    try:
        return validate(given)
    except ValidationError as error:
        raise ValueError(PROMPT_SHAPES) from error


class EmbeddingBody(ModelBody):
    """Body of `POST /v1/embeddings`. dimensions: the first ones alone."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (True,), "normalize": (True,), "embd_normalize": (2,),
        "truncate": (False,), "input_type": (), "task": (), "prompt_name": (),
    }  # fmt: skip

    input: Annotated[Prompt, WrapValidator(_in_shape)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
