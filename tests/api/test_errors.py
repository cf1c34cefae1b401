import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from tests.serving.harness import RunningServer

from penstock.api.bodies import CompletionBody
from penstock.engine.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]

COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "prompt: Field required"),
    ({"prompt": ""}, 400, "prompt: must not be empty"),
    ({"prompt": []}, 400, "prompt: must not be empty"),
    ({"prompt": [[1, 2], []]}, 400, "prompt: must not be empty"),
    ({"prompt": ["a", ""]}, 400, "prompt: must not be empty"),
    ({"prompt": 3}, 400, "prompt: must be a string, a list of strings"),
    ({"prompt": ["a", 3]}, 400, "prompt: must be a string, a list of strings"),
    ({"prompt": [1.5]}, 400, "prompt: must be a string, a list of strings"),
    ({"prompt": [-1]}, 400, "prompt: must be a string, a list of strings"),
    ({"prompt": [4096]}, 400, "token ids go from 0 to 4095, not to 4096"),
    ({"prompt": "a " * 600}, 400, "context length is 512 tokens. However, "),
    ({"prompt": "a", "max_tokens": 512}, 400, "context length is 512 tokens. However, "),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: "),
    ({"prompt": "a", "max_tokens": -5}, 400, "max_tokens: "),
    ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens: "),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens: "),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens: "),
    ({"prompt": "a", "temperature": -0.1}, 400, "temperature: "),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature: "),
    ({"prompt": "a", "temperature": 1e9}, 400, "temperature: "),
    ({"prompt": "a", "top_p": -0.1}, 400, "top_p: "),
    ({"prompt": "a", "top_p": 1.1}, 400, "top_p: "),
    ({"prompt": "a", "top_k": -2}, 400, "top_k: "),
    ({"prompt": "a", "top_k": 2**31}, 400, "top_k: "),
    ({"prompt": "a", "top_k": 2**63}, 400, "top_k: "),
    ({"prompt": "a", "stop_token_ids": [4096]}, 400, "stop_token_ids: token ids go from 0 to 4095"),
    ({"prompt": "a", "stop_token_ids": [2**70]}, 400, "stop_token_ids: token ids go from 0 to"),
    ({"prompt": "a", "seed": 2**64}, 400, "seed: "),
    ({"prompt": "a", "seed": 1.5}, 400, "seed: "),
    ({"prompt": "a", "n": 0}, 400, "n: "),
    ({"prompt": "a", "n": 1000}, 400, "n: "),
    ({"prompt": ["a"] * 33, "n": 128}, 400, "choices each are 4224; together at most 2048 are"),
    ({"prompt": "a", "stop": 3}, 400, "stop: must be a string or a list of strings"),
    ({"prompt": "a", "stop": [""]}, 400, "stop: a stop string must not be empty"),
    ({"prompt": "a", "stop": ""}, 400, "stop: a stop string must not be empty"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop: at most 16 strings"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs: "),
    ({"prompt": "a", "logprobs": True}, 400, "logprobs: "),
    ({"prompt": "a", "echo": 1}, 400, "echo: "),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: 0 is only allowed with echo: true"),
    ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens: may be at most max_tokens, 16, not 17"),
    ({"prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty: "),
    ({"prompt": "a", "stream_options": {}}, 400, "stream_options is only allowed with stream"),
    ({"prompt": "a", "stream": True, "stream_options": 1}, 400, "stream_options: "),
    ({"prompt": "a", "best_of": 2}, 400, "best_of: only 1 is supported"),
    ({"prompt": "a", "model": "gpt-5"}, 404, "model 'gpt-5' does not exist; this server has 'toy'"),
    ({"prompt": "a", "speculation": {"drafter": "x"}}, 400, "choose from auto, none, toy-drafter"),
    ({"prompt": "a", "speculation": {"max_draft_tokens": -1}}, 400, "speculation.max_draft_tokens"),
    ({"prompt": "a", "speculation": {"draft": 1}}, 400, "speculation.draft: unknown field"),
    ({"prompt": "a", "speculation": "none"}, 400, "speculation: "),
    ({"prompt": "a", "speculation": {"origins": "yes"}}, 400, "speculation.origins: "),
    *(
        ({"prompt": "a", "expected_output_tokens": wrong}, 400, "expected_output_tokens: ")
        for wrong in (0, -1, 2.5, "2", True, [2])
    ),
    ({"prompt": [[1]] * 70_000}, 400, "at most 65536"),
    ({"prompt": "a", "latency": {"tpot_ms": 0}}, 400, "latency.tpot_ms: Input should be greater"),
    ({"prompt": "a", "latency": {"deadline_ms": "soon"}}, 400, "latency.deadline_ms: "),
    ({"prompt": "a", "latency": {"ttft_ms": 9}}, 400, "latency.ttft_ms: unknown field"),
    ({"prompt": "a", "latency": 20}, 400, "latency: "),
]

CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "messages: Field required"),
    ({"messages": []}, 400, "messages: "),
    ({"messages": "Hi"}, 400, "messages: "),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, 400, "messages.0.role: "),
    ({"messages": [{"role": "user"}]}, 400, "messages.0: content is required"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content: must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content: must be a string or a list of text parts; images, audio and files are",
    ),
    (
        {"messages": [{"role": "user", "content": "a " * 600}]},
        400,
        "context length is 512 tokens. However, ",
    ),
    ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs is only allowed with logprobs"),
    ({"messages": USER, "logprobs": 1}, 400, "logprobs: "),
    ({"messages": USER, "prompt": "a"}, 400, "prompt: is not supported"),
    ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, 400, "not both"),
    (
        {"messages": USER, "max_completion_tokens": 512},
        400,
        "context length is 512 tokens. However, ",
    ),
    ({"messages": USER, "top_k": 2**32}, 400, "top_k: "),
    ({"messages": USER, "stop_token_ids": [2**32]}, 400, "stop_token_ids: token ids go from 0 to"),
]

BROKEN: list[tuple[bytes, str]] = [
    (b"", "the body is not JSON"),
    (b"{", "the body is not JSON"),
    (b"[]", "the body is wrong: Input should be an object"),
    (b'"text"', "the body is wrong: Input should be an object"),
    (b"\xff\xfe", "the body is not JSON"),
    (b"[" * 100_000, "the body is not JSON"),
    (b'{"prompt": "\\ud800"}', "the body is not JSON"),
    (b'{"prompt": "a", "\\ud800": 1}', "the body is not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: Input should be a finite number"),
    (b'{"prompt": "a", "temperature": Infinity}', "temperature: "),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "the body is not JSON"),
]


def refused(answer: httpx.Response, status: int, message: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(("body", "status", "message"), COMPLETIONS)
def test_bad_completions(http, body, status, message) -> None:
    error = refused(http.post("/v1/completions", json=body), status, message)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(("body", "status", "message"), CHATS)
def test_bad_chats(http: httpx.Client, body: dict[str, Any], status: int, message: str) -> None:
    refused(http.post("/v1/chat/completions", json=body), status, message)


@pytest.mark.parametrize(("body", "message"), BROKEN)
def test_broken_bodies(http: httpx.Client, body: bytes, message: str) -> None:
    refused(http.post("/v1/completions", content=body), 400, message)


def test_a_huge_body_is_refused_before_it_is_read(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * 5_000_000})
    refused(http.post("/v1/completions", content=body), 413, "4194304 bytes")


def test_a_huge_body_of_unknown_size_is_refused(http: httpx.Client) -> None:
    pieces = (b" " * 100_000 for _ in range(50))
    refused(http.post("/v1/completions", content=pieces), 413, "4194304 bytes")


