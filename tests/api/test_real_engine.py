"""The real engine behind the API, with a tiny random family."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.samples import labelled, samples
from tests.api.test_ends_served import alike
from tests.products import first_fast
from tests.serving.fakes import TOKENIZER
from tests.serving.harness import RunningServer, model_server

PROMPT = "One target, several drafters. "


@pytest.fixture(scope="module")
def real_server(family: dict[str, Path]) -> Iterator[RunningServer]:
    drafters = {"near": family["near"], "far": family["far"], "ngram": "ngram"}
    with model_server(family["target"], drafters) as running:
        yield running


def complete(server: RunningServer, drafter: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 48, "speculation": {"drafter": drafter}, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields", first_fast([{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
)
def test_drafters_change_nothing_but_the_speed(real_server, fields) -> None:
    fields |= {"logprobs": 2}
    alone = complete(real_server, "none", **fields)
    assert alone["usage"]["speculation"]["drafter"] is None
    for drafter in ("auto", "near", "far", "ngram"):
        made = complete(real_server, drafter, **fields)
        alike(made["choices"][0], alone["choices"][0])
        used = made["usage"]["speculation"]["drafter"]
        # The policy takes whom it likes, and random text may give look-up nothing to find.
        assert used == drafter or drafter in ("auto", "ngram")
    assert made["usage"]["completion_tokens"] == 48
    near = complete(real_server, "near", **fields)["usage"]["speculation"]
    assert near["drafter"] == "near"
    assert near["mean_acceptance_length"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("batch", first_fast([8, 32]))
def test_many_at_once_with_every_drafter(real_server: RunningServer, batch: int) -> None:
    """Half of them greedy, half sampled."""
    asked = [
        {"prompt": PROMPT + str(i % 5), "temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 24}
        for i in range(batch)
    ]

    def texts(*drafters: str, seed: int = 0) -> list[str]:
        def ask(i: int) -> str:
            fields = {**asked[i], "seed": asked[i]["seed"] + seed}
            made = complete(real_server, drafters[i % len(drafters)], **fields)
            return str(made["choices"][0]["text"])

        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(ask, range(batch)))

    alone = texts("none")
    for drafters in (("near",), ("far",), ("ngram",), ("auto",), ("near", "ngram", "none", "far")):
        assert texts(*drafters) == alone, drafters
    assert texts("near", seed=100)[1::2] != alone[1::2], "other seeds would be seen"


@pytest.mark.slow
def test_metrics_tell_drafters_apart(real_server: RunningServer) -> None:
    def by_drafter(name: str) -> dict[str, float]:
        text = httpx.get(f"{real_server.url}/metrics", timeout=60).text
        return labelled(text, name, "drafter")

    names = ("near", "far")
    switches = by_drafter("drafter_switches_total")
    for drafter in names:
        complete(real_server, drafter, temperature=0)
    rounds, seconds = (
        by_drafter("spec_decode_num_drafts_total"),
        by_drafter("drafter_seconds_total"),
    )
    assert set(seconds) == set(names)
    assert all(rounds[n] and seconds[n] > 0 for n in names)
    before = by_drafter("drafter_requests_total")["near"]
    spent = by_drafter("drafter_seconds_total")
    complete(real_server, "near", temperature=0)
    assert by_drafter("drafter_requests_total")["near"] == before + 1
    assert by_drafter("drafter_seconds_total")["near"] > spent["near"]
    assert by_drafter("drafter_seconds_total")["far"] == spent["far"]
    assert by_drafter("drafter_switches_total") == switches
    accepted = by_drafter("spec_decode_num_accepted_tokens_total")
    assert by_drafter("spec_decode_num_accepted_tokens_per_pos_total") == accepted


def test_metrics_tell_where_the_time_of_a_step_goes(real_server: RunningServer) -> None:
    def figures() -> dict[str, float]:
        text = httpx.get(f"{real_server.url}/metrics", timeout=60).text
        return {
            sample.labels.get("phase", sample.labels.get("kind", sample.name)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.name.removeprefix("penstock:")
            in ("target_step_seconds", "engine_busy_seconds", "kv_cache_fluid_tokens",
                "kv_cache_capacity_tokens")
        }  # fmt: skip

    before = figures()
    for _ in range(3):
        complete(real_server, "near", temperature=0)
    after = figures()
    grown = {name: after[name] - before[name] for name in before if name in after}
    busy = grown["penstock:engine_busy_seconds_total"]
    parts = [grown[name] for name in ("plan", "draft", "batch", "verify")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= busy, "a second counts in one phase only"
    assert grown["receive"] == 0, "there is no draft server"
    assert after["penstock:kv_cache_capacity_tokens"] == 4096
    assert 0 < after["mean"] < after["bound"]


def test_metrics_have_the_prices_of_the_bundled_models() -> None:
    weights = TOKENIZER.parent
    policies = {"allocation": {"name": "priced"}, "admission": {"name": "fluid_guided"}}
    drafters = {"draft-tiny": weights / "draft-tiny"}
    with model_server(weights / "target-large", drafters, policies) as running:
        # A plan without drafts counts, too: which one pays depends on the machine.
        for _ in range(5):
            complete(running, "draft-tiny", max_tokens=200)
            text = httpx.get(f"{running.url}/metrics", timeout=60).text
            found = samples(text)
            if "penstock:plain_step_seconds" in found:
                break
    plain = found["penstock:plain_step_seconds"]
    assert 1e-4 < plain < 1
    assert found["penstock:price_of_second"] >= 0.99 / plain
    assert labelled(text, "draft_token_seconds", "drafter")["draft-tiny"] > 0
    assert labelled(text, "tenant_token_value", "tenant") == {"default": 1}
    assert found["penstock:kv_reserved_tokens"] == 0


def test_the_largest_numbers_that_are_taken(real_server: RunningServer) -> None:
    """A top_k from the vocabulary's size on is off."""
    largest = {"top_k": 2**31 - 1, "seed": 2**64 - 1, "temperature": 0.9}
    made = complete(
        real_server,
        "near",
        **largest,
        stop_token_ids=[255],
        speculation={"drafter": "near", "max_draft_tokens": 2**70},
    )
    plain = complete(real_server, "none", **{**largest, "top_k": 0}, stop_token_ids=[255])
    assert made["choices"][0]["text"] == plain["choices"][0]["text"]


def test_logprobs_are_the_targets(real_server: RunningServer) -> None:
    alone, drafted = (
        complete(real_server, drafter, temperature=0, logprobs=3)["choices"][0]["logprobs"]
        for drafter in ("none", "near")
    )
    assert drafted["tokens"] == alone["tokens"]
    assert drafted["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-3)
    best = [max(top.values()) for top in drafted["top_logprobs"]]
    assert best == pytest.approx(drafted["token_logprobs"], abs=1e-3)


def test_the_prefix_cache_shows_in_usage(real_server: RunningServer) -> None:
    prompt = "a prompt that fills several blocks of the cache, twice over"
    complete(real_server, "none", prompt=prompt)
    usage = complete(real_server, "none", prompt=prompt)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32
