"""The bodies of Ollama's endpoints, as chat and completion requests."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from penstock.api.bodies import (
    MAX_TOOLS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Effort,
    GenerationBody,
    ModelBody,
    SamplingBody,
    Tool,
    ToolCall,
)
from penstock.api.body import Body, NamedSchema, ResponseFormat, json_of_object
from penstock.config import seconds_in
from penstock.core.types import MAX_LOGPROBS

LATEST = ":latest"
"""Tag that Ollama adds to names without one."""


_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_UNSET = {"num_predict": 0, "seed": -1}
"""Values that, like lower ones, mean that an option is not given."""


class OllamaOptions(SamplingBody):
    """Sampling parameters, with Ollama's names, defaults and values for none."""

    model_config = ConfigDict(alias_generator=lambda name: _NAMES.get(name, name))

    @model_validator(mode="before")
    @classmethod
    def _as_ollama(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given

        def is_set(name: str, value: Any) -> bool:
            return value is not None and not (
                name in _UNSET and isinstance(value, int | float) and value <= _UNSET[name]
            )

        return _DEFAULTS | {name: value for name, value in given.items() if is_set(name, value)}


class OllamaShow(Body):
    """Body of `POST /api/show` and of `DELETE /api/delete`. name: the older name of `model`."""

    model: str = Field(validation_alias=AliasChoices("model", "name"))


class OllamaPull(OllamaShow):
    """Body of `POST /api/pull`."""

    stream: bool = True

    @property
    def name(self) -> str:
        """The model's name on the hub, without what Ollama's clients put around it."""
        return re.sub(r"^(hf\.co|huggingface\.co)/", "", self.model.removesuffix(LATEST))


class OllamaCopy(Body):
    """Body of `POST /api/copy`."""

    source: str
    destination: str = Field(min_length=1)


class OllamaRequest(ModelBody):
    """Fields of all requests to the model. keep_alive: of one of several models."""

    model: str
    keep_alive: Annotated[float | None, BeforeValidator(seconds_in)] = None

    @field_validator("model")
    @classmethod
    def _without_latest(cls, name: str) -> str:
        return name.removesuffix(LATEST)


class OllamaEmbed(OllamaRequest):
    """Body of `POST /api/embed`, and of the older `/api/embeddings`, where `input` is `prompt`.

    truncate: False refuses a too long text. options: ignored."""

    input: str | list[str] = Field(default="", validation_alias=AliasChoices("input", "prompt"))
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return [] if texts == [""] else texts


class OllamaBody(OllamaRequest, GenerationBody):
    """Fields of `/api/chat` and `/api/generate`."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "images": ([],), "context": ([],), "template": ("",),
    }  # fmt: skip

    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: str | dict[str, Any] = ""
    think: bool | Effort | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("format")
    @classmethod
    def _is_json(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        if given and isinstance(given, str) and given != "json":
            raise ValueError('must be "json" or a JSON schema')
        return given

    @model_validator(mode="after")
    def _one_answer(self) -> OllamaBody:
        if self.n != 1 or self.options.n != 1:
            raise ValueError("n is not a field of Ollama's API")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self

    @abstractmethod
    def asked(self) -> ChatBody | CompletionBody | None:
        """Return the equivalent request; None if only the model is to be loaded."""

    def parts(self) -> Iterator[tuple[tuple[str | int, ...], Body]]:
        yield ("options",), self.options

    def _chat(self) -> dict[str, Any]:
        """Return the fields that all chats have."""
        shared = {**self._shared(), "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            return {**shared, "reasoning_effort": self.think}
        variables = {} if self.think is None else {"enable_thinking": self.think}
        return {**shared, "chat_template_kwargs": variables}

    def _shared(self) -> dict[str, Any]:
        """Return the fields that all bodies have, as OpenAI's endpoints take them."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        shared |= {name: getattr(self.options, name) for name in SamplingBody.model_fields}
        if self.format:
            given = {"type": "object"} if isinstance(self.format, str) else self.format
            schema = NamedSchema(schema=given)
            made = ResponseFormat(type="json_schema", json_schema=schema)
            shared["response_format"] = made
        # Ollama's calls come whole, also in a stream.
        return {**shared, "stream": False}


def _with_json(calls: Any) -> Any:
    """Return calls with their arguments as JSON."""
    if not isinstance(calls, list):
        return calls
    made = []
    for call in calls:
        match call:
            case {"function": {"arguments": arguments, **function}, **rest}:
                written = {**function, "arguments": json_of_object(arguments)}
                made.append({**rest, "function": written})
            case _:
                made.append(call)
    return made


class OllamaMessage(ChatMessage):
    """One turn of a chat. thinking: of an earlier answer. tool_name: of a result."""

    name: str | None = Field(default=None, alias="tool_name")
    reasoning_content: str = Field(default="", alias="thinking")
    tool_calls: Annotated[list[ToolCall], BeforeValidator(_with_json)] = Field(default_factory=list)


class OllamaChat(OllamaBody):
    """Body of `POST /api/chat`. Without messages it asks for the model to be loaded."""

    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)

    def parts(self) -> Iterator[tuple[tuple[str | int, ...], Body]]:
        yield from super().parts()
        yield from ((("messages", n), message) for n, message in enumerate(self.messages))

    def asked(self) -> ChatBody | None:
        """Return the equivalent chat request."""
        if not self.messages:
            return None
        return ChatBody.model_construct(
            **self._chat(),
            messages=self.messages,
            tools=self.tools,
            continue_final_message=self.messages[-1].is_begun,
        )


class OllamaGenerate(OllamaBody):
    """Body of `POST /api/generate`. raw: the prompt is the text itself, without a chat template.

    suffix: text behind the answer. Without a prompt it asks for the model to be loaded."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False

    def asked(self) -> ChatBody | CompletionBody | None:
        """Return the equivalent request: of a completion if it is raw or fills in the middle."""
        if not (self.prompt or self.suffix):
            return None
        if self.raw or self.suffix:
            told = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionBody.model_construct(
                **self._shared(), prompt=self.prompt, suffix=self.suffix, logprobs=told
            )
        messages = [ChatMessage(role="user", content=self.prompt)]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        return ChatBody.model_construct(**self._chat(), messages=messages)
