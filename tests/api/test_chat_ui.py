"""What Open WebUI and LibreChat send, field by field, and what they look for in what comes back."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.api.tool_servers import HERMES, write_tokenizer
from tests.serving.harness import running_server

from penstock.config import hash_of_key, parse_config
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.zoo.registry import model_path

pytestmark = pytest.mark.slow

FORWARDED = {
    "Authorization": "Bearer ui-key",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann%20Lee",
    "X-OpenWebUI-User-Id": "5f1c",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0d6e",
}
"""Headers of Open WebUI, with ENABLE_FORWARD_USER_INFO_HEADERS."""
HISTORY = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": [{"type": "text", "text": "What is a river?"}]},
    {"role": "assistant", "content": "Water that flows."},
    {"role": "user", "content": "And a penstock?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
WEBUI = {"model": "small", "stream": True, "stream_options": {"include_usage": True}}
LIBRECHAT = {
    **WEBUI,
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "n": 1,
    "user": "65f0c0ffee",
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A bundled model whose template has tools, behind a key."""
    folder = write_tokenizer(tmp_path_factory.mktemp("target"), HERMES)
    for path in model_path("draft-base").iterdir():
        if not (folder / path.name).exists() or path.name == "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    engine: dict[str, Any] = {
        "target": folder,
        "drafters": {"tiny": str(model_path("draft-tiny"))},
        "num_threads": 1,
        "kv_tokens": 8192,
        "tenants": {"ui": {"api_keys": [hash_of_key("ui-key")]}},
    }
    config = {"engine": engine, "port": 0, "served_model_name": "small", "open_metrics": True}
    with (
        running_server(parse_config(config), LOAD_ENGINE) as running,
        httpx.Client(base_url=f"{running.url}/v1", headers=FORWARDED, timeout=120) as client,
    ):
        yield client


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[list[Any], CompletionUsage]:
    """Chunks with a choice, and the usage at the end; each as OpenAI's package has it."""
    chunks, usage, lines = [], None, []
    with http.stream("POST", "/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        chunk = ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
        chunks += [chunk] if chunk.choices else []
        usage = chunk.usage or usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert usage is not None
    return chunks, usage


def whole(http: httpx.Client, body: dict[str, Any]) -> ChatCompletion:
    answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate_json(answer.text, strict=True)


@pytest.mark.parametrize("ui", [WEBUI, LIBRECHAT])
def test_a_streamed_chat(http: httpx.Client, ui: dict[str, Any]) -> None:
    chunks, usage = streamed(http, {**ui, "messages": HISTORY, "max_tokens": 40})
    assert "".join(c.choices[0].delta.content or "" for c in chunks)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert 0 < usage.completion_tokens <= 40


def test_settings_of_a_model(http: httpx.Client) -> None:
    """Open WebUI's advanced parameters."""
    settings = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 30, "frequency_penalty": 0.5}
    more = {"presence_penalty": 0.1, "seed": 7, "stop": ["\n\n", "###"], "top_k": 40, "min_p": 0.0}
    more |= {"logit_bias": {"42": -100}}
    one, _ = streamed(http, {**WEBUI, "messages": HISTORY, **settings, **more})
    two, _ = streamed(http, {**WEBUI, "messages": HISTORY, **settings, **more})
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks) for chunks in (one, two)]
    assert texts[0] == texts[1]


def test_a_tool_and_its_answer(http: httpx.Client) -> None:
    """The call as Open WebUI makes it of a stream, with its `index`, and sends it back."""
    body = {**WEBUI, "messages": HISTORY, "tools": [TOOL], "tool_choice": "required"}
    chunks, _ = streamed(http, {**body, "max_tokens": 100})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    call: dict[str, Any] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            if not call:
                call = piece.model_dump(exclude_none=True)
                call["function"].setdefault("arguments", "")
            else:
                call["function"]["arguments"] += piece.function.arguments or ""
    assert "city" in json.loads(call["function"]["arguments"])
    answered = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21}'},
    ]
    again = {**WEBUI, "messages": HISTORY + answered, "tools": [TOOL], "max_tokens": 20}
    streamed(http, again)
