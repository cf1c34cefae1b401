"""How often draft servers and strangers may connect."""

import hashlib
import heapq
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from tests.serving.scripted import ended, greedy, scripted_server, seeded
from tests.serving.verified import NUM_TOKENS, PROMPT, World, guess_from, verified_world

from penstock.config import DraftersConfig
from penstock.serving import draft_access
from penstock.serving.draft_access import ConnectionLimits, network_of
from penstock.serving.link import Backoff
from penstock.serving.verification import _MAX_STREAMS_EACH


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(draft_access, "time", clock)
    return clock


def arrivals_of(**settings: float) -> ConnectionLimits:
    return ConnectionLimits(DraftersConfig.model_validate({"listen": "127.0.0.1:0", **settings}))


def test_a_server_has_its_own_allowance(clock: Clock) -> None:
    counted = arrivals_of(max_connections_per_s=2)
    answers = [counted.check_authenticated("a") for _ in range(18)]
    assert answers[:16] == [None] * 16
    assert answers[16] == "a connects too often; at most 2 a second, and 16 at once"
    assert counted.check_authenticated("b") is None
    clock.now += 0.5
    assert counted.check_authenticated("a") is None
    assert counted.check_authenticated("a") is not None
    assert counted.refused == {("a", "too_often"): 3}


def test_strangers_have_one_by_network(clock: Clock) -> None:
    counted = arrivals_of(max_unauthenticated_connections_per_s=0.5)
    answers = [counted.check_unauthenticated("192.0.2.1") for _ in range(5)]
    assert answers[:4] == [None] * 4
    assert "from 192.0.2.1; at most 0.5 a second, and 4 at once" in answers[4]
    assert counted.check_unauthenticated("192.0.2.2") is None
    assert counted.check_authenticated("192.0.2.1") is None
    assert counted.refused == {("", "unknown"): 5, ("", "too_often"): 1}


def test_the_table_of_strangers_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_access, "_MAX_NETWORKS", 10)
    counted = arrivals_of(max_unauthenticated_connections_per_s=0.25)
    for n in range(1000):
        counted.check_unauthenticated(f"network {n}")
        counted.check_unauthenticated("busy")
        assert len(counted._networks) <= 10
    # Whoever goes on is remembered; only those that have not been back are forgotten.
    assert counted.refused["", "too_often"] == 998


@pytest.mark.parametrize("lasting_s", [0.0, 0.3, 9.9, 10.0, 25.0])
def test_our_own_back_off_never_meets_the_limit(clock, monkeypatch, lasting_s) -> None:
    """As many draft servers as may share a name, all at once, each with the shortest of pauses."""
    monkeypatch.setattr("penstock.serving.link.random.uniform", lambda low, high: low)
    assert num_refused(clock, arrivals_of(), lasting_s) == 0


@pytest.mark.slow
def test_the_comparison_with_the_limit_can_fail(clock, monkeypatch) -> None:
    """Did a stream that breaks at once start the pauses anew, the limit would be met."""
    monkeypatch.setattr("penstock.serving.link.random.uniform", lambda low, high: low)
    monkeypatch.setattr("penstock.serving.link._STABLE_S", 0.0)
    assert num_refused(clock, arrivals_of(), 0.0) > 0


def num_refused(clock: Clock, counted: ConnectionLimits, lasting_s: float) -> int:
    """Of the attempts of ten minutes by servers whose streams last so long."""
    begun = clock.now
    servers = [(begun, n, Backoff()) for n in range(_MAX_STREAMS_EACH)]
    while servers[0][0] < begun + 600:
        clock.now, n, backoff = heapq.heappop(servers)
        counted.check_authenticated("shared")
        heapq.heappush(servers, (clock.now + lasting_s + backoff.after(lasting_s), n, backoff))
    return counted.refused.total()


@pytest.fixture(scope="module")
def limited(family: dict[str, Path]) -> Iterator[World]:
    servers = {
        name: {"token_sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name}
        for name in ("ann", "ben", "cleo", "dora", "bad")
    }
    # One connection each, however slow the machine is.
    limits = {"max_connections_per_s": 0.001, "max_unauthenticated_connections_per_s": 0.001}
    with verified_world(family, servers=servers, **limits) as running:
        yield running


@asynccontextmanager
async def undisturbed(world: World, before: str, after: str) -> AsyncIterator[None]:
    """A good server is connected meanwhile and gets the target's own text, and another connects
    afterwards; both from the address of the others."""
    sampling = seeded(7)
    expected = world.alone(sampling)
    async with scripted_server(world.address, token=before) as server:
        await server.hello(world.digest)
        yield
        await server.open("mine", PROMPT, NUM_TOKENS, sampling)
        await server.run(guess_from(expected, len(PROMPT), 4), server.all_finished)
        assert server.texts["mine"].output == expected
    async with scripted_server(world.address, token=after) as server:
        await server.hello(world.digest)


@pytest.mark.slow
async def test_a_server_that_connects_in_a_loop(limited: World) -> None:
    async with undisturbed(limited, "ann", "ben"):
        async with scripted_server(limited.address, token="bad") as server:
            await server.hello(limited.digest)
            await server.open("r", PROMPT, 100, greedy())
        async with scripted_server(limited.address, token="bad") as server:
            code, reason = await ended(server)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason == "bad connects too often; at most 0.001 a second, and 1 at once"
    assert await refused(limited, reason="too_often") == 1
    assert await refused(limited, draft_server="bad") == 1


@pytest.mark.slow
async def test_strangers_in_a_loop(limited: World) -> None:
    found = []
    async with undisturbed(limited, "cleo", "dora"):
        for token in ("guess", "another", None):
            async with scripted_server(limited.address, token=token) as server:
                found.append(await ended(server))
    codes = [code for code, _ in found]
    assert codes == [grpc.StatusCode.UNAUTHENTICATED] + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    assert found[-1][1].startswith("too many connections without a known identity from 127.0.0.1;")
    assert await refused(limited, draft_server="", reason="unknown") == 1
    assert await refused(limited, draft_server="", reason="too_often") == 2


async def refused(world: World, **labels: str) -> float:
    """The metric of refused connections."""
    async with httpx.AsyncClient(base_url=world.server.url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    lines = [t for t in text.splitlines() if t.startswith("penstock:refused_connections_total")]
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return sum(float(t.rpartition(" ")[2]) for t in lines if all(w in t for w in wanted))


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.1:50100", "192.0.2.1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:50100", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:50101", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50101", "fe80::/64"),
        ("ipv6:[::ffff:192.0.2.1]:50100", "192.0.2.1"),
        ("unix:/run/socket", "unix"),
        ("", ""),
    ],
)
def test_the_network_of_a_peer(peer: str, network: str) -> None:
    assert network_of(peer) == network
