"""Request bodies of completions and chats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator
from pydantic_core import from_json

from penstock.api.body import Body, StructuredBody
from penstock.core.types import (
    AUTO_DRAFTER,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    LatencyTarget,
)

# OpenAI's limits of choices and tools; the limit of prompts bounds memory.
_MAX_CHOICES = 128
_MAX_PROMPTS = 2**16
MAX_TOOLS = 128
_MAX_TEMPLATE_CHARS = 2**14
"""Limit of chat_template_kwargs as JSON."""
_MAX_TOP_K = 2**31 - 1
"""Largest int32: the type of top_k in the draft servers' protocol."""

TokenId = Annotated[int, Field(ge=0)]
_DecimalId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]

# Lists may have millions of entries: validation stops at the first wrong one.
_Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_Prompts = Annotated[list[TokenIds], Field(fail_fast=True, max_length=_MAX_PROMPTS)]
Prompt = Annotated[str | _Texts | TokenIds | _Prompts, Field(union_mode="left_to_right")]


class StreamOptions(Body):
    """Usage in streams: in a last chunk (include_usage), in every one (continuous_usage_stats)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(Body):
    """Penstock's own options of speculation.

    drafter: `auto` (the scheduler selects), `none`, or a drafter's name. max_draft_tokens: of a
    step. origins: report the origin of every token."""

    model_config = ConfigDict(extra="forbid")

    drafter: str = AUTO_DRAFTER
    max_draft_tokens: int | None = Field(default=None, ge=0)
    origins: bool = False


class LatencyOptions(Body):
    """Latency targets in milliseconds: mean time per token after the first, and end to end."""

    model_config = ConfigDict(extra="forbid")

    tpot_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    deadline_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def target(self) -> LatencyTarget:
        return LatencyTarget.from_ms(self.tpot_ms, self.deadline_ms)


class SamplingBody(Body):
    """Sampling parameters, with vLLM's meanings.

    temperature, top_p: 0 is greedy. top_k: 0 and -1 are off. seed: drawn if not given. n: choices,
    with seeds derived from `seed`. min_tokens: a choice does not stop before so many.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1, le=_MAX_TOP_K)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: dict[_DecimalId, Bias] = Field(default_factory=dict)
    min_tokens: int = Field(default=0, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    stop: str | _Texts = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str]) -> str | list[str]:
        strings = [stop] if isinstance(stop, str) else stop
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} strings are allowed, not {len(strings)}")
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        if (num_chars := sum(map(len, strings))) > MAX_STOP_CHARS:
            raise ValueError(f"at most {MAX_STOP_CHARS} characters are allowed, not {num_chars}")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ModelBody(Body):
    """Fields of all requests to the model.

    user: ignored. timeout: seconds until the request is cancelled."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """This endpoint's own unsupported fields, as in `_UNSUPPORTED`."""

    model: str | None = None
    user: str | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def parts(self) -> Iterator[tuple[tuple[str | int, ...], Body]]:
        """Yield the objects inside it whose unknown fields count, and their paths."""
        yield from ()


class GenerationBody(ModelBody, SamplingBody, StructuredBody):
    """Fields of completions, chats and responses.

    expected_output_tokens: the client's estimate for a choice, used by admission policies.
    latency: targets of every choice."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    latency: LatencyOptions = LatencyOptions()
    expected_output_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _streaming(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class TextPart(Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A part of an earlier answer that refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class PredictedContent(Body):
    """OpenAI's prediction: text that the client expects in the output, which is drafted."""

    type: Literal["content"]
    content: str | list[TextPart]


class PredictedBody(GenerationBody):
    """Fields of completions and chats, which may have a prediction."""

    prediction: PredictedContent | None = None

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else _text_of(self.prediction.content)


