"""Prometheus metrics under vLLM's names, with the prefix `penstock:`.

Counters and histograms are fed here, from what clients are sent; gauges and the engine's own
counters come from its snapshot and start anew when its process is restarted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.api.bodies import UNNAMED
from penstock.api.recent import RecentRequests
from penstock.core.types import NO_TARGET, STEP_TOKENS, TARGET, FinishReason, Output, Request
from penstock.serving.messages import EngineStats

if TYPE_CHECKING:
    from penstock.api.tracing import Tracer
    from penstock.serving.verification import DraftHub

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
"""Names of ignored fields that are told apart; clients make them up. The others count as one."""

MAX_POSITIONS = 16
"""Positions of a draft that are told apart; longer drafts count in these alone."""

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
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_cached": "The same.",
    "latency_target_requests": "Finished requests with a latency target of their own.",
    "latency_target_met": "Those of them that met it.",
}
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FEW = (1, 2, 5, 10, 20)
_TENANT_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": (
        "Time between a request's outputs; a round of speculation is one output.",
        _BETWEEN_TOKENS_S,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time for each token after the first, one value a request.",
        _BETWEEN_TOKENS_S,
    ),
    "request_queue_time_seconds": ("Time until a request was admitted.", _REQUEST_S),
    "request_prefill_time_seconds": ("Time from then to the first token.", _REQUEST_S),
    "request_decode_time_seconds": ("Time from the first token to the last.", _REQUEST_S),
    "request_inference_time_seconds": ("Time from admission to the last token.", _REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _LENGTHS),
    "request_generation_tokens": ("Tokens generated for a request.", _LENGTHS),
    "request_params_max_tokens": ("Tokens that a request allowed.", _LENGTHS),
    "request_params_n": ("Choices of a response: n of each prompt.", _FEW),
    "request_max_num_generation_tokens": ("Tokens of a response's longest choice.", _LENGTHS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were computed, and not found in the prefix cache.",
        _LENGTHS,
    ),
    "request_num_preemptions": ("How often a request was preempted.", (0, *_FEW)),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _REQUEST_S),
}
_DRAFTER_COUNTERS = {
    "spec_decode_num_drafts": "Rounds in which a drafter proposed tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens proposed.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "drafter_requests": "Requests whose first draft it made.",
    "drafter_switches": "Requests that came to it from another drafter.",
}


_Values = float | Mapping[Any, float]
"""One value, or several by the tuples of their labels."""


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.tracer: Tracer | None = None
        self._engine = _EngineCollector(model_name)
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
            "prompt_tokens_by_source", "Prompt tokens by where they came from.", "tenant", "source"
        )
        self._cached_by_source = self._counter(
            "prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by where it is.",
            "tenant",
            "source",
        )
        self._ignored_fields = self._counter(
            "ignored_fields", "Requests with a field that is ignored, by its name.", "field"
        )
        self._ignored_names: set[str] = set()
        self.recent = RecentRequests()
        self.accepted: dict[str, list[int]] = {}
        """Rounds by accepted tokens, by drafter."""
        self.registry.register(_PositionCollector(model_name, self.accepted))
        # Looked up once each: a look-up by labels takes longer than counting.
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
        """Count a round in which a drafter proposed tokens."""
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
        """The exposition text. `stats` is None while the engine cannot say. refused: requests that
        were not taken, by tenant and reason."""
        self._engine.refused = refused
        self._engine.stats = stats
        self._engine.is_up = is_up
        self._engine.num_restarts = num_restarts
        return generate_latest(self.registry)

    def follow(self, hub: DraftHub) -> None:
        """Also tell of draft servers."""
        self._engine.hub = hub

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock:{name}", text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name", "tenant")
        return Histogram(f"penstock:{name}", text, labels, buckets=buckets, registry=self.registry)

    def _children(self, metrics: Mapping[str, Any], **labels: str) -> dict[str, Any]:
        return {n: m.labels(model_name=self.model_name, **labels) for n, m in metrics.items()}


class RequestMeter:
    """Times one engine request, from now on."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._record = metrics.recent.begin(request)
        self.tenant = metrics.tenant(request.tenant)
        self._arrived_at = time.perf_counter()
        self._first_at = 0.0
        self._last_at = 0.0
        self._queued_s = 0.0
        self._trace = None if metrics.tracer is None else metrics.tracer.begin(request)
        self.num_tokens = self._num_cached = self._num_preemptions = 0
        self._drafter: str | None = None
        self._is_finished = self.is_complete = False

    def observe(self, output: Output) -> None:
        self._record.observe(output)
        if self._trace is not None and output.token_ids:
            self._trace.observe(output)
        if output.token_ids:
            self._time_tokens(time.perf_counter(), output)
        self._num_preemptions += output.num_preemptions
        if output.drafter is not None and output.num_proposed:
            self._metrics.count_draft(output.drafter, output.num_proposed, output.num_accepted)
            if output.drafter != self._drafter:
                name = "drafter_requests" if self._drafter is None else "drafter_switches"
                self._metrics.drafter(output.drafter)[name].inc()
                self._drafter = output.drafter

    def finish(self, reason: FinishReason) -> None:
        """Record the end, once."""
        if self._is_finished:
            return
        self._is_finished = True
        self.is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._trace is not None:
            self._trace.finish(reason)
        self._record.end(reason)
        metrics = self._metrics
        metrics.finished.labels(metrics.model_name, self._request.tenant, _REASONS[reason]).inc()
        seconds, mean = time.perf_counter() - self._arrived_at, 0.0
        if self.num_tokens > 1:
            mean = (self._last_at - self._first_at) / (self.num_tokens - 1)
        if self.is_complete:
            self._observe_whole(seconds)
            if self.num_tokens > 1:
                self.tenant["request_time_per_output_token_seconds"].observe(mean)
        if self._request.latency != NO_TARGET and reason is not FinishReason.CANCELLED:
            self.tenant["latency_target_requests"].inc()
            if self.is_complete and self._request.latency.is_met(mean, seconds):
                self.tenant["latency_target_met"].inc()

    def _observe_whole(self, seconds: float) -> None:
        """Of a request that is complete after so many seconds."""
        started_at = self._arrived_at + self._queued_s
        for name, value in (
            ("e2e_request_latency_seconds", seconds),
            ("request_queue_time_seconds", self._queued_s),
            ("request_prefill_time_seconds", max(0.0, self._first_at - started_at)),
            ("request_decode_time_seconds", self._last_at - self._first_at),
            ("request_inference_time_seconds", max(0.0, self._last_at - started_at)),
            ("request_prompt_tokens", self._request.prompt_len),
            ("request_generation_tokens", self.num_tokens),
            ("request_params_max_tokens", self._request.max_tokens),
            ("request_prefill_kv_computed_tokens", self._request.prompt_len - self._num_cached),
            ("request_num_preemptions", self._num_preemptions),
        ):
            self.tenant[name].observe(value)

    def _time_tokens(self, now: float, output: Output) -> None:
        tenant = self.tenant
        if self.num_tokens:
            tenant["inter_token_latency_seconds"].observe(now - self._last_at)
        else:
            self._first_at = now
            self._queued_s = output.queued_s
            tenant["time_to_first_token_seconds"].observe(now - self._arrived_at)
            self._count_prompt(self._request.prompt_len, output.num_cached_tokens)
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
        computed, hit, on_device = self._metrics.sources(self._request.tenant)
        computed.inc(num_tokens - num_cached)
        hit.inc(num_cached)
        on_device.inc(num_cached)


