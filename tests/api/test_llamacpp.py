"""llama.cpp's own endpoints, by what its server's tests ask for (`tools/server/tests/unit`).

`docs/results/llamacpp_tests.csv` has a line for each of these, with the test here that shows it."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.test_prepare import SOMEONE, preparer
from tests.api.tool_servers import HERMES, write_tokenizer
from tests.engine.test_fill import with_tokens
from tests.serving.fakes import TOKENIZER
from tests.serving.harness import (
    RunningServer,
    eventually,
    model_server,
    running_server,
    serve_config,
)
from tokenizers.processors import TemplateProcessing

from penstock.api.bodies import ChatBody
from penstock.api.errors import ApiError
from penstock.api.http import IGNORED_FIELDS
from penstock.api.llamacpp.bodies import LlamaCompletion
from penstock.api.token_bodies import TokenizeBody
from penstock.config import hash_of_key
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.zoo.registry import model_path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/results/llamacpp_tests.csv"
CONTEXT, KV_TOKENS = 512, 65536
PROMPT = "one two three"
PAIRS = "logit_bias: must be an object or a list of [token or text, bias]"
SAID = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
"""The toy engine says its prompt again."""


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/completion", json={**body, "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture
def slow(slow_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=slow_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def begun() -> Tokenizer:
    """A text begins with a token of its own."""
    tokenizer = load_tokenizer(TOKENIZER)
    begin = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer._fast.backend_tokenizer.post_processor = begin
    return tokenizer


# --- /completion ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion(http: httpx.Client, tokenizer: Tokenizer, path: str) -> None:
    made = post(http, path, **SAID, return_tokens=True)
    ids = tokenizer.encode(PROMPT)
    said = [ids[k % len(ids)] for k in range(8)]
    assert (made["content"], made["tokens"]) == (tokenizer.decode(said), said)
    assert (made["stop"], made["stop_type"], made["stopping_word"]) == (True, "limit", "")
    assert (made["truncated"], made["has_new_line"], made["model"]) == (False, False, "toy")
    assert (made["tokens_predicted"], made["tokens_evaluated"]) == (8, len(ids))
    assert (made["prompt"], made["index"]) == (PROMPT, 0)
    timings = made["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == len(ids)
    assert timings["predicted_n"] == 8
    assert post(http, path, **SAID)["tokens"] == []


def test_completion_stream(http: httpx.Client) -> None:
    whole = post(http, "/completion", **SAID, seed=42, return_tokens=True)
    *pieces, last = streamed(http, **SAID, seed=42)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert all(piece["stop"] is False and piece["tokens"] for piece in pieces)
    assert [piece["tokens_predicted"] for piece in pieces][-1] == 8
    assert "timings" not in pieces[0]
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    assert (last["stop_type"], last["truncated"]) == ("limit", False)
    assert last["timings"]["predicted_n"] == 8
    told = last["generation_settings"]
    assert (told["n_predict"], told["max_tokens"], told["seed"]) == (8, 8, 42)
    assert (told["temperature"], told["top_k"], told["stream"]) == (0, 40, True)
    assert "timings" in streamed(http, **SAID, timings_per_token=True)[0]


def test_completion_defaults_are_llama_cpps() -> None:
    body = LlamaCompletion.model_validate({"prompt": "a", "seed": -1, "n_predict": -1})
    asked = body.asked(["a"], {})
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0.8, 40, 0.95, 0.05)
    assert (asked.repetition_penalty, asked.seed, asked.max_tokens) == (1.0, None, None)
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        made = LlamaCompletion.model_validate({"prompt": "a", name: 7, "repeat_penalty": 1.5})
        assert made.asked(["a"], {}).max_tokens == 7
        assert made.repetition_penalty == 1.5


def test_samplers_that_are_not_named_are_off() -> None:
    given = {"prompt": "a", "temperature": 0.5, "repeat_penalty": 1.5}
    body = LlamaCompletion.model_validate({**given, "samplers": ["dry", "top_k", "temperature"]})
    asked = body.asked(["a"], {})
    assert (asked.top_k, asked.temperature) == (40, 0.5)
    assert (asked.top_p, asked.min_p, asked.repetition_penalty) == (1.0, 0.0, 1.0)
    body = LlamaCompletion.model_validate({**given, "samplers": ["penalties", "top_p"]})
    asked = body.asked(["a"], {})
    assert (asked.top_k, asked.temperature, asked.top_p) == (0, 1.0, 0.95)
    assert asked.repetition_penalty == 1.5


def test_n_predict_0_only_reads_the_prompt(http: httpx.Client) -> None:
    made = post(http, "/completion", **SAID | {"n_predict": 0})
    assert (made["content"], made["tokens_predicted"], made["stop_type"]) == ("", 0, "limit")


@pytest.mark.parametrize(("limit", "truncated"), [(64, False), (-1, True), (4000, True)])
def test_ctx_shift_disabled_short_prompt(http: httpx.Client, limit: int, truncated: bool) -> None:
    made = post(http, "/completion", **SAID | {"n_predict": limit}, ignore_eos=True)
    assert made["truncated"] is truncated
    room = CONTEXT - made["tokens_evaluated"]
    assert made["timings"]["predicted_n"] == (room if truncated else limit)


def test_ctx_shift_disabled_long_prompt(http: httpx.Client) -> None:
    answer = http.post("/completion", json={"prompt": "one two " * 4 * CONTEXT})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_stop(http: httpx.Client) -> None:
    made = post(http, "/completion", **SAID, stop=["two"])
    assert (made["content"], made["stop_type"]) == ("one ", "word")
    assert made["stopping_word"] == "two"
    ended = post(http, "/completion", **SAID | {"prompt": "one<|eos|>"})
    assert (ended["content"], ended["stop_type"]) == ("one", "eos")


def test_completion_with_tokens_input(http: httpx.Client) -> None:
    ids = post(http, "/tokenize", content=PROMPT, add_special=True)["tokens"]
    content = post(http, "/completion", **SAID)["content"]
    for one in (ids, {"prompt_string": PROMPT}, [PROMPT], [*ids[:2], PROMPT, *ids[:1]]):
        assert post(http, "/completion", **SAID | {"prompt": one, "n_predict": 2})["content"]
    for several in ([ids, ids], [ids, PROMPT], [ids, {"prompt_string": PROMPT}]):
        both = post(http, "/completion", **SAID | {"prompt": several})
        assert [made["content"] for made in both] == [content] * 2
        assert [made["index"] for made in both] == [0, 1]
    mixed = post(http, "/completion", **SAID | {"prompt": [*ids, " four", *ids]})
    assert mixed["prompt"] == f"{PROMPT} four{PROMPT}"
    each = post(http, "/completion", **SAID, n_cmpl=2)
    assert [made["content"] for made in each] == [content] * 2
    assert each[1]["tokens_evaluated"] == len(ids)


async def test_a_text_in_front_begins_a_row(begun: Tokenizer) -> None:
    built = preparer(begun)
    text = begun.encode("ab", False)
    assert await built.mixed_ids(["ab", 7], "prompt") == [1, *text, 7]
    assert await built.mixed_ids([7, "ab"], "prompt") == [7, *text]
    with pytest.raises(ApiError, match="token ids go from 0 to 4095"):
        await built.mixed_ids([7, 4096], "prompt")
    with pytest.raises(ApiError, match="maximum context length"):
        await built.mixed_ids(["ab"] * 200, "prompt")


def test_json_prompt(http: httpx.Client) -> None:
    given = {"prompt_string": PROMPT, "multimodal_data": []}
    expected = post(http, "/completion", **SAID)["content"]
    assert post(http, "/completion", **SAID | {"prompt": given})["content"] == expected
    with_image = {**given, "multimodal_data": ["iVBORw0KGgo="]}
    assert http.post("/completion", json={"prompt": with_image}).status_code == 400


@pytest.mark.parametrize("fields", [[], ["content", "generation_settings/n_predict", "prompt"]])
def test_completion_response_fields(http: httpx.Client, fields: list[str]) -> None:
    made = post(http, "/completion", **SAID, response_fields=fields)
    assert made["content"]
    if fields:
        assert {*made} == {*fields}
        assert (made["generation_settings/n_predict"], made["prompt"]) == (8, PROMPT)
    else:
        assert made["generation_settings"]["n_predict"] == 8
    assert post(http, "/completion", **SAID, response_fields=["none", "timings/none"]) == {}


@pytest.mark.parametrize("stream", [False, True])
def test_n_probs(http: httpx.Client, stream: bool) -> None:
    asked = SAID | {"n_predict": 5, "n_probs": 10}
    made = streamed(http, **asked)[:-1] if stream else [post(http, "/completion", **asked)]
    told = [token for part in made for token in part["completion_probabilities"]]
    assert len(told) == 5
    for token in told:
        assert len(token["top_logprobs"]) == 10
        for entry in (token, *token["top_logprobs"]):
            assert isinstance(entry["token"], str)
            assert entry["logprob"] <= 0
            assert isinstance(entry["bytes"], list)
        assert token["id"] == token["top_logprobs"][0]["id"] > 0


@pytest.mark.parametrize("as_object", [False, True])
def test_logit_bias(http: httpx.Client, tokenizer: Tokenizer, as_object: bool) -> None:
    first, *_ = tokenizer.encode(" river", False)
    pairs: list[Any] = [[7, 2.5], [" the river", -100]]
    given: Any = dict(pairs) if as_object else [*pairs, [9, False]]
    told = post(http, "/completion", **SAID, logit_bias=given)["generation_settings"]["logit_bias"]
    found = {entry["token"]: entry["bias"] for entry in told}
    expected = dict.fromkeys(tokenizer.encode(" the river", False), -100.0) | {7: 2.5}
    assert found == expected | ({} if as_object else {9: -100.0})
    assert first in found


def test_ignore_eos(http: httpx.Client) -> None:
    asked = SAID | {"prompt": "one<|eos|>", "n_predict": 6}
    made = post(http, "/completion", **asked, ignore_eos=True)
    assert (made["tokens_predicted"], made["stop_type"]) == (6, "limit")
    assert made["generation_settings"]["ignore_eos"] is True
    assert made["generation_settings"]["logit_bias"] == []
    assert post(http, "/completion", **asked)["stop_type"] == "eos"


@pytest.mark.parametrize("cache_prompt", [True, False])
def test_cache_vs_nocache_prompt(http: httpx.Client, cache_prompt: bool) -> None:
    """A prompt is shared in any case, which does not change what is said."""
    given = {**SAID, "prompt": "x y z " * 40, "cache_prompt": cache_prompt, "id_slot": -1}
    answers = [http.post("/completion", json=given) for _ in range(2)]
    first, again = (answer.json() for answer in answers)
    assert first["content"] == again["content"]
    assert 0 < again["timings"]["cache_n"] == again["tokens_cached"]
    assert again["timings"]["prompt_n"] + again["tokens_cached"] == again["tokens_evaluated"]
    ignored = answers[0].headers.get(IGNORED_FIELDS, "")
    assert ignored == ("" if cache_prompt else "cache_prompt")


def test_what_has_no_meaning_here_is_said(http: httpx.Client) -> None:
    more = {"id_slot": 0, "n_keep": -1, "repeat_last_n": 64, "mirostat": 0, "top_n_sigma": -1.0}
    answer = http.post("/completion", json={**SAID, **more})
    assert answer.headers[IGNORED_FIELDS] == "id_slot, n_keep, repeat_last_n"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", 7, "prompt: must be a string, a list of strings"),
        ("prompt", [], "prompt: must not be empty"),
        ("prompt", [True], "prompt: must be"),
        ("n_predict", -2, "n_predict: Input should be greater than or equal to -1"),
        ("repeat_penalty", 0, "repeat_penalty: Input should be"),
        ("mirostat", 2, "mirostat: only 0 is supported"),
        ("xtc_probability", 0.5, "xtc_probability: only 0 is supported"),
        ("adaptive_target", 0.5, "adaptive_target: only -1 is supported"),
        ("post_sampling_probs", True, "post_sampling_probs: only false is supported"),
        ("lora", [{"id": 0, "scale": 1}], "lora: only [] is supported"),
        ("grammar", "root ::= a", "grammar: "),
        ("json_schema", {"type": "hiccup"}, "json_schema: "),
        ("logit_bias", [[5]], PAIRS),
        (
            "logit_bias",
            [[-5, 1]],
            PAIRS,
        ),
        ("logit_bias", 5, PAIRS),
        ("logit_bias", [["12", 1]], "logit_bias: '12' means a token; give those of the text"),
        ("logit_bias", [[5000, 1]], "logit_bias: token ids go from 0 to 4095, not to 5000"),
        ("n_probs", 21, "n_probs: Input should be less than or equal to 20"),
        ("model", "other", "model 'other' does not exist"),
    ],
)
def test_bad_completions(http: httpx.Client, field: str, value: Any, message: str) -> None:
    answer = http.post("/completion", json={**SAID, field: value})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"].startswith(message)


def test_a_stream_that_fails(slow: httpx.Client) -> None:
    *_, last = streamed(slow, prompt="a b", ignore_eos=True, timeout=0.3)
    assert "longer than it may" in last["error"]["message"]


# --- the server -------------------------------------------------------------------------------


def test_server_props(http: httpx.Client) -> None:
    told = http.get("/props").json()
    settings = told["default_generation_settings"]
    assert settings["n_ctx"] == CONTEXT
    assert (settings["params"]["seed"], settings["params"]["n_predict"]) == (-1, -1)
    assert settings["params"]["temperature"] == 0.8
    assert told["total_slots"] == KV_TOKENS // CONTEXT
    assert (told["model_alias"], told["model_path"]) == ("toy", "toy")
    assert told["modalities"] == {"vision": False, "audio": False}
    assert (told["bos_token"], told["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert "messages" in told["chat_template"]
    assert told["is_sleeping"] is False
    assert http.post("/props", json={}).status_code == 405


def test_server_slots(http: httpx.Client) -> None:
    slots = http.get("/slots").json()
    assert len(slots) == http.get("/props").json()["total_slots"]
    assert {slot["n_ctx"] for slot in slots} == {CONTEXT}
    assert [slot["id"] for slot in slots] == [*range(len(slots))]
    assert not any(slot["is_processing"] or "params" in slot for slot in slots)
    assert http.post("/slots/0?action=save", json={"filename": "a"}).status_code == 404


def busy(client: httpx.Client) -> list[dict[str, Any]]:
    return [slot for slot in client.get("/slots").json() if slot["is_processing"]]


def test_completion_parallel_slots(slow: httpx.Client) -> None:
    """Each has what it says alone; none waits for another's place."""
    prompts = [f"{word} two three" for word in ("one", "four", "five", "six")]
    asked = {"n_predict": 30, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(post, slow, "/completion", prompt=p, **asked) for p in prompts]
        eventually(lambda: len(busy(slow)) == 4)
        for prompt, call in zip(prompts, calls, strict=True):
            assert call.result()["content"].startswith(prompt)
    slot = eventually(lambda: not busy(slow)) and slow.get("/slots").json()[0]
    assert "next_token" not in slot


