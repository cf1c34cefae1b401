"""Verification server: connects the streams of all draft servers with the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio

from penstock.config import ConfigError, DraftersConfig, TenantConfig
from penstock.core.types import AuditFinding, DrafterDown, DraftOrder, Output, Request
from penstock.serving.client import EngineClient
from penstock.serving.draft_access import Audits, ConnectionLimits, Identities, Identity, peer_of
from penstock.serving.draft_streams import (
    DraftedRequest,
    DraftStream,
    EdgeRequest,
    Meter,
    StreamEnd,
)
from penstock.serving.messages import DraftOrders, RemoteDraft, RequestText
from penstock.transport import service
from penstock.transport.checks import Limits, Refusal, TokenBucket
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import PrefixDigest

# Limits against faulty peers; conventions.
_MAX_STREAMS_EACH = 16
_HELLO_TIMEOUT_S, _FLUSH_S, _STOP_GRACE_S = 10.0, 1.0, 1.0
_USELESS_PER_S, _USELESS_PAUSE_S = 100.0, 0.05
_REJECTION_DELAY_S, _MAX_DELAYED_REJECTIONS = 1.0, 512

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SendTimes:
    """Sums of seconds from the engine's verdict until it is written to the stream."""

    seconds: float = 0.0
    num_verdicts: int = 0

    def add(self, started_at: float) -> None:
        self.seconds += time.perf_counter() - started_at
        self.num_verdicts += 1


class _Assigned(NamedTuple):
    """A request at a draft server."""

    stream: DraftStream
    request: DraftedRequest

    def order(self, order: DraftOrder) -> None:
        self.stream.order(self.request, order)

    def on_output(self, output: Output) -> bool:
        """Send verified tokens. False: the stream has failed."""
        return self.stream.attempt(partial(self.stream.send_verdict, self.request, output))

    def release(self) -> None:
        self.stream.attempt(partial(self.stream.release, self.request))


@dataclass(slots=True, eq=False)
class _CentralRequest:
    """Request of this server's own endpoint for which drafts have been ordered.

    now: where it is drafted for; next: at the server that has its text before a switch."""

    known: RequestText
    token_ids: list[int]
    now: _Assigned | None = None
    next: _Assigned | None = None

    @property
    def assigned(self) -> list[_Assigned]:
        return [a for a in (self.now, self.next) if a is not None]

    def assign(self, stream: DraftStream, order: DraftOrder) -> _Assigned:
        """Send a server the text with its first order."""
        sampling, prefix = self.known.sampling, PrefixDigest(self.token_ids)
        request = stream.assign(order.request_id, prefix, weighted=sampling.is_ratio)
        stream.order(request, order, (self.token_ids, sampling))
        return _Assigned(stream, request)

    def leave(self, stream: DraftStream) -> None:
        """Forget what a stream that ends had."""
        self.now = None if self.now is not None and self.now.stream is stream else self.now
        self.next = None if self.next is not None and self.next.stream is stream else self.next


