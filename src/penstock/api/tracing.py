"""OpenTelemetry traces of requests: queue, prefill and decode, without texts.

Needs `penstock[otel]`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.api.http import trace_parent
from penstock.core.types import FinishReason, Output, Request
from penstock.serving.logs import request_id

_ROUNDS = 16
"""Steps per event. An event takes 23 µs (measured): one per step would cost a small model a tenth
of its throughput."""


class Tracer:
    """Creates traces with vLLM's attribute names and sends them in the background."""

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "penstock"}))
        self._provider.add_span_processor(processor)
        self.model_name = model_name
        self.spans = self._provider.get_tracer("penstock")

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracer:
        """Return a tracer that sends to a collector's traces endpoint by OTLP over HTTP."""
        return cls(model_name, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def begin(self, request: Request) -> RequestTrace:
        """Start the trace of a request."""
        return RequestTrace(self, request)

    def close(self) -> None:
        """Flush and stop."""
        self._provider.shutdown()


class RequestTrace:
    """Trace of one request, whose spans are created when it ends.

    Times are the wall clock's at the arrival plus the steady clock's since.
    """

    def __init__(self, tracer: Tracer, request: Request) -> None:
        self._tracer = tracer
        self._request = request
        self._began_ns, self._began_at = time.time_ns(), time.perf_counter()
        self._request_id = request_id.get()
        parent = trace_parent.get()
        carrier = {} if parent is None else {"traceparent": parent}
        self._parent = TraceContextTextMapPropagator().extract(carrier)
        self._queued_s = 0.0
        self._rounds: list[_Rounds] = []

    def on_output(self, output: Output) -> None:
        drafter = output.drafter or "none"
        if not self._rounds:
            self._queued_s = output.queued_s
        # The first step ends the prefill and is an event of its own.
        last = self._rounds[-1] if len(self._rounds) > 1 else None
        if last is None or last.drafter != drafter or last.num_rounds == _ROUNDS:
            last = _Rounds(drafter)
            self._rounds.append(last)
        last.end = time.perf_counter()
        last.num_rounds += 1
        last.num_tokens += len(output.token_ids)
        last.num_draft_tokens += output.num_proposed
        last.num_accepted_tokens += output.num_accepted

    def finish(self, reason: FinishReason) -> None:
        """Create the spans."""
        request, end = self._request, self._ns(time.perf_counter())
        admitted = min(self._began_ns + int(self._queued_s * 1e9), end)
        root = self._tracer.spans.start_span(
            "llm_request",
            context=self._parent,
            kind=trace.SpanKind.SERVER,
            start_time=self._began_ns,
            attributes={
                "gen_ai.request.id": request.id,
                "gen_ai.response.model": self._tracer.model_name,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.usage.prompt_tokens": request.prompt_len,
                "gen_ai.usage.completion_tokens": sum(r.num_tokens for r in self._rounds),
                "gen_ai.latency.e2e": (end - self._began_ns) / 1e9,
                "penstock.tenant": request.tenant,
                "penstock.finish_reason": str(reason),
            },
        )
        if self._request_id is not None:
            root.set_attribute("request_id", self._request_id)
        inside = trace.set_span_in_context(root)
        spans = self._tracer.spans
        if self._rounds:
            first, last = self._ns(self._rounds[0].end), self._ns(self._rounds[-1].end)
            root.set_attribute("gen_ai.latency.time_in_queue", self._queued_s)
            root.set_attribute("gen_ai.latency.time_to_first_token", (first - self._began_ns) / 1e9)
            spans.start_span("queue", inside, start_time=self._began_ns).end(admitted)
            spans.start_span("prefill", inside, start_time=admitted).end(first)
            decode = spans.start_span("decode", inside, start_time=first)
            for rounds in self._rounds:
                decode.add_event("rounds", rounds.attributes(), self._ns(rounds.end))
            decode.end(last)
        root.end(end)

    def _ns(self, at: float) -> int:
        return self._began_ns + int((at - self._began_at) * 1e9)


@dataclass(slots=True)
class _Rounds:
    """Consecutive steps with one drafter. end: of the last, on the steady clock."""

    drafter: str
    end: float = 0.0
    num_rounds: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def attributes(self) -> dict[str, str | int]:
        return {
            "drafter": self.drafter,
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }
