"""vllm-router, as people run it before vLLM."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.serving.harness import eventually


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _program() -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("vllm-router", path=path)
    if found is None:
        pytest.skip("vllm-router is not installed; it has packages for Linux only")
    return found


@contextmanager
def router(urls: Sequence[str], log: Path, *options: str) -> Iterator[str]:
    """Its address, in front of these servers."""
    port = free_port()
    command = [_program(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), *options, "--worker-urls", *urls]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, "the router did not start"
            try:
                return httpx.get(f"{url}/health", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(is_ready, 60)
            yield url
        finally:
            process.kill()
