"""A vocabulary with added tokens, served: they are text wherever text is, and a call of a tool may
begin with one that is not special."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.api.conftest import client_of
from tests.api.test_forced_tools import MESSAGES, MODELS, TEMPLATE, TOOLS, told
from tests.api.tool_servers import HERMES
from tests.engine import other_vocabulary
from tests.engine.added_tokens import ADDED, write
from tests.products import covering
from tests.serving.harness import RunningServer, model_server

from penstock.engine.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

DRAFTERS = ("none", "model", "suffix", "text")
SAID = "čas <tool_call>日本<|eos|> <číslo></tool_call>"
SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 3}}
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"verdict": {"enum": ["čas", SAID]}},
            "required": ["verdict"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Tokenizer]]:
    root = tmp_path_factory.mktemp("added")
    target, model = write(root / "target", "draft-base"), write(root / "model", "draft-tiny")
    text = other_vocabulary.write(root / "text", "draft-tiny", other_vocabulary.finer)
    (target / "chat_template.jinja").write_text(TEMPLATE + HERMES[HERMES.rindex("{#") :])
    drafters = {"model": model, "suffix": "suffix", "text": text}
    with model_server(target, drafters, served_model_name="toy") as running:
        yield running, load_tokenizer(target)


def post(server: RunningServer, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_they_are_text_wherever_text_is(added: tuple[RunningServer, Tokenizer]) -> None:
    server, tokenizer = added
    ids = [tokenizer.encode(text)[-1] for text in ADDED]
    assert post(server, "detokenize", tokens=ids)["prompt"] == "".join(ADDED)
    assert post(server, "tokenize", prompt="".join(ADDED))["tokens"] == ids
    asked = {
        "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True,
        "top_logprobs": 5, "logit_bias": dict.fromkeys(ids, 100), "frequency_penalty": 2,
    }  # fmt: skip
    (made,) = post(server, "v1/chat/completions", **asked)["choices"]
    told_bytes = [bytes(token["bytes"]) for token in made["logprobs"]["content"]]
    assert b"".join(told_bytes).decode() == made["message"]["content"]
    assert {"čas", "<číslo>"} <= {raw.decode() for raw in told_bytes} <= set(ADDED)
    tops = [top for token in made["logprobs"]["content"] for top in token["top_logprobs"]]
    assert {"čas", "<číslo>"} <= {bytes(top["bytes"]).decode() for top in tops}
    words = [raw.decode() for raw in told_bytes]
    stop = next(a + b for a, b in pairwise(words))[1:-1]
    (cut,) = post(server, "v1/chat/completions", **asked, stop=[stop])["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == made["message"]["content"].partition(stop)[0]


@pytest.mark.parametrize(("stream", "sampling"), covering([False, True], SAMPLINGS, strength=1))
def test_a_format_that_holds_them(added, stream, sampling) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": {"const": SAID}}}
    ask: dict[str, Any]
    for ask in ({"response_format": form}, {"extra_body": {"guided_choice": [SAID, f"{SAID}!"]}}):
        texts = {answer(added, ask, drafter, stream, SAMPLINGS[sampling]) for drafter in DRAFTERS}
        ((text, calls, reason),) = texts
        assert (json.loads(text) if "response_format" in ask else text.rstrip("!")) == SAID
        assert (calls, reason) == ((), "stop")


@pytest.mark.parametrize(("stream", "sampling"), covering([False, True], SAMPLINGS, strength=1))
def test_a_tool_beside_a_format(added, stream, sampling) -> None:
    """The bundled model knows of no calls: how it begins is pushed."""
    _, tokenizer = added
    ends = {}
    for begins in ("<tool_call>", "```json", '{"verdict'):
        push = dict.fromkeys(tokenizer.encode(begins, add_special_tokens=False), 12)
        asked = {
            "response_format": FORMAT, "tools": TOOLS, "parallel_tool_calls": False,
            "logit_bias": push,
        }  # fmt: skip
        texts = {answer(added, asked, drafter, stream, SAMPLINGS[sampling]) for drafter in DRAFTERS}
        assert len(texts) == 1
        ((text, calls, reason),) = texts
        for name, arguments in calls:
            MODELS[name].model_validate_json(arguments)
        assert calls or json.loads(text)["verdict"] in ("čas", SAID)
        ends[begins] = reason
    assert ends["<tool_call>"] == "tool_calls"
    assert ends['{"verdict'] == "stop"


def answer(
    added: tuple[RunningServer, Tokenizer],
    asked: dict[str, Any],
    drafter: str,
    stream: bool,
    sampling: dict[str, Any],
) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """Content, calls and finish reason."""
    extra = {**asked.get("extra_body", {}), "speculation": {"drafter": drafter}}
    fields = {**asked, **sampling, "extra_body": extra, "stream": stream}
    with client_of(added[0]) as client:
        made = client.chat.completions.create(
            model="toy", messages=MESSAGES, max_tokens=150, **fields
        )
        content, calls, reason = told(made, stream)
    return content, tuple(calls), reason