@pytest.mark.parametrize("text", ["a" * 4_000_000, "word " * 800_000, " " * 4_000_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_far_too_long_is_never_tokenised_whole(http, monkeypatch, path, text) -> None:
    """The context has 512 tokens, and the longest token 14 characters."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    bodies: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": text}]}]
    if path == "/v1/completions":
        bodies = [{"prompt": text}, {"prompt": ["a", text]}]
    for body in bodies:
        error = refused(http.post(path, json=body), 400, "context length is 512 tokens. However, ")
        assert error["code"] == "context_length_exceeded"
    assert sum(sizes) < 2 * 14 * 512


LONG = [{"role": "user", "content": "word " * 600}]
OVERFLOWS: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": [5] * 600},
     "However, your prompt resulted in at least 600 tokens; 511 leave room."),
    ("completions", {"prompt": [5] * 500, "max_tokens": 20},
     "However, you requested 520 tokens (500 in the prompt, 20 in the completion)."),
    ("chat/completions", {"messages": LONG}, "However, your messages resulted in at least "),
    ("chat/completions", {"messages": LONG, "stream": True}, "However, your messages resulted in"),
    ("responses", {"input": "word " * 600}, "However, your messages resulted in at least "),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), OVERFLOWS)
def test_a_context_overflow_in_openais_words(http, path, body, words) -> None:
    error = refused(http.post(f"/v1/{path}", json=body), 400, words)
    assert error["message"].startswith("This model's maximum context length is 512 tokens. ")
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_a_context_overflow_in_anthropics_words(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/{path}", json={"model": "toy", "max_tokens": 9, "messages": LONG})
    assert answer.status_code == 400
    error = answer.json()["error"]
    told = re.fullmatch(r"prompt is too long: (\d+) tokens > 511 maximum", error["message"])
    assert int(told[1]) > 512
    assert error["type"] == "invalid_request_error"


LITELLM = """
import sys
import litellm

def asked(call, model, **fields):
    try:
        call(model=model, api_key="none", **fields)
    except litellm.ContextWindowExceededError:
        print(call.__name__, model)

text, url = "word " * 600, sys.argv[1]
told = {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "num_retries": 0}
for model in ("openai/toy", "hosted_vllm/toy"):
    asked(litellm.completion, model, api_base=url + "/v1", **told)
asked(litellm.completion, "anthropic/toy", api_base=url, **told)
asked(litellm.text_completion, "openai/toy", prompt=text, api_base=url + "/v1")
asked(litellm.responses, "openai/toy", input=text, api_base=url + "/v1")
"""


@pytest.mark.slow
def test_a_context_overflow_is_known_to_litellm(server: RunningServer) -> None:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **os.environ}
    asked = [sys.executable, "-c", LITELLM, server.url]
    ran = subprocess.run(asked, env=own, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.endswith("/toy")] == [
        "completion openai/toy", "completion hosted_vllm/toy", "completion anthropic/toy",
        "text_completion openai/toy", "responses openai/toy",
    ]  # fmt: skip


@pytest.mark.parametrize("prompt", [[1] * 10_000, [[1]] * 10_000])
def test_a_wrong_entry_is_one_complaint(prompt: list[Any]) -> None:
    """Each costs memory, and a body has room for millions."""
    with pytest.raises(ValidationError) as wrong:
        CompletionBody.model_validate_json(json.dumps({"prompt": [*prompt, "x"]}))
    assert wrong.value.error_count() < 8


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_a_compressed_body_is_refused(http: httpx.Client, path: str) -> None:
    body = gzip.compress(json.dumps({"model": "toy", "prompt": "a"}).encode())
    told = http.post(path, content=body, headers={"Content-Encoding": "gzip"})
    assert told.status_code == 415
    message = "Content-Encoding: 'gzip' is not read; send the body uncompressed"
    error = told.json()["error"]
    assert message == (error if path == "/api/chat" else error["message"])
    plain = {"Content-Encoding": "identity"}
    assert http.post("/v1/completions", json={"prompt": "a"}, headers=plain).status_code == 200


def test_unknown_endpoints(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), 404, "no endpoint GET /v1/nothing")
    refused(http.get("/v1/completions"), 405, "no endpoint GET /v1/completions")


def test_the_clients_exceptions(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ai.completions.create(model="gpt-5", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ai.completions.create(model="toy", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"


def test_nothing_else_is_disturbed(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ok"
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
