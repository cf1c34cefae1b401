"""Structured output, as OpenAI's clients and vLLM's ask for it."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field
from tests.api.conftest import client_of
from tests.serving.harness import RunningServer, model_server

from penstock.zoo.registry import model_path

USER = [{"role": "user", "content": "Tell me of a person."}]


class Person(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]
    mood: Literal["glad", "sad"]


SCHEMA = {**Person.model_json_schema(), "additionalProperties": False}


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    drafters = {"tiny": model_path("draft-tiny"), "ngram": "ngram"}
    with model_server(model_path("draft-base"), drafters, served_model_name="toy") as running:
        yield running


def post(real: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{real.url}/v1/{path}", json=body, timeout=60)


def chat(real: RunningServer, **fields: Any) -> str:
    body = {"messages": USER, "seed": 1, "max_tokens": 200, **fields}
    answer = post(real, "chat/completions", **body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": named(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema_in_every_spelling(real: RunningServer, fields: dict[str, Any]) -> None:
    texts = {
        chat(real, **fields, speculation={"drafter": drafter})
        for drafter in ("none", "tiny", "ngram")
    }
    (text,) = texts
    Person.model_validate_json(text)
    assert chat(real, **fields, seed=2) != text


class Pet(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=30)]


PET = Pet.model_json_schema()
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": ("v1/chat/completions", {"response_format": named(PET)}),
    "guided_json": ("v1/chat/completions", {"guided_json": PET}),
    "structured_outputs": ("v1/chat/completions", {"structured_outputs": {"json": PET}}),
    "format": ("api/chat", {"format": PET, "stream": False, "model": "toy"}),
    "output_format": ("v1/messages", {"output_format": {"type": "json_schema", "schema": PET}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_a_class_of_two_fields_has_these_fields(real: RunningServer, door: str) -> None:
    """As pydantic writes its schema: without `additionalProperties`."""
    path, fields = DOORS[door]
    texts = set[str]()
    for drafter in ("none", "tiny", "ngram"):
        body = {"messages": USER, "max_tokens": 200, "temperature": 0, **fields}
        body["options"] = {"temperature": 0, "num_predict": 200}
        body["speculation"] = {"drafter": drafter}
        answer = httpx.post(f"{real.url}/{path}", json=body, timeout=60).json()
        said = answer["choices"][0] if "choices" in answer else answer
        said = said.get("message", said)["content"]
        texts.add(said if isinstance(said, str) else said[0]["text"])
    (text,) = texts
    assert list(json.loads(text)) == ["name", "age"]
    Pet.model_validate_json(text)


@pytest.mark.slow
def test_the_other_kinds(real: RunningServer) -> None:
    short = {"max_tokens": 40}
    choice = ["north", "south", 'öst\n"quoted"']
    for field in ({"structured_outputs": {"choice": choice}}, {"guided_choice": choice}):
        assert chat(real, **field, **short) in choice
    pattern = r"\d{4}-\d{2}-\d{2}"
    for field in ({"structured_outputs": {"regex": pattern}}, {"guided_regex": pattern}):
        assert re.fullmatch(pattern, chat(real, **field, **short))
    grammar = 'root ::= ("ab" | "cd"){2,5}'
    for field in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}):
        assert re.fullmatch("(ab|cd){2,5}", chat(real, **field, **short))
    assert chat(real, response_format={"type": "text"}, temperature=0)


@pytest.mark.slow
def test_a_grammar_that_outgrows_its_limits_is_named(real: RunningServer) -> None:
    """In the middle of an answer: 2,500 alternatives behind the first four characters."""
    many = " | ".join(f'"{n:04}"' for n in range(2500))
    grammar = f'start: /[a-z ]{{3}}/ "." tail\ntail: {many}'
    body = {"prompt": "It", "structured_outputs": {"grammar": grammar}, "max_tokens": 20}
    told = post(real, "completions", **body)
    assert told.status_code == 400
    error = told.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_grammar", "invalid_request_error")
    assert error["message"].startswith("the grammar: Parser Error: Current row has 2501 items")
    *_, last, end = post(real, "completions", **body, stream=True).text.split("\n\n")[:-1]
    assert json.loads(last.removeprefix("data: "))["error"] == error
    assert end == "data: [DONE]"


@pytest.mark.slow
def test_completions_and_responses_have_them_too(real: RunningServer) -> None:
    made = post(real, "completions", prompt="A person:", max_tokens=200, seed=3, guided_json=SCHEMA)
    Person.model_validate_json(made.json()["choices"][0]["text"])
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    said = post(real, "responses", input="A person:", text={"format": form}, seed=3).json()
    assert said["text"]["format"] == form
    Person.model_validate_json(said["output"][0]["content"][0]["text"])


@pytest.mark.slow
def test_openais_client_parses(real: RunningServer) -> None:
    with client_of(real) as client:
        made = client.chat.completions.parse(
            model="toy", messages=USER, response_format=Person, seed=5, max_tokens=300
        )
        assert isinstance(made.choices[0].message.parsed, Person)
        said = client.responses.parse(model="toy", input="Hi", text_format=Person)
        assert isinstance(said.output_parsed, Person)


NESTED = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": {"type": "strng"}}, "guided_json: Invalid type: strng"),
        ({"guided_json": NESTED}, "guided_json: recursion limit exceeded"),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"guided_regex": "(?=a)b"}, "guided_regex: "),
        ({"guided_choice": []}, "guided_choice: "),
        ({"guided_grammar": "start: x"}, "guided_grammar: "),
        ({"guided_grammar": "start: <|no such|>"}, "guided_grammar: "),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice: only one field may say"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex: is not allowed with ignore_eos"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice: only",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag: unknown field"),
        ({"structured_outputs": {"disable_fallback": True}}, "disable_fallback: unknown field"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type: "),
        ({"response_format": {"type": "json_schema"}}, "json_schema is to be given with"),
        ({"response_format": named({"$ref": "http://localhost/x"})}, "response_format: "),
        ({"structural_tag": "x"}, "structural_tag: is not supported"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern: is not supported"),
    ],
)
def test_what_cannot_be_had_is_refused(http, fields, message) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_it_is_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["components"]["schemas"]
    assert "response_format" in described["ChatBody"]["properties"]
    assert "json" in described["StructuredOutputs"]["properties"]
