"""What clients, browsers, proxies and operators expect of any HTTP server."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.serving.harness import RunningServer, running_server, serve_config

from penstock.api.http import ResponseHeaders
from penstock.serving.logs import TextFormatter

PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def cors() -> Iterator[httpx.Client]:
    config = serve_config(served_model_name=["lab/toy", "toy"], cors_origins=[PAGE])
    with running_server(config) as running, httpx.Client(base_url=running.url) as client:
        yield client


def test_one_model(ai: openai.OpenAI) -> None:
    assert ai.models.retrieve("toy") == next(iter(ai.models.list()))
    with pytest.raises(openai.NotFoundError) as missing:
        ai.models.retrieve("gpt-5")
    assert missing.value.code == "model_not_found"


def test_a_models_name_may_have_slashes(cors: httpx.Client) -> None:
    assert cors.get("/v1/models/lab/toy").json()["id"] == "lab/toy"
    assert cors.get("/v1/models/lab%2Ftoy").json()["id"] == "lab/toy"
    assert cors.get("/v1/models/lab").status_code == 404


def test_a_model_with_several_names(cors: httpx.Client) -> None:
    """Each is listed and asked for; answers have the first, as in vLLM."""
    assert [card["id"] for card in cors.get("/v1/models").json()["data"]] == ["lab/toy", "toy"]
    assert cors.get("/v1/models/toy").json()["id"] == "toy"
    listed = cors.get("/api/tags").json()["models"]
    assert [card["name"] for card in listed] == ["lab/toy:latest", "toy:latest"]
    for name in ("lab/toy", "toy"):
        asked = {"model": name, "prompt": "a", "max_tokens": 1}
        assert cors.post("/v1/completions", json=asked).json()["model"] == "lab/toy"
    answer = cors.post("/v1/completions", json={**asked, "model": "x"})
    assert "this server has 'lab/toy', 'toy'" in answer.json()["error"]["message"]
    assert 'model_name="lab/toy"' in cors.get("/metrics").text


@pytest.mark.parametrize("origin", ["http://penstock.example", "HTTPS://[::1]:8000"])
def test_a_target_may_have_its_origin(http: httpx.Client, origin: str) -> None:
    """As clients of proxies send it (RFC 9112, absolute-form)."""

    def get(path: str) -> httpx.Response:
        return http.get("/", extensions={"target": f"{origin}{path}".encode()})

    assert get("/v1/models?a=b").json() == http.get("/v1/models").json()
    assert get("/health").json()["status"] == "ok"
    assert get("/v1/messages/x").json()["type"] == "error"
    assert get("").status_code == http.get("/").status_code


def test_health_can_be_asked_by_head(http: httpx.Client) -> None:
    answer = http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ],
)
def test_405_says_what_is_allowed(http, method, path, allowed) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == allowed


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_openapi(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    named = document["paths"]["/v1/completions"]["post"]["parameters"]
    assert "X-Penstock-Expected-Output-Tokens" in {parameter["name"] for parameter in named}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatBody"]["required"]) == {"messages"}
    assert "speculation" in schemas["CompletionBody"]["properties"]
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "job-7.a:b"}).headers["X-Request-Id"] == (
        "job-7.a:b"
    )
    made = [http.get("/v1/nothing").headers["X-Request-Id"] for _ in range(2)]
    assert made[0] != made[1]
    for hostile in ("a b", "x" * 129, '"><script>', "é"):
        headers = {"X-Request-Id": hostile.encode()}
        own = http.post("/v1/completions", json={}, headers=headers).headers["X-Request-Id"]
        assert own.isalnum()
        assert len(own) == 32


async def test_request_ids_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    caplog.handler.setFormatter(TextFormatter())
    transport = httpx.ASGITransport(ResponseHeaders(broken))
    with caplog.at_level(logging.ERROR):
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            await http.get("/a%0Ab", headers={"X-Request-Id": "job-7"})
    lines = caplog.text.splitlines()
    assert lines == [r"penstock: ERROR: request job-7: GET '/a\nb': status 500"]


def test_pages_of_allowed_origins_may_call(cors: httpx.Client, server: RunningServer) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    asked = cors.options("/v1/chat/completions", headers=preflight)
    assert asked.status_code == 200
    assert asked.headers["Access-Control-Allow-Origin"] == PAGE
    assert cors.get("/health", headers={"Origin": PAGE}).headers[
        "Access-Control-Allow-Origin"
    ] == PAGE  # fmt: skip
    other = cors.get("/health", headers={"Origin": "https://else.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    closed = httpx.options(f"{server.url}/v1/chat/completions", headers=preflight)
    assert "Access-Control-Allow-Origin" not in closed.headers
