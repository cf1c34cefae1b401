"""Several models behind one address, whose engines are toys."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from tests.serving.fakes import FACTORY, SLOW_FACTORY, TOKENIZER, toy_plan
from tests.serving.harness import RunningServer, eventually, running_server, serve_config

from penstock.api.server import serve
from penstock.config import ConfigError, EngineConfig, hash_of_key
from penstock.engine.models.hub import Progress

EACH = 65536
"""Bytes that the toy plan says of each model."""
PROMPT = "one two three"


@pytest.fixture(autouse=True, scope="module")
def planned_as_toys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.api.front.planned", toy_plan)
        yield


def several(names: str, engine: dict[str, Any] | None = None, /, **settings: Any) -> Any:
    own = {"target": TOKENIZER, "kv_tokens": EACH, "allocation": {"name": "fixed"}}
    models = {name: own for name in names.split()}
    return serve_config(engine, models=models, **settings)


def no_hub(name: str, progress: Progress) -> EngineConfig:
    """A hub with one model, in two pieces."""
    if name != "owner/new":
        raise ConfigError(f"{name} is not there")
    for done in (0, 5, 10):
        progress("new.gguf", done, 10)
    return several("new").models["new"]


@contextmanager
def served(
    names: str, factory: str = FACTORY, engine: dict[str, Any] | None = None, /, **settings: Any
) -> Iterator[RunningServer]:
    config = several(names, engine, **settings)
    with running_server(config, factory, pulled=no_hub) as server:
        yield server


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60)


def post(url: str, timeout: float = 60, **body: Any) -> httpx.Response:
    return httpx.post(url, timeout=timeout, **body)


def ask(server: RunningServer, model: str, prompt: str = PROMPT, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    return post(f"{server.url}/v1/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def figures(server: RunningServer, name: str) -> dict[str, float]:
    """A metric of the pool, by model."""
    exposition = get(f"{server.url}/metrics").text
    found = re.findall(rf'^penstock:{name}{{model_name="([^"]+)"}} (\S+)$', exposition, re.M)
    return {model: float(value) for model, value in found}


def running(server: RunningServer) -> set[str]:
    return {name for name, value in figures(server, "model_running").items() if value}


def pid_of(server: RunningServer, model: str) -> int:
    return int(get(f"{server.url}/health").json()["models"][model]["pid"])


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def llama(server: RunningServer, **settings: Any) -> closing[ollama.Client]:
    return closing(ollama.Client(server.url, timeout=60, **settings))


@pytest.fixture(scope="module")
def two() -> Iterator[RunningServer]:
    """Memory for both models."""
    with served("a b") as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> str:
    """What a server of one model says."""
    return text(ask(server, "toy"))


def test_the_first_request_starts_a_model(expected: str) -> None:
    with served("a b") as server:
        assert running(server) == set()
        assert text(ask(server, "b")) == expected
        assert running(server) == {"b"}
        assert text(ask(server, "a")) == expected
        assert running(server) == {"a", "b"}
        assert text(ask(server, "b")) == expected
        assert figures(server, "model_starts_total") == {"a": 1, "b": 1}


@pytest.mark.slow
def test_a_preloaded_model_runs_before_the_first_request() -> None:
    with served("a b", preload=["b"]) as server:
        assert running(server) == {"b"}


def test_all_are_listed_and_clients_choose(two: RunningServer, expected: str) -> None:
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as ai:
        assert [model.id for model in ai.models.list()] == ["a", "b"]
        assert ai.models.retrieve("b").id == "b"
        made = ai.completions.create(model="b", prompt=PROMPT, max_tokens=12, temperature=0)
        assert (made.model, made.choices[0].text) == ("b", expected)
        parts = ai.completions.create(
            model="a", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == expected
        with pytest.raises(openai.NotFoundError, match="this server has 'a', 'b'"):
            ai.completions.create(model="c", prompt=PROMPT)


def test_embeddings_are_those_of_the_model_that_is_named(two: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as ai:
        for name in ("b", "a"):
            answer = ai.embeddings.create(model=name, input=[[3, 4]])
            assert (answer.model, len(answer.data[0].embedding)) == (name, 3)
    with llama(two) as client:
        assert client.embed("b", ["x", "y"]).model == "b"
        assert len(client.embeddings("a:latest", "x").embedding) == 3
        with pytest.raises(ollama.ResponseError, match="this server has 'a', 'b'"):
            client.embed("c", "x")
    exposition = get(f"{two.url}/metrics").text
    made = re.findall(r'^penstock:embeddings_total{model_name="(\w)",.*} (\S+)$', exposition, re.M)
    assert sorted(made) == [("a", "2.0"), ("b", "3.0")]


def test_llama_cpps_endpoints(expected: str) -> None:
    with served("a b") as server:

        def props(**query: str) -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{server.url}/props", params=query).json()
            return found

        assert (props()["model_alias"], props(model="b")["model_alias"]) == ("a", "b")
        assert props(model="b")["is_sleeping"] is True
        asked = {"model": "b", "messages": [{"role": "user", "content": "Hi"}]}
        assert post(f"{server.url}/apply-template", json=asked).json()["prompt"]
        assert post(f"{server.url}/tokenize", json={"model": "b", "content": "Hi"}).is_success
        assert running(server) == set()
        limit = {"n_predict": 12, "temperature": 0}
        made = post(f"{server.url}/completion", json={"model": "b", "prompt": PROMPT, **limit})
        assert (made.json()["model"], made.json()["content"]) == ("b", expected)
        assert running(server) == {"b"}
        assert props(model="b")["is_sleeping"] is False
        assert get(f"{server.url}/slots?model=b").json()[0]["is_processing"] is False
        made = post(f"{server.url}/completion", json={"model": "", "prompt": PROMPT, **limit})
        assert made.json()["model"] == "a"


def test_open_webuis_calls(two: RunningServer) -> None:
    """Its connections to Ollama and to OpenAI, as its backend makes them."""
    headers = {"X-OpenWebUI-User-Name": "Ann%20Lee", "Authorization": "Bearer none"}
    with httpx.Client(base_url=two.url, headers=headers, timeout=60) as http:
        assert http.get("/").text == "Ollama is running"
        assert http.get("/api/version").json()["version"]
        names = [model["model"] for model in http.get("/api/tags").json()["models"]]
        assert names == ["a:latest", "b:latest"]
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["a", "b"]
        messages = [{"role": "user", "content": "What is a river?"}]
        for name in names:
            for field in ("model", "name"):
                shown = http.post("/api/show", json={field: name}).json()
                assert shown["capabilities"] == ["completion"]
            options = {"temperature": 0.8, "num_predict": 8, "num_ctx": 4096, "seed": 7}
            body = {"model": name, "messages": messages, "stream": True, "options": options}
            lines = http.post("/api/chat", json=body).text.splitlines()
            parts = [json.loads(line) for line in lines]
            assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
            whole = http.post("/api/chat", json={**body, "stream": False}).json()
            said = "".join(part["message"]["content"] for part in parts)
            assert said == whole["message"]["content"]
            assert parts[-1]["eval_count"] == 8
            assert {part["model"] for part in parts} == {name.removesuffix(":latest")}
            body = {"model": name[0], "messages": messages, "stream": True, "max_tokens": 8}
            text = http.post("/v1/chat/completions", json=body).text
            assert f'"model":"{name[0]}"' in text
        found = http.get("/api/ps").json()["models"]
        assert {model["model"] for model in found} == {*names}
        unloaded = http.post("/api/generate", json={"model": "b:latest", "keep_alive": 0})
        assert unloaded.json()["done_reason"] == "unload"
        eventually(lambda: "b" not in running(two))


def test_a_request_without_a_model_goes_to_the_first_one(two: RunningServer) -> None:
    answer = post(f"{two.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
    assert answer.json()["model"] == "a"


@pytest.mark.slow
def test_wrong_bodies_start_nothing() -> None:
    with served("a b") as server:
        for body in (b"{", b"[]", b'{"model": 7}', b'{"model": "b", "n": -1, "prompt": "x"}'):
            answer = post(f"{server.url}/v1/completions", content=body)
            assert answer.status_code == 400
        assert running(server) == set()


@pytest.mark.slow
def test_what_needs_no_engine_starts_none(expected: str) -> None:
    with served("a b") as server, llama(server) as client:
        assert client.show("b:latest").capabilities == ["completion"]
        asked = {"model": "b", "prompt": PROMPT}
        assert post(f"{server.url}/tokenize", json=asked).json()["count"] > 0
        assert get(f"{server.url}/version").status_code == 200
        assert running(server) == set()


@pytest.mark.slow
def test_with_memory_for_one_the_least_lately_used_leaves(expected: str) -> None:
    with served("a b c", memory_bytes=2 * EACH) as server:
        for name, left in (("a", "a"), ("b", "a b"), ("a", "a b"), ("c", "a c"), ("b", "b c")):
            assert text(ask(server, name)) == expected
            assert running(server) == set(left.split())


@pytest.mark.slow
def test_requests_at_once_with_memory_for_one_are_all_answered(expected: str) -> None:
    with served("a b", SLOW_FACTORY, memory_bytes=EACH) as server:
        calls = [lambda name=name: ask(server, name) for name in "abab" * 3]
        assert [text(answer) for answer in at_once(*calls)] == [expected] * 12
        starts = figures(server, "model_starts_total")
        # Whoever comes while the other has its turn is served in the next one.
        assert sum(starts.values()) <= 6
        assert figures(server, "model_requests_waiting") == {"a": 0, "b": 0}


@contextmanager
def busy(server: RunningServer, model: str) -> Iterator[Future[httpx.Response]]:
    """A request that takes some seconds and has begun."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, model, max_tokens=120, ignore_eos=True)
        eventually(
            lambda: (
                f'num_requests_running{{model_name="{model}"}} 1.0'
                in get(f"{server.url}/metrics").text
            )
        )
        yield answer


