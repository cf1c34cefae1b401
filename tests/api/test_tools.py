"""Tool calls as OpenAI's package sends and reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.api.conftest import client_of
from tests.api.test_prepare import SOMEONE, preparer
from tests.api.tool_servers import HERMES, LLAMA, TEMPLATE, tool_server, write_tokenizer

from penstock.api.bodies import ChatBody, NamedTool
from penstock.api.errors import ApiError
from penstock.api.tool_use import tool_use
from penstock.engine.closed_schema import closed
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "add"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED = f"Wait.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        tool_server(tmp_path_factory.mktemp("hermes"), HERMES) as server,
        client_of(server) as client,
    ):
        yield client


def chat(ai: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return ai.chat.completions.create(**{"model": "toy", "messages": messages, **fields})


def test_calls_in_a_whole_answer(hermes: openai.OpenAI) -> None:
    (choice,) = chat(hermes, ASKED, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait."
    first, second = choice.message.tool_calls
    assert first.type == "function"
    assert first.id != second.id
    for call in (first, second):
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_no_parallel_calls(hermes: openai.OpenAI) -> None:
    for stream in (False, True):
        made = chat(hermes, ASKED, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        if stream:
            made = list(made)
            last = made[-1].choices[0]
            assert {c.index for m in made for c in m.choices[0].delta.tool_calls or ()} == {0}
        else:
            (last,) = made.choices
            assert len(last.message.tool_calls) == 1
        assert last.finish_reason == "tool_calls"


def test_streamed_calls(hermes: openai.OpenAI) -> None:
    content, names, arguments, reasons = "", {}, {0: [], 1: []}, []
    for chunk in chat(hermes, ASKED, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                assert piece.index not in names
                assert piece.type == "function"
                names[piece.index] = piece.function.name
            arguments[piece.index].append(piece.function.arguments)
    assert content == "Wait."
    assert names == {0: "weather", 1: "weather"}
    assert all("".join(pieces) == '{"city": "Rome"}' for pieces in arguments.values())
    assert len(arguments[0]) > 2
    assert reasons[-1] == "tool_calls"
    assert not any(reasons[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_stays_text(hermes: openai.OpenAI, stream: bool) -> None:
    text = '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'
    made = chat(hermes, text, tools=TOOLS, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in made]
        assert "".join(c.delta.content or "" for c in chunks) == text
        assert not any(c.delta.tool_calls for c in chunks)
        assert chunks[-1].finish_reason == "stop"
    else:
        assert made.choices[0].message.content == text
        assert made.choices[0].message.tool_calls is None
        assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_looked_for(hermes: openai.OpenAI, fields: Any) -> None:
    (choice,) = chat(hermes, ASKED, **fields).choices
    assert choice.message.content == ASKED
    assert choice.finish_reason == "stop"


def test_a_special_token_that_opens_a_call_is_seen(tmp_path: Path) -> None:
    """The bundled vocabulary has none for calls, so one of its own takes that part."""
    folder = write_tokenizer(tmp_path, HERMES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|system|>", "<tool_call>"))
    tokenizer = load_tokenizer(folder)
    (special,) = tokenizer.special_ids(["<tool_call>"])
    tokens = [special, *tokenizer.encode("x", add_special_tokens=False), 4]
    assert "".join(map(tokenizer.detokenizer().add, tokens)) == "x"
    shown = tokenizer.detokenizer(shown={special})
    assert "".join(map(shown.add, tokens)) == "<tool_call>x"


TURNS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("How ", "now")]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "index": 0,
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]  # fmt: skip


async def prompt(tokenizer: Tokenizer, **fields: Any) -> str:
    body = ChatBody.model_validate({"messages": TURNS, **fields})
    (choice,) = await preparer(tokenizer).chat(body, SOMEONE, "job")
    assert choice.request.prompt_token_ids is not None
    return tokenizer.decode(choice.request.prompt_token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def hermes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), HERMES))


async def test_calls_and_tools_as_the_template_gets_them(hermes_tokenizer: Tokenizer) -> None:
    text = await prompt(hermes_tokenizer, tools=TOOLS[1:])
    assert text == (
        "sunny<|eos|><|user|>user: How now<|user|>assistant: Rome"
        '{"type": "function", "function": {"name": "add", "description": "", '
        '"parameters": {"type": "object", "properties": {}}}}'
    )
    assert "add" not in await prompt(hermes_tokenizer, tools=TOOLS[1:], tool_choice="none")


TOOL = TOOLS[0]
NAMED = {"type": "function", "function": {"name": "launch"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL, TOOL]}, "tools: two of them are called 'weather'"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice: no tool is called 'launch'"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice: only one field may say what the text is to be, and guided_regex does",
        ),
    ],
)
async def test_refused_tools(hermes_tokenizer: Tokenizer, fields: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        await prompt(hermes_tokenizer, **fields)
    assert refused.value.message == message
    assert refused.value.status == 400


@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {}])
async def test_a_template_without_tools(tmp_path: Path, fields: Any) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, TEMPLATE.replace("tools", "nothing")))
    with pytest.raises(ApiError, match="chat template has no tools"):
        await prompt(tokenizer, **fields)


CALLED = TURNS[1]["tool_calls"][0]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web"}]}, "tools.0.type: Input should be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tool_choice": "any"}, 'tool_choice: must be "none", "auto", "required" or an object'),
    ({"tool_choice": {"type": "function"}}, 'tool_choice: must be "none", "auto", "required" or'),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALLED]}]},
        "messages.0: tool_calls are only allowed in messages of the assistant",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0: content is required"),
    ({"messages": [{"role": "assistant"}]}, "messages.0: content is required"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
        "messages.0: tool_call_id is only allowed in messages of a tool",
    ),
    *(
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": wrong}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments: must be a JSON object in a string",
        )
        for wrong in ("[]", "{", "[" * 10000)
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_is_wrong_is_said_in_one_line(hermes, fields, message) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(hermes, "a", extra_body=fields)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"].startswith(message)


def test_the_schema_of_a_forced_call() -> None:
    """What a tool's schema refers to is found within the whole one."""
    place = {
        "type": "object",
        "$defs": {"P": {"const": 1}},
        "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"type": "object"}},
    }
    tools = [TOOLS[1], {"type": "function", "function": {"name": "at", "parameters": place}}]
    body = ChatBody.model_validate({"messages": TURNS, "tools": tools, "tool_choice": "required"})
    use = tool_use(body, HERMES)
    assert use.lead == "<tool_call>\n"
    (structure,) = use.shaped([], {})
    second = structure.value["anyOf"][1]["properties"]
    assert second["name"] == {"const": "at"}
    there = second["arguments"]["properties"]["p"]["$ref"]
    assert there == "#/anyOf/1/properties/arguments/$defs/P"
    assert second["arguments"]["properties"]["q"] == {"type": "object"}
    assert (
        closed(structure.value)["anyOf"][1]["properties"]["arguments"]["additionalProperties"]
        is False
    )
    named = {"type": "function", "function": {"name": "add"}}
    use = tool_use(body.model_copy(update={"tool_choice": NamedTool.model_validate(named)}), LLAMA)
    assert use.lead == ""
    (call,) = use.shaped([], {})[0].value["anyOf"]
    assert call["required"] == ["name", "parameters"]
