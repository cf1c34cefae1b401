import re
from collections.abc import Iterator
from importlib.resources import files
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from fastapi import FastAPI
from tests.api.samples import labelled, samples
from tests.serving.fakes import TOKENIZER
from tests.serving.harness import RunningServer, running_server, serve_config

import penstock
from penstock.api.app import create_app
from penstock.api.dashboard import add_home
from penstock.api.server import _facts
from penstock.config import hash_of_key
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.limits import Quotas, WaitingRoom
from penstock.serving.messages import Ready

METRICS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count", "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "num_requests_waiting_by_reason", "cache_config_info", "iteration_tokens_total_count",
    "prompt_tokens_by_source_total", "prompt_tokens_cached_total",
    "prompt_tokens_cached_by_source_total", "request_max_num_generation_tokens_count",
    "request_params_n_count", "request_num_preemptions_count",
    "request_prefill_kv_computed_tokens_count",
)  # fmt: skip

KEYED = {
    "tenants": {
        "north": {"api_keys": [hash_of_key("key-n1"), hash_of_key("key-n2")]},
        "south": {"api_keys": [hash_of_key("key-s")], "weight": 2.0},
    }
}


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    with running_server(serve_config(KEYED, served_model_name="toy")) as running:
        yield running


HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_the_address_itself(http: httpx.Client, keyed_server: RunningServer) -> None:
    """A person finds what is served, and Ollama's clients find their server."""
    page = http.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert "<h2>toy</h2><p>Drafters: toy-drafter</p>" in page.text
    for link in re.findall(r'href="([^":]+)"', page.text):
        assert http.get(f"/{link}").status_code == 200, link
    for method in ("GET", "HEAD"):
        answer = http.request(method, "/")
        assert (answer.status_code, answer.headers["vary"]) == (200, "Accept")
        assert answer.text == ("Ollama is running" if method == "GET" else "")
    hidden = httpx.get(keyed_server.url, headers=HTML)
    assert hidden.status_code == 200
    assert "toy" not in hidden.text
    assert "with an API key only" in hidden.text
    known = {**HTML, "Authorization": "Bearer key-s"}
    assert "<h2>toy</h2>" in httpx.get(keyed_server.url, headers=known).text


async def test_names_are_no_html() -> None:
    app = FastAPI()
    add_home(app, lambda _: [{"id": "<b>toy</b>", "drafters": ["<i>"]}])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        page = (await client.get("/", headers=HTML)).text
    assert "<h2>&lt;b&gt;toy&lt;/b&gt;</h2><p>Drafters: &lt;i&gt;</p>" in page


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json()["engine"]["target"] == "toy"
    assert http.get("/version").json() == {"version": penstock.__version__}


def test_metrics_have_vllms_names(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "one two three", "max_tokens": 30})
    found = samples(http.get("/metrics").text)
    assert {f"penstock:{name}" for name in METRICS} <= set(found)


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    before = samples(http.get("/metrics").text)
    usage = http.post(
        "/v1/completions", json={"prompt": "count these tokens " * 8, "max_tokens": 40}
    ).json()["usage"]
    after = samples(http.get("/metrics").text)

    def growth(name: str) -> float:
        return after[f"penstock:{name}"] - before.get(f"penstock:{name}", 0.0)

    assert growth("generation_tokens_total") == 40
    assert growth("prompt_tokens_total") == usage["prompt_tokens"]
    assert growth("prefix_cache_queries_total") == usage["prompt_tokens"]
    assert growth("prefix_cache_hits_total") == usage["prompt_tokens_details"]["cached_tokens"]
    assert growth("request_success_total") == 1
    assert growth("request_params_n_sum") == 1
    assert growth("request_max_num_generation_tokens_sum") == 40
    assert growth("prompt_tokens_by_source_total") == usage["prompt_tokens"]
    assert growth("time_to_first_token_seconds_count") == 1
    assert growth("e2e_request_latency_seconds_count") == 1
    speculation = usage["speculation"]
    assert growth("spec_decode_num_drafts_total") == speculation["num_drafts"]
    assert growth("spec_decode_num_draft_tokens_total") == speculation["num_draft_tokens"]
    assert growth("spec_decode_num_accepted_tokens_total") == speculation["num_accepted_tokens"]
    assert growth("engine_steps_total") >= growth("inter_token_latency_seconds_count")


