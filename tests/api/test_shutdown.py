import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import httpx
import psutil
import pytest
from tests.products import first_fast
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import engine_pid, eventually, server_process

BODY = {"prompt": [50, 60, 70], "max_tokens": 60, "stream": True}


def chunks(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def send(process: BaseProcess, sig: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, sig)


def exit_code(process: BaseProcess, timeout: float) -> int | None:
    process.join(timeout)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("sig", first_fast([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_what_runs_is_finished_and_nothing_new_is_taken(sig: signal.Signals) -> None:
    with server_process(SLOW_FACTORY) as (process, url):
        engine = engine_pid(url)
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as answer:
            stream = chunks(answer.iter_lines())
            next(stream)
            send(process, sig)
            with pytest.raises(httpx.TransportError):
                eventually(lambda: httpx.get(f"{url}/health").status_code == 0, timeout=5)
            last = list(stream)[-1]
        assert last["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert exit_code(process, 10) == 0
        eventually(lambda: not psutil.pid_exists(engine))


@pytest.mark.slow
def test_what_outlasts_the_grace_period_ends_with_an_error() -> None:
    with server_process(SLOW_FACTORY, shutdown_grace_s=0.2) as (process, url):
        body = {**BODY, "max_tokens": 500}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            stream = chunks(answer.iter_lines())
            next(stream)
            send(process, signal.SIGTERM)
            last = list(stream)[-1]
        assert "the server was stopped" in last["error"]["message"]  # type: ignore[index]
        assert exit_code(process, 5) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    with server_process(SLOW_FACTORY) as (process, url):
        engine = engine_pid(url)
        body = {**BODY, "max_tokens": 500}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            stream = chunks(answer.iter_lines())
            next(stream)
            send(process, signal.SIGTERM)
            time.sleep(0.3)
            send(process, signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                list(stream)
        assert exit_code(process, 3) is not None
        eventually(lambda: not psutil.pid_exists(engine))


@pytest.mark.slow
def test_the_engine_does_not_outlive_the_server() -> None:
    with server_process(SLOW_FACTORY) as (process, url):
        engine = engine_pid(url)
        assert httpx.get(f"{url}/health").status_code == 200
        process.kill()
        eventually(lambda: not psutil.pid_exists(engine))