class DraftHub:
    """Routes orders and verdicts to draft servers' streams, drafts and requests to the engine.

    target, tokenizer_digest: the target's name for users, and its tokenizer. new_meter: called for
    every request of edge ingress."""

    def __init__(
        self,
        client: EngineClient,
        target: str,
        tokenizer_digest: str,
        tenants: Mapping[str, TenantConfig],
        config: DraftersConfig,
        new_meter: Callable[[Request], Meter],
    ) -> None:
        self.client = client
        self.target = target
        self.tokenizer_digest = tokenizer_digest
        self.new_meter = new_meter
        self.send_times = SendTimes()
        self.audits = Audits(config.audit_share, client.info.drafters)
        self.connections = ConnectionLimits(config)
        self.tenants = tenants
        self._useless: dict[str, TokenBucket] = {}
        self._streams: dict[str, DraftStream] = {}
        self._central: dict[str, _CentralRequest] = {}
        self._serial = itertools.count()
        client.follow(self)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The scheduler's names of connected draft servers."""
        return tuple(self._streams)

    def join(self, stream: DraftStream) -> str:
        """Register a stream; returns its name for the scheduler. Raises: Refusal."""
        base = stream.identity.name
        names = (base, *(f"{base}#{n}" for n in range(2, _MAX_STREAMS_EACH + 1)))
        taken = {*self._streams, *self.client.info.drafters}
        name = next((n for n in names if n not in taken), None)
        if name is None:
            raise Refusal(f"{base} has {_MAX_STREAMS_EACH} streams open; no more are allowed")
        self._streams[name] = stream
        return name

    def leave(self, stream: DraftStream) -> None:
        """Remove a stream with its edge requests; those of central ingress go on without it."""
        stream.close()
        if stream.drafter is None:
            return
        del self._streams[stream.drafter]
        for request in self._central.values():
            request.leave(stream)
        self.client.post(DrafterDown(stream.drafter))

    def may_send_useless(self, name: str) -> bool:
        """Return whether a draft server may send one more repeated or late message."""
        now = time.perf_counter()
        if name not in self._useless:
            self._useless[name] = TokenBucket(_USELESS_PER_S, now)
        return self._useless[name].spend(1, now)

    def new_engine_id(self, drafter: str) -> str:
        """Return an id that is never used again, so that late outputs cannot be misrouted."""
        return f"{drafter}/{next(self._serial)}"

    def end_all(self, reason: str) -> None:
        """End every stream; draft servers connect again and go on where they were."""
        for stream in self._streams.values():
            stream.end(grpc.StatusCode.UNAVAILABLE, reason)

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        if not self._central:
            return
        for output in outputs:
            request = self._central.get(output.request_id)
            if request is None:
                continue
            request.token_ids += output.token_ids
            is_over = output.finish_reason is not None
            if is_over or not all([assigned.on_output(output) for assigned in request.assigned]):
                for assigned in request.assigned:
                    assigned.release()
                del self._central[output.request_id]

    def on_orders(self, orders: DraftOrders) -> None:
        for request_id, known in orders.new_requests.items():
            sink = self.client.sink_of(request_id)
            if sink is not None and not isinstance(sink, EdgeRequest):
                self._central[request_id] = _CentralRequest(known, list(known.token_ids))
        for order in orders.orders:
            stream = self._streams.get(order.drafter)
            if stream is not None and not stream.attempt(partial(self._order, stream, order)):
                # It would fail with another draft server, too.
                self._central.pop(order.request_id, None)

    def on_finding(self, finding: AuditFinding) -> None:
        stream = self._streams.get(finding.drafter)
        if stream is None or not self.audits.count(stream.identity.name, finding):
            return
        name = stream.identity.name
        _log.warning("draft server %s fails its audits and is no longer trusted", name)
        for other in self._streams.values():
            if other.identity.name == name:
                other.end(grpc.StatusCode.UNAVAILABLE, "audits failed; connect again, untrusted")

    def on_engine_lost(self) -> None:
        self._central.clear()
        self.end_all("the engine is being restarted; connect again")

    def on_drain(self) -> None:
        """End the streams: edge requests go on with the next server, others without drafts."""
        self.end_all("the verification server is shutting down")

    def _order(self, stream: DraftStream, order: DraftOrder) -> None:
        sink = self.client.sink_of(order.request_id)
        request = self._central.get(order.request_id)
        if isinstance(sink, EdgeRequest):
            stream.order(sink, order)
        elif request is None or not self._may_draft(stream, request.known):
            nothing = RemoteDraft(order.request_id, order.epoch, order.round, order.drafter)
            self.client.post(nothing)
        elif order.max_draft_tokens:
            self._draft(request, stream, order)
        else:
            self._send_text(request, stream, order)

    def _draft(self, request: _CentralRequest, stream: DraftStream, order: DraftOrder) -> None:
        """Pass an order on, with the text if the server has not got it; the one before ends."""
        if request.now is not None and request.now.stream is stream:
            request.now.order(order)
            return
        if request.now is not None:
            request.now.release()
        if request.next is not None and request.next.stream is stream:
            request.now, request.next = request.next, None
            request.now.order(order)
        else:
            request.now = request.assign(stream, order)

    def _send_text(self, request: _CentralRequest, stream: DraftStream, order: DraftOrder) -> None:
        """Let a server read a text before the first order for a draft behind it."""
        if any(assigned.stream is stream for assigned in request.assigned):
            return
        if request.next is not None:
            request.next.release()
        request.next = request.assign(stream, order)

    def _may_draft(self, stream: DraftStream, known: RequestText) -> bool:
        """Return whether a server may see a request and cannot change its output."""
        owner = self.tenants.get(known.tenant)
        shared = owner is not None and owner.share_prompts
        return (
            stream.takes_assignments
            and (shared or known.tenant == stream.identity.tenant)
            and (stream.identity.trusted or known.sampling.verification == "coupled")
        )


