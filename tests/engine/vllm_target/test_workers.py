"""A server whose target is computed by several of vLLM's workers, as people start it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.small_family import write_family
from tests.engine.vllm_target.programs import environment
from tests.serving.harness import engine_pid, eventually
from tests.serving.program import LONG, Program, program

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


@contextmanager
def served(target: Path, log: Path, *options: str) -> Iterator[Program]:
    own = ["--engine", "vllm", "--dtype", "float32", "--kv-tokens", "8192"]
    own += ["--engine-arg", "enforce_eager=true", *options]
    with program(log, str(target), *own, environment=environment(2)) as running:
        yield running


def workers_of(pid: int) -> list[int]:
    """vLLM's workers among the children of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return [
        c for c in children if b"resource_tracker" not in Path(f"/proc/{c}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def failure_of(server: Program, begun: threading.Semaphore, seed: int) -> dict[str, Any]:
    """A stream's error. begun: released with its first token."""
    body = {"prompt": f"request {seed}", "max_tokens": 400, "ignore_eos": True, "stream": True}
    errors: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONG) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for number, line in enumerate(events):
            event = json.loads(line.removeprefix("data: "))
            if number == 0:
                begun.release()
            if "error" in event:
                errors.append(event["error"])
    (error,) = errors
    return error


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"))["target"]


def test_a_worker_is_killed_under_load(target: Path, tmp_path: Path) -> None:
    """Requests end with an error in OpenAI's form; the engine comes back, with the same text; and
    nothing is left of it in the end."""
    begun = threading.Semaphore(0)
    with served(target, tmp_path / "log", "--tensor-parallel", "2") as server:
        engine = engine_pid(server.url)
        first = server.text("One target, two workers.")
        old = workers_of(engine)
        assert len(old) == 2
        with ThreadPoolExecutor(4) as pool:
            failures = [pool.submit(failure_of, server, begun, seed) for seed in range(4)]
            for _ in failures:
                assert begun.acquire(timeout=LONG)
            os.kill(old[1], signal.SIGKILL)
            errors = [failure.result() for failure in failures]
        assert {(e["type"], e["code"]) for e in errors} == {("server_error", "engine_unavailable")}
        again = eventually(lambda: engine_pid(server.url), LONG)
        assert again != engine
        assert server.text("One target, two workers.") == first
        new = workers_of(again)
        server.stop()
    assert not [pid for pid in (*old, *new, engine, again) if is_running(pid)]


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_a_server_takes_its_workers_with_it(target: Path, tmp_path: Path, split: str) -> None:
    """They are ended before it, and leave no shared memory behind."""
    with served(target, tmp_path / "log", f"--{split}-parallel", "2") as server:
        server.text("One target, two workers.")
        engine = engine_pid(server.url)
        pids = (engine, *workers_of(engine))
        log = server.stop()
    assert len(pids) == 3
    assert not [pid for pid in pids if is_running(pid)]
    assert "resource_tracker" not in log
