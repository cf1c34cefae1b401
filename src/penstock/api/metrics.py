"""Prometheus metrics under vLLM's names, with the prefix `penstock:`; requests for the dashboard.

Gauges and the engine's counters come from its snapshot (`collectors`) and restart with its process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.api.collectors import EngineCollector, PositionCollector
from penstock.api.unknown_fields import UNNAMED
from penstock.core.types import LOOK_UP, NO_TARGET, PREDICTION, FinishReason, Output, Request
from penstock.serving.messages import EngineStats

if TYPE_CHECKING:
    from penstock.api.tracing import Tracer
    from penstock.serving.verification import DraftHub

JsonDict = dict[str, Any]

# Ended requests that are kept, and requests that are listed, for the dashboard.
_MAX_ENDED = 64
_MAX_TOLD = 40

# Bucket bounds in seconds, based on vLLM's, with finer ones for small models.
_FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20,
    40, 80, 160,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120,
    240, 480, 960,
)  # fmt: skip

MAX_IGNORED_FIELDS = 64
"""Names with a label of their own; clients choose them, so the others share one label."""

MAX_POSITIONS = 16
"""Draft positions with a label; later ones are not counted."""

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.REFUSED: "error",
    FinishReason.ERROR: "error",
}


_TENANT_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "embeddings": "Embeddings computed.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "latency_target_requests": "Finished requests with a latency target of their own.",
    "latency_target_met": "Finished requests that met their own latency target.",
}
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FEW = (1, 2, 5, 10, 20)
_TENANT_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": (
        "Time between a request's outputs; the tokens of a step are one output.",
        _BETWEEN_TOKENS_S,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time per token after the first, one value per request.",
        _BETWEEN_TOKENS_S,
    ),
    "request_queue_time_seconds": ("Time until a request was admitted.", _REQUEST_S),
    "request_prefill_time_seconds": ("Time from admission to the first token.", _REQUEST_S),
    "request_decode_time_seconds": ("Time from the first token to the last.", _REQUEST_S),
    "request_inference_time_seconds": ("Time from admission to the last token.", _REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _LENGTHS),
    "request_generation_tokens": ("Tokens generated for a request.", _LENGTHS),
    "request_params_max_tokens": ("max_tokens of a request.", _LENGTHS),
    "request_params_n": ("Choices of a response: n of each prompt.", _FEW),
    "request_max_num_generation_tokens": ("Tokens of a response's longest choice.", _LENGTHS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were not in the prefix cache.",
        _LENGTHS,
    ),
    "request_num_preemptions": ("Preemptions of a request.", (0, *_FEW)),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _REQUEST_S),
}
_OF_OUTPUT = {
    f"request_{x}" for x in ("decode_time_seconds", "generation_tokens", "params_max_tokens")
}
"""Histograms that an embedding, which has no output, is not in."""
_DRAFTER_COUNTERS = {
    "spec_decode_num_drafts": "Drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens proposed.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "drafter_requests": "Requests by their first drafter besides look-up.",
    "drafter_switches": "Switches of requests to this drafter from another.",
}


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.tracer: Tracer | None = None
        self._engine = EngineCollector(model_name)
        self.registry.register(self._engine)
        self._of_tenant: dict[str, Counter | Histogram] = {
            n: self._counter(n, text, "tenant") for n, text in _TENANT_COUNTERS.items()
        }
        self._of_tenant |= {
            name: self._histogram(name, text, buckets)
            for name, (text, buckets) in _TENANT_HISTOGRAMS.items()
        }
        self._of_drafter = {
            n: self._counter(n, text, "drafter") for n, text in _DRAFTER_COUNTERS.items()
        }
        self.finished = self._counter(
            "request_success", "Finished requests.", "tenant", "finished_reason"
        )
        self._by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by source.", "tenant", "source"
        )
        self._cached_by_source = self._counter(
            "prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by its location.",
            "tenant",
            "source",
        )
        self._ignored_fields = self._counter(
            "ignored_fields", "Requests with an ignored field, by its name.", "field"
        )
        self._ignored_names: set[str] = set()
        self.recent = RecentRequests()
        self.accepted: dict[str, list[int]] = {}
        """Number of drafts by accepted tokens, for each drafter."""
        self.registry.register(PositionCollector(model_name, self.accepted))
        # Cached: looking up labels takes longer than counting.
        self.tenant = cache(lambda name: self._children(self._of_tenant, tenant=name))
        self.sources = cache(
            lambda name: (
                self._by_source.labels(model_name, name, "local_compute"),
                self._by_source.labels(model_name, name, "local_cache_hit"),
                self._cached_by_source.labels(model_name, name, "device"),
            )
        )
        self.drafter = cache(lambda name: self._children(self._of_drafter, drafter=name))

    def count_draft(self, drafter: str, num_proposed: int, num_accepted: int) -> None:
        """Count a draft."""
        counters = self.drafter(drafter)
        counters["spec_decode_num_drafts"].inc()
        counters["spec_decode_num_draft_tokens"].inc(num_proposed)
        counters["spec_decode_num_accepted_tokens"].inc(num_accepted)
        by_length = self.accepted.setdefault(drafter, [0] * (MAX_POSITIONS + 1))
        by_length[min(num_accepted, MAX_POSITIONS)] += 1

    def count_ignored_fields(self, names: Iterable[str]) -> None:
        """Count a request's ignored fields, each once."""
        labels = set()
        for name in names:
            if len(self._ignored_names) < MAX_IGNORED_FIELDS:
                self._ignored_names.add(name)
            labels.add(name if name in self._ignored_names else UNNAMED)
        for label in labels:
            self._ignored_fields.labels(self.model_name, label).inc()

    def render(
        self,
        stats: EngineStats | None,
        *,
        is_up: bool,
        num_restarts: int,
        refused: Mapping[tuple[str, str], int] = MappingProxyType({}),
    ) -> bytes:
        """Return the exposition text. refused: rejected requests by tenant and reason."""
        self.know(stats, is_up, num_restarts, refused)
        return generate_latest(self.registry)

    def know(
        self, stats: EngineStats | None, is_up: bool, num_restarts: int, refused: Mapping[Any, int]
    ) -> None:
        """Take over the engine's state, as of `render`."""
        self._engine.refused = refused
        self._engine.stats = stats
        self._engine.is_up = is_up
        self._engine.num_restarts = num_restarts

    def follow(self, hub: DraftHub) -> None:
        """Include draft servers."""
        self._engine.hub = hub

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock:{name}", text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name", "tenant")
        return Histogram(f"penstock:{name}", text, labels, buckets=buckets, registry=self.registry)

    def _children(self, metrics: Mapping[str, Any], **labels: str) -> dict[str, Any]:
        return {n: m.labels(model_name=self.model_name, **labels) for n, m in metrics.items()}


class RequestMeter:
    """Metrics, trace and record of one engine request, from now on."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self.request = request
        metrics.recent.begin(self)
        self.tenant = metrics.tenant(request.tenant)
        self._arrived_at = time.perf_counter()
        self._first_at = 0.0
        self._last_at = 0.0
        self._queued_s = 0.0
        self._trace = None if metrics.tracer is None else metrics.tracer.begin(request)
        self.num_tokens = self._num_cached = self._num_preemptions = 0
        self._drafter: str | None = None
        self._drafts: dict[str, list[int]] = {}
        """Drafts, draft tokens and accepted tokens of each drafter."""
        self._is_finished = self.is_complete = False

    def on_output(self, output: Output) -> None:
        if self._trace is not None and output.token_ids:
            self._trace.on_output(output)
        if output.token_ids:
            self._time_tokens(time.perf_counter(), output)
        elif output.embedding:
            self._first_at = self._last_at = time.perf_counter()
            self._queued_s = output.queued_s
            self._count_prompt(self.request.prompt_len, output.num_cached_tokens)
            self.tenant["embeddings"].inc()
        self._num_preemptions += output.num_preemptions
        for drafter, num_proposed, num_accepted in output.drafts:
            self._metrics.count_draft(drafter, num_proposed, num_accepted)
            counts = self._drafts.setdefault(drafter, [0, 0, 0])
            counts[0] += 1
            counts[1] += num_proposed
            counts[2] += num_accepted
            if drafter not in (self._drafter, PREDICTION, LOOK_UP):
                name = "drafter_requests" if self._drafter is None else "drafter_switches"
                self._metrics.drafter(drafter)[name].inc()
                self._drafter = drafter

    def finish(self, reason: FinishReason) -> None:
        """Record the end, once."""
        if self._is_finished:
            return
        self._is_finished = True
        self.is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._trace is not None:
            self._trace.finish(reason)
        self._metrics.recent.end(self, reason)
        metrics = self._metrics
        metrics.finished.labels(metrics.model_name, self.request.tenant, _REASONS[reason]).inc()
        seconds, mean = time.perf_counter() - self._arrived_at, 0.0
        if self.num_tokens > 1:
            mean = (self._last_at - self._first_at) / (self.num_tokens - 1)
        if self.is_complete:
            self._observe_whole(seconds)
            if self.num_tokens > 1:
                self.tenant["request_time_per_output_token_seconds"].observe(mean)
        if self.request.latency != NO_TARGET and reason is not FinishReason.CANCELLED:
            self.tenant["latency_target_requests"].inc()
            if self.is_complete and self.request.latency.is_met(mean, seconds):
                self.tenant["latency_target_met"].inc()

    def describe(self, reason: FinishReason | None = None) -> JsonDict:
        """Return the request as the dashboard shows it. reason: of its end, if it has ended."""
        request = self.request
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        running = "running" if self.num_tokens else "waiting"
        return {
            "id": request.id,
            "tenant": request.tenant,
            "state": running if reason is None else "ended",
            "reason": reason,
            "seconds": time.perf_counter() - self._arrived_at,
            "num_prompt_tokens": request.prompt_len,
            "num_tokens": self.num_tokens,
            "asked": request.drafter,
            "drafters": {
                drafter: dict(zip(names, counts, strict=True))
                for drafter, counts in self._drafts.items()
            },
        }

    def _observe_whole(self, seconds: float) -> None:
        started_at = self._arrived_at + self._queued_s
        for name, value in (
            ("e2e_request_latency_seconds", seconds),
            ("request_queue_time_seconds", self._queued_s),
            ("request_prefill_time_seconds", max(0.0, self._first_at - started_at)),
            ("request_decode_time_seconds", self._last_at - self._first_at),
            ("request_inference_time_seconds", max(0.0, self._last_at - started_at)),
            ("request_prompt_tokens", self.request.prompt_len),
            ("request_generation_tokens", self.num_tokens),
            ("request_params_max_tokens", self.request.max_tokens),
            ("request_prefill_kv_computed_tokens", self.request.prompt_len - self._num_cached),
            ("request_num_preemptions", self._num_preemptions),
        ):
            if self.request.pooling is None or name not in _OF_OUTPUT:
                self.tenant[name].observe(value)

    def _time_tokens(self, now: float, output: Output) -> None:
        tenant = self.tenant
        if self.num_tokens:
            tenant["inter_token_latency_seconds"].observe(now - self._last_at)
        else:
            self._first_at = now
            self._queued_s = output.queued_s
            tenant["time_to_first_token_seconds"].observe(now - self._arrived_at)
            self._count_prompt(self.request.prompt_len, output.num_cached_tokens)
        self._last_at = now
        self.num_tokens += len(output.token_ids)
        tenant["generation_tokens"].inc(len(output.token_ids))

    def _count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self._num_cached = num_cached
        tenant = self.tenant
        tenant["prompt_tokens"].inc(num_tokens)
        tenant["prefix_cache_queries"].inc(num_tokens)
        tenant["prefix_cache_hits"].inc(num_cached)
        tenant["prompt_tokens_cached"].inc(num_cached)
        computed, hit, on_device = self._metrics.sources(self.request.tenant)
        computed.inc(num_tokens - num_cached)
        hit.inc(num_cached)
        on_device.inc(num_cached)


def count_response(meters: Sequence[RequestMeter]) -> None:
    """Observe the metrics of a response whose choices are all complete."""
    if all(meter.is_complete and meter.request.pooling is None for meter in meters):
        tenant = meters[0].tenant
        tenant["request_params_n"].observe(len(meters))
        longest = max(meter.num_tokens for meter in meters)
        tenant["request_max_num_generation_tokens"].observe(longest)


class RecentRequests:
    """Requests of one server. A running one is kept as long as its meter is referenced."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[str, RequestMeter] = WeakValueDictionary()
        self._ended: deque[JsonDict] = deque(maxlen=_MAX_ENDED)

    def begin(self, meter: RequestMeter) -> None:
        """Take in a running request."""
        self._open[meter.request.id] = meter

    def end(self, meter: RequestMeter, reason: FinishReason) -> None:
        """Keep the final description of a request."""
        self._open.pop(meter.request.id, None)
        self._ended.append(meter.describe(reason))

    def rows_of(self, tenant: str | None) -> list[JsonDict]:
        """Return a tenant's requests (None: all): running ones, then ended ones, newest first."""
        return [told for told, _ in zip(self._all(tenant), range(_MAX_TOLD), strict=False)]

    def _all(self, tenant: str | None) -> Iterator[JsonDict]:
        for meter in reversed(list(self._open.values())):
            if tenant is None or meter.request.tenant == tenant:
                yield meter.describe()
        yield from (r for r in reversed(self._ended) if tenant is None or r["tenant"] == tenant)
