"""Embeddings as the packages of OpenAI and Ollama ask for them."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
import torch
from tests.api.conftest import client_of
from tests.api.samples import samples
from tests.api.test_prepare import READY, SOMEONE, preparer
from tests.engine.small_family import small_llama, write_tokenizer
from tests.engine.test_embeddings import MODES, name_pooling
from tests.serving.fakes import TOKENIZER
from tests.serving.harness import RunningServer, model_server
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

from penstock.api.embeddings import _choices
from penstock.api.errors import ApiError
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.zoo.registry import bundled_models

TEXTS = ["A river.", "A penstock is a gated channel that feeds a turbine.", "SELECT 1"]
Matrix = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture(scope="module")
def bundled() -> Iterator[RunningServer]:
    """A chat model and a drafter."""
    cards = bundled_models()
    drafters = {"tiny": cards["draft-tiny"].path}
    engine = {"max_model_len": 256}
    with model_server(
        cards["target-large"].path, drafters, engine, served_model_name="m"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def ai(bundled: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(bundled) as client:
        yield client


@pytest.fixture(scope="module")
def llama(bundled: RunningServer) -> Iterator[ollama.Client]:
    with closing(ollama.Client(bundled.url, timeout=60)) as client:
        yield client


def rows(answer: Any) -> Matrix:
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


def test_openais_package(ai: openai.OpenAI) -> None:
    """A chat model gives its last token's state, as transformers has it."""
    answer = ai.embeddings.create(model="m", input=TEXTS)
    found, tokenizer = rows(answer), load_tokenizer(TOKENIZER)
    model = LlamaForCausalLM.from_pretrained(TOKENIZER, dtype=torch.float32)
    ids = [tokenizer.encode(text) for text in TEXTS]
    for own, token_ids in zip(found, ids, strict=True):
        with torch.inference_mode():
            state = model.model(torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()
        assert own @ state / np.linalg.norm(state) >= 0.9999
    assert np.linalg.norm(found, axis=1) == pytest.approx(1)
    assert found[0] @ found[1] < 0.9999, "texts differ"
    assert (answer.model, answer.usage.prompt_tokens) == ("m", sum(map(len, ids)))
    # By default the package asks for base64; tokens are the text's.
    for given in (TEXTS, ids):
        same = rows(ai.embeddings.create(model="m", input=given, encoding_format="float"))
        assert (same.astype(np.float32) == found.astype(np.float32)).all()
    for one in (TEXTS[1], ids[1]):
        (same,) = rows(ai.embeddings.create(model="m", input=one))
        assert (same == found[1]).all()
    cut = rows(ai.embeddings.create(model="m", input=TEXTS, dimensions=16))
    expected = found[:, :16] / np.linalg.norm(found[:, :16], axis=1, keepdims=True)
    assert cut == pytest.approx(expected, abs=1e-6)


def test_ollamas_package(llama: ollama.Client, ai: openai.OpenAI) -> None:
    expected = rows(ai.embeddings.create(model="m", input=TEXTS))
    answer = llama.embed("m:latest", TEXTS, keep_alive="5m", options={"num_ctx": 2048})
    assert (np.array(answer.embeddings) == expected).all()
    assert answer.prompt_eval_count is not None
    assert answer.prompt_eval_count > 3
    (one,) = llama.embed("m", TEXTS[0], dimensions=8).embeddings
    assert len(one) == 8
    assert np.linalg.norm(one) == pytest.approx(1)
    assert (np.array(llama.embeddings("m", TEXTS[0]).embedding) == expected[0]).all()
    # What would load the model.
    assert llama.embed("m", "").embeddings == []
    assert llama.embeddings("m").embedding == []


def test_too_long_texts(bundled: RunningServer, llama: ollama.Client, ai: openai.OpenAI) -> None:
    long = "one two three four " * 400
    with pytest.raises(openai.BadRequestError) as refused:
        ai.embeddings.create(model="m", input=["a", long])
    assert refused.value.code == "context_length_exceeded"
    assert "are more than the context of 256 tokens" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="257 tokens are more than the context"):
        ai.embeddings.create(model="m", input=[5] * 257)
    assert len(ai.embeddings.create(model="m", input=[5] * 256).data) == 1
    with pytest.raises(ollama.ResponseError, match="are more than the context") as too_long:
        llama.embed("m", long, truncate=False)
    assert too_long.value.status_code == 400
    ids = load_tokenizer(TOKENIZER).encode(long)[:256]
    (expected,) = rows(ai.embeddings.create(model="m", input=ids))
    (beginning,) = llama.embed("m", long).embeddings
    assert (np.array(beginning) == expected).all()
    assert (np.array(llama.embeddings("m", long).embedding) == expected).all()


