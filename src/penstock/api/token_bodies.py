"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from penstock.api.bodies import MAX_TOOLS, ChatMessage, TokenIds, Tool
from penstock.api.body import Body


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