@pytest.mark.slow
def test_a_running_request_is_not_cut_by_another_model(expected: str) -> None:
    with served("a b", SLOW_FACTORY, memory_bytes=EACH) as server, busy(server, "a") as first:
        assert text(ask(server, "b")) == expected
        assert first.result().json()["usage"]["completion_tokens"] == 120


@pytest.mark.slow
def test_a_wait_that_is_too_long_says_what_would_have_to_leave() -> None:
    with (
        served("a b", SLOW_FACTORY, memory_bytes=EACH, max_wait_s=0.3) as server,
        busy(server, "a") as first,
    ):
        answer = ask(server, "b")
        assert answer.status_code == 503
        told = answer.json()["error"]
        assert told["code"] == "engine_unavailable"
        assert re.fullmatch(
            r"model b \(0.0 GiB\) waits for memory: a \(0.0 GiB\), with 1 requests, would have to "
            "leave",
            told["message"],
        )
        assert text(first.result())
        assert text(ask(server, "a"))


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(expected: str) -> None:
    with served("a b", SLOW_FACTORY, memory_bytes=EACH) as server:
        with busy(server, "a") as first:
            with pytest.raises(httpx.ReadTimeout):
                post(
                    f"{server.url}/v1/completions",
                    json={"model": "b", "prompt": PROMPT},
                    timeout=0.3,
                )
            eventually(lambda: figures(server, "model_requests_waiting") == {"a": 0, "b": 0})
            assert text(ask(server, "a")) == expected
            assert text(first.result())
        assert figures(server, "model_starts_total") == {"a": 1, "b": 0}


