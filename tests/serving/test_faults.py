"""Faults under load, with real processes and sockets: nobody's output changes, and none is lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.serving.fault_rig import (
    NUM_TOKENS,
    Child,
    Mangler,
    Proxy,
    bodies,
    complete,
    complete_all,
    draft_process,
    metric,
    until,
    url_of,
    verification_process,
)
from tests.serving.harness import engine_pid
from tests.serving.scripted import free_port

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NO_DRAFTS = {"speculation": {"drafter": "none"}}


@dataclass
class World:
    """A verification server, and what it makes of all requests when nobody drafts."""

    family: dict[str, Path]
    process: Child
    drafters_port: int
    expected: dict[str, str]

    @property
    def url(self) -> str:
        return url_of(self.process)

    def drafting(self, model: str = "near", port: int | None = None) -> Child:
        return draft_process(self.family[model], port or self.drafters_port)

    async def is_at_work(self) -> bool:
        """Some tens of drafts have been verified since the last call."""
        return await self.num_drafts() > self.seen + 40

    async def num_drafts(self) -> float:
        return await metric(self.url, "spec_decode_num_drafts_total")

    seen: float = 0.0

    async def in_the_middle(self) -> None:
        """Wait until work is well under way."""
        await until(self.is_at_work)
        self.seen = await self.num_drafts()


async def start_world(family: dict[str, Path], **settings: object) -> World:
    port = free_port()
    process = verification_process(family["target"], port, free_port(), **settings)
    await process.start()
    return World(family, process, port, {})


@pytest.fixture(scope="module")
def lasting(family: dict[str, Path]) -> Iterator[World]:
    """A world for all tests that leave the verification server alone."""
    world = asyncio.run(start_world(family))
    with world.process:
        world.expected = asyncio.run(complete_all(world.url, **NO_DRAFTS))
        assert len(set(world.expected.values())) == len(world.expected)
        yield world


@pytest.fixture
async def world(lasting: World) -> World:
    async def is_alone() -> bool:
        return await metric(lasting.url, "draft_servers") == 0

    await until(is_alone)
    lasting.seen = await lasting.num_drafts()
    return lasting


async def test_without_faults(world: World) -> None:
    with world.drafting() as server:
        await server.start(2)
        edge, central = await asyncio.gather(complete_all(url_of(server)), complete_all(world.url))
        assert edge == central == world.expected
        assert await world.num_drafts() - world.seen > 100
        assert await server.end() == 0


async def test_the_comparison_can_fail(world: World) -> None:
    other = await complete_all(world.url, temperature=0.9, seed=1)
    assert all(other[name] != world.expected[name] for name in other)


async def test_a_killed_draft_server(world: World) -> None:
    """Requests that it drafted for go on alone; those of another server's users do not notice."""
    with world.drafting() as doomed, world.drafting("far") as other:
        await doomed.start(2)
        await other.start(2)
        edge = asyncio.create_task(complete_all(url_of(other)))
        central = asyncio.create_task(complete_all(world.url))
        await world.in_the_middle()
        await doomed.end(signal.SIGKILL)
        assert await edge == world.expected
        assert await central == world.expected


async def test_a_frozen_draft_server(world: World) -> None:
    with world.drafting() as frozen, world.drafting("far") as other:
        await frozen.start(2)
        await other.start(2)
        own = asyncio.create_task(complete_all(url_of(frozen)))
        edge = asyncio.create_task(complete_all(url_of(other)))
        central = asyncio.create_task(complete_all(world.url))
        await world.in_the_middle()
        frozen.send(signal.SIGSTOP)
        assert await edge == world.expected
        assert await central == world.expected
        assert not own.done()
        frozen.send(signal.SIGCONT)
        assert await own == world.expected
        # Once heard from, it is asked for drafts again.
        before = await world.num_drafts()
        await other.end()
        assert await complete_all(world.url) == world.expected
        assert await world.num_drafts() - before > 100


@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_a_link_that_is_down_for_a_while(world: World, fault: str) -> None:
    async with Proxy(world.drafters_port).running() as link:
        with world.drafting(port=link.port) as server:
            await server.start(2)
            edge = asyncio.create_task(complete_all(url_of(server)))
            central = asyncio.create_task(complete_all(world.url))
            await world.in_the_middle()
            getattr(link, fault)()
            assert await central == world.expected
            assert not edge.done()
            await asyncio.sleep(1)
            link.heal()
            assert await edge == world.expected
            assert link.num_connections == (2 if fault == "cut" else 1)


