"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.api.bodies import (
    MAX_TOOLS,
    CalledFunction,
    ChatBody,
    ChatMessage,
    FunctionDefinition,
    GenerationBody,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
)
from penstock.api.body import Body, json_of_object
from penstock.api.response_bodies import TextFormat, TextOptions


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Texts = Annotated[
    list[TextPart], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextPart])
]


class ToolUseBlock(CalledFunction):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    arguments: Annotated[
        str, BeforeValidator(json_of_object, json_schema_input_type=dict[str, Any])
    ] = Field(default="", alias="input")


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = Field(default_factory=list)


class ThinkingBlock(Body):
    """Thinking of an earlier answer."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


_Block = Annotated[
    TextPart | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]


class Turn(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[_Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block])
    ]

    @model_validator(mode="after")
    def _belongs_to_role(self) -> Turn:
        for block in self.content:
            owner = {"tool_use": "assistant", "tool_result": "user"}.get(block.type)
            if owner not in (None, self.role):
                raise ValueError(f"{block.type} is only allowed in messages of the {owner}")
        return self


class _Custom(Body):
    type: Literal["custom"] = "custom"


class ClientTool(FunctionDefinition, _Custom):
    """A tool. Names may be longer than OpenAI's: servers of tools put theirs before them."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,128}$")
    parameters: dict[str, Any] = Field(alias="input_schema")


class ToolChoice(Body):
    """A choice of tools: the model may, must or must not call one. name: with type tool."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is to be given with type tool, and only with it")
        return self

    @property
    def as_chat(self) -> Literal["none", "auto", "required"] | NamedTool:
        if self.name is not None:
            return NamedTool(function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class Thinking(Body):
    """Switches thinking on or off, where the chat template has it."""

    type: str


class MessagesInput(GenerationBody):
    """Body of `POST /v1/messages/count_tokens`. output_format: output_config's older name."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "container": (), "mcp_servers": ([],),
    }  # fmt: skip

    messages: list[Turn] = Field(min_length=1)
    system: _Texts = Field(default_factory=list)
    tools: list[ClientTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice()
    stop: list[str] = Field(default_factory=list, alias="stop_sequences")
    output_config: TextOptions = TextOptions()
    output_format: TextFormat | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> MessagesInput:
        if self.n != 1:
            raise ValueError("n is not a field of messages")
        if self.output_format is not None and "format" in self.output_config.model_fields_set:
            raise ValueError("give output_config.format or output_format, not both")
        return self

    def parts(self) -> Iterator[tuple[tuple[str | int, ...], Body]]:
        for name, listed in (("system", self.system), ("tools", self.tools)):
            yield from (((name, n), part) for n, part in enumerate(listed))
        yield ("tool_choice",), self.tool_choice
        yield ("output_config",), self.output_config
        for n, turn in enumerate(self.messages):
            yield ("messages", n), turn
            for block in turn.content:
                if not isinstance(block, ThinkingBlock):
                    yield ("messages", n, "content"), block

    def as_chat(self) -> ChatBody:
        """Return the equivalent chat request."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        messages = list(self._messages())
        given = self.output_format
        text = self.output_config if given is None else TextOptions(format=given)
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return ChatBody.model_construct(
            **shared | {"response_format": text.response_format},
            messages=messages,
            tools=[Tool(type="function", function=tool) for tool in self.tools],
            tool_choice=self.tool_choice.as_chat,
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            continue_final_message=messages[-1].is_begun,
            chat_template_kwargs={"enable_thinking": thinks} if self.thinking else {},
        )

    def _messages(self) -> Iterator[ChatMessage]:
        if self.system:
            yield ChatMessage(role="system", content=_text_of(self.system))
        # Turns of one role in a row are one turn, and results of tools precede its text.
        for role, turns in groupby(self.messages, key=lambda turn: turn.role):
            blocks = [block for turn in turns for block in turn.content]
            results = [block for block in blocks if isinstance(block, ToolResultBlock)]
            for result in results:
                text = _text_of(result.content)
                yield ChatMessage(role="tool", content=text, tool_call_id=result.tool_use_id)
            called = [block for block in blocks if isinstance(block, ToolUseBlock)]
            calls = [ToolCall(id=block.id, function=block) for block in called]
            texts = [block for block in blocks if isinstance(block, TextPart)]
            thought = "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock))
            if texts or not results:
                yield ChatMessage(
                    role=role,
                    content=_text_of(texts),
                    tool_calls=calls,
                    reasoning_content=thought,
                )


class MessagesBody(MessagesInput):
    """Body of `POST /v1/messages`. max_tokens: the context may allow fewer."""

    max_tokens: int = Field(ge=1)


def _text_of(parts: Iterable[TextPart]) -> str:
    return "\n".join(part.text for part in parts)