@pytest.mark.slow
def test_a_crash_of_one_touches_no_other(expected: str) -> None:
    with served("a b", SLOW_FACTORY) as server, busy(server, "a") as first:
        assert text(ask(server, "b")) == expected
        os.kill(pid_of(server, "b"), signal.SIGKILL)
        eventually(lambda: not figures(server, "engine_up")["b"])
        assert text(ask(server, "b")) == expected
        assert first.result().json()["usage"]["completion_tokens"] == 120
        assert figures(server, "engine_restarts_total") == {"a": 0, "b": 1}


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_says_why_and_others_serve(expected: str) -> None:
    config = several("a b")
    broken = config.models["b"].model_copy(update={"block_size": 32})
    config = config.model_copy(update={"models": {**config.models, "b": broken}})
    factory = "tests.api.test_several:broken_engine"
    with running_server(config, factory) as server:
        answer = ask(server, "b")
        assert answer.status_code == 503
        assert "cannot be started: b is broken" in answer.json()["error"]["message"]
        assert text(ask(server, "a")) == expected


def broken_engine(config: EngineConfig) -> Any:
    from tests.serving.fakes import toy_engine

    if config.block_size == 32:
        raise ValueError("b is broken")
    return toy_engine(config)


def refusal(names: str, **settings: Any) -> str:
    """What a server says that does not start."""
    with pytest.raises(ConfigError) as error:
        asyncio.run(serve(several(names, **settings), print, FACTORY))
    return str(error.value)


