"""Engines that stand still, and requests that take too long."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.api.samples import samples
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import (
    RunningServer,
    engine_pid,
    eventually,
    running_server,
    serve_config,
    server_process,
)

from lab.bench.bundled_server import bundled_server
from penstock.engine.native.loading import best_instruction_set

BODY: dict[str, Any] = {"prompt": [50, 60, 70], "max_tokens": 400, "ignore_eos": True}
LIMIT = {"heartbeat_timeout_s": 6.0}


@pytest.fixture(scope="module")
def limited_server() -> Iterator[RunningServer]:
    """Requests of a server where none may take longer than half a second."""
    with running_server(serve_config(request_timeout_s=0.5), SLOW_FACTORY) as running:
        yield running


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=20)


def errors(lines: Iterator[str]) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["error"] for event in events if "error" in event]


@pytest.mark.slow
def test_a_frozen_engine_is_found_out_and_replaced() -> None:
    with running_server(serve_config(LIMIT), SLOW_FACTORY) as server:
        first = server.engine_pid
        stream = {**BODY, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=stream, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(first, signal.SIGSTOP)
            unavailable = eventually(lambda: health(server.url).is_error and health(server.url))
            assert unavailable.status_code == 503
            assert "no sign of life" in unavailable.json()["reason"]
            (error,) = errors(lines)
        assert error["code"] == "engine_unavailable"
        assert "try again" in error["message"]
        again = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert again.status_code == 200
        assert server.engine_pid != first


@pytest.mark.slow
@pytest.mark.faults
def test_an_engine_that_only_paused_goes_on() -> None:
    with running_server(serve_config({"heartbeat_timeout_s": 20.0}), SLOW_FACTORY) as server:
        first = server.engine_pid
        stream = {**BODY, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=stream, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(first, signal.SIGSTOP)
            eventually(lambda: health(server.url).status_code == 503)
            os.kill(first, signal.SIGCONT)
            eventually(lambda: health(server.url).status_code == 200)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert server.engine_pid == first
        found = samples(httpx.get(f"{server.url}/metrics").text)
        assert found["penstock:engine_restarts_total"] == 0


@pytest.mark.slow
@pytest.mark.faults
def test_a_frozen_engine_does_not_hold_up_the_end() -> None:
    """The grace period of 30 s is for requests that may still be finished."""
    settings = serve_config(LIMIT).engine.model_dump()
    with server_process(SLOW_FACTORY, engine=settings) as (process, url):
        stream = {**BODY, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=stream, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine_pid(url), signal.SIGSTOP)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            assert errors(lines)
        process.join(15)
        assert process.exitcode == 0


@pytest.mark.parametrize("timeout", [{}, {"timeout": 100.0}])
def test_no_request_takes_longer_than_the_server_allows(limited_server, timeout) -> None:
    url = f"{limited_server.url}/v1/completions"
    late = httpx.post(url, json={**BODY, "n": 3, **timeout}, timeout=60)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    eventually(lambda: not running(limited_server), timeout=3)
    soon = httpx.post(url, json={"prompt": "a", "max_tokens": 2, **timeout}, timeout=60)
    assert soon.status_code == 200


def test_a_request_has_a_limit_of_its_own(slow_server: RunningServer) -> None:
    url = f"{slow_server.url}/v1/completions"
    body = {**BODY, "timeout": 0.3}
    assert httpx.post(url, json=body, timeout=60).status_code == 504
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        assert [e["code"] for e in errors(answer.iter_lines())] == ["timeout"]
    eventually(lambda: not running(slow_server), timeout=3)
    assert httpx.post(url, json={**body, "timeout": 0}, timeout=60).status_code == 400


def test_time_runs_while_the_engine_stands_still(slow_server: RunningServer) -> None:
    url = f"{slow_server.url}/v1/completions"
    engine = slow_server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        assert httpx.post(url, json={**BODY, "timeout": 0.3}, timeout=4).status_code == 504
    finally:
        os.kill(engine, signal.SIGCONT)
    eventually(lambda: not running(slow_server))


def running(server: RunningServer) -> float:
    found = samples(httpx.get(f"{server.url}/metrics", timeout=20).text)
    return found["penstock:num_requests_running"] + found["penstock:num_requests_waiting"]


def libraries(process: psutil.Process) -> set[str]:
    """Names of the shared libraries in its memory, without SciPy's."""
    files = (Path(mapped.path) for mapped in process.memory_maps())
    return {f.name for f in files if ".so" in f.suffixes and "scipy" not in str(f)}


@pytest.mark.slow
def test_a_restart_loads_no_libraries_again() -> None:
    """But the kernels, what reads the weights, and SciPy, which is loaded behind the start: all
    others are in the process that engines are forked from, which stays."""
    with bundled_server() as running:
        first = psutil.Process(engine_pid(running.url))
        parent = first.parent()
        assert parent is not None
        loaded = libraries(parent)
        first.kill()
        eventually(lambda: engine_pid(running.url) not in (0, first.pid), timeout=120)
        again = psutil.Process(engine_pid(running.url))
        assert again.ppid() == parent.pid != running.process.pid
        assert {"libtorch_cpu.so"} < loaded
        new = {name.partition(".")[0] for name in libraries(again) - loaded}
        assert new == {f"penstock_{best_instruction_set()}", "_safetensors_rust"}
