"""`speculation.origins`: where every token of an answer is from."""

import json
from typing import Any

import httpx
import pytest

from penstock.api.choices import origins_of
from penstock.core.types import Output

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@pytest.mark.parametrize(
    ("output", "kinds"),
    [
        (Output("r", (1,)), ["target"]),
        (Output("r", (1, 2, 3), drafter="a", num_proposed=2, num_accepted=2),
         ["accepted", "accepted", "bonus"]),
        (Output("r", (1, 2), drafter="a", num_proposed=2, num_accepted=1),
         ["accepted", "recovered"]),
        (Output("r", (1,), drafter="a", num_proposed=2), ["recovered"]),
        # Cut at a stop token among the accepted ones.
        (Output("r", (1, 2), drafter="a", num_proposed=3, num_accepted=2),
         ["accepted", "accepted"]),
        # A drafter that had nothing to propose.
        (Output("r", (1,), drafter="a"), ["target"]),
    ],
)  # fmt: skip
def test_kinds(output: Output, kinds: list[str]) -> None:
    told = origins_of(output)
    assert [o.kind for o in told] == kinds
    assert all(o.drafter == (None if o.kind == "target" else "a") for o in told)


def test_looked_up_tokens_are_not_the_drafters() -> None:
    """Two were looked up, and the drafter went on with two, of which the first was right."""
    mixed = Output(
        "r", (1, 2, 3, 4), drafter="a", num_proposed=4, num_accepted=3, num_looked_up=2,
        look_up="look-up",
    )  # fmt: skip
    told = [(o.kind, o.drafter) for o in origins_of(mixed)]
    accepted = [("accepted", "look-up")] * 2 + [("accepted", "a")]
    assert told == [*accepted, ("recovered", "a")]


def body(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt} if path == COMPLETION else {"messages": [turn(prompt)]}
    return {**asked, "max_tokens": 40, "temperature": 0, "seed": 3, **fields}


def turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chunks(http: httpx.Client, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**asked, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_they_are_told_with_the_text(http: httpx.Client, path: str) -> None:
    asked = body(path, "one two three, ünï ☃", speculation={"origins": True})
    answer = http.post(path, json=asked).json()
    (choice,) = answer["choices"]
    text = choice["text"] if path == COMPLETION else choice["message"]["content"]
    told = choice["origins"]
    assert "".join(o["text"] for o in told) == text
    assert len(told) == answer["usage"]["completion_tokens"] == 40
    usage = answer["usage"]["speculation"]
    kinds = [o["origin"] for o in told]
    assert kinds.count("accepted") == usage["num_accepted_tokens"] > 0
    assert kinds.count("recovered") + kinds.count("bonus") == usage["num_drafts"] > 0
    assert {o["drafter"] for o in told if o["origin"] != "target"} == {"toy-drafter"}
    streamed = chunks(http, path, asked)
    assert [o for c in streamed for o in c["choices"][0].get("origins", [])] == told


def test_a_stop_string_cuts_the_last_token(http: httpx.Client) -> None:
    asked = body(COMPLETION, "abcdefgh ijkl", speculation={"origins": True})
    whole = http.post(COMPLETION, json=asked).json()["choices"][0]["text"]
    cut = whole[9:12]
    whole_answer = http.post(COMPLETION, json={**asked, "stop": cut}).json()
    for parts in ([whole_answer], chunks(http, COMPLETION, {**asked, "stop": cut})):
        choices = [part["choices"][0] for part in parts]
        told = "".join(o["text"] for choice in choices for o in choice.get("origins", []))
        assert told == "".join(choice["text"] for choice in choices)
        assert choices[-1]["finish_reason"] == "stop"


def test_origins_are_told_on_request_only(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETION):
        asked = body(path, "one two three")
        assert "origins" not in http.post(path, json=asked).json()["choices"][0]
        assert all("origins" not in c["choices"][0] for c in chunks(http, path, asked))


def test_log_probabilities_are_as_without_them(http: httpx.Client) -> None:
    asked = body(COMPLETION, "one two three", logprobs=2)
    plain = http.post(COMPLETION, json=asked).json()["choices"][0]
    told = http.post(COMPLETION, json={**asked, "speculation": {"origins": True}}).json()
    told = told["choices"][0]
    assert len(told.pop("origins")) == 40
    assert told == plain
