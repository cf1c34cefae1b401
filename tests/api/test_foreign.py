"""Fields of other engines: ignored and named, or refused where the answer would be another."""

from typing import Any

import httpx
import pytest
from tests.api.samples import labelled

from penstock.api.http import IGNORED_FIELDS
from penstock.api.metrics import MAX_IGNORED_FIELDS

USER = [{"role": "user", "content": "Hi"}]
ROUTER = {
    "no_stop_trim": False, "continue_final_message": False, "skip_special_tokens": True,
    "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
    "include_reasoning": True,
}  # fmt: skip
"""What vllm-router 0.1.17 adds to every chat request."""

NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text"}, "logit_bias": {}, "top_k": -1, "best_of": 1,
    "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0,
    "min_tokens": 0, "tools": [], "tool_choice": "none", "guided_json": None, "echo": False,
    "functions": [], "include_stop_str_in_output": False, "bad_words": [], "regex": None,
    "chat_template_kwargs": {}, "skip_special_tokens": True, "use_beam_search": False,
}  # fmt: skip

CHANGING: list[tuple[str, Any, str]] = [
    ("guided_choice", [], "List should have at least 1 item after validation, not 0"),
    ("structural_tag", "{}", "is not supported"),
    ("grammar", "root ::= 'a'", 'only "" is supported'),
    ("tool_choice", "required", "there are no tools"),
    ("functions", [{"name": "f"}], "only [] is supported"),
    ("logit_bias", [50], "Input should be an object"),
    ("logit_bias", {"4096": 3}, "token ids go from 0 to 4095, not to 4096"),
    ("min_p", 1.1, "Input should be less than or equal to 1"),
    ("min_p", False, "Input should be a valid number"),
    ("frequency_penalty", 2.5, "Input should be less than or equal to 2"),
    ("presence_penalty", "0", "Input should be a valid number"),
    ("repetition_penalty", True, "Input should be a valid number"),
    ("repetition_penalty", 0, "Input should be greater than or equal to 0.01"),
    ("best_of", 3, "only 1 is supported"),
    ("use_beam_search", True, "only false is supported"),
    ("min_tokens", 5, "may be at most max_tokens, 4, not 5"),
    ("bad_words", ["a"], "only [] is supported"),
    ("no_stop_trim", True, "only false is supported"),
    ("skip_special_tokens", False, "only true is supported"),
    ("chat_template", "{{ messages }}", "is not supported"),
    ("echo", True, "only false is supported"),
]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(
        "/v1/chat/completions", json={"messages": USER, "max_tokens": 4, "seed": 1, **fields}
    )


def counted(http: httpx.Client) -> dict[str, float]:
    return labelled(http.get("/metrics").text, "ignored_fields_total", "field")


def test_what_a_router_adds_is_ignored_named_and_counted(http: httpx.Client) -> None:
    before = counted(http).get("separate_reasoning", 0)
    plain = chat(http)
    assert IGNORED_FIELDS not in plain.headers
    for stream in (False, True):
        answer = chat(http, **ROUTER, stream=stream)
        assert answer.status_code == 200, answer.text
        named = answer.headers[IGNORED_FIELDS].split(", ")
        assert named == ["separate_reasoning", "stream_reasoning", "include_reasoning"]
    assert counted(http)["separate_reasoning"] == before + 2
    assert chat(http, **ROUTER).json()["choices"] == plain.json()["choices"]


def test_neutral_values_change_nothing(http: httpx.Client) -> None:
    answer = chat(http, **NEUTRAL)
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS not in answer.headers
    assert answer.json()["choices"] == chat(http).json()["choices"]


@pytest.mark.parametrize(("name", "value", "message"), CHANGING)
def test_what_would_change_the_answer_is_refused_by_name(http, name, value, message) -> None:
    answer = chat(http, **{name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"{name}: {message}"
    assert error["param"] == name


def test_in_messages_too(http: httpx.Client) -> None:
    echoed = {"role": "assistant", "content": "Ho", "refusal": None, "annotations": [{}]}
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    messages = [*USER, echoed, {"role": "user", "content": [part], "name": "Ada"}]
    answer = chat(http, messages=messages, stream=True, stream_options={"x": 1})
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[IGNORED_FIELDS].split(", ")) == {
        "stream_options.x", "messages.annotations", "messages.content.cache_control",
    }  # fmt: skip
    called = {**echoed, "function_call": {"name": "f"}}
    error = chat(http, messages=[*USER, called]).json()["error"]
    assert error["message"] == "messages.1.function_call: is not supported"
    assert chat(http, messages=[*USER, {**echoed, "tool_calls": []}]).status_code == 200


def test_names_are_not_trusted(http: httpx.Client) -> None:
    hostile = {"a\r\nSet-Cookie: x": 1, "é" * 20: 1, "x" * 65: 1, "fine": 1}
    answer = chat(http, **hostile)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_FIELDS] == "other, fine"
    many = chat(http, **{f"field{i}": i for i in range(200)}).headers[IGNORED_FIELDS]
    assert many == ", ".join([*(f"field{i}" for i in range(16)), "..."])
    assert len(counted(http)) <= MAX_IGNORED_FIELDS + 1
    assert counted(http)["other"] >= 2
    refused = chat(http, **{f"field{i}": i for i in range(500)})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the body has more than 256 unknown fields"
