"""Links of draft servers: TLS and certificates, trust, and what happens when something dies."""

import asyncio
import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.serving.certificates import write_certificates
from tests.serving.scripted import ScriptedServer, ended, greedy, scripted_server, seeded
from tests.serving.verified import NUM_TOKENS, PROMPT, World, guess_from, until, verified_world

from penstock.transport.service import channel_credentials
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import WEIGHT_SUM


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, and certificates of `server`, `edge` and `stranger` from it, and one of
    `edge` from `other_ca`; PEM."""
    issuers = {"server": "ca", "edge": "ca", "stranger": "ca", "edge.forged": "other_ca"}
    return write_certificates(tmp_path_factory.mktemp("certificates"), issuers)


@pytest.fixture(scope="module")
def secured(family: dict[str, Path], certificates: Path) -> Iterator[World]:
    tls = {
        "certificate": certificates / "server.pem",
        "key": certificates / "server.key",
        "client_ca": certificates / "ca.pem",
    }
    servers = {"edge1": {"common_name": "edge", "tenant": "edges"}}
    with verified_world(family, tls=tls, servers=servers) as running:
        yield running


def credentials(folder: Path, name: str | None) -> grpc.ChannelCredentials:
    if name is None:
        return channel_credentials(folder / "ca.pem")
    return channel_credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


@pytest.mark.slow
async def test_a_certificate_is_an_identity(secured: World, certificates: Path) -> None:
    own = credentials(certificates, "edge")
    async with scripted_server(secured.address, credentials=own) as draft_server:
        welcome = await draft_server.hello(secured.digest)
        assert welcome.drafter == "edge1"
        await draft_server.open("r", PROMPT, 10, greedy())
        guess = guess_from(secured.alone(greedy()), len(PROMPT), 0)
        await draft_server.run(guess, draft_server.all_finished)
        assert draft_server.texts["r"].output == secured.alone(greedy())[:10]


@pytest.mark.parametrize("name", ["stranger", "edge.forged", None])
async def test_other_certificates_are_none(secured, certificates, name) -> None:
    """Signed, but not known; of the right name, but signed by another; absent."""
    other = credentials(certificates, name)
    async with scripted_server(secured.address, credentials=other, token="edge") as draft_server:
        code, reason = await ended(draft_server)
    if name == "stranger":
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "not known here" in reason
    else:
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_no_tls_where_it_is_needed(secured: World) -> None:
    async with scripted_server(secured.address) as draft_server:
        code, _ = await ended(draft_server)
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_a_welcome_tells_the_targets_ends_of_text(family, tmp_path) -> None:
    shutil.copytree(family["target"], tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    with verified_world({**family, "target": tmp_path / "target"}) as world:
        async with scripted_server(world.address) as draft_server:
            welcome = await draft_server.hello(world.digest)
    assert list(welcome.eos_token_ids) == [7, 9]


@pytest.fixture(scope="module")
def trusting(family: dict[str, Path]) -> Iterator[World]:
    digest = hashlib.sha256(b"secret").hexdigest()
    servers: dict[str, Any] = {"friend": {"token_sha256": digest, "trusted": True}}
    with verified_world(family, servers=servers) as running:
        yield running


COIN = pb.Distribution(token_ids=[7, 8], weights=[WEIGHT_SUM // 2] * 2)


async def test_a_trusted_server_is_verified_by_its_weights(trusting: World) -> None:
    sampling = pb.Sampling(temperature=0.9, top_p=1, seed=3, ratio=True)
    async with scripted_server(trusting.address, token="secret") as draft_server:
        welcome = await draft_server.hello(trusting.digest)
        assert welcome.trusted
        assert welcome.weight_sum == WEIGHT_SUM
        await draft_server.open("r", PROMPT, NUM_TOKENS, sampling)
        num_drafts = 0
        while not draft_server.all_finished():
            assign = draft_server.take(await draft_server.receive())
            if assign is None:
                continue
            num_drafts += 1
            tokens = [7, 8][: assign.num_draft_tokens]
            weights = [COIN] * (len(tokens) - (num_drafts % 3 == 0))
            await draft_server.send(draft=draft_server.draft(assign, tokens, weights=weights))
    assert len(draft_server.texts["r"].output) == NUM_TOKENS
    assert all("distributions for" in r.reason for r in draft_server.refused)
    assert len(draft_server.refused) == num_drafts // 3 > 0


async def test_weights_are_needed_only_where_something_is_sampled(trusting: World) -> None:
    sampling = pb.Sampling(temperature=0, top_p=1, ratio=True)
    async with scripted_server(trusting.address, token="secret") as draft_server:
        await draft_server.hello(trusting.digest)
        await draft_server.open("r", PROMPT, NUM_TOKENS, sampling)
        guess = guess_from(trusting.alone(greedy()), len(PROMPT), 4)
        await draft_server.run(guess, draft_server.all_finished)
    assert draft_server.texts["r"].output == trusting.alone(greedy())
    assert draft_server.texts["r"].num_accepted > NUM_TOKENS / 4


async def test_false_weights_cost_the_trust(family: dict[str, Path]) -> None:
    """The engine holds the model that the server says it has, and no draft goes unaudited."""
    servers = {
        name: {"token_sha256": hashlib.sha256(name.encode()).hexdigest(), "trusted": True}
        for name in ("liar", "friend")
    }
    sampling = pb.Sampling(temperature=0.9, top_p=1, seed=3, ratio=True)
    with verified_world(family, local=("near",), servers=servers, audit_share=1.0) as world:
        async with scripted_server(world.address, token="liar") as liar:
            await liar.hello(world.digest, model_name="near")
            await liar.open("r", PROMPT, NUM_TOKENS, sampling)
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await _lie(liar)
        assert lost.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        async with scripted_server(world.address, token="liar") as liar:
            assert not (await liar.hello(world.digest)).trusted
        async with scripted_server(world.address, token="friend") as friend:
            assert (await friend.hello(world.digest)).trusted


async def _lie(liar: ScriptedServer) -> None:
    while not liar.all_finished():
        assign = liar.take(await liar.receive())
        if assign is not None:
            weights = [COIN] * assign.num_draft_tokens
            tokens = [7] * assign.num_draft_tokens
            await liar.send(draft=liar.draft(assign, tokens, weights=weights))


@pytest.mark.slow
async def test_the_engine_dies(world: World) -> None:
    """Streams end, so that draft servers open their requests again; nothing is lost."""
    # Asked for first: on a busy machine the answer may take longer than the request.
    pid = await asyncio.to_thread(lambda: world.server.engine_pid)
    sampling = seeded(7)
    guess = guess_from(world.alone(sampling), len(PROMPT), 4)
    async with scripted_server(world.address) as first:
        await first.hello(world.digest)
        await first.open("r", PROMPT, NUM_TOKENS, sampling)
        text = first.texts["r"]
        await first.run(guess, lambda: len(text.output) > 8)
        os.kill(pid, signal.SIGKILL)
        code, reason = await ended(first)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "restarted" in reason
        assert not text.finish_reason
    async with scripted_server(world.address) as early:
        code, _ = await ended(early)
        assert code is grpc.StatusCode.UNAVAILABLE
    await until(world, "engine_up", 1)
    async with scripted_server(world.address) as second:
        await second.hello(world.digest)
        num_left = NUM_TOKENS - len(text.output)
        await second.open("r", text.token_ids, num_left, sampling)
        await second.run(guess, second.all_finished)
        assert second.texts["r"].token_ids == PROMPT + world.alone(sampling)
    assert 0 < num_left < NUM_TOKENS


@pytest.mark.slow
async def test_a_frozen_server_delays_others_once(world: World) -> None:
    """It gets orders and never answers."""
    expected = world.alone(greedy())
    async with scripted_server(world.address) as frozen, scripted_server(world.address) as alive:
        await frozen.hello(world.digest)
        await alive.hello(world.digest)
        await frozen.open("f", PROMPT, 200, greedy())
        late = await frozen.next_assign()
        while len(frozen.texts["f"].output) < 5:
            assert frozen.take(await frozen.receive()) is None
        await alive.open("r", PROMPT, NUM_TOKENS, greedy())
        guess = guess_from(expected, len(PROMPT), 0)
        await asyncio.wait_for(alive.run(guess, alive.all_finished), 10)
        assert alive.texts["r"].output == expected
        assert alive.texts["r"].num_accepted > NUM_TOKENS / 2
        await frozen.send(draft=frozen.draft(late, [1]))
        await asyncio.wait_for(frozen.next_assign(), 10)
        assert not frozen.refused


@pytest.mark.slow
async def test_a_server_that_stops_says_so(family: dict[str, Path]) -> None:
    with ExitStack() as running:
        world = running.enter_context(verified_world(family))
        async with scripted_server(world.address) as draft_server:
            await draft_server.hello(world.digest)
            await draft_server.open("r", PROMPT, 200, greedy())
            await draft_server.next_assign()
            reading = asyncio.create_task(ended(draft_server))
            await asyncio.to_thread(running.close)
            code, reason = await reading
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in reason
