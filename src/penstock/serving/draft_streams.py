"""One connected draft server: what it may do, what it has open, what waits to be sent to it."""

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
    """Why a stream is ended."""

    code: grpc.StatusCode
    reason: str


class Meter(Protocol):
    """Counts what becomes of one request."""

    def observe(self, output: Output) -> None: ...
    def finish(self, reason: FinishReason) -> None: ...


class Outbox:
    """Messages that wait to be written, bounded: a reader that is too slow must not cost memory."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[bytes, float | None] | None] = asyncio.Queue()
        self._num_bytes = 0

    def put(self, message: pb.Down, verdict_at: float | None = None) -> bool:
        """False where there is no room. verdict_at: when the verdict in it came, if any."""
        data = message.SerializeToString()
        num_bytes = self._num_bytes + len(data)
        if self._waiting.qsize() >= _MAX_QUEUED_MESSAGES or num_bytes > _MAX_QUEUED_BYTES:
            return False
        self._num_bytes = num_bytes
        self._waiting.put_nowait((data, verdict_at))
        return True

    def close(self) -> None:
        """Nothing more comes."""
        self._waiting.put_nowait(None)

    async def get(self) -> tuple[bytes, float | None] | None:
        """The oldest message; None when all are out and the box is closed."""
        waiting = await self._waiting.get()
        if waiting is not None:
            self._num_bytes -= len(waiting[0])
        return waiting


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """A request as its draft server sees it. `prefix`: the verified text."""

    wire_id: str
    engine_id: str
    prefix: PrefixDigest
    weighted: bool
    order: ExpectedDraft | None = None


@dataclass(slots=True, eq=False)
class EdgeRequest(DraftedRequest):
    """A request of the draft server's own user; the engine's outputs for it come here."""

    stream: DraftStream = field(kw_only=True)
    meter: Meter = field(kw_only=True)

    def put(self, output: Output) -> None:
        self.stream.attempt(partial(self.stream.on_output, self, output))


class Hub(Protocol):
    """What all streams share: the engine, and what is told of it.

    target, tokenizer_digest: its name for users, and its tokenizer. join: makes a stream known to
    the scheduler, under the name that is returned. Raises: Refusal.
    """

    client: EngineClient
    target: str
    tokenizer_digest: str
    audits: Audits
    new_meter: Callable[[Request], Meter]

    def join(self, stream: DraftStream, max_draft_tokens: int) -> str: ...
    def new_engine_id(self, drafter: str) -> str: ...


class DraftStream:
    """The state of one stream. No I/O: messages come in by `receive`, and leave by `outbox`."""

    def __init__(self, hub: Hub, identity: Identity, limits: Limits) -> None:
        self.identity = identity
        self.limits = limits
        self.outbox = Outbox()
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self.drafter: str | None = None
        """The name that the scheduler knows it by; None before its `Hello`."""
        self.takes_assignments = False
        self.model_name = ""
        self._hub = hub
        self._edge: dict[str, EdgeRequest] = {}
        self._assigned: dict[str, DraftedRequest] = {}
        self._num_assigned = 0
        self._num_late = 0
        now = time.perf_counter()
        self._messages = TokenBucket(limits.max_messages_per_s, now)
        self._bytes = TokenBucket(limits.max_bytes_per_s, now)

    # --- up -------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> bool:
        """Act on a message; False where it was of no use. Raises: Refusal; without a request id the
        stream must end."""
        now = time.perf_counter()
        if not self._messages.take(1, now) or not self._bytes.take(len(data), now):
            raise Refusal(
                f"too many messages: at most {self.limits.max_messages_per_s:g} and "
                f"{self.limits.max_bytes_per_s:g} bytes a second"
            )
        message = parse(data, self.limits)
        kind = message.WhichOneof("message")
        if (kind == "hello") is not (self.drafter is None):
            raise Refusal("hello must be the first message, and come once")
        if kind == "hello":
            self._hello(message.hello)
        elif kind == "open":
            self._open(message.open)
        elif kind == "draft":
            return self._draft(message.draft)
        elif kind == "ahead":
            return self._ahead(message.ahead)
        else:
            self._close(message.close.request_id)
        return True

    def _hello(self, hello: pb.Hello) -> None:
        check_hello(hello, self._hub.tokenizer_digest)
        self.takes_assignments = hello.takes_assignments
        self.model_name = hello.model_name
        longest = min(hello.max_draft_tokens, self.limits.max_draft_tokens)
        self.drafter = self._hub.join(self, longest)
        welcome = self.limits.welcome(
            self.drafter,
            self._hub.target,
            self._hub.client.info.eos_token_ids,
            trusted=self.identity.trusted,
        )
        self.send(pb.Down(welcome=welcome))

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
        """What goes on from a text that has taken another turn meanwhile is nobody's fault."""
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
        """A late answer to an order that was withdrawn: the engine learns that the server lives."""
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

    # --- down -----------------------------------------------------------------------------------

    def send(self, message: pb.Down, verdict_at: float | None = None) -> None:
        if not self.ended.done() and not self.outbox.put(message, verdict_at):
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "the draft server reads too slowly")

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """Nothing more is sent but the reason."""
        if not self.ended.done():
            self.ended.set_result(StreamEnd(code, reason))

    def attempt(self, action: Callable[[], None]) -> bool:
        """Do what a message of the engine asks of this stream; False where that fails. Then this
        stream ends, and nothing else: the engine's connection would not outlive the error."""
        try:
            action()
        except Exception:
            _log.exception("draft server %s: an error ends its stream", self.drafter)
            self.end(grpc.StatusCode.INTERNAL, "an error in the verification server")
            return False
        return True

    def on_output(self, request: EdgeRequest, output: Output) -> None:
        """What the engine says of a request of edge ingress."""
        if self.ended.done():
            # It is opened again over the next stream; even an error is not its end.
            return
        request.meter.observe(output)
        self.send_verdict(request, output, output.logprobs)
        if output.finish_reason is not None:
            request.meter.finish(output.finish_reason)
            self._forget(request)

    def send_verdict(
        self, request: DraftedRequest, output: Output, logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """`logprobs`: for whom the request is its own; no draft server needs those of others."""
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
        """A request of central ingress that this server drafts for from now on."""
        self._num_assigned += 1
        wire_id = f"{ASSIGNED_PREFIX}{self._num_assigned}"
        request = DraftedRequest(wire_id, engine_id, prefix, weighted)
        self._assigned[wire_id] = request
        return request

    def release(self, request: DraftedRequest) -> None:
        """It no longer drafts for a request of central ingress."""
        self._forget(request)
        self.send(pb.Down(release=pb.Release(request_id=request.wire_id)))

    def order(
        self,
        request: DraftedRequest,
        order: DraftOrder,
        text: tuple[list[int], SamplingParams] | None = None,
    ) -> None:
        """Let it draft. `text`: prefix and sampling, where it has not seen them."""
        self._void(request)
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
        """The stream is gone: its own users' requests are opened again over another one."""
        for request in list(self._edge.values()):
            self._cancel(request)
        self._assigned.clear()
        self.outbox.close()
