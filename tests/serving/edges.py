"""A draft server's parts in this process, and requests of its own users."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.serving.scripted_verifier import LIMITS, ScriptedVerifier

from penstock.core.types import Output, Request, SamplingParams
from penstock.serving.draft_server import DraftService
from penstock.serving.drafting import DrafterOptions, load_drafter
from penstock.serving.edge import EdgeClient
from penstock.serving.link import Endpoint, LinkRefused
from penstock.serving.messages import Ready

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=7)


@asynccontextmanager
async def drafting(port: int, model: Path, **options: object) -> AsyncIterator[DraftService]:
    loaded = load_drafter(DrafterOptions(model.name, model, dtype="float32", **options))
    server = DraftService(Endpoint(f"127.0.0.1:{port}", token="t0"), loaded.hello, loaded.sessions)
    running = asyncio.create_task(server.run())
    try:
        await asyncio.wait((running, server.welcome), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield server
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, LinkRefused):
            await running


def edge_client(server: DraftService, model: Path) -> EdgeClient:
    info = Ready(model, LIMITS.max_request_tokens, LIMITS.vocab_size, frozenset(), ("edge",), {})
    return EdgeClient(server, info, max_waiting=100)


def request(
    name: str, sampling: SamplingParams = GREEDY, max_tokens: int = 24, first: int = 40, **more
) -> Request:
    prompt = tuple(range(first, first + 9))
    return Request(
        name, len(prompt), max_tokens, prompt_token_ids=prompt, sampling=sampling, **more
    )


async def read(stream) -> list[Output]:
    async with asyncio.timeout(30):
        return [output async for output in stream]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def linked(
    verifier: ScriptedVerifier, model: Path, **options: Any
) -> AsyncIterator[tuple[DraftService, EdgeClient]]:
    """A draft server with a stream to the verifier, and the endpoint of its users. options: of
    `drafting`."""
    async with verifier.serving() as port, drafting(port, model, **options) as server:
        yield server, edge_client(server, model)


async def complete(client: EdgeClient, *requests: Request) -> list[Output]:
    """All outputs of a user's requests."""
    with await client.submit("someone", requests) as stream:
        return await read(stream)