async def test_a_link_that_breaks_again_and_again(world: World) -> None:
    async with Proxy(world.drafters_port).running() as link:
        with world.drafting(port=link.port) as server:
            await server.start(2)
            edge = asyncio.create_task(complete_all(url_of(server)))
            for _ in range(4):
                await asyncio.sleep(0.3)
                link.cut()
                link.heal()
            assert await edge == world.expected
            assert link.num_connections > 2


async def test_every_message_twice_and_in_any_order(world: World) -> None:
    async with Mangler(world.drafters_port).running() as link:
        with world.drafting(port=link.port) as server:
            await server.start(2)
            edge, central = await asyncio.gather(
                complete_all(url_of(server)), complete_all(world.url)
            )
            assert edge == central == world.expected
            assert link.num_messages > 500
            assert await world.num_drafts() - world.seen > 100


async def test_a_killed_engine(family: dict[str, Path], lasting: World) -> None:
    """Edge requests go on with the next engine process; those of the server's own end."""

    world = await start_world(family)
    with world.process, world.drafting() as server:
        await server.start(2)
        edge = asyncio.create_task(complete_all(url_of(server)))
        central = asyncio.create_task(complete(world.url, next(iter(bodies()))[1]))
        await world.in_the_middle()
        os.kill(await asyncio.to_thread(engine_pid, world.url), signal.SIGKILL)
        assert await edge == lasting.expected
        answer = await central
        assert answer.status_code == 503
        assert "the engine process died" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restarted_verification_server(family, lasting, number) -> None:
    first = await start_world(family, shutdown_grace_s=0)
    http_port = int(first.url.rpartition(":")[2])
    second = verification_process(family["target"], first.drafters_port, http_port)
    with first.process, second, first.drafting() as server:
        await server.start(2)
        edge = asyncio.create_task(complete_all(url_of(server)))
        central = asyncio.create_task(complete(first.url, next(iter(bodies()))[1]))
        await first.in_the_middle()
        await first.process.end(number)
        if number == signal.SIGTERM:
            answer = await central
            assert answer.status_code == 503
            assert "stopped before this request was finished" in answer.text
        else:
            with pytest.raises(httpx.TransportError):
                await central
        assert not edge.done()
        await second.start()
        assert await edge == lasting.expected
        again = await complete(url_of(server), {"prompt": "x", "max_tokens": 8})
        assert again.status_code == 200


@pytest.mark.parametrize("seconds", [2, 20])
async def test_a_frozen_verification_server(family, lasting, seconds) -> None:
    """Two seconds are a pause on the same stream; after twenty it has been given up."""
    world = await start_world(family)
    with world.process, world.drafting() as server:
        await server.start(2)
        edge = asyncio.create_task(complete_all(url_of(server)))
        central = asyncio.create_task(complete_all(world.url))
        await world.in_the_middle()
        world.process.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        world.process.send(signal.SIGCONT)
        assert await edge == lasting.expected
        assert await central == lasting.expected
        assert await metric(url_of(server), "engine_restarts") == (seconds > 15)


async def test_users_without_a_verification_server_are_told(family, lasting) -> None:
    async with Proxy(lasting.drafters_port).running() as link:
        with lasting.drafting(port=link.port) as server:
            await server.start(2)
            link.cut()
            async with httpx.AsyncClient() as http:

                async def is_down() -> bool:
                    return (await http.get(f"{url_of(server)}/health")).status_code == 503

                await until(is_down)
                health = (await http.get(f"{url_of(server)}/health")).json()
                assert "no connection to the verification server" in health["reason"]
                waiting = asyncio.create_task(
                    complete(url_of(server), {"prompt": "x", "max_tokens": NUM_TOKENS})
                )
                await asyncio.sleep(0.5)
                assert not waiting.done()
                link.heal()
                assert (await waiting).status_code == 200


async def test_a_server_that_dies_while_it_drafts_ahead(world: World) -> None:
    """Its lines are at hand, and are used; then it is killed, and comes again under its name."""
    name = "ahead_draft_tokens_total"
    async with asyncio.timeout(120):
        for _ in range(2):
            before = await metric(world.url, name)
            with world.drafting("same") as doomed:
                await doomed.start(2)
                central = asyncio.create_task(complete_all(world.url))

                async def has_sent(least: float = before + 200) -> bool:
                    return await metric(world.url, name) > least

                await until(has_sent)
                await doomed.end(signal.SIGKILL)
                assert await central == world.expected
