"""`/v1/messages` as Anthropic's package sends and reads it."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tests.api.tool_servers import HERMES, tool_server
from tests.serving.harness import RunningServer, running_server, serve_config

from penstock.api.anthropic.bodies import MessagesBody
from penstock.api.body import Structure
from penstock.config import hash_of_key

WEATHER: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def client_of(server: RunningServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """Its model says what its last message says, and then ends."""
    with (
        tool_server(tmp_path_factory.mktemp("hermes"), HERMES) as server,
        client_of(server) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def user(content: Any) -> Any:
    return [{"role": "user", "content": content}]


def test_a_text(tools: anthropic.Anthropic) -> None:
    made = tools.messages.create(
        model="toy",
        max_tokens=100,
        system="Be brief.",
        messages=user("Say it."),
        extra_body={"temperature": 0, "top_k": 3},
    )
    assert (made.type, made.role, made.model) == ("message", "assistant", "toy")
    assert made.id.startswith("msg_")
    (block,) = made.content
    assert block.type == "text"
    assert block.text == "Say it."
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.usage.input_tokens > 5
    assert made.usage.output_tokens > 1


def test_why_it_ends(claude: anthropic.Anthropic) -> None:
    """The toy model repeats its prompt, and never ends by itself."""
    asked = {"model": "toy", "messages": user("one two three four")}
    made = claude.messages.create(max_tokens=3, **asked)
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 3)
    made = claude.messages.create(max_tokens=32000, **asked)
    assert made.stop_reason == "model_context_window_exceeded"
    made = claude.messages.create(max_tokens=100, stop_sequences=["zzz", "three"], **asked)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "three")
    (block,) = made.content
    assert block.type == "text"
    assert block.text.endswith("two ")


def streamed(
    client: anthropic.Anthropic, **fields: Any
) -> tuple[list[str], anthropic.types.Message]:
    """Kinds of the raw events, of deltas once in a row, and the message at the end."""
    kinds: list[str] = []
    asked: Any = {"model": "toy", "max_tokens": 100, **fields}
    for event in client.messages.create(stream=True, **asked):
        kind = event.delta.type if event.type == "content_block_delta" else event.type
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    with client.messages.stream(**asked) as stream:
        return kinds, stream.get_final_message()


def block_of(delta: str) -> list[str]:
    return ["content_block_start", delta, "content_block_stop"]


END = ["message_delta", "message_stop"]


def test_streamed_text(tools: anthropic.Anthropic) -> None:
    kinds, made = streamed(tools, messages=user("Say it slowly."))
    assert kinds == ["message_start", *block_of("text_delta"), *END]
    (block,) = made.content
    assert block.type == "text"
    assert block.text == "Say it slowly."
    assert made.stop_reason == "end_turn"
    assert made.usage.output_tokens > 1


def test_the_events_on_the_wire(http: httpx.Client) -> None:
    asked = {"model": "toy", "max_tokens": 20, "messages": user("a b"), "stream": True}
    answer = http.post("/v1/messages?beta=true", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    assert [kind for kind, _ in events][:3] == [
        "event: message_start", "event: ping", "event: content_block_start",
    ]  # fmt: skip
    told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert all(f"event: {one['type']}" == kind for one, (kind, _) in zip(told, events, strict=True))
    assert told[0]["message"]["content"] == []
    assert told[0]["message"]["usage"]["input_tokens"] > 0
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


@pytest.mark.parametrize("choice", ["auto", "none", "any", "tool"])
def test_tool_choices(tools: anthropic.Anthropic, choice: str) -> None:
    named = {"name": "weather"} if choice == "tool" else {}
    asked: Any = {"type": choice, **named}
    made = tools.messages.create(
        model="toy", max_tokens=60, messages=user("Hello"), tools=[WEATHER], tool_choice=asked
    )
    kinds = {block.type for block in made.content}
    assert ("tool_use" in kinds) <= (choice in ("any", "tool"))
    assert made.stop_reason in ("end_turn", "tool_use", "max_tokens")


def test_streamed_calls(tools: anthropic.Anthropic) -> None:
    kinds, made = streamed(tools, messages=user(f"Wait. {CALL}\n{CALL}"), tools=[WEATHER])
    calls = block_of("input_json_delta") * 2
    assert kinds == ["message_start", *block_of("text_delta"), *calls, *END]
    _, first, second = made.content
    assert first.type == second.type == "tool_use"
    assert first.input == second.input == {"city": "Rome"}
    assert first.id != second.id
    assert made.stop_reason == "tool_use"


def test_one_call(tools: anthropic.Anthropic) -> None:
    made = tools.messages.create(
        model="toy",
        max_tokens=100,
        messages=user(f"{CALL}\n{CALL}"),
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    (call,) = made.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    assert made.stop_reason == "tool_use"


def test_a_whole_conversation(tools: anthropic.Anthropic) -> None:
    """An answer's own blocks go back in."""
    turns = user(CALL)
    made = tools.messages.create(model="toy", max_tokens=99, messages=turns, tools=[WEATHER])
    (call,) = made.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns += [{"role": "assistant", "content": made.content}, *user([result])]
    made = tools.messages.create(model="toy", max_tokens=99, messages=turns, tools=[WEATHER])
    (block,) = made.content
    assert block.type == "text"
    assert block.text == "sunny"