def test_a_model_that_never_fits_is_refused_at_the_start() -> None:
    told = refusal("a", memory_bytes=EACH - 1)
    assert told.startswith("model 'a': models take 0.0 GiB and their KV memory 0.0 GiB; ")


def test_preloaded_models_that_do_not_fit_together_are_refused_at_the_start() -> None:
    told = refusal("a b", memory_bytes=EACH, preload=["a", "b"])
    assert told.startswith("preload: a (0.0 GiB) and b (0.0 GiB) do not fit together into 0.0 GiB")


@pytest.mark.slow
def test_a_model_is_stopped_after_keep_alive() -> None:
    with served("a b", keep_alive="200ms") as server, llama(server) as client:
        text(ask(server, "a"))
        assert [model.model for model in client.ps().models] == ["a:latest"]
        eventually(lambda: running(server) == set())
        assert client.ps().models == []
        assert text(ask(server, "a"))


@pytest.mark.slow
def test_keep_alive_of_a_request(expected: str) -> None:
    with served("a b", keep_alive="1h") as server, llama(server) as client:
        client.generate("a", "x", keep_alive=-1, options={"num_predict": 1})
        (loaded,) = client.ps().models
        assert loaded.expires_at is not None
        assert loaded.expires_at.year == 9999
        client.generate("a", "x", keep_alive="30m", options={"num_predict": 1})
        (loaded,) = client.ps().models
        assert loaded.expires_at is not None
        left = loaded.expires_at.timestamp() - time.time()
        assert 1790 < left < 1801
        client.generate("a", "x", keep_alive=0, options={"num_predict": 1})
        eventually(lambda: running(server) == set())
        assert client.generate("b").done_reason == "load"
        assert running(server) == {"b"}
        assert client.generate("b", keep_alive=0).done_reason == "unload"
        eventually(lambda: running(server) == set())
        assert client.chat("b", keep_alive=0).done_reason == "unload"
        assert running(server) == set()
        with pytest.raises(ollama.ResponseError, match="'soon' is no duration") as error:
            client.generate("b", "x", keep_alive="soon")
        assert error.value.status_code == 400


@pytest.mark.slow
def test_pull_copy_and_delete() -> None:
    with served("a") as server, llama(server) as client:
        events = list(client.pull("hf.co/owner/new", stream=True))
        assert [event.status for event in events][::4] == ["pulling manifest", "success"]
        assert [(e.completed, e.total) for e in events[1:-1]] == [(0, 10), (5, 10), (10, 10)]
        assert client.pull("owner/new").status == "success"
        client.copy("owner/new", "mine")
        names = [model.model for model in client.list().models]
        assert names == ["a:latest", "owner/new:latest", "mine:latest"]
        made = client.generate("mine", PROMPT, options={"num_predict": 3})
        assert made.model == "mine"
        assert running(server) == {"a", "owner/new"} - {"a"}
        client.delete("owner/new")
        assert client.generate("mine", PROMPT, options={"num_predict": 3}).response
        client.delete("mine")
        assert [model.model for model in client.list().models] == ["a:latest"]
        eventually(lambda: running(server) == set())
        for refused in (
            lambda: client.delete("mine"),
            lambda: client.copy("mine", "other"),
            lambda: client.generate("mine", "x"),
        ):
            with pytest.raises(ollama.ResponseError, match="'mine' does not exist") as error:
                refused()
            assert error.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="owner/old is not there"):
            client.pull("owner/old")
        with pytest.raises(ollama.ResponseError, match="owner/old is not there"):
            list(client.pull("owner/old", stream=True))


