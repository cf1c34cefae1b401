import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.serving.fakes import FACTORY, SLOW_FACTORY, TOKENIZER, expected_tokens

from penstock.config import EngineConfig, PolicyConfig
from penstock.core.types import FinishReason, Output, Request
from penstock.serving.client import EngineClient, EngineUnavailable, OutputStream
from penstock.serving.limits import QueueFull
from penstock.serving.process import EngineFailed

PROMPT = (5, 6, 7, 8, 9)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(target=TOKENIZER, allocation=PolicyConfig(name="fixed"), **settings)


def client_of(factory: str, max_waiting: int = 100, **settings: Any) -> EngineClient:
    return EngineClient(config(**settings), max_waiting=max_waiting, factory=factory)


def request(request_id: str, max_tokens: int = 30, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(request_id, len(prompt), max_tokens, prompt_token_ids=prompt)


async def read(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


@pytest.fixture
async def slow() -> AsyncIterator[EngineClient]:
    async with client_of(SLOW_FACTORY) as client:
        yield client


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `condition` is true, for five seconds at most."""
    async with asyncio.timeout(5):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_free(client: EngineClient) -> None:
    async def is_free() -> bool:
        stats = await client.stats()
        return stats is not None and not stats.num_running and not any(stats.kv_usage.values())

    await until(is_free)


async def test_requests_share_a_stream_and_are_all_finished() -> None:
    async with client_of(FACTORY) as client:
        with await client.submit("someone", [request("a"), request("b", 12, (1, 2))]) as stream:
            outputs = await read(stream)
        for name, prompt, length in (("a", PROMPT, 30), ("b", (1, 2), 12)):
            mine = [o for o in outputs if o.request_id == name]
            assert [t for o in mine for t in o.token_ids] == expected_tokens(list(prompt), length)
            assert [o.finish_reason for o in mine if o.finish_reason] == [FinishReason.LENGTH]
        assert client.num_open == 0
        await until_free(client)


@pytest.mark.slow
async def test_an_idle_engine_does_not_spin() -> None:
    async with client_of(FACTORY) as client:
        with await client.submit("someone", [request("a")]) as stream:
            await read(stream)
        process, used = psutil.Process(client.pid), []
        # At first it imports what can wait until it serves.
        while not used or (used[-1] >= 0.1 and len(used) < 10):
            before = process.cpu_times()
            await asyncio.sleep(0.5)
            after = process.cpu_times()
            used.append(after.user + after.system - before.user - before.system)
        assert used[-1] < 0.1


@pytest.mark.slow
async def test_leaving_a_stream_cancels_its_requests(slow: EngineClient) -> None:
    with await slow.submit("someone", [request("a", 400), request("b", 400)]) as stream:
        await anext(stream)
        stats = await slow.stats()
        assert stats.num_running == 2
        assert stats.kv_usage["target"] > 0
    assert slow.num_open == 0
    await until_free(slow)


async def test_one_of_a_streams_requests_can_be_cancelled(slow: EngineClient) -> None:
    with await slow.submit("someone", [request("a", 400), request("b", 20)]) as stream:
        await anext(stream)
        stream.cancel("a")
        rest = await read(stream)
    assert {o.request_id for o in rest} == {"b"}
    assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_too_many_waiting_requests_are_refused() -> None:
    async with client_of(SLOW_FACTORY, max_waiting=5) as client:
        with await client.submit("someone", [request("a"), request("b")]) as stream:
            with pytest.raises(QueueFull, match="2 requests are waiting"):
                await client.submit("someone", [request("c"), request("d")])
            await anext(stream)
            await anext(stream)
            with await client.submit("someone", [request("c"), request("d")]) as second:
                assert len(await read(second)) > 2


async def test_a_killed_engine_fails_its_requests_and_is_restarted(slow: EngineClient) -> None:
    pid = slow.pid
    assert pid is not None
    with await slow.submit("someone", [request("a", 400), request("b", 400)]) as stream:
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        failed = [o for o in await read(stream) if o.finish_reason]
    assert {o.request_id for o in failed} == {"a", "b"}
    assert all(o.finish_reason is FinishReason.CANCELLED for o in failed)
    assert all("died" in str(o.error) for o in failed)
    with await slow.submit("someone", [request("c", 8)]) as stream:
        outputs = await read(stream)
    assert [t for o in outputs for t in o.token_ids] == expected_tokens(list(PROMPT), 8)
    assert slow.pid != pid
    assert slow.num_restarts == 1
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("refused", f"{TOKENIZER}: not a checkpoint, really"),
        ("killed", "the engine process ended while it was loading, killed as if memory ran out"),
    ],
)
async def test_an_engine_that_cannot_be_loaded_says_why_in_one_line(engine: str, told: str) -> None:
    client = client_of(f"tests.serving.fakes:{engine}_engine")
    with pytest.raises(EngineFailed) as failure:
        await client.start()
    await client.close()
    assert str(failure.value) == told


@pytest.mark.slow
async def test_an_engine_that_cannot_be_restarted_is_tried_again(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    fragile = EngineConfig(target=tmp_path, allocation=PolicyConfig(name="fixed"))
    factory = "tests.serving.fakes:fragile_engine"
    async with EngineClient(fragile, max_waiting=10, factory=factory) as client:

        async def says_so() -> bool:
            return "checkpoint is broken" in (client.problem or "")

        (tmp_path / "broken").touch()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(says_so)
        assert await client.stats() is None
        (tmp_path / "broken").unlink()
        with await client.submit("someone", [request("a", 8)]) as stream:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_draining_lets_requests_finish(slow: EngineClient) -> None:
    with await slow.submit("someone", [request("a", 40)]) as stream:
        await anext(stream)
        draining = asyncio.create_task(slow.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await slow.submit("someone", [request("b")])
        assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
    await asyncio.wait_for(draining, 1)


async def test_draining_cancels_what_outlasts_the_grace_period(slow: EngineClient) -> None:
    with await slow.submit("someone", [request("a", 500)]) as stream:
        await anext(stream)
        await slow.drain(0.1)
        last = (await read(stream))[-1]
    assert last.finish_reason is FinishReason.CANCELLED
    assert "stopped" in str(last.error)
    await until_free(slow)


async def test_closing_ends_the_process_quickly() -> None:
    client = client_of(SLOW_FACTORY)
    await client.start()
    pid = client.pid
    assert pid is not None
    stream = await client.submit("someone", [request("a", 500)])
    await anext(stream)
    started_at = time.monotonic()
    await client.close()
    assert time.monotonic() - started_at < 10
    assert (await read(stream))[-1].finish_reason is FinishReason.CANCELLED
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
async def test_closing_while_the_engine_loads() -> None:
    client = client_of(SLOW_FACTORY)
    starting = asyncio.create_task(client.start())
    while client.pid is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    pid = client.pid
    starting.cancel()
    await client.close()
    assert not psutil.pid_exists(pid)


async def test_the_engine_ignores_signals_meant_for_the_server(slow: EngineClient) -> None:
    assert slow.pid is not None
    with await slow.submit("someone", [request("a", 20)]) as stream:
        await anext(stream)
        os.kill(slow.pid, signal.SIGINT)
        os.kill(slow.pid, signal.SIGTERM)
        assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
