"""llama.cpp's `/infill`, by the requests that llama.vim makes, and what it looks for in answers."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import httpx
import ollama
import pytest
from tests.api.test_prepare import preparer
from tests.engine.test_fill import with_tokens
from tests.serving.fakes import TOKENIZER, ToyEngine, toy_engine
from tests.serving.harness import RunningServer, running_server, serve_config

from penstock.api.http import IGNORED_FIELDS
from penstock.api.llamacpp.bodies import InfillBody
from penstock.api.llamacpp.endpoints import filling as filled
from penstock.config import EngineConfig

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>")
TIMED = ("n", "ms", "per_token_ms", "per_second")
TIMINGS = [f"timings/{what}_{name}" for what in ("prompt", "predicted") for name in TIMED]
SUGGEST: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": 'def mean(values):\n    """Return the mean."""\n',
    "input_suffix": "\n\ndef main():\n    print(mean([1, 2, 3]))\n",
    "input_extra": [{"filename": "s1.py", "time": [1795707844, 548398], "text": "x = 1\n"}],
    "prompt": "    total = sum(values)",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
    "model": "",
}
"""As recorded from llama.vim in Vim; likewise the next."""
READ = SUGGEST | {
    "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0,
    "samplers": [], "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
ECHO = {"input_prefix": "one two\nthree ", "input_suffix": "four", "ignore_eos": True}
"""The toy engine says its prompt again."""


def filling_engine(config: EngineConfig) -> ToyEngine:
    return replace(toy_engine(config), vocab_size=5000)


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("filling")
    with_tokens(*QWEN)._fast.save_pretrained(folder)
    shutil.copy(TOKENIZER / "config.json", folder)
    config = serve_config({"target": folder}, served_model_name="toy")
    with running_server(config, "tests.api.test_infill:filling_engine") as running:
        yield running


def asked(server: RunningServer, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}/infill", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_what_llama_vim_asks_for_and_reads(filling: RunningServer) -> None:
    headers = {"Authorization": "Bearer ", "Content-Type": "application/json"}
    body = json.dumps(SUGGEST).encode()  # httpx sends no empty key
    with urlopen(Request(f"{filling.url}/infill", body, headers), timeout=60) as answer:
        text = answer.read().decode()
    assert re.search(r'^\s*\{.*"content"\s*:"', text), "the plugin's own test"
    made = json.loads(text)
    assert set(made) == {"content", *TIMINGS, "truncated", "tokens_cached"}
    assert all(isinstance(made[f"timings/{w}_ms"], float) for w in ("prompt", "predicted"))
    assert "n_indent" in answer.headers[IGNORED_FIELDS]
    assert asked(filling, **READ).json() == {}
    instruct = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert httpx.post(f"{filling.url}/v1/chat/completions", json=instruct).status_code == 200


def test_whole_and_streamed(filling: RunningServer) -> None:
    whole = asked(filling, **ECHO, n_predict=16).json()
    assert whole["content"].startswith("file\none two\nthree")
    assert (whole["stop"], whole["stop_type"]) == (True, "limit")
    assert whole["timings"]["predicted_n"] == 16
    lines = asked(filling, **ECHO, n_predict=16, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"]["predicted_n"] == 16
    stopped = asked(filling, **ECHO, n_predict=16, stop=["two"]).json()
    assert (stopped["content"], stopped["stop_type"]) == ("file\none ", "word")
    assert stopped["stopping_word"] == "two"
    ended = asked(filling, **ECHO | {"ignore_eos": False}).json()
    assert (ended["content"], ended["stop_type"]) == ("", "eos"), "a file begins"


def test_a_text_of_several_lines_ends_after_a_while(filling: RunningServer) -> None:
    made = asked(filling, **ECHO, n_predict=400, t_max_predict_ms=20).json()
    assert "\n" in made["content"]
    assert made["stop_type"] == "limit"
    assert 1 < made["timings"]["predicted_n"] < 400
    one_line = SUGGEST | {"input_prefix": "", "prompt": "one two", "input_suffix": " four"}
    made = asked(filling, **one_line | {"ignore_eos": True, "n_predict": 3}).json()
    assert made["timings/predicted_n"] == 3


async def test_the_prompt_of_an_infill() -> None:
    tokenizer = with_tokens(*QWEN)
    built = preparer(tokenizer)
    built.engine = replace(built.engine, vocab_size=tokenizer.vocab_size, max_request_tokens=1000)
    service: Any = SimpleNamespace(
        prepare=built, tokenizer=tokenizer, client=SimpleNamespace(info=built.engine)
    )
    pre, suf, mid, sep, pad = (tokenizer.encode(token, False)[0] for token in QWEN)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, False)

    made = await filled(service, InfillBody.model_validate(SUGGEST | {"stop_token_ids": [7]}))
    before, behind = SUGGEST["input_prefix"] + SUGGEST["prompt"], SUGGEST["input_suffix"]
    files = [sep, *ids("s1.py\nx = 1\n"), sep, *ids("file\n")]
    fill = [*tokenizer.encode(""), pre, *ids(before), suf, *ids(behind), mid]
    assert made.prompts == [files + fill]
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.0, 40, 0.9, 128)
    assert {*made.stop_token_ids} == {7, pre, suf, mid, sep, pad}
    long = SUGGEST | {"input_extra": [{"text": "y = 2\n" * 100}] * 3, "n_predict": 50}
    made = await filled(service, InfillBody.model_validate(long))
    (prompt,) = made.prompts
    assert len(prompt) + 50 == built.engine.max_request_tokens
    assert prompt[-len(fill) :] == fill
    made = await filled(service, InfillBody.model_validate({**ECHO, "temperature": 0.5}))
    assert (made.temperature, made.max_tokens, made.stop_token_ids) == (0.5, None, [])


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 7}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 0}, "n_cmpl"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra.0.filename"),
        ({"model": "other"}, "model"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"input_suffix": "x" * 9000}, "input_suffix"),
    ],
)
def test_bad_input(filling: RunningServer, wrong: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{filling.url}/infill", json={**ECHO, **wrong}, timeout=60)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_model_without_fill_in_the_middle_tokens(http: httpx.Client) -> None:
    error = http.post("/infill", json=ECHO).json()["error"]
    assert error["param"] == "input_suffix"
    assert "has no fill-in-the-middle tokens" in error["message"]


def test_ollamas_form(filling: RunningServer) -> None:
    body = {"prompt": "one two", "suffix": "three", "max_tokens": 9, "temperature": 0}
    expected = httpx.post(f"{filling.url}/v1/completions", json=body, timeout=60).json()
    with closing(ollama.Client(filling.url, timeout=60)) as client:
        options = {"temperature": 0, "num_predict": 9}
        made = client.generate("toy", "one two", suffix="three", options=options)
        assert made.response == expected["choices"][0]["text"]
        assert made.prompt_eval_count == expected["usage"]["prompt_tokens"]
        before = client.generate("toy", suffix="three", options=options)
        assert (before.prompt_eval_count or 0) < (made.prompt_eval_count or 0)
        assert client.show("toy").capabilities == ["completion", "insert"]
