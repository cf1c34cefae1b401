"""The body of `POST /v1/responses`, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from penstock.api.bodies import (
    MAX_TOOLS,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ChatMessage,
    Effort,
    FunctionDefinition,
    GenerationBody,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolSubset,
)
from penstock.api.body import Body, NamedSchema, ResponseFormat

_LOGPROBS = "message.output_text.logprobs"


class InputText(Body):
    """A text part of an input message or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Body):
    """A message of the client or of an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class FunctionCall(CalledFunction):
    """A tool call of an earlier answer."""

    call_id: str


class FunctionCallOutput(Body):
    """The result of a tool call."""

    call_id: str
    output: str | list[InputText]


class ReasoningText(Body):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer, which precedes its message or calls."""

    content: list[ReasoningText] = Field(default_factory=list)


class ReasoningOptions(Body):
    """How much the model is to think. summary: ignored; the reasoning itself is returned."""

    effort: Effort | None = None


def _kind(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else "message"


_Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class _Function(Body):
    type: Literal["function"]


class FunctionTool(FunctionDefinition, _Function):
    """A tool, with the function's fields beside its type."""


class NamedFunctionTool(NamedFunction, _Function):
    """A tool_choice, with the function's name beside its type."""


class AllowedFunctionTools(Body):
    """A tool_choice that allows some of the tools, with the fields beside its type."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool] = Field(min_length=1, max_length=MAX_TOOLS)


class TextFormat(NamedSchema):
    """Format of the text, with a schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    @property
    def as_given(self) -> dict[str, Any]:
        return {"type": self.type, **self.model_dump(by_alias=True, exclude_unset=True)}


class TextOptions(Body):
    """Options of the text output."""

    format: TextFormat = TextFormat()

    @property
    def response_format(self) -> ResponseFormat:
        if self.format.type != "json_schema":
            return ResponseFormat(type=self.format.type)
        return ResponseFormat(type="json_schema", json_schema=self.format)


class ResponsesBody(GenerationBody):
    """Body of `POST /v1/responses`. No state is kept: `input` has the whole conversation."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "previous_response_id": (), "conversation": (), "background": (False,), "store": (False,),
        "truncation": ("disabled",), "top_logprobs": (0,),
    }  # fmt: skip

    input: list[_Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools = (
        "auto"
    )
    parallel_tool_calls: bool = True
    include: list[str] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("input", mode="before")
    @classmethod
    def _text_is_a_message(cls, given: Any) -> Any:
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @field_validator("include")
    @classmethod
    def _is_there(cls, include: list[str]) -> list[str]:
        if _LOGPROBS in include:
            raise ValueError(f"{_LOGPROBS} is not supported")
        return include

    @model_validator(mode="after")
    def _one_answer(self) -> ResponsesBody:
        if self.n != 1 or self.max_tokens is not None:
            name = "n" if self.max_tokens is None else "max_tokens"
            raise ValueError(f"{name} is not a field of responses")
        return self

    def as_chat(self) -> ChatBody:
        """Return the equivalent chat request."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = NamedTool(function=choice)
        elif isinstance(choice, AllowedFunctionTools):
            named = [NamedTool(function=tool) for tool in choice.tools]
            allowed = AllowedTools(mode=choice.mode, tools=named)
            choice = ToolSubset(type=choice.type, allowed_tools=allowed)
        return ChatBody.model_construct(
            **shared | {"response_format": self.text.response_format},
            messages=list(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            tools=[Tool(type="function", function=tool) for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
        )

    def _messages(self) -> Iterator[ChatMessage]:
        # Reasoning and calls belong to the assistant's turn between them.
        if self.instructions is not None:
            yield ChatMessage(role="system", content=self.instructions)
        thought, said, calls = "", "", list[ToolCall]()
        for item in [*self.input, None]:
            is_said = isinstance(item, InputMessage) and item.role == "assistant"
            joins = isinstance(item, FunctionCall) or (is_said and not (said or calls))
            if (thought or said or calls) and not joins:
                yield ChatMessage(
                    role="assistant", content=said, tool_calls=calls, reasoning_content=thought
                )
                thought, said, calls = "", "", []
            if isinstance(item, FunctionCall):
                calls.append(ToolCall(id=item.call_id, function=item))
            elif isinstance(item, ReasoningItem):
                thought = "".join(part.text for part in item.content)
            elif isinstance(item, FunctionCallOutput):
                text = _joined(item.output)
                yield ChatMessage(role="tool", content=text, tool_call_id=item.call_id)
            elif isinstance(item, InputMessage) and item.role == "assistant":
                said = _joined(item.content)
            elif item is not None:
                yield ChatMessage(role=item.role, content=_joined(item.content))


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