@pytest.mark.slow
def test_only_operators_change_models() -> None:
    engine = {"tenants": {"t": {"api_keys": [hash_of_key("sk-t")]}}}
    keys = (hash_of_key("sk-operator"),)
    with served("a b", FACTORY, engine, metrics_keys=keys) as server:
        tenant, operator = ({"Authorization": f"Bearer sk-{name}"} for name in ("t", "operator"))
        with llama(server, headers=tenant) as client:
            assert len(client.list().models) == 2
            with pytest.raises(ollama.ResponseError, match="none for metrics") as error:
                client.delete("a")
            assert error.value.status_code == 401
        with llama(server, headers=operator) as client:
            client.delete("a")
        for path in ("v1/models", "api/tags", "dashboard/requests", "dashboard/requests?model=x"):
            assert get(f"{server.url}/{path}").status_code == 401
        answer = post(f"{server.url}/v1/completions", json={"model": "x", "prompt": "y"})
        assert answer.status_code == 401
        assert get(f"{server.url}/health").status_code == 200


def test_pages_of_other_sites_change_no_models(two: RunningServer) -> None:
    headers = {"Origin": "https://elsewhere.example"}
    for path in ("pull", "copy"):
        asked = {"model": "owner/new", "source": "a", "destination": "c"}
        answer = post(f"{two.url}/api/{path}", json=asked, headers=headers)
        assert answer.status_code == 403
    assert len(get(f"{two.url}/v1/models").json()["data"]) == 2


def test_metrics_have_each_family_once(two: RunningServer) -> None:
    for name in "ab":
        text(ask(two, name))
    whole = get(f"{two.url}/metrics").text
    helps = re.findall(r"^# HELP (\S+)", whole, re.M)
    assert len(helps) == len({*helps})
    for name in "ab":
        assert f'penstock:generation_tokens_total{{model_name="{name}",tenant="default"}}' in whole
        own = get(f"{two.url}/metrics?model={name}").text
        found = {*re.findall(r'generation_tokens_total{model_name="(.)"', own)}
        assert found == {name}
        page = get(f"{two.url}/dashboard/requests?model={name}").json()
        assert page["model"] == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"served_model_name": "x"}, "served_model_name is for one model"),
        ({"drafters": {"listen": "127.0.0.1:0"}}, "drafters is for one model"),
        ({"otlp_traces_endpoint": "http://x"}, "otlp_traces_endpoint is for one model"),
        ({"preload": ["c"]}, "preload: 'c' is none of a, b"),
        ({"keep_alive": "soon"}, "keep_alive: 'soon' is no duration"),
    ],
)
def test_settings_that_do_not_go_with_several(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        several("a b", **settings)


@pytest.mark.parametrize("setting", ["preload", "keep_alive", "memory_bytes"])
def test_settings_for_several_alone(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is for several models"):
        serve_config(**{setting: ["a"] if setting == "preload" else 1})


def test_gpus_are_not_shared() -> None:
    with pytest.raises(ConfigError, match="'a': several models are for CPUs"):
        serve_config(models={"a": {"target": TOKENIZER, "device": "cuda"}})


@pytest.mark.slow
def test_paths_of_models_are_not_looked_for(tmp_path: Path) -> None:
    with served("a") as server, llama(server) as client:
        for name in (str(tmp_path), "../x"):
            with pytest.raises(ollama.ResponseError):
                client.pull(name)
