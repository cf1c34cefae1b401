"""Client of servers that complete texts: how long a call may take."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.config import CompletionsServer
from penstock.engine.drafters.completions import CompletionsClient, ServerError

HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(params=[HEAD, HEAD + b"Content-Length: 60000\r\n\r\n"], ids=["head", "body"])
def trickling(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server that ends a header, or a part of its answer, every 20 ms."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(request.param)
                while True:
                    connection.sendall(b"X-Name: value\r\n")
                    time.sleep(0.02)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_a_trickling_server_is_late(trickling: str) -> None:
    client = CompletionsClient(CompletionsServer(trickling, None, is_here=True), None, "")
    began = time.monotonic()
    with pytest.raises(ServerError, match="its answer is late"):
        client.complete("a", 1, 0.2)
    assert time.monotonic() - began < 10
    client.close()


def test_a_call_ends_with_the_client(trickling: str) -> None:
    client = CompletionsClient(CompletionsServer(trickling, None, is_here=True), None, "")
    threading.Timer(0.2, client.close).start()
    began = time.monotonic()
    with pytest.raises(ServerError):
        client.complete("a", 1, 60)
    assert time.monotonic() - began < 10
    time.sleep(0.1)
    with pytest.raises(ServerError):
        client.complete("a", 1, 60)
