"""Prometheus collectors of the engine, accepted draft tokens and draft servers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.core.policies.declared import Gauge
from penstock.core.policies.registry import known_gauges
from penstock.core.types import STEP_TOKENS, TARGET
from penstock.serving.messages import EngineStats

if TYPE_CHECKING:
    from penstock.serving.verification import DraftHub

_Values = float | Mapping[Any, float]
"""One value, or values by tuples of labels."""


class PositionCollector(Collector):
    """Accepted draft tokens by position in the draft, from 0."""

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


class EngineCollector(Collector):
    """Metrics of the engine's last snapshot."""

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
        yield from self._refused()
        if self.hub is not None:
            yield from self._draft_servers(self.hub)
        stats = self.stats
        if stats is None:
            return
        if self.hub is not None or stats.server_failures:
            yield self._ahead(stats)
        failures = {(name,): num for name, num in stats.server_failures.items()}
        yield self._counter(
            "drafter_call_failures", "Failed calls of servers that draft.", failures, ("drafter",)
        )
        yield self._gauge("num_requests_running", "Requests running.", stats.num_running)
        yield from self._waiting(stats)
        yield from self._memory(stats)
        yield self._gauge(
            "tenant_weight",
            "Fair-share weights of tenants.",
            {(name,): weight for name, weight in stats.tenant_weights.items()},
            ("tenant",),
        )
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield from self._steps(stats)
        yield from self._of_policies(stats.gauges)

    def _of_policies(self, given: Mapping[Gauge, Any]) -> Iterator[Metric]:
        """Yield the policies' gauges; without a value those that no running policy has."""
        gauges: dict[str, tuple[Gauge, Any]] = {g.name: (g, {}) for g in known_gauges()}
        gauges |= {g.name: (g, known) for g, known in given.items()}
        for gauge, known in gauges.values():
            values = {(of,): v for of, v in known.items()} if isinstance(known, Mapping) else known
            labels = () if gauge.label is None else (gauge.label,)
            yield self._gauge(gauge.name, gauge.help, values, labels)

    def _refused(self) -> Iterator[Metric]:
        yield self._counter(
            "requests_refused",
            "Rejected requests, by tenant and reason.",
            self.refused,
            ("tenant", "reason"),
        )
        rejected: dict[tuple[str], int] = {}
        for (_, reason), num in self.refused.items():
            rejected[reason,] = rejected.get((reason,), 0) + num
        yield self._counter(
            "admission_rejections",
            "Rejected requests, by reason.",
            rejected,
            ("reason",),
        )

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
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
            "Capacity of the target's KV cache in tokens.",
            stats.kv_capacity_tokens,
        )
        if stats.state_slots is not None:
            yield self._gauge(
                "recurrent_state_slots",
                "Requests at once whose recurrent states have room.",
                stats.state_slots,
            )
            yield self._gauge(
                "recurrent_state_bytes", "Memory of all recurrent states.", stats.state_bytes
            )
        if stats.kv_fluid is not None:
            yield self._gauge(
                "kv_cache_fluid_tokens",
                "KV tokens of the present traffic in the fluid model: the mean, and a bound "
                "exceeded within an hour with probability 0.001 at most.",
                {("mean",): stats.kv_fluid.mean, ("bound",): stats.kv_fluid.bound},
                ("kind",),
            )

    def _steps(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("engine_busy_seconds", "Seconds the engine was at work.", stats.busy_s)
        yield self._counter("target_steps", "Steps of the target.", stats.num_target_steps)
        yield self._step_tokens(stats)
        phases = stats.phases
        yield self._counter(
            "target_step_seconds",
            "Seconds of the target's steps by phase; receive: waiting for draft servers, batch: "
            "host time between drafting and the target's pass.",
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
            "Seconds of a local drafter's passes.",
            {(name,): seconds for name, seconds in stats.drafter_seconds.items()},
            ("drafter",),
        )

    def _waiting(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_waiting", "Requests waiting.", stats.num_waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting for KV blocks (capacity) or for their grammars (deferred).",
            {
                ("capacity",): stats.num_waiting - stats.num_deferred,
                ("deferred",): stats.num_deferred,
            },
            ("reason",),
        )

    def _step_tokens(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily(
            "penstock:iteration_tokens_total",
            "Tokens computed in a step of the target, including draft tokens.",
            labels=("model_name",),
        )
        bounds = [*map(float, STEP_TOKENS), math.inf]
        counts = zip(map(floatToGoString, bounds), accumulate(stats.steps_by_tokens), strict=False)
        family.add_metric((self._model_name,), list(counts), stats.num_step_tokens)
        return family

    def _ahead(self, stats: EngineStats) -> Metric:
        return self._counter(
            "ahead_draft_tokens",
            "Tokens that draft servers sent ahead, by whether they were verified.",
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
            "Refused connections, by draft server (empty: unknown).",
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

    def _gauge(self, name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
        return self._family(GaugeMetricFamily, name, text, values, labels)

    def _counter(
        self, name: str, text: str, values: _Values, labels: tuple[str, ...] = ()
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, values, labels)

    def _family(
        self, kind: Any, name: str, text: str, values: _Values, labels: Sequence[str]
    ) -> Metric:
        family = kind(f"penstock:{name}", text, labels=("model_name", *labels))
        for of, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric((self._model_name, *of), float(value))
        made: Metric = family
        return made