class VerificationServer:
    """Server for draft servers. Bound at once, else raises ConfigError; `start` begins to serve."""

    def __init__(self, config: DraftersConfig) -> None:
        self.config = config
        self._identities = Identities(config)
        self._hub: DraftHub | None = None
        self._num_delayed = 0
        self._server = grpc.aio.server(
            options=service.server_options(), compression=grpc.Compression.NoCompression
        )
        service.add_service(self._server, self._connect)
        self.address = f"{config.listen.rpartition(':')[0]}:{self._bind()}"

    def _bind(self) -> int:
        listen, tls = self.config.listen, self.config.tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                credentials = service.server_credentials(tls.certificate, tls.key, tls.client_ca)
                port = self._server.add_secure_port(listen, credentials)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {listen} for draft servers") from error
        return int(port)

    async def start(self, hub: DraftHub) -> None:
        """Accept streams. `hub`: of a client whose engine is loaded."""
        self._hub = hub
        await self._server.start()

    async def close(self) -> None:
        """End all streams, and stop listening."""
        if self._hub is not None:
            self._hub.on_drain()
        await self._server.stop(_STOP_GRACE_S)

    async def _connect(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        hub = self._hub
        assert hub is not None
        identity = await self._admit(hub.connections, context)
        if hub.client.problem is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, hub.client.problem)
        info = hub.client.info
        limits = Limits(
            info.vocab_size,
            info.max_request_tokens,
            max_open_requests=self.config.max_open_requests,
            max_messages_per_s=self.config.max_messages_per_s,
        )
        if identity.name in hub.audits.demoted:
            identity = identity._replace(trusted=False)
        stream = DraftStream(hub, identity, limits)
        end = await _run(stream, hub, messages, context)
        if end is not None:
            await context.abort(end.code, end.reason)

    async def _admit(
        self, limits: ConnectionLimits, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> Identity:
        """Return the peer's identity; abort an unknown peer, or one that connects too often."""
        peer = peer_of(context)
        try:
            identity = self._identities.identify(peer)
        except Refusal as refusal:
            too_often = limits.check_unauthenticated(peer.network)
            if too_often is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal.reason)
        else:
            too_often = limits.check_authenticated(identity.name)
            if too_often is None:
                return identity
        await self._delay_rejection()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, too_often)

    async def _delay_rejection(self) -> None:
        """Delay a rejection, to slow further attempts; only so many, since each costs memory."""
        if self._num_delayed >= _MAX_DELAYED_REJECTIONS:
            return
        self._num_delayed += 1
        try:
            await asyncio.sleep(_REJECTION_DELAY_S)
        finally:
            self._num_delayed -= 1


async def _run(
    stream: DraftStream,
    hub: DraftHub,
    messages: AsyncIterator[bytes],
    context: grpc.aio.ServicerContext[bytes, bytes],
) -> StreamEnd | None:
    """Serve a stream to its end; returns why this side ended it, if it did."""
    reader = asyncio.create_task(_read(stream, hub, messages))
    writer = asyncio.create_task(_write(stream, hub.send_times, context))
    hello = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, _expect_hello, stream)
    tasks: list[asyncio.Future[Any]] = [reader, writer, stream.ended]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hello.cancel()
        reader.cancel()
        if stream.ended.done():
            name = stream.drafter or stream.identity.name
            _log.info("draft server %s: %s", name, stream.ended.result().reason)
        hub.leave(stream)
        try:
            if not stream.ended.done():
                stream.outbox.close()
            # gRPC cannot send the peer the status while a message is being written.
            if not writer.done():
                await asyncio.wait({writer}, timeout=_FLUSH_S)
        finally:
            writer.cancel()
            failed, _ = await asyncio.gather(reader, writer, return_exceptions=True)
            _report(stream, failed)
    return stream.ended.result() if stream.ended.done() else None


async def _read(stream: DraftStream, hub: DraftHub, messages: AsyncIterator[bytes]) -> None:
    async for data in messages:
        try:
            is_of_use = stream.receive(data)
        except Refusal as refusal:
            is_of_use = False
            refused = pb.Refused(
                request_id=refusal.request_id, reason=refusal.reason, code=refusal.code
            )
            stream.send(pb.Down(refused=refused))
            if not refusal.request_id:
                stream.end(grpc.StatusCode.INVALID_ARGUMENT, refusal.reason)
                return
        if not is_of_use and not hub.may_send_useless(stream.identity.name):
            # A pause in reading: flow control keeps further messages at the sender.
            await asyncio.sleep(_USELESS_PAUSE_S)


def _report(stream: DraftStream, failed: BaseException | None) -> None:
    if isinstance(failed, Exception) and not isinstance(failed, grpc.RpcError):
        _log.error("draft server %s: %r", stream.drafter, failed, exc_info=failed)


async def _write(
    stream: DraftStream, times: SendTimes, context: grpc.aio.ServicerContext[bytes, bytes]
) -> None:
    while (waiting := await stream.outbox.get()) is not None:
        data, verdict_at = waiting
        await context.write(data)
        if verdict_at is not None:
            times.add(verdict_at)


def _expect_hello(stream: DraftStream) -> None:
    if stream.drafter is None:
        stream.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_TIMEOUT_S:g} s")
