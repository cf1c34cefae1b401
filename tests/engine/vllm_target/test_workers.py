"""A server whose target is computed by several of vLLM's workers, as people start it."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.routing import free_port
from tests.engine.small_family import write_family
from tests.engine.vllm_target.programs import environment
from tests.serving.harness import engine_pid, eventually
from tests.serving.program import LONG, START, Program, program

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


VLLM = ["--engine", "vllm", "--dtype", "float32", "--kv-tokens", "8192"]
VLLM += ["--set", "vllm.args.enforce_eager=true"]


@contextmanager
def served(target: Path, log: Path, *options: str) -> Iterator[Program]:
    with program(log, str(target), *VLLM, *options, environment=environment(2)) as running:
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
    """Requests end with an error in OpenAI's form."""
    begun = threading.Semaphore(0)
    with served(target, tmp_path / "log", "--set", "vllm.tensor_parallel=2") as server:
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
    with served(target, tmp_path / "log", "--set", f"vllm.{split}_parallel=2") as server:
        server.text("One target, two workers.")
        engine = engine_pid(server.url)
        pids = (engine, *workers_of(engine))
        log = server.stop()
    assert len(pids) == 3
    assert not [pid for pid in pids if is_running(pid)]
    assert "resource_tracker" not in log


def test_two_nodes(target: Path, tmp_path: Path) -> None:
    """On one machine, each with a worker."""
    place = ["nodes=2", f"master=127.0.0.1:{free_port()}", "tensor_parallel=2"]
    options = [*VLLM, *(part for text in place for part in ("--set", f"vllm.{text}"))]
    cores = sorted(os.sched_getaffinity(0))
    bound = [{"VLLM_CPU_OMP_THREADS_BIND": str(core)} for core in (cores[0], cores[-1])]
    prompt = "One target, two nodes."
    with program(tmp_path / "one", str(target), "--dtype", "float32") as alone:
        expected = alone.text(prompt)
    command = [*START, str(target), *options, "--set", "vllm.node_rank=1"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment() | bound[1]
        ) as node,
    ):
        try:
            with program(
                tmp_path / "0", str(target), *options, environment=environment() | bound[0]
            ) as first:
                assert node.stdout.readline() == "penstock: node 1 has joined\n"
                assert first.text(prompt) == expected
                engine = engine_pid(first.url)
                os.kill(engine, signal.SIGKILL)
                assert node.stdout.readline() == "penstock: node 1 has joined\n"
                eventually(lambda: engine_pid(first.url) not in (0, engine), LONG)
                assert first.text(prompt) == expected
                first.stop()
            node.terminate()
            assert node.wait(LONG) == 0
        finally:
            node.kill()
