"""Metrics of drafters, fed by hand."""

from dataclasses import replace

import pytest
from tests.api.samples import labelled

from penstock.api.metrics import MAX_POSITIONS, Metrics, RequestMeter, count_response
from penstock.core.policies.declared import Gauge
from penstock.core.policies.registry import known_gauges
from penstock.core.types import FinishReason, LatencyTarget, Output, PhaseTimes, Request
from penstock.serving.messages import EngineStats

STATS = EngineStats(
    0, 0, 0, {"target": 0.0}, 0, 0.0, 0, PhaseTimes(), {"small": 0.25, "large": 0.0}
)


def values(
    metrics: Metrics, name: str, label: str = "drafter", stats: EngineStats = STATS
) -> dict[str, float]:
    text = metrics.render(stats, is_up=True, num_restarts=0).decode()
    return labelled(text, name, label)


def feed(metrics: Metrics, *rounds: tuple[str | None, int, int]) -> None:
    meter = RequestMeter(metrics, Request("r", 3, 100))
    for drafter, proposed, accepted in rounds:
        meter.on_output(
            Output("r", (1,), 1, drafter=drafter, num_proposed=proposed, num_accepted=accepted)
        )


def test_rounds_requests_and_switches_are_the_drafters() -> None:
    metrics = Metrics("toy")
    feed(metrics, (None, 0, 0), ("small", 4, 4), ("large", 4, 0), (None, 0, 0), ("large", 4, 1))
    feed(metrics, ("small", 2, 1), ("large", 2, 1), ("small", 2, 1))
    assert values(metrics, "spec_decode_num_drafts_total") == {"small": 3, "large": 3}
    assert values(metrics, "drafter_requests_total") == {"small": 2, "large": 0}
    assert values(metrics, "drafter_switches_total") == {"small": 1, "large": 2}
    assert values(metrics, "drafter_seconds_total") == {"small": 0.25, "large": 0.0}


def test_accepted_tokens_are_counted_by_position() -> None:
    metrics = Metrics("toy")
    feed(metrics, ("small", 4, 0), ("small", 4, 1), ("small", 4, 3), ("small", 4, 3))
    found = values(metrics, "spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert [found[str(p)] for p in range(4)] == [3, 2, 2, 0]
    assert len(found) == MAX_POSITIONS
    assert sum(found.values()) == values(metrics, "spec_decode_num_accepted_tokens_total")["small"]


def test_gauges_are_those_that_policies_declare() -> None:
    metrics = Metrics("toy")
    known = {g.name: g for g in known_gauges()}
    own = Gauge("queue_age", "Seconds that the oldest request waits.", "queue")
    gauges = {known["price_of_second"]: 500.0, own: {"a": 2.0}}
    stats = replace(STATS, gauges={**gauges, known["draft_token_seconds"]: {"small": 1e-3}})
    assert values(metrics, "price_of_second", "model_name", stats) == {"toy": 500}
    assert values(metrics, "draft_token_seconds", "drafter", stats) == {"small": 1e-3}
    assert values(metrics, "queue_age", "queue", stats) == {"a": 2.0}
    assert values(metrics, "kv_reserved_tokens", "model_name", stats) == {}
    text = metrics.render(stats, is_up=True, num_restarts=0).decode()
    assert "# HELP penstock:kv_reserved_tokens Free KV tokens" in text
    assert "# HELP penstock:queue_age Seconds that the oldest" in text


@pytest.mark.parametrize(
    ("latency", "reason", "counted", "met"),
    [
        (LatencyTarget(tpot=60.0), FinishReason.STOP, 1, 1),
        (LatencyTarget(deadline=60.0), FinishReason.LENGTH, 1, 1),
        (LatencyTarget(tpot=1e-9), FinishReason.LENGTH, 1, 0),
        (LatencyTarget(tpot=60.0, deadline=1e-9), FinishReason.STOP, 1, 0),
        (LatencyTarget(tpot=60.0), FinishReason.ERROR, 1, 0),
        (LatencyTarget(tpot=60.0), FinishReason.CANCELLED, 0, 0),
        (LatencyTarget(), FinishReason.STOP, 0, 0),
    ],
)
def test_targets_that_were_met(latency, reason, counted, met) -> None:
    metrics = Metrics("toy")
    meter = RequestMeter(metrics, Request("r", 3, 100, tenant="a", latency=latency))
    for token in (1, 2, 3):
        meter.on_output(Output("r", (token,), 1))
    meter.finish(reason)
    assert values(metrics, "latency_target_requests_total", "tenant") == {"a": counted}
    assert values(metrics, "latency_target_met_total", "tenant") == {"a": met}


def test_a_response_counts_its_choices_and_preemptions_once_it_is_complete() -> None:
    metrics = Metrics("toy")
    ended = [RequestMeter(metrics, Request(name, 3, 100)) for name in "ab"]
    for meter, num, preempted in zip(ended, (4, 9), (0, 2), strict=True):
        meter.on_output(
            Output("r", (1,) * num, num, num_cached_tokens=2, num_preemptions=preempted)
        )
        meter.finish(FinishReason.LENGTH)
    broken = RequestMeter(metrics, Request("c", 3, 100))
    broken.finish(FinishReason.CANCELLED)
    count_response([*ended, broken])
    assert not any(values(metrics, "request_params_n_count", "tenant").values())
    count_response(ended)
    for name, count, total in (
        ("request_params_n", 1, 2),
        ("request_max_num_generation_tokens", 1, 9),
        ("request_num_preemptions", 2, 2),
        ("request_prefill_kv_computed_tokens", 2, 2),
    ):
        assert values(metrics, f"{name}_count", "tenant")["default"] == count
        assert values(metrics, f"{name}_sum", "tenant")["default"] == total
    sources = values(metrics, "prompt_tokens_by_source_total", "source")
    assert sources == {"local_compute": 2, "local_cache_hit": 4}
