"""Many clients, clients that go away, engines that die."""

import asyncio
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests.api.conftest import client_of
from tests.api.samples import samples
from tests.serving.fakes import SLOW_FACTORY, expected_tokens
from tests.serving.harness import RunningServer, eventually, running_server, serve_config

LONG = {"prompt": [50, 60, 70], "max_tokens": 400}
# A stream whose headers are there is admitted; what is only sent may be overtaken.
_HEADERS = b"\r\n\r\n"


def is_free(server: RunningServer) -> bool:
    """Nothing runs, and no block is in use."""
    found = samples(httpx.get(f"{server.url}/metrics").text)
    return not any(
        found[f"penstock:{name}"]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def connect(
    server: RunningServer, body: dict[str, Any], *, until: bytes = b"data: "
) -> socket.socket:
    """A client that reads so far into its answer, if it is a stream."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    if body.get("stream"):
        received = b""
        while until not in received:
            received += sock.recv(1000)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(slow_server: RunningServer, stream: bool) -> None:
    with connect(slow_server, {**LONG, "n": 2, "stream": stream}):
        eventually(lambda: not is_free(slow_server))
    eventually(lambda: is_free(slow_server), timeout=3)


def test_too_many_waiting_requests(slow_server: RunningServer) -> None:
    """While the engine stands still nothing gets its first token."""
    engine = slow_server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        with (
            connect(slow_server, {"prompt": "a", "n": 4, "stream": True}, until=_HEADERS),
            client_of(slow_server) as ai,
            pytest.raises(openai.RateLimitError) as full,
        ):
            ai.completions.create(model="toy", prompt="a", stream=True)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert full.value.code == "queue_full"
    assert 1 <= int(full.value.response.headers["Retry-After"]) <= 60


@pytest.mark.slow
def test_a_stream_that_is_left_before_its_first_output_frees_its_place(slow_server) -> None:
    body: dict[str, Any] = {"prompt": "a", "n": 4}

    def is_refused(timeout: float) -> bool:
        """Whether all places are taken; if not, the request is left after that time."""
        url = f"{slow_server.url}/v1/completions"
        try:
            return httpx.post(url, json=body, timeout=timeout).is_error
        except httpx.ReadTimeout:
            return False

    os.kill(slow_server.engine_pid, signal.SIGSTOP)
    try:
        with connect(slow_server, {**body, "stream": True}, until=_HEADERS):
            assert is_refused(20)
        eventually(lambda: not is_refused(1))
    finally:
        os.kill(slow_server.engine_pid, signal.SIGCONT)
    eventually(lambda: is_free(slow_server))


def test_a_stream_begins_before_its_first_token(slow_server, monkeypatch) -> None:
    """Its headers come, and then a sign of life now and again."""
    monkeypatch.setattr("penstock.api.responses._KEEP_ALIVE_S", 0.1)
    url = f"{slow_server.url}/v1/completions"
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    os.kill(slow_server.engine_pid, signal.SIGSTOP)
    try:
        with httpx.stream("POST", url, json=body, timeout=10) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            os.kill(slow_server.engine_pid, signal.SIGCONT)
            rest = [line for line in lines if line not in ("", ": keep-alive")]
    finally:
        os.kill(slow_server.engine_pid, signal.SIGCONT)
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "data: [DONE]"


def test_more_choices_than_can_ever_wait(slow_server: RunningServer) -> None:
    with client_of(slow_server) as ai, pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(model="toy", prompt="a", n=5)
    assert refused.value.param == "n"


async def test_64_streams_lose_and_repeat_nothing(server, tokenizer) -> None:
    async with httpx.AsyncClient(
        base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=64)
    ) as http:

        async def one(number: int) -> None:
            prompt = [100 + number, 200 + 3 * number, 1000 + 7 * number, 300 + number]
            length = 20 + number
            body = {"prompt": prompt, "max_tokens": length, "stream": True}
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert text == tokenizer.decode(expected_tokens(prompt, length))

        await asyncio.gather(*(one(number) for number in range(64)))
    eventually(lambda: is_free(server))


@pytest.mark.slow
def test_an_engine_killed_in_mid_stream() -> None:
    config = serve_config(served_model_name="toy")
    with running_server(config, SLOW_FACTORY) as server, client_of(server) as ai:
        first = server.engine_pid
        stream = iter(ai.completions.create(model="toy", prompt="abc", max_tokens=400, stream=True))
        next(stream)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine process died"):
            list(stream)
        again = ai.completions.create(model="toy", prompt="abc", max_tokens=10)
        assert again.choices[0].finish_reason == "length"
        assert server.engine_pid != first
        found = samples(httpx.get(f"{server.url}/metrics").text)
        assert found["penstock:engine_restarts_total"] == 1
        assert found["penstock:engine_up"] == 1


def test_an_engine_killed_under_a_whole_answer() -> None:
    with running_server(serve_config(), SLOW_FACTORY) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=20)
        eventually(lambda: not is_free(server))
        os.kill(server.engine_pid, signal.SIGKILL)
        answer = asked.result(20)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert "the engine process died" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    """Its timeout is shorter than the queue before it: 429 now, and not 504 later."""
    few = {"admission": {"name": "vllm_v1", "options": {"max_num_seqs": 1}}}
    body = {"prompt": "a", "max_tokens": 10, "ignore_eos": True}
    with (
        running_server(serve_config(few), SLOW_FACTORY) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(30) as pool,
    ):

        def ask(**fields: Any) -> httpx.Response:
            return http.post("/v1/completions", json={**body, **fields})

        asked = [pool.submit(ask) for _ in range(30)]
        eventually(lambda: sum(done.done() for done in asked) >= 10)
        refused = ask(timeout=0.2)
        assert refused.status_code == 429
        assert "may not wait longer than 0.2 s" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert all(done.result(60).status_code == 200 for done in asked)


@pytest.mark.slow
@pytest.mark.faults
def test_clients_that_wait_as_told_are_all_served() -> None:
    """OpenAI's own client heeds `Retry-After`, and tries again twice."""
    few = {"admission": {"name": "vllm_v1", "options": {"max_num_seqs": 2}}}
    config = serve_config(few, served_model_name="toy", max_waiting_requests=16)
    with (
        running_server(config, SLOW_FACTORY) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as ai,
        ThreadPoolExecutor(48) as pool,
    ):

        def ask(number: int) -> str | None:
            made = ai.completions.create(model="toy", prompt="abc", max_tokens=20)
            return made.choices[0].finish_reason

        assert set(pool.map(ask, range(48))) == {"length"}
        found = samples(httpx.get(f"{server.url}/metrics").text)
        assert found["penstock:request_success_total"] == 48
