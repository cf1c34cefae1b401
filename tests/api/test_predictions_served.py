"""`prediction`: drafted, counted, and never seen in the text; `suffix`: fill in the middle."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tests.api.test_completions import events
from tests.api.test_forced_tools import MESSAGES, TEMPLATE, TOOLS
from tests.api.test_prepare import completion, preparer
from tests.api.tool_servers import HERMES
from tests.engine.test_fill import with_tokens
from tests.products import first_fast
from tests.serving.harness import RunningServer, model_server

from penstock.api.errors import ApiError
from penstock.api.http import IGNORED_FIELDS
from penstock.engine.tokenizer import Tokenizer
from penstock.zoo.registry import model_path

PROMPT = "One day a little dog"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    target = tmp_path_factory.mktemp("predicted") / "target"
    shutil.copytree(model_path("draft-base"), target)
    (target / "chat_template.jinja").write_text(TEMPLATE + HERMES[HERMES.rindex("{#") :])
    # Without memory: it would find the same text in the answer to the first request.
    drafters = {"ngram": "ngram", "tiny": str(model_path("draft-tiny"))}
    with model_server(target, drafters, {"verification": "coupled"}) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS not in answer.headers
    return answer.json()


def counted(made: dict[str, Any]) -> tuple[int, int]:
    details = made["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.mark.parametrize("drafter", first_fast(["auto", "ngram", "tiny"]))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_text_is_the_same_with_any_prediction(real, drafter, seed) -> None:
    asked = {
        "prompt": PROMPT, "max_tokens": 60, "seed": seed, "ignore_eos": True,
        "speculation": {"drafter": drafter}, "n": 2, "stop": ["zzz"],
    }  # fmt: skip
    plain = post(real, COMPLETIONS, **asked)
    texts = [choice["text"] for choice in plain["choices"]]
    assert counted(plain) == (0, 0)
    kept = {}
    for name, text in (
        ("right", texts[0]), ("edited", texts[0].replace("e", "o", 3)), ("wrong", "8 9 " * 40)
    ):  # fmt: skip
        made = post(real, COMPLETIONS, **asked, prediction=content(text))
        assert [choice["text"] for choice in made["choices"]] == texts
        kept[name], rejected = counted(made)
        assert kept[name] <= made["usage"]["completion_tokens"] == 120
        assert rejected >= 0
    assert min(kept["right"], kept["edited"]) > 15 > kept["wrong"]
    none = {**asked, "speculation": {"drafter": "none"}, "prediction": content(texts[0])}
    assert counted(post(real, COMPLETIONS, **none)) == (0, 0)


def test_chats_streams_tools_and_formats(real: RunningServer) -> None:
    asked: dict[str, Any] = {
        "messages": MESSAGES, "seed": 1, "max_tokens": 80, "tools": TOOLS, "tool_choice": "required"
    }  # fmt: skip
    plain = post(real, CHAT, **asked)
    calls = plain["choices"][0]["message"]["tool_calls"]
    call = {"name": calls[0]["function"]["name"]}
    call |= {"arguments": json.loads(calls[0]["function"]["arguments"])}
    parts = [{"type": "text", "text": text} for text in ("<tool_call>", json.dumps(call))]
    predicted = {**asked, "prediction": {"type": "content", "content": parts}}
    made = post(real, CHAT, **predicted)
    (again,) = made["choices"][0]["message"]["tool_calls"]
    assert again["function"] == calls[0]["function"]
    assert counted(made)[0] > 0
    usage = {"stream_options": {"include_usage": True}}
    with httpx.Client(base_url=real.url, timeout=60) as http:
        chunks = events(http, CHAT, **predicted, **usage)
    assert counted(chunks[-1])[0] > 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("a text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "code", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "word " * 600}, "prediction"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, given: Any, field: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    answer = http.post(path, json={**asked, "prediction": given})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
    assert len(answer.json()["error"]["message"].splitlines()) == 1


def test_responses_have_none(http: httpx.Client) -> None:
    body = {"input": "Hi", "max_output_tokens": 4, "prediction": content("Hi")}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED_FIELDS] == "prediction"


# --- fill in the middle ---------------------------------------------------------------------------

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def test_without_fill_in_the_middle_tokens(ai: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="has no fill-in-the-middle tokens") as error:
        ai.completions.create(model="toy", prompt="a", suffix="b")
    assert error.value.param == "suffix"
    assert ai.completions.create(model="toy", prompt="a", suffix="").choices
    body = {"messages": [{"role": "user", "content": "Hi"}], "suffix": "b"}
    assert http.post(CHAT, json=body).status_code == 400


async def test_the_prompt_of_a_fill(tokenizer: Tokenizer) -> None:
    filling = with_tokens(*QWEN)
    built = preparer(filling)
    built.engine = replace(built.engine, vocab_size=filling.vocab_size)
    pre, suf, mid, pad = (filling.encode(token, False)[0] for token in QWEN)
    before, behind = (filling.encode(text, False) for text in ("def f():", "\n    return x"))
    whole = (pre, *before, suf, *behind, mid)
    (made,) = await completion(built, prompt="def f():", suffix="\n    return x")
    assert made.prompt_token_ids == whole
    assert made.stop_token_ids >= {2, pre, suf, mid, pad}
    (made,) = await completion(built, prompt=before, suffix="\n    return x", ignore_eos=True)
    assert made.prompt_token_ids == whole
    assert not made.stop_token_ids
    several = await completion(built, prompt=["", "def f():"], suffix="\n    return x", n=2)
    assert [r.prompt_token_ids for r in several[2:]] == [whole] * 2
    assert several[0].prompt_token_ids == (pre, suf, *behind, mid)
    for name, fields in (
        ("suffix", {"suffix": "x" * 9000}),
        ("echo", {"suffix": "b", "echo": True}),
    ):
        with pytest.raises((ApiError, ValueError), match=name):
            await completion(built, prompt="a", **fields)
