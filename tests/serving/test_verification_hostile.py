"""Draft servers that lie, flood, stall or are not who they should be; and what others notice."""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.serving.scripted import ScriptedServer, ended, greedy, scripted_server, seeded
from tests.serving.verified import (
    NUM_TOKENS,
    PROMPT,
    World,
    complete_by_http,
    guess_from,
    metrics_of,
    until,
    verified_world,
)

from penstock.serving import draft_streams
from penstock.serving.draft_streams import DraftStream
from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.service import MAX_MESSAGE_BYTES
from penstock.transport.v1 import drafting_pb2 as pb


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture(scope="module")
def guarded(family: dict[str, Path]) -> Iterator[World]:
    """Draft servers need tokens. The requests of HTTP clients are of the tenant `default`."""
    servers: dict[str, Any] = {
        "good": {"token_sha256": sha256("good"), "tenant": "good"},
        "bad": {"token_sha256": sha256("bad"), "tenant": "bad"},
        "flood": {"token_sha256": sha256("flood"), "tenant": "bad"},
        "helper": {"token_sha256": sha256("helper")},
        "trusted": {"token_sha256": sha256("trusted"), "trusted": True},
    }
    with verified_world(
        family, servers=servers, max_open_requests=8, max_messages_per_s=300
    ) as running:
        yield running


@asynccontextmanager
async def connected(world: World, name: str, **options: int) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(world.address, token=name, **options) as draft_server:
        await draft_server.hello(world.digest)
        yield draft_server


@asynccontextmanager
async def undisturbed(world: World) -> AsyncIterator[None]:
    """Somebody else's request runs meanwhile, and comes out as it should."""
    sampling = seeded(7)
    expected = world.alone(sampling)
    async with connected(world, "good") as draft_server:
        await draft_server.open("mine", PROMPT, NUM_TOKENS, sampling)
        guess = guess_from(expected, len(PROMPT), 4)
        text = draft_server.texts["mine"]
        await draft_server.run(guess, lambda: len(text.output) > 5)
        yield
        await draft_server.run(guess, draft_server.all_finished)
        assert text.output == expected
        assert not draft_server.refused


@pytest.mark.parametrize("token", [None, "", "wrong", "good ", "x" * 5000])
async def test_no_identity(guarded: World, token: str | None) -> None:
    async with scripted_server(guarded.address, token=token) as draft_server:
        if token == "good ":
            await draft_server.hello(guarded.digest)
            return
        code, reason = await ended(draft_server)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer TOKEN" in reason


def hello(**changes: Any) -> bytes:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "tokenizer_digest": "DIGEST",
        "max_draft_tokens": 4,
    }
    return pb.Up(hello=pb.Hello(**{**fields, **changes})).SerializeToString()


OPEN = pb.Up(
    open=pb.Open(request_id="r", prompt_token_ids=PROMPT, max_tokens=4, sampling=greedy())
).SerializeToString()


STARTS: list[tuple[bytes, str]] = [
    (OPEN, "hello must be the first message"),
    (b"", "unknown kind"),
    (b"\xfa\x01\x02hi", "unknown kind"),
    (b"\xff" * 40, "not penstock.v1.Up"),
    (hello(protocol_version=4), "protocol version 4; this server speaks 5"),
    (hello(tokenizer_digest="another"), "another tokenizer"),
    (hello(max_draft_tokens=0), "max_draft_tokens 0"),
    (hello(max_draft_tokens=2**32 - 1), "max_draft_tokens"),
    (hello(model_name="x" * 300), "model_name"),
    (hello(tokenizer_digest="x" * 50_000), "a message of 50"),
]


async def test_a_bad_start(guarded: World) -> None:
    async with undisturbed(guarded):
        for data, reason in STARTS:
            async with scripted_server(guarded.address, token="bad") as draft_server:
                await draft_server.send_bytes(
                    data if b"DIGEST" not in data else _with_digest(data, guarded.digest)
                )
                code, details = await ended(draft_server)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, reason
            assert reason in details
            assert [r.reason for r in draft_server.refused] == [details]
            assert "\n" not in details


def _with_digest(data: bytes, digest: str) -> bytes:
    up = pb.Up.FromString(data)
    up.hello.tokenizer_digest = digest
    return up.SerializeToString()


async def test_hello_twice(guarded: World) -> None:
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        await draft_server.send_bytes(_with_digest(hello(), guarded.digest))
        code, details = await ended(draft_server)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "come once" in details


