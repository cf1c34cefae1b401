"""A verification server that cannot take a draft server's requests, and what their users hear."""

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.products import first_fast
from tests.serving.edges import drafting, edge_client
from tests.serving.scripted import greedy, scripted_server
from tests.serving.scripted_verifier import ScriptedVerifier, target_oracle
from tests.serving.verified import PROMPT

from penstock.api.app import create_app
from penstock.config import parse_config
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.client import EngineClient, EngineUnavailable
from penstock.serving.limits import QueueFull
from penstock.transport.v1 import drafting_pb2 as pb


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull, pb.Refused.BUSY), (EngineUnavailable, pb.Refused.UNAVAILABLE)]
)
async def test_why_a_request_is_not_taken(world, monkeypatch, error, code) -> None:
    def refuse(self: EngineClient, *arguments: object) -> None:
        raise error("not now")

    monkeypatch.setattr(EngineClient, "submit_now", refuse)
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        await draft_server.open("r", PROMPT, 4, greedy())
        await draft_server.open("@r", PROMPT, 4, greedy())
        while len(draft_server.refused) < 2:
            draft_server.take(await draft_server.receive())
    assert [(r.request_id, r.code) for r in draft_server.refused] == [
        ("r", code),
        ("@r", pb.Refused.INVALID),
    ]
    assert draft_server.refused[0].reason == "not now"


@asynccontextmanager
async def edge(verifier: ScriptedVerifier, model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The endpoint of a draft server's own users."""
    config = parse_config({"engine": {"target": model}, "served_model_name": "big"})
    async with verifier.serving() as port, drafting(port, model) as server:
        app = create_app(config, edge_client(server, model), load_tokenizer(model))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
            yield http


REFUSALS: list[tuple[pb.Refused.Code, int, str, str | None]] = [
    (pb.Refused.BUSY, 429, "queue_full", "1"),
    (pb.Refused.UNAVAILABLE, 503, "engine_unavailable", "1"),
    (pb.Refused.INVALID, 400, "engine_error", None),
]


@pytest.mark.parametrize("refusal", first_fast(REFUSALS))
async def test_users_hear_the_same_as_at_the_centre(family, monkeypatch, refusal) -> None:
    """After it has been tried for a while; and when there is room again they are served."""
    code, status, name, retry_after = refusal
    monkeypatch.setattr("penstock.serving.edge._RETRY_S", 0.001)
    verifier = ScriptedVerifier(target_oracle(family["target"]))
    verifier.refuse_opens = code
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    async with edge(verifier, family["near"]) as http:
        answer = await http.post("/v1/completions", json={**body, "n": 2})
        assert answer.status_code == status
        assert answer.headers.get("Retry-After") == retry_after
        error = answer.json()["error"]
        assert (error["message"], error["code"]) == ("not now", name)
        stream = await http.post("/v1/completions", json={**body, "stream": True})
        assert stream.status_code == 200
        event, done = stream.text.removeprefix("data: ").strip().split("\n\ndata: ")
        assert json.loads(event)["error"] == error
        assert done == "[DONE]"
        verifier.refuse_opens = None
        answer = await http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 5


async def test_what_the_link_does_not_carry_is_an_error_of_the_client(family) -> None:
    """Before the headers are out, whether the text is streamed or not."""
    verifier = ScriptedVerifier(target_oracle(family["target"]))
    fields: tuple[dict[str, Any], ...] = (
        {"min_p": 0.1},
        {"logit_bias": {"3": 1}},
        {"min_tokens": 2},
    )
    async with edge(verifier, family["near"]) as http:
        for stream, field in itertools.product((False, True), fields):
            body = {"prompt": PROMPT, "max_tokens": 5, "stream": stream, **field}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["message"].startswith("a draft server does not pass on structured output")
            assert error["code"] == "unsupported_value"
