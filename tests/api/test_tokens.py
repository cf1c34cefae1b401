"""Tokens of texts and back, and what this kind of model does not make."""

from typing import Any

import httpx
import pytest

from penstock.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_text_and_back(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "What is a penstock?"
    made = http.post("/tokenize", json={"model": "toy", "prompt": text}).json()
    assert made["tokens"] == tokenizer.encode(text)
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 512
    assert made["token_strs"] is None
    back = http.post("/detokenize", json={"model": "toy", "tokens": made["tokens"]}).json()
    assert text in back["prompt"]
    again = {"prompt": back["prompt"], "add_special_tokens": False}
    assert http.post("/tokenize", json=again).json()["tokens"] == made["tokens"]


def test_a_conversation(http: httpx.Client, tokenizer: Tokenizer) -> None:
    made = http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True}).json()
    assert made["tokens"] == tokenizer.apply_chat_template(MESSAGES)
    assert made["token_strs"][0] == "<|bos|>"
    assert len(made["token_strs"]) == made["count"]
    shorter = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})
    assert shorter.json()["tokens"] == made["tokens"][:-1]


def test_a_long_text(http: httpx.Client) -> None:
    """As in completions: it would not fit the context."""
    answer = http.post("/tokenize", json={"prompt": "ab " * 5000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "the body is wrong: give one of prompt, messages and content"),
        (
            "/tokenize",
            {"prompt": "a", "messages": MESSAGES},
            "the body is wrong: give one of prompt, messages and content",
        ),
        ("/tokenize", {"prompt": "a", "truncate": 3}, "truncate: unknown field"),
        ("/detokenize", {"tokens": [4096]}, "tokens: token ids go from 0 to 4095, not to 4096"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0: Input should be greater than or equal to 0"),
        ("/detokenize", {}, "tokens: Field required"),
    ],
)
def test_bad_bodies(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message


def test_another_model(http: httpx.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert http.post(path, json={**body, "model": "gpt-9"}).status_code == 404


def test_what_a_client_without_the_model_must_know(http, tokenizer) -> None:
    told = http.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert "messages" in told["chat_template"]
    body = {"prompt": told["eos_token"], "add_special_tokens": False}
    (eos,) = http.post("/tokenize", json=body).json()["tokens"]
    assert tokenizer.special_tokens[eos] == "<|eos|>"
