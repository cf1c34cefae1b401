"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them, and of `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, WrapValidator, model_validator

from penstock.api.bodies import MAX_TOOLS, ChatMessage, ModelBody, Prompt, TokenIds, Tool
from penstock.api.body import Body
from penstock.api.errors import PROMPT_SHAPES


class TokenizeBody(Body):
    """Body of `/tokenize`: a prompt or messages.

    add_special_tokens: default true for a prompt; chat templates add their own."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give prompt or messages, and not both")
        return self


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: TokenIds


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
