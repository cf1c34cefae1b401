"""State of one connected draft server: permissions, open requests, outgoing messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import grpc

from penstock.core.types import (
    DraftAhead,
    DrafterUp,
    DraftOrder,
    FinishReason,
    LatencyTarget,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.serving.client import EngineClient, EngineUnavailable
from penstock.serving.draft_access import Audits, Identity
from penstock.serving.limits import NotAllowed, QueueFull, RateLimited
from penstock.serving.messages import RemoteDraft
from penstock.transport.checks import (
    ASSIGNED_PREFIX,
    ExpectedDraft,
    Limits,
    Refusal,
    TokenBucket,
    answers,
    check_draft,
    check_hello,
    check_lines,
    check_open,
    parse,
)
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import (
    PrefixDigest,
    decode_pieces,
    decode_sampling,
    decode_stop,
    decode_weights,
    encode_logprobs,
    encode_sampling,
    in_effect,
)

_MAX_QUEUED_MESSAGES = 4096
_MAX_QUEUED_BYTES = 16 << 20

_log = logging.getLogger(__name__)


class StreamEnd(NamedTuple):
    """Status and reason with which a stream is ended."""

    code: grpc.StatusCode
    reason: str


class Meter(Protocol):
    """Counter of one request's results."""

    def on_output(self, output: Output) -> None: ...
    def finish(self, reason: FinishReason) -> None: ...


