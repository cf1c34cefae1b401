"""Clients that send nothing, read nothing, or want everything: what they do to others."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from tests.api.samples import samples
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import RunningServer, eventually, running_server, serve_config

from penstock.config import hash_of_key

pytestmark = pytest.mark.slow

QUICK = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "write_timeout_s": 0.5}
KEYED = {
    "tenants": {
        "small": {"api_keys": [hash_of_key("key-small")], "max_waiting_requests": 2},
        "other": {"api_keys": [hash_of_key("key-other")]},
    }
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def quick_server() -> Iterator[RunningServer]:
    """It waits half a second for its clients."""
    with running_server(serve_config(**QUICK), SLOW_FACTORY) as running:
        yield running


@contextmanager
def connection(server: RunningServer, *, window: int | None = None) -> Iterator[socket.socket]:
    """window: bytes that are received ahead of the reader."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.settimeout(20)
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.connect((host, int(port)))
        yield sock


def to_the_end(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/comp",
        b"GET /version HTTP/1.1\r\nHost: toy\r\n",
        HEAD % 100 + b'{"prompt": "a',
    ],
)
def test_a_request_that_never_comes_whole(quick_server: RunningServer, begun: bytes) -> None:
    with connection(quick_server) as sock:
        sock.sendall(begun)
        answer = to_the_end(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert (
        b"took longer than 0.5 s"
        in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].encode()
    )


def test_the_second_request_of_a_connection_that_never_comes_whole(quick_server) -> None:
    with connection(quick_server) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: toy\r\n\r\nGET /vers")
        answer = to_the_end(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


def test_what_comes_slowly_but_in_time_is_served(quick_server: RunningServer) -> None:
    """Neither limit runs on while the request is worked on: it takes two seconds."""
    data = json.dumps({"prompt": [50, 60], "max_tokens": 100, "ignore_eos": True}).encode()
    with connection(quick_server) as sock:
        for piece in (HEAD[:9], HEAD[9:] % len(data), data[:5], data[5:]):
            sock.sendall(piece)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_loses_its_request(quick_server: RunningServer) -> None:
    """It would have run for ten seconds."""
    body = {"prompt": [50, 60], "max_tokens": 500, "n": 8, "logprobs": 20, "stream": True}
    data = json.dumps({**body, "speculation": {"drafter": "none"}}).encode()
    with ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(connection(quick_server, window=4096))
            sock.sendall(HEAD % len(data) + data)

        def aborted() -> bool:
            text = httpx.get(f"{quick_server.url}/metrics", timeout=20).text
            return text.count('finished_reason="abort"') > 0 and not any(
                samples(text)[f"penstock:num_requests_{state}"] for state in ("running", "waiting")
            )

        eventually(aborted)
    found = samples(httpx.get(f"{quick_server.url}/metrics").text)
    assert found["penstock:generation_tokens_total"] < 4 * 8 * 400


def test_a_slow_reader_is_served(quick_server: RunningServer) -> None:
    """It takes longer than the limit in all, but reads something now and again."""
    body = {"prompt": [50, 60], "max_tokens": 100, "n": 8, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    received = b""
    with connection(quick_server, window=4096) as sock:
        sock.sendall(HEAD % len(data) + data)
        while b"data: [DONE]" not in received:
            received += sock.recv(4096) or b"data: [DONE] too early"
    assert received.count(b'"finish_reason":"length"') == 8


@contextmanager
def frozen(server: RunningServer) -> Iterator[None]:
    """Nothing gets its first token meanwhile."""
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@contextmanager
def asked(
    server: RunningServer, body: dict[str, Any], *, address: str = "127.0.0.1", key: str = "none"
) -> Iterator[httpx.Response]:
    """A stream that is left open meanwhile, by a client of its own."""
    transport = httpx.HTTPTransport(local_address=address)
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=server.url, transport=transport, timeout=20, headers=headers) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        if answer.is_error:
            answer.read()
        yield answer


def test_one_client_leaves_room_for_the_next(slow_server: RunningServer) -> None:
    """Eight may wait. The first has half of the places, the next half of what is left."""
    with frozen(slow_server), ExitStack() as stack:

        def status(n: int, address: str) -> int:
            body = {"prompt": ["a"] * n}
            return stack.enter_context(asked(slow_server, body, address=address)).status_code

        assert [status(3, "127.0.0.1"), status(1, "127.0.0.1")] == [200, 200]
        assert status(1, "127.0.0.1") == 429
        assert status(2, "127.0.0.2") == 200
        assert status(1, "127.0.0.2") == 429
        assert status(1, "127.0.0.3") == 200


def test_tenants_have_limits_of_their_own() -> None:
    config = serve_config(KEYED, max_waiting_requests=8)
    with running_server(config, SLOW_FACTORY) as server, frozen(server), ExitStack() as stack:

        def status(n: int, key: str) -> int:
            return stack.enter_context(asked(server, {"prompt": ["a"] * n}, key=key)).status_code

        assert status(3, "key-small") == 400
        assert [status(1, "key-small") for _ in range(3)] == [200, 200, 429]
        assert status(3, "key-other") == 200
        assert status(1, "key-other") == 429
