"""`tool_choice`, `required` or a named tool: the bundled model has never seen a call, and must."""

import json
import shutil
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.api.conftest import client_of
from tests.api.tool_servers import (
    DEEPSEEK,
    DEEPSEEK_V31,
    GEMMA,
    GLM,
    GPT_OSS,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
)
from tests.serving.harness import model_server

from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import model_path


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


class Weather(BaseModel):
    """Its schema has definitions that it refers to."""

    place: Place
    days: Annotated[int, Field(ge=1, le=9)]


class Add(BaseModel):
    a: Annotated[int, Field(ge=0, le=99)]
    b: Annotated[int, Field(ge=0, le=99)]


MODELS: dict[str, type[BaseModel]] = {"weather": Weather, "add": Add}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
    for name, model in MODELS.items()
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CHOICES = ["required", {"type": "function", "function": {"name": "add"}}]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>{# tools #}"


@pytest.fixture(
    scope="module",
    params=[
        HERMES,
        GPT_OSS,
        *(
            pytest.param(t, marks=pytest.mark.slow)
            for t in (
                LLAMA,
                MISTRAL,
                MISTRAL_ARGS,
                QWEN_CODER,
                DEEPSEEK,
                DEEPSEEK_V31,
                GLM,
                GRANITE,
                GEMMA,
                LFM2,
            )
        ),
    ],
)
def forced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    target = tmp_path_factory.mktemp("forced") / "target"
    shutil.copytree(model_path("draft-base"), target)
    comment = request.param[request.param.rindex("{#") :]
    (target / "chat_template.jinja").write_text(TEMPLATE + comment)
    tiny = {"tiny": model_path("draft-tiny")}
    with model_server(target, tiny, served_model_name="toy") as server, client_of(server) as client:
        yield client


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_call_must_come(forced: openai.OpenAI, choice: Any, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "toy", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice,
        "seed": seed, "max_tokens": 200, "response_format": {"type": "json_object"},
    }  # fmt: skip
    (made,) = forced.chat.completions.create(**asked).choices
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    assert made.message.tool_calls is not None
    (call,) = made.message.tool_calls
    assert call.type == "function"
    assert call.function.name in (MODELS if choice == "required" else ["add"])
    MODELS[call.function.name].model_validate_json(call.function.arguments)
    pieces = [
        piece
        for chunk in forced.chat.completions.create(**asked, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0].function.name == call.function.name
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments


def test_without_it_nothing_comes(forced: openai.OpenAI) -> None:
    """The control."""
    asked: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "tools": TOOLS}
    (made,) = forced.chat.completions.create(**asked, seed=1, max_tokens=50).choices
    assert made.message.tool_calls is None


def test_a_call_in_responses(forced: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    made = forced.responses.create(
        model="toy", input="Add.", tools=tools, tool_choice={"type": "function", "name": "add"}
    )
    (item,) = made.output
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"a", "b"}


def test_a_schema_that_is_none(forced: openai.OpenAI) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="tool_choice: ") as refused:
        forced.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            tools=[bad],
            tool_choice="required",  # type: ignore[list-item]
        )
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_beside_tools_is_that_of_texts(forced: openai.OpenAI, stream: bool) -> None:
    """The bundled model prefers neither: its first token decides, which is pushed."""
    schema = {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"verdict": {"$ref": "#/$defs/verdict"}},
            "required": ["verdict"],
            "additionalProperties": False,
            "$defs": {"verdict": {"enum": ["dry", "wet"]}},
        },
    }
    asked: dict[str, Any] = {
        "model": "toy", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "stream": stream,
        "response_format": {"type": "json_schema", "json_schema": schema},
        # One call is enough: a list of them may go on for long.
        "parallel_tool_calls": False,
    }  # fmt: skip
    tokenizer = load_tokenizer(model_path("draft-base"))
    ends = set()
    for start in ('{"verdict', '{"name', "<tool", "[TOOL", "final", "commentary", "<|tool"):
        push = dict.fromkeys(tokenizer.encode(start, add_special_tokens=False), 8)
        for seed in range(3):
            made = forced.chat.completions.create(**asked, seed=seed, logit_bias=push)
            content, calls, reason = told(made, stream)
            ends.add(reason)
            if reason == "stop":
                assert not calls
                assert json.loads(content) in ({"verdict": "dry"}, {"verdict": "wet"})
            elif reason == "tool_calls":
                assert not content
                for name, arguments in calls:
                    MODELS[name].model_validate_json(arguments)
    assert {"stop", "tool_calls"} <= ends, "both come about"


def told(made: Any, stream: bool) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of an answer."""
    if not stream:
        (choice,) = made.choices
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    content, reason = "", ""
    written: dict[int, list[str]] = {}
    for chunk in made:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            call = written.setdefault(piece.index, [piece.function.name or "", ""])
            call[1] += piece.function.arguments or ""
    return content, [(name, arguments) for name, arguments in written.values()], reason


def test_a_format_that_is_no_schema(forced: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}
    with pytest.raises(openai.BadRequestError, match="must be a JSON object, or true"):
        forced.chat.completions.create(
            model="toy", messages=MESSAGES, tools=TOOLS, response_format=form
        )
