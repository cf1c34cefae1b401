"""Whatever comes over gRPC where draft servers connect: it ends that stream, or nothing."""

import asyncio
import itertools
from collections import Counter

import grpc
import pytest
from tests.mutations import attempts
from tests.serving.scripted import greedy, scripted_server
from tests.serving.verified import NUM_TOKENS, PROMPT, World, complete_by_http

from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.v1 import drafting_pb2 as pb

pytestmark = pytest.mark.slow

SENDING_AT_ONCE = 8
ENDS_WITHIN_S = 20.0


def messages(digest: str) -> list[bytes]:
    """What a draft server that means well sends."""
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_digest=digest,
        model_name="fuzzed",
        max_draft_tokens=8,
        takes_assignments=True,
    )
    request = pb.Open(
        request_id="1", prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS, sampling=greedy()
    )
    drafts = pb.DraftTokens(request_id="1", token_ids=[1, 2, 3])
    return [
        pb.Up(hello=hello).SerializeToString(),
        pb.Up(open=request).SerializeToString(),
        pb.Up(draft=drafts).SerializeToString(),
    ]


async def one_stream(world: World, sent: list[bytes]) -> str:
    """What the stream ended with, which it must."""
    async with scripted_server(world.address) as server:
        try:
            for data in sent:
                await server.send_bytes(data)
            await server.call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # it has ended already
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                try:
                    await server.receive()
                except (EOFError, grpc.aio.AioRpcError):
                    break
            code: grpc.StatusCode = await server.call.code()
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), sent
    return code.name


async def test_damaged_messages(world: World) -> None:
    expected = (await complete_by_http(world))["choices"]
    good = messages(world.digest)
    ends: Counter[str] = Counter()
    damaged = attempts(good)
    for number in itertools.count():
        few = list(itertools.islice(damaged, SENDING_AT_ONCE))
        if not few:
            break
        # Behind none, one or two that are right.
        begin = number % len(good)
        ends.update(await asyncio.gather(*(one_stream(world, [*good[:begin], x]) for x in few)))
    assert (await complete_by_http(world))["choices"] == expected
    assert ends["INVALID_ARGUMENT"], ends
