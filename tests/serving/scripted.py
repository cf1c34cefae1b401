"""A scripted draft server: says what a test wants, over a real gRPC stream."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from penstock.core.ahead import LinePiece
from penstock.transport import service
from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import PrefixDigest, encode_pieces

Guess = Callable[[list[int], int], list[int]]
"""From a text and a number to that many draft tokens, or fewer."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def greedy(seed: int = 0) -> pb.Sampling:
    return pb.Sampling(temperature=0, top_p=1, seed=seed)


def seeded(seed: int, temperature: float = 0.8) -> pb.Sampling:
    return pb.Sampling(temperature=temperature, top_p=1, seed=seed)


@dataclass
class Text:
    """What a draft server knows of one request. asked: tokens of each order."""

    token_ids: list[int]
    prompt_len: int
    finish_reason: str = ""
    num_accepted: int = 0
    num_drafted: int = 0
    num_drafts: int = 0
    asked: list[int] = field(default_factory=list)
    logprobs: list[pb.Logprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


@dataclass
class ScriptedServer:
    """One stream. Bytes go up as they are; messages come down parsed."""

    call: Any
    texts: dict[str, Text] = field(default_factory=dict)
    refused: list[pb.Refused] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    welcome: pb.Welcome | None = None
    num_received: int = 0

    async def send(self, **message: Any) -> None:
        await self.send_bytes(pb.Up(**message).SerializeToString())

    async def send_bytes(self, data: bytes) -> None:
        await self.call.write(data)

    async def hello(self, digest: str, **changes: Any) -> pb.Welcome:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "tokenizer_digest": digest,
            "model_name": "scripted",
            "max_draft_tokens": 8,
            "takes_assignments": True,
        }
        await self.send(hello=pb.Hello(**{**fields, **changes}))
        message = await self.receive()
        assert message.HasField("welcome"), message
        self.welcome = message.welcome
        await self.send(ahead=pb.DraftAhead())
        return message.welcome

    async def open(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: pb.Sampling,
        **fields: Any,
    ) -> None:
        self.texts[request_id] = Text(list(prompt), len(prompt))
        await self.send(
            open=pb.Open(
                request_id=request_id,
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                sampling=sampling,
                **fields,
            )
        )

    async def ahead(self, request_id: str, *pieces: LinePiece) -> None:
        """Send lines of a request."""
        lines = pb.Lines(request_id=request_id, pieces=encode_pieces(pieces))
        await self.send(ahead=pb.DraftAhead(lines=[lines]))

    async def receive(self) -> pb.Down:
        data = await asyncio.wait_for(self.call.read(), 30)
        if data is grpc.aio.EOF:
            raise EOFError
        self.num_received += 1
        return pb.Down.FromString(data)

    def draft(self, assign: pb.Assign, token_ids: Sequence[int], **changes: Any) -> pb.DraftTokens:
        text = self.texts[assign.request_id]
        fields = {
            "request_id": assign.request_id,
            "epoch": assign.epoch,
            "round": assign.round,
            "prefix_len": assign.prefix_len,
            "prefix_digest": PrefixDigest(text.token_ids[: assign.prefix_len]).digest(),
            "token_ids": token_ids,
        }
        return pb.DraftTokens(**{**fields, **changes})

    def take(self, message: pb.Down) -> pb.Assign | None:
        """Note what a message says; returns an order."""
        if message.HasField("verdict"):
            verdict = message.verdict
            text = self.texts[verdict.request_id]
            assert verdict.start == len(text.token_ids)
            text.token_ids += verdict.token_ids
            text.num_accepted += verdict.num_accepted
            text.num_drafted += verdict.num_drafted
            text.logprobs += verdict.logprobs
            text.finish_reason = verdict.finish_reason
        elif message.HasField("assign"):
            assign = message.assign
            if assign.prefix_token_ids:
                self.texts[assign.request_id] = Text(
                    list(assign.prefix_token_ids), len(assign.prefix_token_ids)
                )
            text = self.texts[assign.request_id]
            assert assign.prefix_len == len(text.token_ids)
            text.asked.append(assign.num_draft_tokens)
            return assign
        elif message.HasField("refused"):
            self.refused.append(message.refused)
        elif message.HasField("release"):
            self.released.append(message.release.request_id)
        return None

    async def next_assign(self) -> pb.Assign:
        while (assign := self.take(await self.receive())) is None:
            pass
        return assign

    async def run(self, guess: Guess, until: Callable[[], bool]) -> None:
        """Answer orders until `until` says that it is enough."""
        while not until():
            assign = self.take(await self.receive())
            if assign is not None and assign.num_draft_tokens:
                text = self.texts[assign.request_id]
                token_ids = guess(text.token_ids, assign.num_draft_tokens)
                text.num_drafts += bool(token_ids)
                await self.send(draft=self.draft(assign, token_ids))

    def all_finished(self) -> bool:
        return all(t.finish_reason for t in self.texts.values())


@asynccontextmanager
async def scripted_server(
    address: str,
    token: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    compression: grpc.Compression | None = None,
    **options: int,
) -> AsyncIterator[ScriptedServer]:
    """Connect. options: of the channel, in the place of those that a draft server should use."""
    settings = [(f"grpc.{k}", v) for k, v in options.items()] or service.channel_options()
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=settings)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=settings)
    async with channel:
        connect = channel.stream_stream(f"/{service.SERVICE}/Connect")
        call = connect(metadata=service.token_metadata(token), compression=compression)
        try:
            yield ScriptedServer(call)
        finally:
            call.cancel()


async def ended(server: ScriptedServer) -> tuple[grpc.StatusCode, str]:
    """Read to the end of a stream that the other side ends; how it ended."""
    try:
        while True:
            server.take(await server.receive())
    except (grpc.aio.AioRpcError, EOFError):
        pass
    return await server.call.code(), await server.call.details()
