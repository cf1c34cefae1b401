import json
import re
from typing import Any

import httpx
import openai
import pytest
from tests.serving.fakes import EOS

PROMPT = "Hello world, this is it. "


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as it should."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(ai: openai.OpenAI) -> None:
    made = ai.completions.create(model="toy", prompt=PROMPT, max_tokens=20)
    (choice,) = made.choices
    assert (PROMPT * 5).startswith(choice.text)
    assert choice.finish_reason == "length"
    assert made.usage.completion_tokens == 20
    assert made.usage.total_tokens == made.usage.prompt_tokens + 20
    assert made.id.startswith("cmpl-")
    assert made.model == "toy"


def test_usage_tells_how_speculation_went(ai: openai.OpenAI) -> None:
    made = ai.completions.create(model="toy", prompt=PROMPT, max_tokens=40)
    speculation = made.usage.to_dict()["speculation"]
    assert isinstance(speculation, dict)
    assert speculation["drafter"] == "toy-drafter"
    assert 0 < speculation["num_accepted_tokens"] <= speculation["num_draft_tokens"]
    ratio = speculation["num_accepted_tokens"] / speculation["num_drafts"]
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + ratio)
    own = {n: speculation[n] for n in ("num_draft_tokens", "num_accepted_tokens")}
    assert speculation["drafters"] == {"toy-drafter": own}


def test_a_request_can_do_without_speculation(ai: openai.OpenAI) -> None:
    extra = {"speculation": {"drafter": "none"}}
    made = ai.completions.create(model="toy", prompt=PROMPT, max_tokens=40, extra_body=extra)
    assert made.usage.to_dict()["speculation"] == {
        "drafter": None,
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "mean_acceptance_length": 1.0,
        "drafters": {},
    }


def test_a_stream_is_the_same_text_in_pieces(ai: openai.OpenAI) -> None:
    whole = ai.completions.create(model="toy", prompt=PROMPT, max_tokens=50).choices[0].text
    chunks = list(ai.completions.create(model="toy", prompt=PROMPT, max_tokens=50, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole
    assert len(chunks) > 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1


def test_usage_at_the_end_of_a_stream(http: httpx.Client) -> None:
    options = {"include_usage": True}
    chunks = events(http, "/v1/completions", prompt=PROMPT, max_tokens=9, stream_options=options)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("world", "Hello "), ([", this", "it"], "Hello world"), (" is it. Hell", "Hello world, this")],
)
def test_stop_strings(ai: openai.OpenAI, stop: str | list[str], text: str, stream: bool) -> None:
    made: Any = ai.completions.create(
        model="toy", prompt=PROMPT, max_tokens=100, stop=stop, stream=stream
    )
    chunks = list(made) if stream else [made]
    assert "".join(c.choices[0].text for c in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_end_of_text_is_counted_but_not_shown(http: httpx.Client) -> None:
    body = {"prompt": [50, 60, EOS, 70], "max_tokens": 9, "logprobs": 0}
    (ended,) = http.post("/v1/completions", json=body).json()["choices"]
    assert ended["finish_reason"] == "stop"
    assert len(ended["logprobs"]["tokens"]) == 2
    made = http.post("/v1/completions", json=body).json()
    assert made["usage"]["completion_tokens"] == 3
    going_on = http.post("/v1/completions", json={**body, "ignore_eos": True}).json()
    assert going_on["choices"][0]["finish_reason"] == "length"


def test_prompts_come_in_four_shapes(http: httpx.Client) -> None:
    def texts(prompt: Any) -> list[str]:
        made = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6}).json()
        assert [c["index"] for c in made["choices"]] == list(range(len(made["choices"])))
        return [c["text"] for c in made["choices"]]

    (one,) = texts("Hello world")
    assert texts(["Hello world", "this is"])[0] == one
    (by_id,) = texts([50, 60, 70])
    assert texts([[50, 60, 70], [80, 90]])[0] == by_id


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": [[50, 60], [80, 90]], "max_tokens": 10, "n": 3}
    texts: dict[int, str] = {}
    made: list[dict[str, Any]]
    if stream:
        options = {"include_usage": True}
        made = events(http, "/v1/completions", **body, stream_options=options)
    else:
        made = [http.post("/v1/completions", json=body).json()]
    for chunk in made:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert sorted(texts) == list(range(6))
    assert len({texts[i] for i in range(3)}) == len({texts[i] for i in range(3, 6)}) == 1
    assert made[-1]["usage"]["prompt_tokens"] == 4
    assert made[-1]["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2}
    if stream:
        made = events(http, "/v1/completions", **body)
    else:
        made = [http.post("/v1/completions", json=body).json()]
    text = "".join(c["choices"][0]["text"] for c in made)
    parts = [c["choices"][0]["logprobs"] for c in made]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:i])) for i in range(12)]
    assert [v for part in parts for v in part["token_logprobs"]] == [-0.25] * 12
    assert all(len(top) == 2 for part in parts for top in part["top_logprobs"])


def test_parts_of_characters_stay_apart_in_logprobs(http, tokenizer) -> None:
    parts = tokenizer.encode("€")
    body = {"prompt": parts, "max_tokens": len(parts), "logprobs": 0}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "€"
    spelt = "".join(choice["logprobs"]["tokens"]).replace("bytes:", "")
    assert spelt == "\\xe2\\x82\\xac"


SHARED = {"seed": 7, "min_tokens": 2, "stop_token_ids": [9], "expected_output_tokens": 5}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
OPTIONS = {"num_predict": -1, "seed": -1, "top_k": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHARED | {"prompt": [50, 60], "max_tokens": 6, "logprobs": 1, "n": 2}),
        ("/v1/completions", {"prompt": [[50], [70]], "speculation": {"max_draft_tokens": 2}}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 6, "logprobs": True, "top_logprobs": 1}),
        ("/v1/responses", SHARED | {"input": "Hi", "max_output_tokens": 6}),
        ("/v1/messages", CHAT | SHARED | {"max_tokens": 6}),
        ("/api/chat", CHAT | {"stream": False, "options": OPTIONS}),
        ("/detokenize", {"tokens": [50, 60]}),
    ],
)
def test_integers_may_have_a_point(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """6.0 for 6, as some languages write it."""
    pointed = re.sub(r"(?<=[ \[])(-?\d+)(?=[,\]}])", r"\1.0", json.dumps(body))
    told, plain = http.post(path, content=pointed), http.post(path, json=body)
    assert told.status_code == plain.status_code == 200, told.text
    for name in ("choices", "usage", "content", "message", "prompt", "eval_count"):
        assert told.json().get(name) == plain.json().get(name)
