"""Whatever comes over HTTP: no crash, no hang, no error of the server's own."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.mutations import SECONDS, attempts
from tests.serving.harness import RunningServer, running_server, serve_config

pytestmark = pytest.mark.slow

WAITS = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "write_timeout_s": 1.0}
BODIES = [
    ("/v1/completions", {"prompt": ["a b", [1, 2]], "max_tokens": 3, "seed": 4, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
            "stream": True,
            "stop": ["x", "y"],
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": "Hi"}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]},
            ],
            "stream": True,
        },
    ),
    ("/api/chat", {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/api/generate", {"model": "toy", "prompt": "a", "options": {"num_predict": 3, "stop": "b"}}),
    (
        "/completion",
        {"prompt": [1, "a"], "n_predict": 3, "logit_bias": [["b", False]], "samplers": ["top_k"]},
    ),
    ("/tokenize", {"content": ["a", 7], "with_pieces": True}),
    ("/slots", None),
    ("/v1/models", None),
    ("/metrics", None),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(serve_config(served_model_name="toy", **WAITS)) as running:
        yield running


@pytest.fixture(autouse=True)
def _nobody_else_is_touched(server: RunningServer) -> Iterator[None]:
    """The engine that was there still is, and answers as before."""

    def answer() -> object:
        body = {"prompt": "a b c", "max_tokens": 8, "temperature": 0}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()["choices"]

    engine, expected = server.engine_pid, answer()
    yield
    assert (server.engine_pid, answer()) == (engine, expected)


def written(path: str, body: object) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + data


def answered(server: RunningServer, data: bytes) -> bytes:
    """All that comes back until the server ends it, which it must."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    address = (host, int(port))
    with socket.create_connection(address, timeout=20) as sock, suppress(ConnectionError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            received += piece
    return received


def test_damaged_requests(server: RunningServer) -> None:
    statuses: set[int] = set()
    for data in attempts([written(*one) for one in BODIES]):
        received = answered(server, data)
        found = [int(s) for s in re.findall(rb"^HTTP/1\.\d (\d{3})", received, re.MULTILINE)]
        assert all(status < 500 for status in found), (data, received)
        statuses.update(found)
    assert {200, 400, 404} <= statuses


def test_requests_by_the_server_s_own_description(server: RunningServer, tmp_path: Path) -> None:
    """schemathesis, from /openapi.json."""
    program = [sys.executable, "-m", "schemathesis.cli", "fuzz", f"{server.url}/openapi.json"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    checks += ",response_schema_conformance"
    options = ["--max-time", f"{SECONDS:.0f}", "--checks", checks, "--seed", "1", "--no-color"]
    done = subprocess.run(
        [*program, *options], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
