"""`/v1/responses` as OpenAI's package sends and reads it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from tests.api.conftest import client_of
from tests.api.tool_servers import HERMES, tool_server

from penstock.api.response_bodies import ResponsesBody

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Its model says what its last message says, and then ends."""
    with (
        tool_server(tmp_path_factory.mktemp("hermes"), HERMES) as server,
        client_of(server) as client,
    ):
        yield client


def test_a_text(tools: openai.OpenAI) -> None:
    made = tools.responses.create(
        model="toy", input="Say it.", instructions="Be brief.", metadata={"a": "b"}, temperature=0
    )
    assert made.output_text == "Say it."
    assert made.status == "completed"
    assert made.id.startswith("resp_")
    assert made.instructions == "Be brief."
    assert made.metadata == {"a": "b"}
    assert made.store is False
    (message,) = made.output
    assert message.type == "message"
    assert message.status == "completed"
    usage = made.usage
    assert usage.output_tokens > 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def streamed(ai: openai.OpenAI, **fields: Any) -> tuple[list[str], Response]:
    """Kinds of the events in a row, each once, and the response at the end."""
    kinds: list[str] = []
    with ai.responses.stream(model="toy", **fields) as stream:
        for number, event in enumerate(stream):
            assert event.type == "response.completed" or event.sequence_number >= number // 2
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
        return kinds, stream.get_final_response()


TEXT_EVENTS = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
]  # fmt: skip
TEXT_DONE = [
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
CALL_EVENTS = ["response.output_item.added", "response.function_call_arguments.delta"]
CALL_DONE = ["response.function_call_arguments.done", "response.output_item.done"]
BEGIN, END = ["response.created", "response.in_progress"], ["response.completed"]


def test_streamed_text(tools: openai.OpenAI) -> None:
    kinds, made = streamed(tools, input="Say it slowly.")
    assert kinds == [*BEGIN, *TEXT_EVENTS, *TEXT_DONE, *END]
    assert made.output_text == "Say it slowly."
    assert made.usage is not None


def test_calls(tools: openai.OpenAI) -> None:
    made = tools.responses.create(model="toy", input=f"Wait. {CALL}", tools=[WEATHER])  # type: ignore[list-item]
    message, call = made.output
    assert made.output_text == "Wait."
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')


def test_streamed_calls(tools: openai.OpenAI) -> None:
    kinds, made = streamed(tools, input=f"{CALL}\n{CALL}", tools=[WEATHER])
    assert kinds == [*BEGIN, *CALL_EVENTS, *CALL_EVENTS, *CALL_DONE, *CALL_DONE, *END]
    first, second = made.output
    assert first.type == second.type == "function_call"
    assert first.arguments == second.arguments == '{"city": "Rome"}'
    assert first.call_id != second.call_id


def test_a_whole_conversation(tools: openai.OpenAI) -> None:
    """An answer's own items go back in."""
    asked: list[Any] = [{"role": "user", "content": CALL}]
    made = tools.responses.create(model="toy", input=asked, tools=[WEATHER])  # type: ignore[list-item]
    (call,) = made.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked += [*made.output, result]
    made = tools.responses.create(model="toy", input=asked, tools=[WEATHER])  # type: ignore[list-item]
    assert made.output_text == "sunny"


def test_a_stream_that_fails(slow_server) -> None:
    asked: Any = {"model": "toy", "input": "abc", "extra_body": {"timeout": 0.3}}
    with client_of(slow_server) as ai, pytest.raises(openai.APIError, match="longer than it may"):
        list(ai.responses.create(stream=True, **asked))


def test_items_as_turns() -> None:
    body = ResponsesBody.model_validate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Or not."},
                {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "function_call", "call_id": "3", "name": "f", "arguments": ""},
            ],
        }
    )
    messages = [message.for_template() for message in body.as_chat().messages]
    calls = [message.pop("tool_calls", []) for message in messages]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Or not."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Well."},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    ]
    assert [[call["id"] for call in made] for made in calls] == [[], [], [], ["1", "2"], [], ["3"]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id: is not supported"),
    ({"conversation": "conv_1"}, "conversation: is not supported"),
    ({"background": True}, "background: only false is supported"),
    ({"store": True}, "store: only false is supported"),
    ({"truncation": "auto"}, 'truncation: only "disabled" is supported'),
    ({"n": 2}, "the body is wrong: n is not a field of responses"),
    ({"max_tokens": 2}, "the body is wrong: max_tokens is not a field of responses"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type: Input should be 'text', 'json_"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is"),
    ({"input": []}, "input: List should have at least 1 item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: Input tag 'item_reference'"),
    ({"input": [{"role": "user", "content": 7}]}, "input.0.message.content: must be"),
    ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_not_offered(ai: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.responses.create(model="toy", input="a", extra_body=fields)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"].startswith(message)


def test_nothing_is_kept(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve("resp_1")