def test_the_dashboard_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    paths, asked = ["dashboard"], set()
    while paths:
        path = paths.pop()
        asked.add(path)
        answer = http.get(f"/{path}")
        assert answer.status_code == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        # The name of SVG's elements is no address.
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(|innerHTML|eval\(", text)
        assert not re.search(r"<style|<script>| on[a-z]+=| style=", text)
        found = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', text)
        found += [f"dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        paths += [path for path in found if path not in asked]
    served = {f"dashboard/{f.name}" for f in files("penstock.api.dashboard").iterdir()}
    assert asked - {"dashboard"} == {p for p in served if p.endswith((".js", ".css"))}


@pytest.mark.parametrize(
    "path", ["__init__.py", "none.js", "", "%2e%2e/app.py", "..%2fapp.py", "index.html/x"]
)
def test_the_dashboard_has_no_other_files(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/dashboard/{path}", follow_redirects=False)
    assert answer.status_code == (404 if path else 307)


def test_requests_are_told_one_by_one(http: httpx.Client) -> None:
    secret = "nobody shall read this"
    usage = http.post("/v1/completions", json={"prompt": secret, "max_tokens": 30}).json()["usage"]
    answer = http.get("/dashboard/requests")
    told = answer.json()
    assert (told["model"], told["problem"], told["drafters"]) == ("toy", None, ["toy-drafter"])
    request = told["requests"][0]
    assert (request["tenant"], request["state"], request["reason"]) == (
        "default", "ended", "length"
    )  # fmt: skip
    assert request["num_tokens"] == 30
    assert request["num_prompt_tokens"] == usage["prompt_tokens"]
    of_drafter = request["drafters"]["toy-drafter"]
    assert of_drafter == {name: usage["speculation"][name] for name in of_drafter}
    assert len(told["requests"]) <= 40
    assert not any(word in answer.text for word in ("nobody", "read", "toy-token"))


def test_the_dashboard_reads_metrics_that_exist(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "one two three", "max_tokens": 30})
    known = http.get("/metrics").text
    page = files("penstock.api.dashboard").joinpath("overview.js").read_text(encoding="utf-8")
    read = set(
        re.findall(
            r'"([a-z_]+_(?:total|seconds?|perc|running|waiting|weight|value)|kv_[a-z_]+_tokens)"',
            page,
        )
    )
    assert len(read) > 12
    assert {"price_of_second", "kv_reserved_tokens", "tenant_token_value"} <= read
    assert [name for name in read if f"penstock:{name}" not in known] == []


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "an API key is required"),
        ({"Authorization": "Basic key-s"}, "an API key is required"),
        ({"Authorization": "Bearer"}, "an API key is required"),
        ({"Authorization": "Bearer key"}, "the API key is not known"),
        ({"Authorization": "Bearer key-s\xe9"}, "the API key is not known"),
    ],
)
def test_keys_are_asked_for(keyed_server, headers, message) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(f"{keyed_server.url}{path}", content=b"{", headers=raw)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert message in answer.json()["error"]["message"]
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.get(f"{keyed_server.url}/v1/models", headers=raw).status_code == 401  # type: ignore[arg-type]
    assert httpx.get(f"{keyed_server.url}/health").status_code == 200


def bare_get(server: RunningServer, key: str | None, path: str = "/metrics") -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}{path}", headers=headers)


def test_metrics_are_behind_the_keys(keyed_server: RunningServer) -> None:
    """They name the tenants. The page itself knows nothing: it asks for a key."""
    for key in (None, "key"):
        answer = bare_get(keyed_server, key)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "penstock:" not in answer.text
    assert "penstock:engine_up" in bare_get(keyed_server, "key-s").text
    page = bare_get(keyed_server, None, "/dashboard").text
    assert not any(tenant in page for tenant in KEYED["tenants"])
    for key in (None, "key"):
        assert bare_get(keyed_server, key, "/dashboard/requests").status_code == 401


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({"metrics_keys": [hash_of_key("key-m")]}, "key-m", 200),
        ({"metrics_keys": [hash_of_key("key-m")]}, "key-s", 401),
        ({"metrics_keys": [hash_of_key("key-m")]}, None, 401),
        ({"open_metrics": True}, None, 200),
    ],
)
async def test_operators_keys(settings: dict[str, Any], key: str | None, status: int) -> None:
    client = SimpleNamespace(
        info=Ready(TOKENIZER, 100, 4096, frozenset(), (), {}),
        room=WaitingRoom(8),
        quotas=Quotas(),
        refused={},
        problem=None,
        num_restarts=0,
        drafters=(),
        stats=AsyncMock(return_value=None),
    )
    app = create_app(serve_config(KEYED, **settings), client, load_tokenizer(TOKENIZER))  # type: ignore[arg-type]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://toy", headers=headers
    ) as http:
        assert (await http.get("/metrics")).status_code == status
        # A tenant sees its own requests there, and an operator all.
        page = await http.get("/dashboard/requests")
        assert page.status_code == (200 if key == "key-s" else status)
        of_a_model = await http.get("/v1/models")
        assert of_a_model.status_code == (200 if key == "key-s" else 401)


def test_keys_stand_for_tenants(keyed_server: RunningServer) -> None:
    for key in ("key-n1", "key-n2", "key-s"):
        with openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key=key) as ai:
            ai.completions.create(model="toy", prompt="abc", max_tokens=7)
    metrics = bare_get(keyed_server, "key-s").text
    by_tenant = labelled(metrics, "generation_tokens_total", "tenant")
    assert by_tenant == {"north": 14, "south": 7}


@pytest.mark.parametrize(
    ("engine", "more", "why"),
    [
        ({"look_up": "suffix"}, {}, "as asked"),
        ({}, {}, "none is named, and vLLM gets none by itself"),
        ({}, {"drafters": {"listen": "127.0.0.1:0"}}, "draft servers may connect"),
    ],
)
def test_why_there_are_no_drafters(engine: Any, more: Any, why: str) -> None:
    facts = {"dtype": "float32", "backend": "eager", "kv_tokens": 1, "max_model_len": 1}
    facts |= dict.fromkeys(("instruction_set", "num_threads", "kv_bytes"))
    client: Any = SimpleNamespace(info=SimpleNamespace(description=facts), drafters=())
    assert [*_facts("toy", serve_config(engine, **more), client)][1].endswith(f"none ({why})")
