"""Two whole servers with the bundled family behind one router: what docs/scale.md says."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.api.routing import free_port, router
from tests.api.samples import samples
from tests.serving.harness import eventually
from tests.serving.program import LONG, Program, program, text

pytestmark = pytest.mark.slow

SERVED = ("--kv-tokens", "16384", "--dtype", "float32")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    logs = tmp_path_factory.mktemp("replicas")
    with program(logs / "0", *SERVED) as first, program(logs / "1", *SERVED) as second:
        yield first, second


@pytest.fixture
def routed(replicas: tuple[Program, Program], tmp_path: Path) -> Iterator[str]:
    with router([r.url for r in replicas], tmp_path / "router", "--policy", "cache_aware") as url:
        yield url


def streamed(url: str, prompt: str, **fields: Any) -> tuple[str, bool]:
    """The text of a stream, and whether it came to its end."""
    body = {"prompt": prompt, "stream": True, "temperature": 0, "ignore_eos": True, **fields}
    made = ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LONG) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return made, True
                if line.startswith("data: "):
                    made += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    except httpx.TransportError:
        """The connection was broken off."""
    return made, False


def counted(replica: Program, name: str) -> float:
    return samples(httpx.get(f"{replica.url}/metrics", timeout=60).text).get(f"penstock:{name}", 0)


def test_answers_are_those_of_one_server(replicas: tuple[Program, Program], routed: str) -> None:
    asked = [
        (f"def f{i}(a, b):", {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 40})
        for i in range(8)
    ]
    expected = [replicas[0].text(prompt, **fields) for prompt, fields in asked]
    with ThreadPoolExecutor(8) as pool:
        whole = pool.map(lambda a: text(routed, a[0], **a[1]), asked)
        assert list(whole) == expected
        parts = pool.map(lambda a: streamed(routed, a[0], **a[1]), asked)
        assert list(parts) == [(made, True) for made in expected]


@pytest.mark.parametrize(
    ("policy", "share"), [("cache_aware", [0, 4]), ("round_robin", [2, 2])], ids=lambda v: str(v)
)
def test_where_prompts_with_one_beginning_go(replicas, tmp_path, policy, share) -> None:
    """To the replica that has it in its cache, where the policy is the one for it."""
    beginning = f"{policy}: one two three four five six seven. " * 20
    names = ("request_success_total", "prefix_cache_hits_total", "prefix_cache_queries_total")

    def counts() -> np.ndarray:
        return np.array([[counted(replica, name) for replica in replicas] for name in names])

    before = counts()
    with router([r.url for r in replicas], tmp_path / "router", "--policy", policy) as url:
        for question in range(4):
            text(url, f"{beginning}{question}")
    served, hits, queries = counts() - before
    assert sorted(served) == share
    # Nearly all of every prompt but the first at each replica.
    assert round(4 * hits.sum() / queries.sum()) == 4 - np.count_nonzero(share)


def test_a_replica_dies(tmp_path: Path) -> None:
    """Its streams break off; those of the other go on, and so do all new requests."""
    port = str(free_port())
    prompts = [f"{number} is the number of" for number in range(8)]
    options = ("--policy", "round_robin", "--health-check-interval-secs", "1")
    with ExitStack() as stack:
        first = stack.enter_context(program(tmp_path / "0", *SERVED, "--port", port))
        second = stack.enter_context(program(tmp_path / "1", *SERVED))
        urls = (first.url, second.url)
        url = stack.enter_context(router(urls, tmp_path / "router", *options))
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(streamed, url, p, max_tokens=600) for p in prompts]
            eventually(lambda: all(counted(r, "num_requests_running") for r in (first, second)))
            first.process.kill()
            made = [stream.result() for stream in streams]
            later = list(pool.map(lambda prompt: text(url, prompt), prompts))
            alone = list(pool.map(lambda p: second.text(p, max_tokens=600), prompts))
        for whole, (begun, is_done) in zip(alone, made, strict=True):
            assert begun == whole if is_done else whole.startswith(begun)
        assert {is_done for _, is_done in made} == {True, False}
        assert all(whole.startswith(short) for whole, short in zip(alone, later, strict=True))

        again = stack.enter_context(program(tmp_path / "2", *SERVED, "--port", port))

        def is_used() -> bool:
            text(url, "One more.")
            return counted(again, "request_success_total") > 0

        eventually(is_used, LONG)
