"""Tenants on a real engine, told apart by their keys: nobody waits for another's many requests."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.products import first_fast
from tests.serving.harness import RunningServer, running_server

from penstock.config import ConfigError, hash_of_key, parse_config
from penstock.serving.fork_context import LOAD_ENGINE

GREEDY = 12


def settings(family: dict[str, Path], **engine: Any) -> dict[str, Any]:
    tenants = {
        "quiet": {"api_keys": [hash_of_key("quiet-key")]},
        "greedy": {"api_keys": [hash_of_key("greedy-key")], **engine.pop("greedy", {})},
    }
    return {
        "port": 0,
        "open_metrics": True,
        "engine": {
            "target": str(family["target"]),
            "dtype": "float32",
            "num_threads": 1,
            "kv_tokens": 4096,
            "admission": {"name": "vllm_v1", "options": {"max_num_seqs": 2}},
            "tenants": tenants,
            **engine,
        },
    }


def ask(server: RunningServer, tenant: str, seed: int = 0, max_tokens: int = 100) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": f"{tenant} {seed}", "max_tokens": max_tokens, "ignore_eos": True},
        headers={"Authorization": f"Bearer {tenant}-key"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


def served_before_the_quiet_one(server: RunningServer) -> int:
    """Of the greedy tenant's requests, all of them there before it."""
    with ThreadPoolExecutor(GREEDY) as pool:
        asked = [pool.submit(ask, server, "greedy", i) for i in range(GREEDY)]
        wait(asked[:2], return_when="FIRST_COMPLETED")
        before = sum(a.done() for a in asked)
        ask(server, "quiet", max_tokens=20)
        after = sum(a.done() for a in asked)
        for a in asked:
            a.result()
    return after - before


@pytest.mark.slow
def test_a_quiet_tenant_does_not_wait_for_a_greedy_one(family: dict[str, Path]) -> None:
    with running_server(parse_config(settings(family)), LOAD_ENGINE) as server:
        assert served_before_the_quiet_one(server) <= 4
    with running_server(parse_config(settings(family, fairness=False)), LOAD_ENGINE) as server:
        assert served_before_the_quiet_one(server) >= 7


def most_running(server: RunningServer, stop: threading.Event) -> float:
    """As `/metrics` has it."""
    most = 0.0
    while not stop.is_set():
        for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
            if line.startswith("penstock:num_requests_running"):
                most = max(most, float(line.rsplit(" ", 1)[1]))
        time.sleep(0.005)
    return most


@pytest.mark.parametrize("fairness", first_fast([True, False]))
def test_a_limit_of_running_requests(family: dict[str, Path], fairness: bool) -> None:
    given = settings(family, greedy={"max_running_requests": 1}, fairness=fairness)
    stop = threading.Event()
    with running_server(parse_config(given), LOAD_ENGINE) as server, ThreadPoolExecutor(5) as pool:
        watched = pool.submit(most_running, server, stop)
        asked = [pool.submit(ask, server, "greedy", i, 60) for i in range(4)]
        wait(asked)
        stop.set()
        for a in asked:
            a.result()
        assert watched.result() == 1


def test_limits_are_checked(family: dict[str, Path]) -> None:
    for limit in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="max_running_requests"):
            parse_config(settings(family, greedy={"max_running_requests": limit}))
