"""`echo` with log-probabilities, as evaluation harnesses ask for it, and stop strings with
`min_tokens`."""

from typing import Any

import httpx
import openai
import pytest
from tests.api.test_completions import PROMPT
from tests.serving.fakes import expected_tokens

from penstock.engine.tokenizer import Tokenizer


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", [PROMPT, "H"])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_prompt_then_text(http, tokenizer, max_tokens, prompt) -> None:
    ids = tokenizer.encode(prompt)[-len(prompt) :]
    body = {"echo": True, "max_tokens": max_tokens, "logprobs": 2}
    made = complete(http, prompt=ids, **body)
    choice = made["choices"][0]
    whole = ids + expected_tokens(ids, max_tokens)
    assert choice["text"] == tokenizer.decode(whole)
    assert choice["finish_reason"] == "length"
    assert made["usage"]["prompt_tokens"] == len(ids)
    assert made["usage"]["completion_tokens"] == max_tokens
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(whole)
    assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(whole) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][0] == 0
    spelt = complete(http, prompt=prompt, add_special_tokens=len(prompt) > 1, **body)
    assert spelt["choices"] == made["choices"]


def test_as_lm_eval_scores_a_continuation(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """Two contexts in one request; the token that is made is cut off again."""
    prompts = [tokenizer.encode("One two three"), tokenizer.encode("Four five")]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    for choice, ids in zip(complete(http, **body, echo=True)["choices"], prompts, strict=True):
        scores = choice["logprobs"]["token_logprobs"][1:-1]
        assert sum(scores) == -0.25 * (len(ids) - 1)
        for tokens, top in zip(
            choice["logprobs"]["tokens"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True
        ):
            assert tokens in top


def test_without_logprobs_and_streamed(http: httpx.Client, ai: openai.OpenAI) -> None:
    made = complete(http, prompt=PROMPT, echo=True, max_tokens=5)
    assert made["choices"][0]["text"].startswith(PROMPT)
    assert made["choices"][0]["logprobs"] is None
    chunks = ai.completions.create(
        model="toy", prompt=PROMPT, echo=True, max_tokens=5, stream=True, logprobs=0
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == made["choices"][0]["text"]


def test_echo_does_not_move_a_stop_string(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """The prompt's end and what is made first are the stop string, too, and do not count."""
    ids = tokenizer.encode("red green blue ")
    text = tokenizer.decode(expected_tokens(ids, 60))
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 60, "stop": "blue " + text[:3]}
    assert text.count(body["stop"]) > 0
    plain, echoed = complete(http, **body), complete(http, **body, echo=True)
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    first, second = plain["choices"][0], echoed["choices"][0]
    assert second["text"] == tokenizer.decode(ids) + first["text"]
    assert first["finish_reason"] == second["finish_reason"] == "stop"
    assert first["text"] == text[: text.index(body["stop"])]


def test_min_tokens_come_before_any_stop_string(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("red green blue ")
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 30, "stop": ["green"]}
    early = complete(http, **body)
    late = complete(http, **body, min_tokens=len(ids) + 1)
    assert "green" not in early["choices"][0]["text"]
    assert late["choices"][0]["text"].count("green") == 1
    assert late["usage"]["completion_tokens"] > len(ids)
    assert late["choices"][0]["finish_reason"] == "stop"
