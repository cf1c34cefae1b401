"""Prometheus metrics under vLLM's names, with the prefix `penstock:`.

Counters and histograms are fed here, from what clients are sent; gauges and the engine's own
counters come from its snapshot and start anew when its process is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api.bodies import UNNAMED
from penstock.core.types import TARGET, FinishReason, Output, Request
from penstock.serving.messages import EngineStats
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


class _Tenant:
    """Metrics of one tenant, looked up once."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        def child(metric: Any) -> Any:
            return metric.labels(model_name=metrics.model_name, tenant=name)

        self.prompt_tokens: Counter = child(metrics.prompt_tokens)
        self.generation_tokens: Counter = child(metrics.generation_tokens)
        self.prefix_queries: Counter = child(metrics.prefix_queries)
        self.prefix_hits: Counter = child(metrics.prefix_hits)
        self.first_token: Histogram = child(metrics.first_token)
        self.between_tokens: Histogram = child(metrics.between_tokens)
        self.per_token: Histogram = child(metrics.per_token)
        self.latency: Histogram = child(metrics.latency)


class _Drafter:
    """Metrics of one drafter, looked up once."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        labels = {"model_name": metrics.model_name, "drafter": name}
        self.drafts = metrics.drafts.labels(**labels)
        self.draft_tokens = metrics.draft_tokens.labels(**labels)
        self.accepted_tokens = metrics.accepted_tokens.labels(**labels)
        self.requests = metrics.drafter_requests.labels(**labels)
        self.switches = metrics.drafter_switches.labels(**labels)
        self.by_length = [0] * (MAX_POSITIONS + 1)
        """Rounds by accepted tokens."""


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self.registry.register(self._engine)
        tenant, drafter = ("model_name", "tenant"), ("model_name", "drafter")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.", tenant)
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.", tenant)
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", tenant
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", tenant
        )
        self.finished = self._counter(
            "request_success", "Finished requests.", (*tenant, "finished_reason")
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_S
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "Time between a request's outputs; a round of speculation is one output.",
            _BETWEEN_TOKENS_S,
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time for each token after the first, one value a request.",
            _BETWEEN_TOKENS_S,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST_S
        )
        self.drafts = self._counter(
            "spec_decode_num_drafts", "Rounds in which a drafter proposed tokens.", drafter
        )
        self.draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Draft tokens proposed.", drafter
        )
        self.accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", drafter
        )
        self.drafter_requests = self._counter(
            "drafter_requests", "Requests whose first draft it made.", drafter
        )
        self.drafter_switches = self._counter(
            "drafter_switches", "Requests that came to it from another drafter.", drafter
        )
        self._ignored_fields = self._counter(
            "ignored_fields",
            "Requests with a field that is ignored, by its name.",
            ("model_name", "field"),
        )
        self._ignored_names: set[str] = set()
        self.drafters: dict[str, _Drafter] = {}
        self.registry.register(_PositionCollector(model_name, self.drafters))
        self.tenant = cache(lambda name: _Tenant(self, name))

    def drafter(self, name: str) -> _Drafter:
        """A drafter's metrics."""
        known = self.drafters.get(name)
        if known is None:
            known = self.drafters[name] = _Drafter(self, name)
        return known

    def count_ignored_fields(self, names: Iterable[str]) -> None:
        """Count a request's ignored fields, each once."""
        labels = set()
        for name in names:
            if len(self._ignored_names) < MAX_IGNORED_FIELDS:
                self._ignored_names.add(name)
            labels.add(name if name in self._ignored_names else UNNAMED)
        for label in labels:
            self._ignored_fields.labels(self.model_name, label).inc()

    def render(self, stats: EngineStats | None, *, is_up: bool, num_restarts: int) -> bytes:
        """The exposition text. `stats` is None while the engine cannot say."""
        self._engine.stats = stats
        self._engine.is_up = is_up
        self._engine.num_restarts = num_restarts
        return generate_latest(self.registry)

    def follow(self, hub: DraftHub) -> None:
        """Also tell of draft servers."""
        self._engine.hub = hub

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(f"penstock:{name}", text, tuple(labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"penstock:{name}",
            text,
            ("model_name", "tenant"),
            buckets=buckets,
            registry=self.registry,
        )


class RequestMeter:
    """Times one engine request, from now on."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._tenant = metrics.tenant(request.tenant)
        self._arrived_at = time.perf_counter()
        self._first_at = 0.0
        self._last_at = 0.0
        self._num_tokens = 0
        self._drafter: str | None = None
        self._is_finished = False

    def observe(self, output: Output) -> None:
        now = time.perf_counter()
        if output.token_ids:
            self._time_tokens(now, output)
        if output.drafter is not None and output.num_proposed:
            drafter = self._metrics.drafter(output.drafter)
            drafter.drafts.inc()
            drafter.draft_tokens.inc(output.num_proposed)
            drafter.accepted_tokens.inc(output.num_accepted)
            drafter.by_length[min(output.num_accepted, MAX_POSITIONS)] += 1
            if output.drafter != self._drafter:
                (drafter.requests if self._drafter is None else drafter.switches).inc()
                self._drafter = output.drafter

    def finish(self, reason: FinishReason) -> None:
        """Record the end, once."""
        if self._is_finished:
            return
        self._is_finished = True
        metrics = self._metrics
        metrics.finished.labels(metrics.model_name, self._request.tenant, _REASONS[reason]).inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._tenant.latency.observe(time.perf_counter() - self._arrived_at)
            if self._num_tokens > 1:
                seconds = self._last_at - self._first_at
                self._tenant.per_token.observe(seconds / (self._num_tokens - 1))

    def _time_tokens(self, now: float, output: Output) -> None:
        if self._num_tokens:
            self._tenant.between_tokens.observe(now - self._last_at)
        else:
            self._first_at = now
            self._tenant.first_token.observe(now - self._arrived_at)
            self._tenant.prompt_tokens.inc(self._request.prompt_len)
            self._tenant.prefix_queries.inc(self._request.prompt_len)
            self._tenant.prefix_hits.inc(output.num_cached_tokens)
        self._last_at = now
        self._num_tokens += len(output.token_ids)
        self._tenant.generation_tokens.inc(len(output.token_ids))


class _PositionCollector(Collector):
    """Counts accepted draft tokens by their position in the draft, from 0 on, when it is asked."""

    def __init__(self, model_name: str, drafters: Mapping[str, _Drafter]) -> None:
        self._model_name = model_name
        self._drafters = drafters

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "penstock:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            labels=("model_name", "drafter", "position"),
        )
        for name, drafter in list(self._drafters.items()):
            longer = accumulate(reversed(drafter.by_length[1:]))
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
        self.hub: DraftHub | None = None

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "Whether the engine takes requests.", self.is_up)
        yield self._counter("engine_restarts", "Restarts of the engine.", self.num_restarts)
        if self.hub is not None:
            yield from self._draft_servers(self.hub)
        stats = self.stats
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Requests running.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the target's KV blocks used.", stats.kv_usage[TARGET]
        )
        by_drafter = GaugeMetricFamily(
            "penstock:drafter_kv_cache_usage_perc",
            "Share of a drafter's KV blocks used.",
            labels=("model_name", "drafter"),
        )
        for name, value in stats.kv_usage.items():
            if name != TARGET:
                by_drafter.add_metric((self._model_name, name), value)
        yield by_drafter
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("engine_busy_seconds", "Seconds the engine was at work.", stats.busy_s)
        yield self._counter("target_steps", "Steps of the target.", stats.num_target_steps)
        yield self._phases(stats)
        seconds = CounterMetricFamily(
            "penstock:drafter_seconds",
            "Seconds that a drafter of this machine has drafted and read.",
            labels=("model_name", "drafter"),
        )
        for name, value in stats.drafter_seconds.items():
            seconds.add_metric((self._model_name, name), value)
        yield seconds

    def _phases(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "penstock:target_step_seconds",
            "Seconds of the target's steps by phase; receive is the wait for draft servers.",
            labels=("model_name", "phase"),
        )
        phases = stats.phases
        seconds = {
            "receive": phases.receive,
            "draft": phases.draft,
            "verify": phases.verify + phases.sample,
        }
        for phase, value in seconds.items():
            family.add_metric((self._model_name, phase), value)
        return family

    def _draft_servers(self, hub: DraftHub) -> Iterator[Metric]:
        yield self._gauge("draft_servers", "Draft servers connected.", len(hub.drafters))
        times = hub.send_times
        yield self._counter("verdicts_sent", "Verdicts sent to draft servers.", times.num_verdicts)
        yield self._counter(
            "verdict_send_seconds", "Seconds until verdicts were written, summed.", times.seconds
        )
        refused = CounterMetricFamily(
            "penstock:refused_connections",
            "Connections that were refused, by draft server (empty: not known).",
            labels=("model_name", "draft_server", "reason"),
        )
        for (server, reason), count in hub.arrivals.refused.items():
            refused.add_metric((self._model_name, server, reason), count)
        yield refused
        counts = {
            "audited_drafts": ("Drafts recomputed.", "num_drafts"),
            "failed_audits": ("Weighted drafts that proved false.", "num_failed"),
            "audited_draft_tokens": ("Draft tokens recomputed.", "num_tokens"),
            "false_draft_tokens": ("Draft tokens that the model does not draw.", "num_false_draws"),
        }
        for name, (text, field) in counts.items():
            family = CounterMetricFamily(
                f"penstock:{name}", text, labels=("model_name", "draft_server")
            )
            for server, audited in hub.audits.by_server.items():
                family.add_metric((self._model_name, server), getattr(audited, field))
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"penstock:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"penstock:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), float(value))
        return family