@pytest.mark.slow
async def test_random_bytes(guarded: World) -> None:
    rng = random.Random(0)
    async with undisturbed(guarded):
        for _ in range(40):
            async with connected(guarded, "bad") as draft_server:
                await draft_server.open("r", PROMPT, 30, greedy())
                assign = await draft_server.next_assign()
                data = bytearray(
                    pb.Up(draft=draft_server.draft(assign, [1, 2])).SerializeToString()
                )
                for _ in range(rng.randrange(1, 6)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                try:
                    await draft_server.send_bytes(bytes(data))
                    await draft_server.send_bytes(rng.randbytes(rng.randrange(200)))
                    await draft_server.call.done_writing()
                except (grpc.RpcError, asyncio.InvalidStateError):
                    pass
                await ended(draft_server)


async def test_larger_than_grpc_takes(guarded: World) -> None:
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        channel_refuses = False
        try:
            await draft_server.send_bytes(b"\x00" * (MAX_MESSAGE_BYTES + 1))
        except (grpc.RpcError, asyncio.InvalidStateError):
            channel_refuses = True
        code, _ = await ended(draft_server)
    assert channel_refuses or code is not grpc.StatusCode.OK
    await until(guarded, "draft_servers", 0)


async def test_nothing_compressed_is_taken(guarded: World) -> None:
    """Or a small message could be a large one. This one would be welcome."""
    async with (
        undisturbed(guarded),
        scripted_server(
            guarded.address,
            token="bad",
            compression=grpc.Compression.Gzip,
            use_local_subchannel_pool=1,
        ) as draft_server,
    ):
        data = _with_digest(hello(), guarded.digest)
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await draft_server.send_bytes(data)
        code, _ = await ended(draft_server)
    assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
    assert draft_server.num_received == 0


@pytest.mark.slow
async def test_a_flood_of_nothing_is_read_slowly(guarded: World) -> None:
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        begun = time.monotonic()

        async def write() -> None:
            while True:
                await draft_server.send(close=pb.Close(request_id="unknown"))

        writing = asyncio.create_task(write())
        while len(draft_server.refused) < 260:
            draft_server.take(await draft_server.receive())
        # Two seconds' worth at once; after that each is followed by a pause.
        assert 200 + 120 * (time.monotonic() - begun) > 250
        writing.cancel()
        # Another stream has no more of them.
        begun = time.monotonic()
        async with connected(guarded, "bad") as second:
            for _ in range(60):
                await second.send(close=pb.Close(request_id="unknown"))
            while len(second.refused) < 60:
                second.take(await second.receive())
            assert 120 * (time.monotonic() - begun) > 50


@pytest.mark.slow
async def test_a_flood(guarded: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.serving.verification")
    async with undisturbed(guarded), connected(guarded, "flood") as draft_server:
        leave = pb.Up(close=pb.Close(request_id="r")).SerializeToString()

        async def read() -> None:
            with contextlib.suppress(grpc.RpcError, EOFError):
                while True:
                    await draft_server.receive()

        reading = asyncio.create_task(read())
        for _ in range(1250):
            try:
                await draft_server.send_bytes(OPEN)
                await draft_server.send_bytes(leave)
            except (grpc.RpcError, asyncio.InvalidStateError):
                break
        await reading
        await until(guarded, "draft_servers", 1)
    assert "flood: too many messages: at most 300" in caplog.text


@pytest.mark.slow
async def test_a_reader_that_does_not_read(guarded, monkeypatch, caplog) -> None:
    """What waits for it is bounded; then its stream is ended."""
    caplog.set_level(logging.INFO, "penstock.serving.verification")
    monkeypatch.setattr(draft_streams, "_MAX_QUEUED_MESSAGES", 50)
    window = {"use_local_subchannel_pool": 1, "http2.bdp_probe": 0}
    async with undisturbed(guarded), connected(guarded, "bad", **window) as draft_server:
        unknown = pb.Up(close=pb.Close(request_id="\N{BUTTERFLY}" * 64)).SerializeToString()
        await until(guarded, "draft_servers", 2)

        async def write() -> None:
            while True:
                await draft_server.send_bytes(unknown)
                await asyncio.sleep(1 / 300)

        writing = asyncio.create_task(write())
        await until(guarded, "draft_servers", 1)
        writing.cancel()
    assert "bad: the draft server reads too slowly" in caplog.text


def opened(**changes: Any) -> pb.Open:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": PROMPT,
        "max_tokens": 4,
        "sampling": greedy(),
    }
    return pb.Open(**{**fields, **changes})


OPENS: list[tuple[pb.Open, str]] = [
    (opened(request_id="@1"), "this server's own"),
    (opened(request_id="taken"), "open already"),
    (opened(prompt_token_ids=[]), "at least 1 prompt token"),
    (opened(max_tokens=0), "at least 1 prompt token"),
    (opened(prompt_token_ids=[5, 256]), "prompt token 256; token ids go from 0 to 255"),
    (opened(stop_token_ids=[2**32 - 1]), "stop token 4294967295"),
    (opened(stop_token_ids=range(65)), "65 stop tokens"),
    (opened(stop=pb.StopStrings()), "0 stop strings of 0 characters; from 1 to 16"),
    (opened(stop=pb.StopStrings(strings=["a", ""])), "none of them empty"),
    (opened(stop=pb.StopStrings(strings=["a"] * 17)), "17 stop strings"),
    (opened(stop=pb.StopStrings(strings=["a" * 1025])), "1024 characters in all are allowed"),
    (opened(stop=pb.StopStrings(strings=["a"], previous=256)), "previous token 256"),
    (opened(stop=pb.StopStrings(strings=["a"], shown_token_ids=[256])), "shown token 256"),
    (opened(stop=pb.StopStrings(strings=["a"], shown_token_ids=range(65))), "65 shown tokens"),
    (opened(stop=pb.StopStrings(strings=["a"], num_made=2**32 - 1)), "are output; one must be"),
    (opened(max_tokens=2**32 - 1), "together at most 512"),
    (opened(sampling=None), "sampling is missing"),
    (opened(sampling=pb.Sampling(temperature=math.nan, top_p=1)), "temperature nan"),
    (opened(sampling=pb.Sampling(temperature=math.inf, top_p=1)), "temperature inf"),
    (opened(sampling=pb.Sampling(temperature=-1, top_p=1)), "temperature -1"),
    (opened(sampling=pb.Sampling(temperature=1e-300, top_p=1)), "temperature 1e-300"),
    (opened(sampling=pb.Sampling(temperature=1)), "top_p 0"),
    (opened(sampling=pb.Sampling(temperature=1, top_p=math.nan)), "top_p nan"),
    (opened(sampling=pb.Sampling(temperature=1, top_p=1.5)), "top_p 1.5"),
    (opened(num_logprobs=21), "num_logprobs 21; at most 20"),
]


async def test_a_bad_request(guarded: World) -> None:
    """Each is refused, and those that run beside it are not disturbed."""
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        await draft_server.open("taken", PROMPT, NUM_TOKENS, greedy())
        for message, _ in OPENS:
            await draft_server.send(open=message)
        guess = guess_from(guarded.alone(greedy()), len(PROMPT), 3)
        await draft_server.run(guess, draft_server.all_finished)
    for refused, (message, reason) in zip(draft_server.refused, OPENS, strict=True):
        assert refused.request_id == message.request_id
        assert reason in refused.reason
    assert draft_server.texts["taken"].output == guarded.alone(greedy())


async def test_requests_without_end(guarded: World) -> None:
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        for n in range(12):
            await draft_server.open(f"r{n}", PROMPT, 100, greedy())
        while len(draft_server.refused) < 4:
            draft_server.take(await draft_server.receive())
    assert {r.request_id for r in draft_server.refused} == {"r8", "r9", "r10", "r11"}
    assert all("8 requests are open; at most 8" in r.reason for r in draft_server.refused)


async def test_another_ones_request(guarded: World) -> None:
    """Both streams know a request `mine`; neither reaches the other's, nor by the engine's ids."""
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        for name in ("mine", "good/0", "good/1", "bad/0"):
            await draft_server.send(close=pb.Close(request_id=name))
            for number in range(3):
                await draft_server.send(
                    draft=pb.DraftTokens(request_id=name, epoch=number + 1, round=number)
                )
        while len(draft_server.refused) < 16:
            draft_server.take(await draft_server.receive())
    assert all("no such request" in r.reason for r in draft_server.refused)


DRAFTS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [256]}, "draft token 256; token ids go from 0 to 255"),
    ({"token_ids": [2**32 - 1]}, "draft token 4294967295"),
    ({"token_ids": [1] * 9}, "9 draft tokens; "),
    ({"prefix_len": 1}, "a draft behind 1 tokens"),
    ({"prefix_len": 2**32 - 1}, "a draft behind 4294967295 tokens"),
    ({"prefix_digest": b"another."}, "another text"),
    ({"prefix_digest": b""}, "another text"),
    ({"weights": [pb.Distribution(token_ids=[1], weights=[65536])]}, "compared with the sample"),
]


