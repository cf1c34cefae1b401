"""Stream of a draft server to its verification server, with reconnection."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from penstock.transport.service import DraftingStub, channel_options, token_metadata
from penstock.transport.v1 import drafting_pb2 as pb

# Conventions; `Backoff` says how the delays relate to the server's rate limit.
_WELCOME_TIMEOUT_S, _STABLE_S = 10.0, 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0

_FINAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes that a repetition does not change."""
_NOT_YET = "not connected to the verification server yet"

_Outbox = asyncio.Queue[pb.Up | None]
"""Messages to send; None ends the stream."""

_log = logging.getLogger(__name__)


class LinkRefused(Exception):
    """The verification server refuses this draft server. The message is one line."""


class _LinkLost(Exception):
    """The stream broke, or could not be made. The message is one line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of the verification server, and credentials (None: no TLS)."""

    address: str
    credentials: grpc.ChannelCredentials | None = None
    token: str | None = None

    def channel(self) -> grpc.aio.Channel:
        options = channel_options()
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self.credentials, options=options)


class Backoff:
    """Exponential back-off with jitter, reset by a stream that lasted `_STABLE_S`.

    From 0.1 s, doubling to 2 s, each shortened at random by up to a half: one attempt at once, five
    more in 1.5 s, then at most one a second, less than a verification server allows
    (`DraftersConfig.max_connections_per_s`)."""

    def __init__(self) -> None:
        self._longest = _FIRST_DELAY_S

    def after(self, lasted_s: float) -> float:
        """Return the seconds to wait after a stream that lasted so long; 0 if there was none."""
        if lasted_s >= _STABLE_S:
            self._longest = _FIRST_DELAY_S
        longest, self._longest = self._longest, min(2 * self._longest, _LONGEST_DELAY_S)
        return longest * random.uniform(0.5, 1.0)


class LinkUser(Protocol):
    """Listener of a link: begin and end of a stream, and its messages."""

    def connected(self, welcome: pb.Welcome) -> None: ...
    def received(self, message: pb.Down) -> None: ...
    def lost(self) -> None: ...


class VerifierLink:
    """Keeps one stream open, with exponential back-off between attempts."""

    def __init__(self, endpoint: Endpoint, hello: pb.Hello, user: LinkUser) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._user = user
        self._outbox: _Outbox | None = None
        self._welcome_at = 0.0
        self.problem: str | None = _NOT_YET
        """Reason why there is no stream now; None while there is one."""
        self.num_losses = 0

    def send(self, message: pb.Up) -> None:
        """Send a message, or drop it without a stream, which voids all messages before it."""
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    async def run(self) -> None:
        """Keep the stream open until cancelled.

        Raises: LinkRefused if the first one is refused; a later refusal may be temporary, as while
        the server has not noticed that the last stream broke."""
        async with self._endpoint.channel() as channel:
            await self._keep_open(DraftingStub(channel))

    async def _keep_open(self, stub: DraftingStub) -> None:
        backoff = Backoff()
        was_welcome = False
        while True:
            try:
                await self._stream(stub)
            except LinkRefused as error:
                if not was_welcome:
                    raise
                problem = str(error)
            except _LinkLost as error:
                problem = str(error)
            lasted_s = 0.0
            if self.problem is None:
                was_welcome = True
                lasted_s = time.monotonic() - self._welcome_at
                self.num_losses += 1
            if self.problem in (None, _NOT_YET):
                _log.warning("%s; trying again", problem)
            self.problem = problem
            await asyncio.sleep(backoff.after(lasted_s))

    async def _stream(self, stub: DraftingStub) -> None:
        """Run one stream from start to end. Raises: LinkRefused, _LinkLost."""
        outbox: _Outbox = asyncio.Queue()
        outbox.put_nowait(pb.Up(hello=self._hello))
        call = stub.connect(_drain(outbox), metadata=token_metadata(self._endpoint.token))
        try:
            messages = aiter(call)
            welcome = await self._welcome(messages)
            if self.num_losses:
                _log.warning("connected to %s again", self._endpoint.address)
            self._outbox, self.problem = outbox, None
            self.send(pb.Up(ahead=pb.DraftAhead()))
            self._welcome_at = time.monotonic()
            self._user.connected(welcome)
            async for message in messages:
                if message.WhichOneof("message") == "refused" and not message.refused.request_id:
                    raise LinkRefused(self._refused(message.refused.reason))
                self._user.received(message)
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or error.code().name).split())
            if error.code() in _FINAL:
                raise LinkRefused(self._refused(details)) from error
            raise _LinkLost(self._lost(details)) from error
        finally:
            call.cancel()
            outbox.put_nowait(None)
            if self._outbox is not None:
                self._outbox = None
                self._user.lost()
        raise _LinkLost(self._lost("it ended the stream"))

    async def _welcome(self, messages: AsyncIterator[pb.Down]) -> pb.Welcome:
        try:
            first = await asyncio.wait_for(anext(messages), _WELCOME_TIMEOUT_S)
        except TimeoutError:
            raise _LinkLost(self._lost("it does not answer")) from None
        except StopAsyncIteration:
            raise _LinkLost(self._lost("it ended the stream")) from None
        if first.WhichOneof("message") == "refused":
            raise LinkRefused(self._refused(first.refused.reason))
        if first.WhichOneof("message") != "welcome":
            raise LinkRefused(self._refused("it does not begin with a welcome"))
        return first.welcome

    def _refused(self, why: str) -> str:
        return f"the verification server at {self._endpoint.address} refuses: {why}"

    def _lost(self, why: str) -> str:
        return f"no connection to the verification server at {self._endpoint.address}: {why}"


async def _drain(outbox: _Outbox) -> AsyncIterator[pb.Up]:
    while (message := await outbox.get()) is not None:
        yield message
