"""Many clients at once over real models: what lies behind an end is counted nowhere."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.samples import samples
from tests.products import covering
from tests.serving.edges import drafting, edge_client
from tests.serving.harness import RunningServer, eventually, model_server
from tests.serving.scripted import free_port

from penstock.core.types import FinishReason, Request, SamplingParams, StopStrings
from penstock.engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

WEIGHTS = Path(__file__).parents[2] / "src/penstock/zoo/weights"
NUM_CLIENTS = 6
ENDS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["the", "e ", ". ", "\n"]},
    "stop_token_ids": {"stop_token_ids": list(range(260, 400))},
    "max_tokens": {"max_tokens": 7},
    "grammar": {"guided_regex": "(yes|no|maybe), (yes|no|maybe)"},
}


ENGINE = {"kv_tokens": 16384, "allocation": {"name": "fixed", "options": {"k": 6}}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    drafters = {"tiny": WEIGHTS / "draft-tiny", "ngram": "ngram"}
    with model_server(WEIGHTS / "draft-base", drafters, ENGINE) as running:
        yield running


def body_of(i: int, kind: str, drafter: str, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": f"Number {i} said that the boats and the bells of the old harbour",
        "max_tokens": 40,
        "temperature": 0.7 * (i % 2),
        "seed": i,
        "ignore_eos": kind == "max_tokens",
        "speculation": {"drafter": drafter},
        "logprobs": i % 3,
        **ENDS[kind],
        **fields,
    }


def made(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(ask, bodies))


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Text, tokens, offsets and end are equal; log-probabilities but for rounding."""
    told, expected = dict(one["logprobs"]), dict(other["logprobs"])
    for name in ("token_logprobs", "top_logprobs"):
        values, wanted = told.pop(name), expected.pop(name)
        for value, want in zip(values, wanted, strict=True):
            assert value == pytest.approx(want, abs=1e-3)
    assert one | {"logprobs": told} == other | {"logprobs": expected}


def figures(url: str) -> dict[str, float]:
    """When everything has ended."""
    names = ("num_requests_running", "num_requests_waiting")

    def idle() -> dict[str, float] | None:
        found = samples(httpx.get(f"{url}/metrics", timeout=60).text)
        return None if any(found.get(f"penstock:{n}", 1) for n in names) else found

    return eventually(idle)


COUNTED = {
    "generation_tokens_total": lambda usage: usage["completion_tokens"],
    "spec_decode_num_draft_tokens_total": lambda usage: usage["speculation"]["num_draft_tokens"],
    "spec_decode_num_accepted_tokens_total": (
        lambda usage: usage["speculation"]["num_accepted_tokens"]
    ),
}


def counted_alike(
    before: dict[str, float], after: dict[str, float], answers: list[dict[str, Any]]
) -> None:
    for name, count in COUNTED.items():
        key = f"penstock:{name}"
        assert after[key] - before.get(key, 0.0) == sum(count(a["usage"]) for a in answers), name


@pytest.mark.parametrize(
    ("kind", "drafter"), covering(ENDS, ["tiny", "ngram"], strength=1, fast=[("stop", "tiny")])
)
def test_metrics_and_usage_count_what_answers_have(server, kind, drafter) -> None:
    alone = made(server.url, [body_of(i, kind, "none") for i in range(2 * NUM_CLIENTS)])
    before = figures(server.url)
    drafted = made(server.url, [body_of(i, kind, drafter) for i in range(2 * NUM_CLIENTS)])
    for one, other in zip(alone, drafted, strict=True):
        alike(other["choices"][0], one["choices"][0])
        num_tokens = one["usage"]["completion_tokens"]
        assert other["usage"]["completion_tokens"] == num_tokens
        speculation = other["usage"]["speculation"]
        assert speculation["num_accepted_tokens"] <= num_tokens
    counted_alike(before, figures(server.url), drafted)
    if kind != "max_tokens":
        assert "stop" in {a["choices"][0]["finish_reason"] for a in drafted}


def test_streams_end_as_whole_answers_do(server: RunningServer) -> None:
    for i in range(4):
        body = body_of(i, "stop", "tiny")
        (whole,) = made(server.url, [body])
        pieces = httpx.post(
            f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
        ).text
        events = [line[6:] for line in pieces.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        parts = [choice["logprobs"] for choice in choices]
        joined = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        text = "".join(c["text"] for c in choices)
        alike(choices[-1] | {"text": text, "logprobs": joined}, whole["choices"][0])
        assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_string_that_is_too_long_is_refused(server: RunningServer) -> None:
    body = body_of(0, "stop", "none", stop=["a" * 600, "b" * 600])
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "stop: at most 1024 characters are allowed, not 1200"


async def test_the_same_with_draft_servers() -> None:
    """Requests of the verification server's own endpoint, and of a draft server's users."""
    address = f"127.0.0.1:{free_port()}"
    tokenizer = load_tokenizer(WEIGHTS / "draft-base")
    listen = {"listen": address}
    with model_server(WEIGHTS / "draft-base", {}, ENGINE, drafters=listen) as running:
        async with AsyncExitStack() as stack:
            draft_server = await stack.enter_async_context(
                drafting(int(address.rpartition(":")[2]), WEIGHTS / "draft-tiny")
            )
            for kind in ("stop",):
                bodies = [body_of(i, kind, "none") for i in range(NUM_CLIENTS)]
                alone = await asyncio.to_thread(made, running.url, bodies)
                before = await asyncio.to_thread(figures, running.url)
                bodies = [body | {"speculation": {"drafter": "loopback"}} for body in bodies]
                drafted = await asyncio.to_thread(made, running.url, bodies)
                after = await asyncio.to_thread(figures, running.url)
                for one, other in zip(alone, drafted, strict=True):
                    alike(other["choices"][0], one["choices"][0])
                counted_alike(before, after, drafted)
                assert sum(COUNTED["spec_decode_num_accepted_tokens_total"](a["usage"])
                           for a in drafted) > 0  # fmt: skip
            client = edge_client(draft_server, WEIGHTS / "draft-base")
            for i in range(3):
                body = body_of(i, "stop", "none")
                (central,) = await asyncio.to_thread(made, running.url, [body])
                prompt = tokenizer.encode(body["prompt"])
                request = Request(
                    f"edge-{i}",
                    len(prompt),
                    body["max_tokens"],
                    prompt_token_ids=tuple(prompt),
                    stop_token_ids=frozenset({2}),
                    sampling=SamplingParams(temperature=body["temperature"], seed=i),
                    stop=StopStrings(tuple(body["stop"]), tokenizer.last_of_text(prompt)),
                )
                before = await asyncio.to_thread(figures, running.url)
                with await client.submit("someone", [request]) as stream:
                    outputs = [output async for output in stream]
                after = await asyncio.to_thread(figures, running.url)
                num_tokens = sum(len(o.token_ids) for o in outputs)
                assert num_tokens == central["usage"]["completion_tokens"]
                assert outputs[-1].finish_reason is FinishReason.STOP
                assert outputs[-1].num_stop_chars > 0
                key = "penstock:generation_tokens_total"
                assert after[key] - before[key] == num_tokens
