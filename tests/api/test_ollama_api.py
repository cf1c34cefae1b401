"""Ollama's endpoints as its own package sends and reads them."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from tests.api.tool_servers import HERMES, tool_server
from tests.serving.harness import RunningServer, running_server, serve_config

from penstock.api.bodies import ChatBody
from penstock.api.body import Structure
from penstock.api.ollama.bodies import OllamaChat, OllamaGenerate
from penstock.config import hash_of_key
from penstock.zoo.registry import bundled_models

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where.
    """
    return f"sunny in {city}"


def client_of(server: RunningServer, **settings: Any) -> closing[ollama.Client]:
    return closing(ollama.Client(server.url, timeout=60, **settings))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    """Its model says what its last message says, and then ends."""
    with (
        tool_server(tmp_path_factory.mktemp("hermes"), HERMES) as server,
        client_of(server) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def llama(server: RunningServer) -> Iterator[ollama.Client]:
    with client_of(server) as client:
        yield client


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("name", ["toy", "toy:latest"])
def test_a_chat(tools: ollama.Client, name: str) -> None:
    made = tools.chat(name, user("Say it."), options={"temperature": 0, "num_ctx": 4096})
    assert (made.message.role, made.message.content) == ("assistant", "Say it.")
    assert (made.done, made.done_reason) == (True, "stop")
    assert made.message.tool_calls is None
    assert made.eval_count is not None
    assert made.eval_count > 1
    assert made.prompt_eval_count is not None
    assert made.total_duration is not None
    assert made.prompt_eval_duration is not None
    assert made.eval_duration is not None
    assert 0 < made.prompt_eval_duration + made.eval_duration <= made.total_duration + 1


def test_a_streamed_chat(tools: ollama.Client) -> None:
    parts = list(tools.chat("toy", user("Say it slowly."), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Say it slowly."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1
    assert parts[-1].eval_count is not None


def test_lines(http: httpx.Client) -> None:
    """Without `stream`, answers are streamed."""
    asked = {"model": "toy", "prompt": "a b", "options": {"num_predict": 20}}
    answer = http.post("/api/generate", json=asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"] is True
    assert lines[-1]["done_reason"] == "length"
    assert lines[-1]["eval_count"] == 20
    assert "".join(line["response"] for line in lines)
    assert all(line["created_at"].endswith("Z") for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_calls(tools: ollama.Client, stream: bool) -> None:
    asked: Any = {"messages": user(f"Wait. {CALL}\n{CALL}"), "tools": [weather]}
    if stream:
        parts = list(tools.chat("toy", stream=True, **asked))
        calls = [call for part in parts for call in part.message.tool_calls or ()]
    else:
        calls = list(tools.chat("toy", **asked).message.tool_calls or ())
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert [dict(call.function.arguments) for call in calls] == [{"city": "Rome"}] * 2


def test_a_whole_conversation(tools: ollama.Client) -> None:
    turns: list[Any] = user(CALL)
    made = tools.chat("toy", turns, tools=[weather])
    (call,) = made.message.tool_calls or ()
    result = weather(**call.function.arguments)
    turns += [made.message, {"role": "tool", "tool_name": "weather", "content": result}]
    assert tools.chat("toy", turns, tools=[weather]).message.content == "sunny in Rome"


def test_thinking(tmp_path: Path) -> None:
    thought = "<think>\nWhat is it? Rain.\n</think>\n\nRain."
    with (
        tool_server(tmp_path, HERMES + "{# </think> enable_thinking #}") as server,
        client_of(server) as client,
    ):
        made = client.chat("toy", user(thought), think=True)
        assert (made.message.thinking, made.message.content) == ("What is it? Rain.", "Rain.")
        parts = list(client.generate("toy", thought, stream=True, think="low"))
        assert "".join(part.thinking or "" for part in parts) == "What is it? Rain."
        assert "".join(part.response or "" for part in parts) == "Rain."
        turns = [*user("a"), made.message, *user("b")]
        assert client.chat("toy", turns).message.content == "b"


def test_generate(tools: ollama.Client) -> None:
    assert tools.generate("toy", "Say it.", system="Be brief.").response == "Say it."
    parts = list(tools.generate("toy", "Say it.", stream=True))
    assert "".join(part.response or "" for part in parts) == "Say it."


def test_a_raw_prompt(llama: ollama.Client, http: httpx.Client) -> None:
    options = {"num_predict": 5, "temperature": 0}
    made = llama.generate("toy", "one two three", raw=True, options=options)
    asked = {"prompt": "one two three", "max_tokens": 5, "temperature": 0}
    expected = http.post("/v1/completions", json=asked).json()
    assert made.response == expected["choices"][0]["text"]
    assert made.prompt_eval_count == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("limit", [-1, -2, 100_000])
def test_as_long_as_the_context(llama: ollama.Client, limit: int) -> None:
    made = llama.generate("toy", "a b", raw=True, options={"num_predict": limit, "seed": -1})
    assert made.done_reason == "length"
    assert (made.prompt_eval_count or 0) + (made.eval_count or 0) == 512


def test_loading(llama: ollama.Client) -> None:
    """Clients ask for it before the first question."""
    assert llama.generate("toy", keep_alive="5m").done_reason == "load"
    assert llama.chat("toy").done_reason == "load"
    for nothing in (0, "0", "0s", 0.0):
        assert llama.generate("toy", keep_alive=nothing).done_reason == "unload"
        assert llama.chat("toy", keep_alive=nothing).done_reason == "unload"
    for forever in (-1, "-1m", "10m"):
        assert llama.chat("toy", keep_alive=forever).done_reason == "load"
    assert llama.generate("toy", "a", keep_alive=0).done_reason in ("stop", "length")
    with pytest.raises(ollama.ResponseError, match="'other' does not exist"):
        llama.generate("other")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(llama: ollama.Client, http: httpx.Client, stream: bool) -> None:
    def told(made: Any) -> list[Any]:
        return [entry for part in (made if stream else [made]) for entry in part.logprobs or ()]

    asked: Any = {"options": {"num_predict": 6, "temperature": 0}, "stream": stream}
    asked |= {"logprobs": True, "top_logprobs": 2}
    plain = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body = plain | {"messages": user("one two three")}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    found = [
        entry.model_dump() for entry in told(llama.chat("toy", user("one two three"), **asked))
    ]
    for entry in (e for one in choice["logprobs"]["content"] for e in (one, *one["top_logprobs"])):
        entry.pop("bytes")
    assert found == choice["logprobs"]["content"]
    assert len(found) == 6
    assert told(llama.generate("toy", "one two three", **asked)) == told(
        llama.chat("toy", user("one two three"), **asked)
    )
    body = {"prompt": "one two three", "logprobs": 2, "max_tokens": 6, "temperature": 0}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    raw = told(llama.generate("toy", "one two three", raw=True, **asked))
    assert [entry.token for entry in raw] == choice["logprobs"]["tokens"]
    assert [len(entry.top_logprobs) for entry in raw] == [2] * 6
    assert llama.chat("toy", user("a")).logprobs is None


def test_the_model(tools: ollama.Client, llama: ollama.Client) -> None:
    (model,) = tools.list().models
    assert model.model == "toy:latest"
    (running,) = tools.ps().models
    assert (running.model, running.context_length) == ("toy:latest", 512)
    shown = tools.show("toy:latest")
    assert shown.capabilities == ["completion", "tools"]
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == 512
    assert llama.show("toy").capabilities == ["completion"]


def test_sizes_of_a_bundled_model(llama: ollama.Client, http: httpx.Client) -> None:
    card = bundled_models()["target-large"]
    size = (card.path / "model.safetensors").stat().st_size
    assert [model.size for model in (*llama.list().models, *llama.ps().models)] == [size] * 2
    for name in ("model", "name"):
        shown = http.post("/api/show", json={name: "toy"}).json()
        assert shown["model_info"]["general.parameter_count"] == card.parameters
        assert shown["details"]["parameter_size"] == f"{card.parameters / 1e6:.1f}M"


def test_the_version(http: httpx.Client) -> None:
    """Clients want a new one."""
    version = http.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


def test_what_is_read_only(llama: ollama.Client) -> None:
    for refused in (
        lambda: llama.pull("other"),
        lambda: list(llama.pull("other", stream=True)),
        lambda: llama.push("toy"),
        lambda: llama.create("other", from_="toy"),
        lambda: llama.copy("toy", "other"),
        lambda: llama.delete("toy"),
    ):
        with pytest.raises(ollama.ResponseError, match="is not offered: this server") as error:
            refused()
        assert error.value.status_code == 501


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [*user("a"), {"role": "robot"}]}, "messages.1.role: Input should be"),
    ("chat", {"messages": [{**user("a")[0], "images": ["x"]}]}, "messages.0.images: only [] is"),
    ("chat", {"messages": [{**user("a")[0], "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages.0: tool_calls are only allowed in messages of the assistant"),
    ("chat", {"messages": user("a"), "logprobs": True, "top_logprobs": 21}, "top_logprobs: Input"),
    ("chat", {"messages": user("a"), "top_logprobs": 1}, "the body is wrong: top_logprobs is only"),
    ("chat", {"messages": user("a"), "suffix": "b"}, 'suffix: only "" is supported'),
    ("chat", {"messages": user("a"), "prompt": "b"}, "prompt: is not supported"),
    ("chat", {"messages": user("a"), "n": 2}, "the body is wrong: n is not a field of Ollama's"),
    ("generate", {"prompt": "a", "suffix": "b"}, "suffix: this model has no fill-in-the-middle"),
    ("generate", {"prompt": "a", "images": ["x"]}, "images: only [] is supported"),
    ("generate", {"prompt": "a", "context": [1]}, "context: only [] is supported"),
    ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 'template: only "" is supported'),
    ("generate", {"prompt": "a", "format": "xml"}, 'format: must be "json" or a JSON schema'),
    ("generate", {"prompt": "a", "options": {"temperature": -1}}, "options.temperature: "),
    ("generate", {"prompt": "a", "options": {"num_predict": "x"}}, "options.num_predict: "),
    ("generate", {"prompt": "a", "options": {"mirostat": 2}}, "options.mirostat: only 0 is"),
    ("generate", {"prompt": "a" * 9000, "raw": True}, "This model's maximum context length is"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "message"), REFUSED)
def test_what_is_not_offered(http, path, fields, message) -> None:
    answer = http.post(f"/api/{path}", json={"model": "toy", **fields})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(message)


def test_ignored_options_are_said(http: httpx.Client) -> None:
    options = {"num_ctx": 4096, "repeat_last_n": 64, "num_predict": 1}
    body = {"model": "toy", "prompt": "a", "think": None, "keep_alive": "5m", "options": options}
    answer = http.post("/api/generate", json=body)
    ignored = answer.headers["X-Penstock-Ignored-Fields"].split(", ")
    assert {*ignored} == {"options.num_ctx", "options.repeat_last_n"}


def test_unknown_models_and_endpoints(llama: ollama.Client, http: httpx.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'other' does not exist") as error:
        llama.chat("other", user("a"))
    assert error.value.status_code == 404
    assert http.get("/api/nothing").json() == {"error": "no endpoint GET /api/nothing"}


def test_keys() -> None:
    engine = {"tenants": {"a": {"api_keys": [hash_of_key("sk-a")]}}}
    with running_server(serve_config(engine, served_model_name="toy")) as server:
        headers = {"Authorization": "Bearer sk-a"}
        with client_of(server, headers=headers) as known, client_of(server) as other:
            known.list()
            with pytest.raises(ollama.ResponseError, match="an API key is required") as error:
                other.list()
        assert error.value.status_code == 401


def test_a_stream_that_fails(slow_server: RunningServer) -> None:
    asked = {"model": "toy", "messages": user("abc"), "timeout": 0.3}
    answer = httpx.post(f"{slow_server.url}/api/chat", json=asked, timeout=60)
    last = json.loads(answer.text.splitlines()[-1])
    assert list(last) == ["error"]
    assert "longer than it may" in last["error"]


def test_options_and_formats() -> None:
    given = {"num_predict": 7, "repeat_penalty": 1.1, "seed": 3, "stop": ["x"], "top_k": None}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = OllamaChat.model_validate(
        {"model": "toy:latest", "messages": user("a"), "options": given, "format": schema}
    )
    chat = body.asked()
    assert (body.model, chat.model) == ("toy", "toy")
    assert (chat.max_tokens, chat.seed, chat.stops) == (7, 3, ("x",))
    assert (chat.repetition_penalty, chat.temperature, chat.top_k) == (1.1, 0.8, 40)
    assert chat.structures == [Structure("response_format", "json", schema)]
    asked = {"model": "toy", "prompt": "a", "system": "b", "format": "json"}
    made = OllamaGenerate.model_validate(asked).asked()
    assert isinstance(made, ChatBody)
    assert [message.role for message in made.messages] == ["system", "user"]
    assert made.structures == [Structure("response_format", "json", {"type": "object"})]
    assert (made.max_tokens, made.top_p) == (None, 0.9)