def test_cancel_request(slow: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "stream": True, "ignore_eos": True}
    with slow.stream("POST", "/completion", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        (slot,) = busy(slow)
        assert slot["n_prompt_tokens"] > 0
        assert slot["next_token"][0]["n_decoded"] > 0
        lines.close()
    eventually(lambda: not busy(slow))


def test_keys() -> None:
    """One tenant does not see another's requests; `fail_on_no_slot` counts all."""
    tenants = {name: {"api_keys": [hash_of_key(f"sk-{name}")]} for name in "ab"}
    config = serve_config({"tenants": tenants, "kv_tokens": CONTEXT}, served_model_name="toy")
    with (
        running_server(config, "tests.serving.fakes:slow_engine") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer invalid-key"}):
            for path in ("/completions", "/infill", "/apply-template", "/tokenize"):
                refused = http.post(path, json=SAID, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["type"] == "authentication_error"
            assert {http.get(p, headers=headers).status_code for p in ("/props", "/slots")} == {401}
        a, b = {"Authorization": "Bearer sk-a"}, {"X-Api-Key": "sk-b"}
        for headers in (a, b):
            assert http.post("/completions", json=SAID, headers=headers).json()["content"]
        none = "/slots?fail_on_no_slot=1"
        assert len(http.get(none, headers=b).json()) == 1
        asked = {"prompt": PROMPT, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/completion", json=asked, headers=a) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert len(http.get("/slots", headers=a).json()) == 1
            assert http.get("/slots", headers=b).json() == []
            assert http.get(none, headers=b).status_code == 503
            lines.close()


# --- tokens and templates ---------------------------------------------------------------------


def test_tokenize_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    content = "What is the capital of France ?"
    tokens = post(http, "/tokenize", content=content)["tokens"]
    assert tokens == tokenizer.encode(content, False)
    assert post(http, "/detokenize", tokens=tokens)["content"] == content
    assert post(http, "/tokenize", content=[7, content, 8])["tokens"] == [7, *tokens, 8]


async def test_tokenize_with_bos(begun: Tokenizer) -> None:
    built = preparer(begun)
    plain = await built.token_ids(TokenizeBody(content="ab"))
    assert await built.token_ids(TokenizeBody(content="ab", add_special=True)) == [1, *plain]
    spelt = await built.token_ids(TokenizeBody(content="ab<|eos|>"))
    assert spelt == [*plain, 2]
    assert await built.token_ids(TokenizeBody(content="ab", parse_special=False)) == plain
    with pytest.raises(ApiError, match="spells special tokens"):
        await built.token_ids(TokenizeBody(content="ab<|eos|>", parse_special=False))


def test_tokenize_with_pieces(http: httpx.Client) -> None:
    content = "This is a test string with unicode 媽 and emoji 🤗"
    tokens = post(http, "/tokenize", content=content, with_pieces=True)["tokens"]
    raw = b""
    for token in tokens:
        assert token["id"] > 0
        piece = token["piece"]
        assert piece
        raw += piece.encode() if isinstance(piece, str) else bytes(piece)
    assert raw.decode() == content
    assert any(isinstance(token["piece"], list) for token in tokens)


def test_apply_chat_template(http: httpx.Client) -> None:
    """`/completion` reads the same tokens as a chat."""
    messages = [
        {"role": "system", "content": "You are a test."},
        {"role": "user", "content": "Hi there"},
    ]
    prompt = post(http, "/apply-template", messages=messages)["prompt"]
    assert prompt == "<|bos|><|system|>You are a test.<|user|>Hi there<|assistant|>"
    limit = {"max_tokens": 4, "temperature": 0}
    chat = post(http, "/v1/chat/completions", messages=messages, **limit)
    made = post(http, "/completion", prompt=prompt, **limit)
    assert made["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    assert made["content"] == chat["choices"][0]["message"]["content"]
    begun = [*messages, {"role": "assistant", "content": "Well,"}]
    assert post(http, "/apply-template", messages=begun)["prompt"] == f"{prompt}Well,"
    refused = http.post("/apply-template", json={"messages": messages, "model": "other"})
    assert refused.status_code == 404
    assert http.post("/apply-template", json={"messages": []}).status_code == 400


async def test_a_prompt_is_without_what_completion_adds(begun: Tokenizer) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    built = preparer(begun)
    prompt = await built.chat_prompt(body)
    assert prompt == "<|user|>Hi<|assistant|>"
    (choice,) = await built.chat(body, SOMEONE, "job")
    assert tuple(begun.encode(prompt)) == choice.request.prompt_token_ids


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_add_generation_prompt(http: httpx.Client, add_generation_prompt: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "What is today?"}]}
    asked |= {"add_generation_prompt": add_generation_prompt}
    prompt = post(http, "/apply-template", **asked)["prompt"]
    assert prompt.endswith("<|assistant|>") is add_generation_prompt


async def test_templates_with_dates_tools_and_reasoning(tmp_path: Path) -> None:
    template = (
        "{# <think> </think> #}{{ strftime_now('%d %b %Y') }}"
        + HERMES
        + "<|assistant|>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    function = {"name": "test", "parameters": {"type": "object", "properties": {}}}
    built = preparer(load_tokenizer(write_tokenizer(tmp_path, template)))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What is today?"}]}
    for tools in (None, [], [{"type": "function", "function": function}]):
        asked |= {"tools": tools}
        prompt = await built.chat_prompt(ChatBody.model_validate(asked))
        assert date.today().strftime("%d %b %Y") in prompt
        assert prompt.endswith("<|assistant|>")
        assert ("parameters" in prompt) is bool(tools)
        off = {**asked, "chat_template_kwargs": {"enable_thinking": False}}
        prompt = await built.chat_prompt(ChatBody.model_validate(off))
        assert prompt.endswith("<|assistant|><think>\n\n</think>\n\n")


async def test_grammars_and_schemas(begun: Tokenizer) -> None:
    built = preparer(with_tokens())
    for field, value in (("grammar", 'root ::= "a"+'), ("json_schema", {}), ("json_schema", None)):
        body = LlamaCompletion.model_validate({"prompt": "a", field: value})
        (choice,) = await built.completion(body.asked(["a"], {}), SOMEONE, "job", clips=True)
        assert (choice.request.sampling.grammar is None) is (value is None)


# --- with a model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[httpx.Client]:
    with (
        model_server(model_path("draft-base"), {"near": model_path("draft-tiny")}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.slow
def test_seeds(model: httpx.Client) -> None:
    asked = {"prompt": "I believe the meaning of life is", "n_predict": 24, "temperature": 1.0}
    asked |= {"min_p": 0}
    same = [post(model, "/completion", **asked, seed=42) for _ in range(3)]
    assert len({made["content"] for made in same}) == 1
    assert post(model, "/completion", **asked, seed=42, cache_prompt=False) | {
        "timings": None
    } == same[1] | {"timings": None}
    several = [post(model, "/completion", **asked, seed=seed)["content"] for seed in range(4)]
    assert len({*several}) == 4


@pytest.mark.slow
def test_with_and_without_draft(model: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "temperature": 0.2, "top_k": 5, "seed": 4242, "n_predict": 16}
    asked |= {"return_tokens": True}
    alone = post(model, "/completion", **asked, speculation={"drafter": "none"})
    for most in (1, 4, 12):
        options = {"drafter": "near", "max_draft_tokens": most}
        drafted = post(model, "/completion", **asked, speculation=options)
        assert drafted["timings"]["draft_n"] > 0
        assert 0 < drafted["timings"]["draft_n_accepted"] <= drafted["timings"]["draft_n"]
        assert drafted["tokens"] == alone["tokens"]
    assert "draft_n" not in alone["timings"]


@pytest.mark.slow
def test_banned_tokens_and_grammars(model: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "n_predict": 12, "return_tokens": True}
    said = {*post(model, "/completion", **asked)["tokens"]}
    biases = [[token, False] for token in said]
    assert said.isdisjoint(post(model, "/completion", **asked, logit_bias=biases)["tokens"])
    made = post(model, "/completion", **asked, grammar='root ::= "ab"{3,3}')
    assert (made["content"], made["stop_type"]) == ("ababab", "eos")
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    made = post(model, "/completion", **asked | {"n_predict": 40}, json_schema=schema)
    assert json.loads(made["content"]) == {"a": 7}


# --- the table --------------------------------------------------------------------------------


def test_the_table_names_tests_that_are_here() -> None:
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    num = Counter(row["result"] for row in rows)
    told = (
        f"Of {len(rows)} tests that llama.cpp's server has for these (in llama-cpp-python 0.3.36), "
        f"{num.pop('passes')} hold here, ported; {num.pop('differs')} differ on purpose, "
        f"{num.pop('not offered')} are of what is not offered, one was not run"
    )
    assert told in " ".join((ROOT / "docs/api.md").read_text().split())
    assert num == {"not run": 1}
    for row in rows:
        place, _, name = row["here"].partition("::")
        assert bool(row["why"]) == (row["result"] != "passes"), row
        if place or row["result"] in ("passes", "differs"):
            assert f"def {name}(" in (ROOT / "tests" / place).read_text(), row
    keys = [(row["file"], row["test"]) for row in rows]
    assert len(keys) == len({*keys})