def test_count_tokens(tools: anthropic.Anthropic) -> None:
    asked: Any = {"model": "toy", "system": "Be brief.", "messages": user("How many are these?")}
    counted = tools.messages.count_tokens(**asked).input_tokens
    made = tools.messages.create(max_tokens=100, **asked)
    assert counted == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert tools.messages.count_tokens(tools=[WEATHER], **asked).input_tokens > counted + 20


@pytest.mark.parametrize("old", [False, True])
def test_a_schema(old: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    asked = {"output_format": form} if old else {"output_config": {"format": form}}
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": user("a"), **asked})
    assert body.as_chat().structures == [Structure("response_format", "json", schema)]


def test_what_agents_send(claude: anthropic.Anthropic) -> None:
    """As Claude Code: nothing that is harmless is refused, and what is ignored is said."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    raw = claude.beta.messages.with_raw_response.create(
        model="toy",
        max_tokens=32000,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
            {"type": "text", "text": "You are an agent.", **cached},  # type: ignore[typeddict-item]
        ],
        messages=user([{"type": "text", "text": "Hi", **cached}]),
        metadata={"user_id": "someone"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": []},
        betas=["interleaved-thinking-2025-05-14", "unheard-of-2031-01-01"],
        extra_body={"output_config": {"effort": "high"}, "service_tier": "auto", "new_one": {}},
        extra_headers={"anthropic-version": "2023-06-01"},
    )
    assert raw.parse().stop_reason == "model_context_window_exceeded"
    ignored = set(raw.headers["X-Penstock-Ignored-Fields"].split(", "))
    assert {"metadata", "system.cache_control", "messages.content.cache_control"} <= (ignored)
    assert {"output_config.effort", "context_management", "new_one"} <= ignored


def test_thinking_is_a_block(tmp_path: Path) -> None:
    with (
        tool_server(tmp_path, HERMES + "{# </think> enable_thinking #}") as server,
        client_of(server) as client,
    ):
        asked: Any = {"messages": user("<think>\nWhat is it? Rain.\n</think>\n\nRain.")}
        made = client.messages.create(model="toy", max_tokens=100, **asked)
        kinds, final = streamed(client, **asked)
        assert kinds == [
            "message_start", *block_of("thinking_delta"), *block_of("text_delta"), *END,
        ]  # fmt: skip
        for message in (made, final):
            thought, text = message.content
            assert thought.type == "thinking"
            assert text.type == "text"
            assert (thought.thinking, text.text) == ("What is it? Rain.", "Rain.")
        turns = [*user("a"), {"role": "assistant", "content": made.content}, *user("b")]
        (text,) = client.messages.create(model="toy", max_tokens=100, messages=turns).content
        assert text.type == "text"
        assert text.text == "b"


@pytest.mark.parametrize(("thinking", "thinks"), [("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(thinking: str, thinks: bool) -> None:
    asked = {"max_tokens": 1, "messages": user("a"), "thinking": {"type": thinking}}
    made = MessagesBody.model_validate(asked).as_chat()
    assert made.chat_template_kwargs == {"enable_thinking": thinks}


def test_a_last_turn_of_the_assistant_goes_on() -> None:
    turns = [*user("a"), {"role": "assistant", "content": "b"}]
    made = MessagesBody.model_validate({"max_tokens": 1, "messages": turns}).as_chat()
    assert made.continue_final_message
    made = MessagesBody.model_validate({"max_tokens": 1, "messages": user("a")}).as_chat()
    assert not made.continue_final_message


def test_models(claude: anthropic.Anthropic) -> None:
    listed = claude.models.list()
    assert (listed.first_id, listed.last_id, listed.has_more) == ("toy", "toy", False)
    for model in (*listed, *claude.beta.models.list(), claude.models.retrieve("toy")):
        assert (model.id, model.type, model.display_name) == ("toy", "model", "toy")
        assert abs((datetime.now(UTC) - model.created_at).total_seconds()) < 3600
        assert (model.lifecycle, model.max_input_tokens) == ("active", 512)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": user([IMAGE])}, "messages.0.content.0: Input tag 'image'"),
    (
        {"messages": user([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}])},
        "messages.0.content.0.tool_result.content.0.type: Input should be 'text'",
    ),
    ({"messages": user([{"type": "tool_use", "id": "1", "name": "f"}])}, "messages.0: tool_use is"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": user(7)}, "messages.0.content: "),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"max_tokens": None}, "max_tokens: Field required"),
    (
        {"output_format": {"type": "text"}, "output_config": {"format": {"type": "text"}}},
        "the body is wrong: give output_config.format or output_format, not both",
    ),
    ({"output_format": {"type": "xml"}}, "output_format.type: Input should be"),
    ({"n": 2}, "the body is wrong: n is not a field of messages"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: only [] is supported"),
    ({"stop_sequences": [""]}, "stop_sequences: a stop string must not be empty"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type: Input should be"),
    ({"tools": [{"name": "w"}]}, "tools.0.input_schema: Field required"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: name is to be given with type tool"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_not_offered(claude, fields, message) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="toy", max_tokens=1, messages=user("a"), extra_body=fields)
    body = refused.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(message)


def test_an_input_that_is_no_json(http: httpx.Client) -> None:
    """A body may have NaN where any value may be, arguments of calls may not."""
    call = '{"type": "tool_use", "id": "1", "name": "f", "input": {"a": NaN}}'
    turn = '{"role": "assistant", "content": [' + call + "]}"
    body = '{"model": "toy", "max_tokens": 1, "messages": [' + turn + "]}"
    answer = http.post("/v1/messages", content=body)
    assert answer.status_code == 400
    assert "input: must be a JSON object" in answer.json()["error"]["message"]


def test_types_of_errors(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'claude-x' does not exist"):
        claude.messages.create(model="claude-x", max_tokens=1, messages=user("a"))
    with pytest.raises(anthropic.NotFoundError, match="no endpoint"):
        claude.messages.batches.list()
    answer = http.post("/v1/messages", content=b"x" * 40_000_000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_keys() -> None:
    engine = {"tenants": {"a": {"api_keys": [hash_of_key("sk-a")]}}}
    with running_server(serve_config(engine, served_model_name="toy")) as server:
        asked: Any = {"model": "toy", "max_tokens": 1, "messages": user("a")}
        with client_of(server, "sk-a") as known, client_of(server, "sk-b") as other:
            known.messages.create(**asked)
            with pytest.raises(anthropic.AuthenticationError) as refused:
                other.messages.create(**asked)
        assert "authentication_error" in str(refused.value)
        headers = {"Authorization": "Bearer sk-a"}
        answer = httpx.post(f"{server.url}/v1/messages", json=asked, headers=headers)
        assert answer.status_code == 200


def test_a_stream_that_fails(slow_server: RunningServer) -> None:
    message = "longer than it may"
    with client_of(slow_server) as client, pytest.raises(anthropic.APIStatusError, match=message):
        streamed(client, max_tokens=400, messages=user("abc"), extra_body={"timeout": 0.3})


def test_blocks_as_turns() -> None:
    """Turns of one role in a row are one; results of tools precede the text beside them."""

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    def call(number: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": number, "name": "f", "input": {"a": 1}}

    body = MessagesBody.model_validate(
        {
            "max_tokens": 1,
            "system": [text("Be brief."), text("Or not.")],
            "messages": [
                *user("a"),
                *user([text("b")]),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        text("Well."),
                        call("1"),
                    ],
                },
                {"role": "assistant", "content": [call("2")]},
                *user([text("and"), {"type": "tool_result", "tool_use_id": "1", "content": "x"}]),
                *user([{"type": "tool_result", "tool_use_id": "2"}]),
                {"role": "system", "content": "Now."},
            ],
        }
    )
    messages = [message.for_template() for message in body.as_chat().messages]
    calls = [message.pop("tool_calls", []) for message in messages]
    assert messages == [
        {"role": "system", "content": "Be brief.\nOr not."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "and"},
        {"role": "system", "content": "Now."},
    ]
    assert [one["id"] for one in calls[2]] == ["1", "2"]
    assert calls[2][0]["function"] == {"name": "f", "arguments": {"a": 1}}
