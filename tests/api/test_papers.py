"""The three bundles of the papers, served with the bundled family by one command each."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.api.samples import labelled, samples
from tests.serving.harness import RunningServer, running_server

from penstock.cli.settings import in_force
from penstock.config import hash_of_key
from penstock.serving.fork_context import LOAD_ENGINE

pytestmark = pytest.mark.slow

PROMPT = "Question: language of Poland?"
MANY = 32
KEYS = {"plant-a": "key-a", "plant-b": "key-b"}
CODE = "def add(a, b):\n    return"


@contextmanager
def served(policy: str, *settings: str) -> Iterator[RunningServer]:
    """As `penstock serve --policy NAME --set SETTING ...` does."""
    options = {"policy": policy, "settings": ["port=0", "num_threads=1", "state=none", *settings]}
    with running_server(in_force(options), LOAD_ENGINE) as running:
        yield running


def ask(server: RunningServer, prompt: str = PROMPT, key: str | None = None, **fields: Any) -> int:
    """Return the tokens of an answer."""
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, **fields}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def ask_many(server: RunningServer, *keys: str | None) -> None:
    """Ask one question alone, then many at once; all must be answered."""
    assert ask(server, key=keys[0]) == 32
    with ThreadPoolExecutor(MANY) as pool:
        asked = [pool.submit(ask, server, key=keys[i % len(keys)]) for i in range(MANY)]
        assert [a.result() for a in asked] == [32] * MANY


def gauges(
    server: RunningServer, name: str, label: str, key: str | None = None
) -> dict[str, float]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    return labelled(text, name, label)


def test_goodspeed_knows_each_client() -> None:
    """A draft server's users are a tenant; here two with keys, one of which accepts less."""
    tenants = [f"tenants.{n}.api_keys=['{hash_of_key(key)}']" for n, key in KEYS.items()]
    with served("goodspeed", *tenants) as server:
        ask_many(server, *KEYS.values())
        for _ in range(8):
            ask(server, "Tell me about rivers.", KEYS["plant-a"])
            ask(server, CODE, KEYS["plant-b"])
        accepted = gauges(server, "acceptance_estimate", "tenant", KEYS["plant-a"])
        goodput = gauges(server, "goodput_estimate", "tenant", KEYS["plant-a"])
    assert set(accepted) == set(goodput) == set(KEYS)
    assert all(0 < rate < 1 for rate in accepted.values())
    assert all(1 <= tokens <= 17 for tokens in goodput.values())


def test_spin_measures_its_drafters() -> None:
    with served("spin") as server:
        ask_many(server, None)
        measured = gauges(server, "drafter_goodput_estimate", "drafter")
        drafts = gauges(server, "spec_decode_num_drafts_total", "drafter")
        switches = gauges(server, "drafter_switches_total", "drafter")
    assert len(measured) >= 4, "every drafter is explored"
    assert all(tokens > 0 for tokens in measured.values())
    assert sum(switches.values()) > 0
    assert len(drafts) >= 4


def test_wait_plans_for_the_traffic_that_comes() -> None:
    with served("wait") as server:
        ask_many(server, None)
        ask_many(server, None)
        thresholds = gauges(server, "segment_threshold", "segment")
        ends = gauges(server, "segment_end", "segment")
        held = gauges(server, "segment_requests", "segment")
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert thresholds["1"] > 1 - 1e-9
    assert thresholds == dict(sorted(thresholds.items(), key=lambda n: -n[1])), "fewer go on"
    assert any(31 <= end <= 34 for end in ends.values()), "outputs have 32 tokens"
    assert sum(held.values()) == samples(text)["penstock:num_requests_running"] == 0
