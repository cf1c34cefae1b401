"""Traces of requests, kept in memory."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.api.http import trace_parent
from penstock.api.metrics import Metrics, RequestMeter
from penstock.api.tracing import Tracer
from penstock.core.types import FinishReason, Output, Request
from penstock.serving.logs import request_id

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def nothing_is_served() -> Iterator[None]:
    yield
    request_id.set(None)
    trace_parent.set(None)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def metrics(spans: InMemorySpanExporter) -> Metrics:
    made = Metrics("toy")
    made.tracer = Tracer("toy", SimpleSpanProcessor(spans))
    return made


def test_queue_prefill_and_rounds(metrics: Metrics, spans: InMemorySpanExporter) -> None:
    request_id.set("mine")
    trace_parent.set(PARENT)
    meter = RequestMeter(metrics, Request("r", 3, 100, tenant="us"))
    meter.on_output(Output("r", (7,), 1, queued_s=0.0))
    meter.on_output(Output("r", (8, 9), 2, drafter="small", num_proposed=4, num_accepted=1))
    meter.finish(FinishReason.STOP)
    meter.finish(FinishReason.STOP)
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert [*by_name] == ["queue", "prefill", "decode", "llm_request"]
    root = by_name["llm_request"]
    assert root.context is not None
    assert f"{root.parent.trace_id:032x}" in PARENT
    assert f"{root.parent.span_id:016x}" in PARENT
    for name in ("queue", "prefill", "decode"):
        inner = by_name[name].parent
        assert inner.span_id == root.context.span_id
    queue, prefill, decode = (by_name[n] for n in ("queue", "prefill", "decode"))
    times = [queue.start_time, queue.end_time, prefill.end_time, decode.end_time, root.end_time]
    assert times == sorted(times, key=lambda t: t or 0)
    assert root.attributes["request_id"] == "mine"
    assert root.attributes["penstock.tenant"] == "us"
    assert root.attributes["gen_ai.usage.completion_tokens"] == 3
    assert [tuple((e.attributes or {}).values()) for e in decode.events] == [
        ("none", 1, 1, 0, 0),
        ("small", 1, 2, 4, 1),
    ]


def test_rounds_of_one_drafter_share_an_event(metrics, spans) -> None:
    meter = RequestMeter(metrics, Request("r", 3, 100))
    for drafter, num_rounds in ((None, 3), ("small", 20)):
        for _ in range(num_rounds):
            meter.on_output(Output("r", (7,), 1, drafter=drafter, num_proposed=2, num_accepted=0))
    meter.finish(FinishReason.LENGTH)
    decode = next(span for span in spans.get_finished_spans() if span.name == "decode")
    found = [dict(e.attributes or {}) for e in decode.events]
    # The first token is that of the prefill.
    assert [(e["drafter"], e["num_rounds"], e["num_draft_tokens"]) for e in found] == [
        ("none", 1, 2),
        ("none", 2, 4),
        ("small", 16, 32),
        ("small", 4, 8),
    ]
    times = [e.timestamp for e in decode.events]
    assert times == sorted(times)
    assert (decode.start_time, decode.end_time) == (times[0], times[-1])


def test_a_request_that_made_nothing(metrics: Metrics, spans: InMemorySpanExporter) -> None:
    RequestMeter(metrics, Request("r", 3, 100)).finish(FinishReason.CANCELLED)
    (span,) = spans.get_finished_spans()
    assert span.attributes["penstock.finish_reason"] == "cancelled"
    assert span.parent is None