def count_response(meters: Sequence[RequestMeter]) -> None:
    """Count the choices of a response that is over, if they are complete."""
    if all(meter.is_complete for meter in meters):
        tenant = meters[0].tenant
        tenant["request_params_n"].observe(len(meters))
        longest = max(meter.num_tokens for meter in meters)
        tenant["request_max_num_generation_tokens"].observe(longest)


class _PositionCollector(Collector):
    """Counts accepted draft tokens by their position in the draft, from 0 on, when it is asked."""

    def __init__(self, model_name: str, accepted: Mapping[str, list[int]]) -> None:
        self._model_name = model_name
        self._accepted = accepted

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "penstock:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            labels=("model_name", "drafter", "position"),
        )
        for name, by_length in list(self._accepted.items()):
            longer = accumulate(reversed(by_length[1:]))
            for position, count in enumerate(reversed(list(longer))):
                family.add_metric((self._model_name, name, str(position)), count)
        yield family


class _EngineCollector(Collector):
    """Turns the engine's last snapshot into metrics."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: EngineStats | None = None
        self.is_up = False
        self.num_restarts = 0
        self.refused: Mapping[tuple[str, str], int] = {}
        self.hub: DraftHub | None = None

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "Whether the engine takes requests.", self.is_up)
        yield self._counter("engine_restarts", "Restarts of the engine.", self.num_restarts)
        yield self._counter(
            "requests_refused",
            "Requests that were not taken, by tenant and reason.",
            self.refused,
            ("tenant", "reason"),
        )
        rejected: dict[tuple[str], int] = {}
        for (_, reason), num in self.refused.items():
            rejected[reason,] = rejected.get((reason,), 0) + num
        yield self._counter(
            "admission_rejections",
            "Requests that were not taken, by reason.",
            rejected,
            ("reason",),
        )
        if self.hub is not None:
            yield from self._draft_servers(self.hub)
        stats = self.stats
        if stats is None:
            return
        if self.hub is not None:
            yield self._ahead(stats)
        yield self._gauge("num_requests_running", "Requests running.", stats.num_running)
        yield from self._waiting(stats)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the target's KV blocks used.", stats.kv_usage[TARGET]
        )
        yield self._gauge(
            "drafter_kv_cache_usage_perc",
            "Share of a drafter's KV blocks used.",
            {(name,): share for name, share in stats.kv_usage.items() if name != TARGET},
            ("drafter",),
        )
        yield self._gauge(
            "cache_config_info",
            "Blocks of the target's KV cache, as labels.",
            {(str(stats.kv_block_size), str(stats.kv_capacity_tokens // stats.kv_block_size)): 1},
            ("block_size", "num_gpu_blocks"),
        )
        yield self._gauge(
            "kv_cache_capacity_tokens",
            "Tokens that the target's KV holds.",
            stats.kv_capacity_tokens,
        )
        if stats.kv_fluid is not None:
            yield self._gauge(
                "kv_cache_fluid_tokens",
                "KV tokens that the present traffic takes in the fluid: in the mean, and exceeded "
                "within an hour with probability 0.001 at most.",
                {("mean",): stats.kv_fluid.mean, ("bound",): stats.kv_fluid.bound},
                ("kind",),
            )
        yield self._gauge(
            "tenant_weight",
            "Weights by which tenants share the server.",
            {(name,): weight for name, weight in stats.tenant_weights.items()},
            ("tenant",),
        )
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("engine_busy_seconds", "Seconds the engine was at work.", stats.busy_s)
        yield self._counter("target_steps", "Steps of the target.", stats.num_target_steps)
        yield self._step_tokens(stats)
        phases = stats.phases
        yield self._counter(
            "target_step_seconds",
            "Seconds of the target's steps by phase; receive is the wait for draft servers, batch "
            "what the host does between drafting and the target's pass.",
            {
                ("plan",): stats.plan_s,
                ("receive",): phases.receive,
                ("draft",): phases.draft,
                ("batch",): phases.other,
                ("verify",): phases.verify + phases.sample,
            },
            ("phase",),
        )
        yield self._counter(
            "drafter_seconds",
            "Seconds that a drafter of this machine has drafted and read.",
            {(name,): seconds for name, seconds in stats.drafter_seconds.items()},
            ("drafter",),
        )

    def _waiting(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_waiting", "Requests waiting.", stats.num_waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting for room (capacity), and while their grammars are compiled "
            "(deferred).",
            {
                ("capacity",): stats.num_waiting - stats.num_deferred,
                ("deferred",): stats.num_deferred,
            },
            ("reason",),
        )

    def _step_tokens(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily(
            "penstock:iteration_tokens_total",
            "Tokens that a step of the target computed, drafts among them.",
            labels=("model_name",),
        )
        bounds = [*map(float, STEP_TOKENS), math.inf]
        counts = zip(map(floatToGoString, bounds), accumulate(stats.steps_by_tokens), strict=False)
        family.add_metric((self._model_name,), list(counts), stats.num_step_tokens)
        return family

    def _ahead(self, stats: EngineStats) -> Metric:
        return self._counter(
            "ahead_draft_tokens",
            "Tokens that draft servers sent unasked, and whether they were verified.",
            {
                ("used",): stats.num_ahead_used,
                ("unused",): stats.num_ahead - stats.num_ahead_used,
            },
            ("outcome",),
        )

    def _draft_servers(self, hub: DraftHub) -> Iterator[Metric]:
        yield self._gauge("draft_servers", "Draft servers connected.", len(hub.drafters))
        times = hub.send_times
        yield self._counter("verdicts_sent", "Verdicts sent to draft servers.", times.num_verdicts)
        yield self._counter(
            "verdict_send_seconds", "Seconds until verdicts were written, summed.", times.seconds
        )
        yield self._counter(
            "refused_connections",
            "Connections that were refused, by draft server (empty: not known).",
            hub.connections.refused,
            ("draft_server", "reason"),
        )
        counts = {
            "audited_drafts": ("Drafts recomputed.", "num_drafts"),
            "failed_audits": ("Weighted drafts that proved false.", "num_failed"),
            "audited_draft_tokens": ("Draft tokens recomputed.", "num_tokens"),
            "false_draft_tokens": ("Draft tokens that the model does not draw.", "num_false_draws"),
        }
        for name, (text, field) in counts.items():
            audited = {(s,): getattr(a, field) for s, a in hub.audits.by_server.items()}
            yield self._counter(name, text, audited, ("draft_server",))

    def _gauge(self, name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> Metric:
        return self._family(GaugeMetricFamily, name, text, values, labels)

    def _counter(
        self, name: str, text: str, values: _Values, labels: tuple[str, ...] = ()
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, values, labels)

    def _family(
        self, kind: Any, name: str, text: str, values: _Values, labels: tuple[str, ...]
    ) -> Metric:
        family = kind(f"penstock:{name}", text, labels=("model_name", *labels))
        for of, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric((self._model_name, *of), float(value))
        made: Metric = family
        return made