@pytest.mark.parametrize(("changes", "reason"), DRAFTS)
async def test_a_bad_draft(guarded: World, changes: dict[str, Any], reason: str) -> None:
    """Every draft is bad in the same way: refused each time, and the output is the target's."""
    async with connected(guarded, "bad") as draft_server:
        await draft_server.open("r", PROMPT, 12, greedy())
        while not draft_server.all_finished():
            assign = draft_server.take(await draft_server.receive())
            if assign is not None:
                draft = draft_server.draft(assign, **{"token_ids": [1], **changes})
                await draft_server.send(draft=draft)
    assert draft_server.texts["r"].output == guarded.alone(greedy())[:12]
    assert draft_server.texts["r"].num_accepted == 0
    assert len(draft_server.refused) > 3
    assert all(reason in r.reason and r.request_id == "r" for r in draft_server.refused)


@pytest.mark.parametrize("changes", [{"epoch": 0}, {"epoch": 2**64 - 1}, {"round": 2**64 - 1}])
async def test_a_draft_for_another_round(guarded: World, changes: dict[str, Any]) -> None:
    """It is ignored, wrong as it is, and the right one behind it is taken."""
    expected = guarded.alone(greedy())
    guess = guess_from(expected, len(PROMPT), 0)
    async with connected(guarded, "bad") as draft_server:
        await draft_server.open("r", PROMPT, NUM_TOKENS, greedy())
        while not draft_server.all_finished():
            assign = draft_server.take(await draft_server.receive())
            if assign is not None:
                await draft_server.send(draft=draft_server.draft(assign, [9999], **changes))
                text = draft_server.texts["r"].token_ids
                good = draft_server.draft(assign, guess(text, assign.num_draft_tokens))
                await draft_server.send(draft=good)
    assert draft_server.texts["r"].output == expected
    # Not all of them: on a busy machine some come too late.
    assert draft_server.texts["r"].num_accepted > NUM_TOKENS / 8
    assert not draft_server.refused