SHAPE = "input: must be a string, a list of strings, a list of token ids, or a list of such lists"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input: Field required"),
    ({"input": {"text": "a"}}, SHAPE),
    ({"input": ["a", 5]}, SHAPE),
    ({"input": ""}, "input: must not be empty"),
    ({"input": []}, "input: must not be empty"),
    ({"input": [5, 4096]}, "input: token ids go from 0 to 4095, not to 4096"),
    ({"input": ["a"] * 2049}, "input: 2049 texts are given; together at most 2048 are allowed"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format: Input should be 'float' or"),
    ({"input": "a", "dimensions": 0}, "dimensions: Input should be greater than or equal to 1"),
    ({"input": "a", "dimensions": 1000}, "dimensions: the model's embeddings have 384"),
    ({"input": "a", "normalize": False}, "normalize: only true is supported"),
    ({"input": "a", "input_type": "query"}, "input_type: is not supported"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refused_in_one_line(bundled: RunningServer, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{bundled.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.startswith(message)
    assert "\n" not in told


def test_another_model(bundled: RunningServer) -> None:
    for path, field in (("v1/embeddings", "input"), ("api/embeddings", "prompt")):
        body = {"model": "gpt-9", field: "a"}
        assert httpx.post(f"{bundled.url}/{path}", json=body, timeout=60).status_code == 404


def test_ignored_fields_are_told(bundled: RunningServer) -> None:
    body = {"input": "a", "color": "red", "user": "me", "normalize": True}
    answer = httpx.post(f"{bundled.url}/v1/embeddings", json=body, timeout=60)
    assert answer.headers["X-Penstock-Ignored-Fields"] == "color"


def test_metrics(bundled: RunningServer, ai: openai.OpenAI) -> None:
    def counted() -> dict[str, float]:
        return samples(httpx.get(f"{bundled.url}/metrics", timeout=60).text)

    before = counted()
    num_tokens = ai.embeddings.create(model="m", input=TEXTS).usage.prompt_tokens
    after = counted()

    def more(name: str) -> float:
        return after[f"penstock:{name}"] - before.get(f"penstock:{name}", 0.0)

    assert more("embeddings_total") == more("request_success_total") == 3
    assert more("prompt_tokens_total") == num_tokens
    assert more("e2e_request_latency_seconds_count") == 3
    for name in ("time_to_first_token_seconds", "request_generation_tokens", "request_params_n"):
        assert more(f"{name}_count") == 0


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model whose folder names a pooling."""
    path = tmp_path_factory.mktemp("embedder")
    small_llama(2, seed=1).save_pretrained(path)
    write_tokenizer(path)
    name_pooling(path, MODES["mean"])
    with model_server(path, {}, served_model_name="e") as running:
        yield running


def test_an_embedding_model_makes_no_text(embedder: RunningServer) -> None:
    messages, line = (
        [{"role": "user", "content": "a"}],
        "the model 'e' makes embeddings and no text",
    )
    with client_of(embedder) as ai, closing(ollama.Client(embedder.url, timeout=60)) as llama:
        for ask in (
            lambda: ai.completions.create(model="e", prompt="a"),
            lambda: ai.chat.completions.create(model="e", messages=messages),  # type: ignore[arg-type]
            lambda: ai.responses.create(model="e", input="a"),
        ):
            with pytest.raises(openai.BadRequestError, match=line):
                ask()
        for call in (lambda: llama.generate("e", "a"), lambda: llama.chat("e", messages)):
            with pytest.raises(ollama.ResponseError, match=line):
                call()
        assert llama.show("e").capabilities == ["embedding"]
        assert rows(ai.embeddings.create(model="e", input=["a", "b"])).shape == (2, 64)


# --- without a server -----------------------------------------------------------------------------


async def test_engines_without_embeddings(tokenizer: Tokenizer) -> None:
    built = preparer(tokenizer)
    assert built.engine is READY
    with pytest.raises(ApiError, match="this server's engine gives no embeddings") as refused:
        await _choices(built, ["a"], SOMEONE, False)
    assert (refused.value.status, refused.value.code) == (400, "unsupported_model")


async def test_a_cut_text_has_its_special_tokens() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    built = preparer(tokenizer)
    built.engine = replace(READY, pooling="last", max_request_tokens=6)

    async def ids(text: str, clips: bool = True) -> list[int]:
        (choice,) = await _choices(built, [text], SOMEONE, clips)
        return list(choice.request.prompt_token_ids or ())

    own = tokenizer.encode("a b c d e f g h", add_special_tokens=False)
    specials = [("<|bos|>", 1), ("<|eos|>", 2)]
    for single, begin, end in (
        ("$A", [], []), ("<|bos|> $A", [1], []), ("$A <|eos|>", [], [2]),
        ("<|bos|> $A <|eos|>", [1], [2]),
    ):  # fmt: skip
        template = TemplateProcessing(single=single, special_tokens=specials)
        tokenizer._fast.backend_tokenizer.post_processor = template
        room = 6 - len(begin) - len(end)
        assert await ids("a b c d e f g h") == begin + own[:room] + end
        assert await ids("a") == begin + own[:1] + end
    with pytest.raises(ApiError, match="more than the context of 6 tokens"):
        await ids("a b c d e f g h", clips=False)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    from penstock.cli.generate import Generator
    from penstock.config import ConfigError, EngineConfig

    small_llama(1, seed=1).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    name_pooling(tmp_path, MODES["last"])
    given = {"dtype": "float32", "kv_tokens": 512, "num_threads": 1}
    with pytest.raises(ConfigError, match="makes embeddings and no text"):
        Generator(EngineConfig(target=tmp_path, **given))