class Outbox:
    """Bounded queue of outgoing messages, so that a slow reader cannot use up memory."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[bytes, float | None] | None] = asyncio.Queue()
        self._num_bytes = 0

    def put(self, message: pb.Down, verdict_at: float | None = None) -> bool:
        """Return False without room. verdict_at: time of the verdict in the message, if any."""
        data = message.SerializeToString()
        num_bytes = self._num_bytes + len(data)
        if self._waiting.qsize() >= _MAX_QUEUED_MESSAGES or num_bytes > _MAX_QUEUED_BYTES:
            return False
        self._num_bytes = num_bytes
        self._waiting.put_nowait((data, verdict_at))
        return True

    def close(self) -> None:
        """Close the outbox behind its messages."""
        self._waiting.put_nowait(None)

    async def get(self) -> tuple[bytes, float | None] | None:
        """Return the oldest message; None when the outbox is empty and closed."""
        waiting = await self._waiting.get()
        if waiting is not None:
            self._num_bytes -= len(waiting[0])
        return waiting


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """Request that a draft server drafts for. `prefix`: the verified text."""

    wire_id: str
    engine_id: str
    prefix: PrefixDigest
    weighted: bool
    order: ExpectedDraft | None = None


@dataclass(slots=True, eq=False)
class EdgeRequest(DraftedRequest):
    """Request of the draft server's own user; receives the engine's outputs."""

    stream: DraftStream = field(kw_only=True)
    meter: Meter = field(kw_only=True)

    def put(self, output: Output) -> None:
        self.stream.attempt(partial(self.stream.on_output, self, output))


class Hub(Protocol):
    """Shared by all streams: the engine and its description.

    target, tokenizer_digest: the target's name for users, and its tokenizer. join: registers a
    stream and returns its name for the scheduler. Raises: Refusal."""

    client: EngineClient
    target: str
    tokenizer_digest: str
    audits: Audits
    new_meter: Callable[[Request], Meter]

    def join(self, stream: DraftStream) -> str: ...
    def new_engine_id(self, drafter: str) -> str: ...


class DraftStream:
    """State of one stream, without I/O: messages come in by `receive`, and leave by `outbox`."""

    def __init__(self, hub: Hub, identity: Identity, limits: Limits) -> None:
        self.identity = identity
        self.limits = limits
        self.outbox = Outbox()
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self.drafter: str | None = None
        """The scheduler's name of it; None before its `Hello`."""
        self.takes_assignments = False
        self.model_name = ""
        self._hub = hub
        self._edge: dict[str, EdgeRequest] = {}
        self._assigned: dict[str, DraftedRequest] = {}
        self._num_assigned = 0
        self._num_late = 0
        self._longest = 0
        self._welcomed_at: float | None = None
        """Time of a `Welcome` that was not answered."""
        now = time.perf_counter()
        self._messages = TokenBucket(limits.max_messages_per_s, now)
        self._bytes = TokenBucket(limits.max_bytes_per_s, now)

    def receive(self, data: bytes) -> bool:
        """Process a message; False if it was useless. The first one after `Welcome` answers it.

        Raises: Refusal; without a request id the stream must end."""
        now = time.perf_counter()
        if not self._messages.spend(1, now) or not self._bytes.spend(len(data), now):
            raise Refusal(
                f"too many messages: at most {self.limits.max_messages_per_s:g} and "
                f"{self.limits.max_bytes_per_s:g} bytes a second"
            )
        message = parse(data, self.limits)
        kind = message.WhichOneof("message")
        if (kind == "hello") is not (self.drafter is None):
            raise Refusal("hello must be the first message, and come once")
        is_answer = self._welcomed_at is not None
        if self._welcomed_at is not None:
            # Not before: with a link of unknown length the first round would wait for it.
            self._post_up(now - self._welcomed_at)
            self._welcomed_at = None
        if kind == "hello":
            self._hello(message.hello)
        elif kind == "open":
            self._open(message.open)
        elif kind == "draft":
            return self._draft(message.draft)
        elif kind == "ahead":
            return self._ahead(message.ahead) or is_answer
        else:
            self._close(message.close.request_id)
        return True

    def _hello(self, hello: pb.Hello) -> None:
        check_hello(hello, self._hub.tokenizer_digest)
        self.takes_assignments = hello.takes_assignments
        self.model_name = hello.model_name
        self._longest = min(hello.max_draft_tokens, self.limits.max_draft_tokens)
        self.drafter = self._hub.join(self)
        welcome = self.limits.welcome(
            self.drafter,
            self._hub.target,
            self._hub.client.info.eos_token_ids,
            trusted=self.identity.trusted,
        )
        self.send(pb.Down(welcome=welcome))
        self._welcomed_at = time.perf_counter()

    def _post_up(self, round_trip_s: float) -> None:
        assert self.drafter is not None
        tenant, takes = self.identity.tenant, self.takes_assignments
        most = self.identity.max_num_seqs
        up = DrafterUp(self.drafter, self._longest, tenant, takes, round_trip_s, most)
        self._hub.client.post(up)

    def _open(self, message: pb.Open) -> None:
        check_open(message, self.limits, self._edge)
        assert self.drafter is not None
        num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
        sampling = decode_sampling(message.sampling, num_logprobs)
        request = Request(
            id=self._hub.new_engine_id(self.drafter),
            prompt_len=len(message.prompt_token_ids),
            max_tokens=message.max_tokens,
            tenant=self.identity.tenant,
            prompt_token_ids=tuple(message.prompt_token_ids),
            stop_token_ids=frozenset(message.stop_token_ids),
            sampling=in_effect(sampling, trusted=self.identity.trusted),
            drafter=self.drafter,
            expected_output_tokens=message.expected_output_tokens or None,
            latency=LatencyTarget(message.tpot or None, message.deadline or None),
            stop=decode_stop(message.stop) if message.HasField("stop") else None,
        )
        opened = EdgeRequest(
            message.request_id,
            request.id,
            PrefixDigest(message.prompt_token_ids),
            weighted=request.sampling.is_ratio,
            stream=self,
            meter=self._hub.new_meter(request),
        )
        try:
            self._hub.client.submit_now(self.identity.client, request, opened)
        except NotAllowed as error:
            raise Refusal(str(error), message.request_id) from error
        except (QueueFull, RateLimited) as error:
            raise Refusal(str(error), message.request_id, pb.Refused.BUSY) from error
        except EngineUnavailable as error:
            raise Refusal(str(error), message.request_id, pb.Refused.UNAVAILABLE) from error
        self._edge[message.request_id] = opened
        self.send(pb.Down(opened=pb.Opened(request_id=message.request_id)))

    def _draft(self, draft: pb.DraftTokens) -> bool:
        request = self._edge.get(draft.request_id) or self._assigned.get(draft.request_id)
        if request is None:
            self._note_late_answer()
            raise Refusal("this stream has no such request open", draft.request_id[:64])
        order = request.order
        if order is None or not answers(draft, order):
            self._note_late_answer()
            return False
        try:
            check_draft(draft, self.limits, order, request.prefix)
        except Refusal:
            self._answer(request, order)
            raise
        weights = decode_weights(draft.weights) if order.weighted else None
        self._answer(request, order, tuple(draft.token_ids), weights)
        return True

    def _answer(
        self,
        request: DraftedRequest,
        order: ExpectedDraft,
        token_ids: tuple[int, ...] = (),
        weights: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None = None,
    ) -> None:
        request.order = None
        assert self.drafter is not None
        self._hub.client.post(
            RemoteDraft(
                request.engine_id,
                order.epoch,
                order.round,
                self.drafter,
                token_ids,
                weights,
                audit=self._hub.audits.choose(self.model_name) if token_ids else None,
                prefix_len=request.prefix.length,
            )
        )

    def _ahead(self, ahead: pb.DraftAhead) -> bool:
        """Pass on drafts ahead; drafts for unknown requests are dropped without penalty."""
        assert self.drafter is not None
        is_of_use = False
        for lines in ahead.lines:
            request = self._edge.get(lines.request_id) or self._assigned.get(lines.request_id)
            if request is None:
                continue
            check_lines(lines, self.limits, weighted=request.weighted)
            pieces = decode_pieces(lines.pieces)
            self._hub.client.post(DraftAhead(request.engine_id, self.drafter, pieces))
            is_of_use = True
        return is_of_use

    def _note_late_answer(self) -> None:
        """Tell the engine that the server is alive: it answered a withdrawn order."""
        if self._num_late and self.drafter is not None:
            self._num_late -= 1
            self._hub.client.post(RemoteDraft("", 0, 0, self.drafter))

    def _close(self, wire_id: str) -> None:
        request = self._edge.get(wire_id)
        if request is None:
            raise Refusal("this stream has no such request open", wire_id[:64])
        self._cancel(request)

    def _cancel(self, request: EdgeRequest) -> None:
        self._forget(request)
        self._hub.client.cancel(request.engine_id)
        request.meter.finish(FinishReason.CANCELLED)

    def _forget(self, request: DraftedRequest) -> None:
        self._edge.pop(request.wire_id, None)
        self._assigned.pop(request.wire_id, None)
        self._void(request)

    def _void(self, request: DraftedRequest) -> None:
        """Withdraw the open order: its draft would come too late."""
        self._num_late += request.order is not None
        request.order = None

    def send(self, message: pb.Down, verdict_at: float | None = None) -> None:
        if not self.ended.done() and not self.outbox.put(message, verdict_at):
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "the draft server reads too slowly")

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream; only the reason is still sent."""
        if not self.ended.done():
            self.ended.set_result(StreamEnd(code, reason))

    def attempt(self, action: Callable[[], None]) -> bool:
        """Run an action for this stream; a failure ends only this stream, and returns False."""
        try:
            action()
        except Exception:
            _log.exception("draft server %s: an error ends its stream", self.drafter)
            self.end(grpc.StatusCode.INTERNAL, "an error in the verification server")
            return False
        return True

    def on_output(self, request: EdgeRequest, output: Output) -> None:
        """Process an output of a request of edge ingress."""
        if self.ended.done():
            # It is opened again over the next stream, even after an error.
            return
        request.meter.on_output(output)
        self.send_verdict(request, output, output.logprobs)
        if output.finish_reason is not None:
            request.meter.finish(output.finish_reason)
            self._forget(request)

    def send_verdict(
        self, request: DraftedRequest, output: Output, logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Send verified tokens. `logprobs`: for a request of the server's own user only."""
        verdict = pb.VerifiedTokens(
            request_id=request.wire_id,
            start=request.prefix.length,
            token_ids=output.token_ids,
            num_accepted=output.num_accepted,
            num_drafted=output.num_proposed,
            finish_reason=output.finish_reason or "",
            reason=output.error or "",
            logprobs=encode_logprobs(logprobs),
            num_stop_chars=output.num_stop_chars,
        )
        request.prefix.extend(output.token_ids)
        self._void(request)
        self.send(pb.Down(verdict=verdict), time.perf_counter())

    def assign(self, engine_id: str, prefix: PrefixDigest, *, weighted: bool) -> DraftedRequest:
        """Return a new assignment of a request of central ingress to this server."""
        self._num_assigned += 1
        wire_id = f"{ASSIGNED_PREFIX}{self._num_assigned}"
        request = DraftedRequest(wire_id, engine_id, prefix, weighted)
        self._assigned[wire_id] = request
        return request

    def release(self, request: DraftedRequest) -> None:
        """End an assignment of a request of central ingress."""
        self._forget(request)
        self.send(pb.Down(release=pb.Release(request_id=request.wire_id)))

    def order(
        self,
        request: DraftedRequest,
        order: DraftOrder,
        text: tuple[list[int], SamplingParams] | None = None,
    ) -> None:
        """Send an order, which gets no answer where it is for no draft, but a text to read.

        text: prefix and sampling, if they are new to the server."""
        self._void(request)
        if order.max_draft_tokens:
            request.order = ExpectedDraft(
                order.epoch, order.round, order.max_draft_tokens, request.weighted
            )
        assign = pb.Assign(
            request_id=request.wire_id,
            epoch=order.epoch,
            round=order.round,
            prefix_len=request.prefix.length,
            num_draft_tokens=order.max_draft_tokens,
            min_survival=order.min_survival,
        )
        if text is not None:
            token_ids, sampling = text
            assign.prefix_token_ids.extend(token_ids)
            assign.sampling.CopyFrom(encode_sampling(sampling))
        self.send(pb.Down(assign=assign))

    def close(self) -> None:
        """Cancel all requests: own users' ones are opened again over another stream."""
        for request in list(self._edge.values()):
            self._cancel(request)
        self._assigned.clear()
        self.outbox.close()