def each_prompt(given: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """Return one entry per prompt: text or token ids."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [prompt for prompt in given if not isinstance(prompt, int)]


class CompletionBody(PredictedBody):
    """Body of `POST /v1/completions`.

    suffix: text behind the output, which fills in the middle. logprobs: alternatives per token.
    echo: prepend the prompt, with its log-probabilities; max_tokens may then be 0.
    add_special_tokens: to text prompts."""

    prompt: Prompt
    suffix: str = ""
    add_special_tokens: bool = True
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _something_to_show(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only allowed with echo: true")
        if self.suffix and self.echo:
            raise ValueError("echo is not allowed with suffix")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        return each_prompt(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class CalledFunction(Body):
    """Name of a called function, and its arguments: a JSON object in a string."""

    name: str
    arguments: str = ""

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        try:
            value = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object in a string")
        return arguments


class ToolCall(Body):
    """A tool call of an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template, with its arguments as a mapping."""
        arguments = from_json(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class ChatMessage(Body):
    """One turn of a chat.

    role: `developer` is OpenAI's newer name of `system`. name: passed to the chat template.
    tool_calls, reasoning_content (or `reasoning`), refusal: of the assistant; content is then
    optional. tool_call_id: the call answered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] = ""
    refusal: str = ""
    reasoning_content: str = Field(
        default="", validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _belongs_to_role(self) -> ChatMessage:
        answered = [n for n in ("tool_calls", "reasoning_content", "refusal") if getattr(self, n)]
        if "content" not in self.model_fields_set and not answered:
            raise ValueError("content is required")
        if answered and self.role != "assistant":
            are = "are" if answered[0] == "tool_calls" else "is"
            raise ValueError(f"{answered[0]} {are} only allowed in messages of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id is only allowed in messages of a tool")
        return self

    @property
    def text(self) -> str:
        return _text_of(self.content) or self.refusal

    @property
    def is_begun(self) -> bool:
        """Return whether it is an answer that can go on."""
        return self.role == "assistant" and bool(self.text) and not self.tool_calls

    @property
    def is_about_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template."""
        made: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.role == "developer":
            made["role"] = "system"
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_content:
            made["reasoning_content"] = self.reasoning_content
            if self.tool_calls and not self.text:
                made["thinking"] = self.reasoning_content  # as gpt-oss's template has it
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return made | {key: value for key, value in named.items() if value is not None}


class FunctionDefinition(Body):
    """A function offered as a tool. parameters: a JSON schema. strict: ignored."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function = self.function
        made = {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": made}


class NamedFunction(Body):
    """The function of a `NamedTool`."""

    name: str


class NamedTool(Body):
    """A tool_choice that names the function to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    """The tools of a `ToolSubset`. mode: whether one of them is to be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolSubset(Body):
    """A tool_choice that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_TEMPLATE_NAME = re.compile(r"(?!\w*_token$)[A-Za-z_]\w{0,63}", re.ASCII)
RESERVED_NAMES = frozenset({
    "self", "messages", "conversation", "tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip
"""Parameters of transformers' apply_chat_template, which no client sets."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(PredictedBody):
    """Body of `POST /v1/chat/completions`.

    top_logprobs: alternatives per token. parallel_tool_calls: false ends a choice after its first
    call. add_special_tokens: in addition to those of the chat template. chat_template_kwargs: its
    variables. continue_final_message: the last message is the beginning of the answer."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ToolSubset = "auto"
    parallel_tool_calls: bool = True
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, str]] = Field(default_factory=list)
    reasoning_effort: Effort | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not _TEMPLATE_NAME.fullmatch(name) or name in RESERVED_NAMES:
                raise ValueError(f"{name[:64]!r} is not a variable that a client may set")
        if (size := len(json.dumps(given))) > _MAX_TEMPLATE_CHARS:
            raise ValueError(f"at most {_MAX_TEMPLATE_CHARS} characters are allowed, not {size}")
        return given

    @model_validator(mode="after")
    def _end_of_prompt(self) -> ChatBody:
        if self.continue_final_message:
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise ValueError("give continue_final_message or add_generation_prompt, not both")
            if self.messages[-1].role != "assistant" or not self.messages[-1].text:
                raise ValueError("continue_final_message needs a last message of the assistant")
        return self

    @model_validator(mode="after")
    def _alternatives(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def uses_tools(self) -> bool:
        """Return whether anything in it is about tools."""
        is_asked = self.tools or self.tool_choice not in ("none", "auto")
        return bool(is_asked) or any(message.is_about_tools for message in self.messages)

    @property
    def must_call(self) -> bool:
        """Return whether the answer is to be a call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, ToolSubset) else choice
        return mode not in ("none", "auto")

    @property
    def named_tools(self) -> list[str] | None:
        """Names of the tools that may be called; None: all."""
        choice = self.tool_choice
        if isinstance(choice, ToolSubset):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, NamedTool) else None

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the chat template receives."""
        if isinstance(self.tool_choice, ToolSubset):
            return [t for t in self.tools if t.function.name in (self.named_tools or ())]
        return [] if self.tool_choice == "none" else self.tools