async def test_cherry_picked_tokens_change_nothing(guarded: World) -> None:
    """Its own requests at a temperature."""
    sampling = pb.Sampling(temperature=1.5, top_p=1, seed=3, ratio=True)
    expected = guarded.alone(pb.Sampling(temperature=1.5, top_p=1, seed=3))
    async with undisturbed(guarded), connected(guarded, "bad") as draft_server:
        assert not draft_server.welcome.trusted
        await draft_server.open("r", PROMPT, NUM_TOKENS, sampling)
        await draft_server.run(lambda text, n: [7] * n, draft_server.all_finished)
    assert draft_server.texts["r"].output == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_central", [False, True], ids=["edge", "central"])
@pytest.mark.parametrize("method", ["order", "send_verdict"])
async def test_an_error_ends_one_stream_alone(guarded, monkeypatch, method, is_central) -> None:
    """It happens on the engine's messages; whatever it is, the engine goes on, and so do others."""
    works = getattr(DraftStream, method)

    def fails(self: DraftStream, *arguments: Any, **more: Any) -> None:
        if self.identity.name == "helper":
            raise OverflowError("a number that is too large")
        works(self, *arguments, **more)

    async with undisturbed(guarded), connected(guarded, "helper") as draft_server:
        monkeypatch.setattr(DraftStream, method, fails)
        if is_central:
            working = asyncio.create_task(complete_by_http(guarded))
        else:
            await draft_server.open("r", PROMPT, NUM_TOKENS, greedy())
        code, reason = await ended(draft_server)
        if is_central:
            made = await working
            assert made["usage"]["completion_tokens"] == NUM_TOKENS
    assert code is grpc.StatusCode.INTERNAL
    assert reason == "an error in the verification server"
    assert (await metrics_of(guarded))["penstock:engine_restarts_total"] == 0


async def test_prompts_of_others_stay_here(guarded: World) -> None:
    """`bad` offers to draft for the tenant `default`, whose prompts are not its own."""
    async with connected(guarded, "bad") as draft_server:
        made = await complete_by_http(guarded)
        assert made["usage"]["completion_tokens"] == NUM_TOKENS
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(draft_server.call.read(), 0.2)


async def test_a_server_of_the_tenant_sees_them(guarded: World) -> None:
    """Control: the one above could have seen something."""
    async with connected(guarded, "helper") as draft_server:
        working = asyncio.create_task(complete_by_http(guarded))
        assign = await draft_server.next_assign()
        assert list(assign.prefix_token_ids)[: len(PROMPT)] == PROMPT
        guess = guess_from(guarded.alone(greedy()), len(PROMPT), 0)
        await draft_server.send(
            draft=draft_server.draft(assign, guess(list(assign.prefix_token_ids), 2))
        )
        await draft_server.run(guess, lambda: len(draft_server.released) > 0)
        await working


async def test_nothing_is_left_behind(guarded: World) -> None:
    await until(guarded, "num_requests_running", 0)
    await until(guarded, "draft_servers", 0)
    metrics = await metrics_of(guarded)
    assert metrics["penstock:num_requests_waiting"] == 0
    assert metrics["penstock:kv_cache_usage_perc"] == 0
    assert metrics["penstock:engine_restarts_total"] == 0
