"""Both roles as real processes, with identities and trust."""

import asyncio
import hashlib
from pathlib import Path

import httpx
import pytest
from tests.serving.fault_rig import Child, complete, draft_process, url_of, verification_process
from tests.serving.scripted import free_port

pytestmark = pytest.mark.slow

SERVERS = {
    name: {"tenant": name, "token_sha256": hashlib.sha256(name.encode()).hexdigest()}
    for name in ("friend", "stranger")
}
SERVERS["friend"]["trusted"] = True  # type: ignore[assignment]


async def started(family: dict[str, Path], port: int, name: str, model: str = "near") -> Child:
    child = draft_process(family[model], port, token=name)
    await child.start(2)
    assert child.lines[0].endswith(f" as {name}")
    return child


async def test_trust(family: dict[str, Path]) -> None:
    """Without a seed a request is verified by ratio where the server is trusted, and compared with
    the target's own sample where it is not; both get drafts accepted, and nothing is refused."""
    port = free_port()
    with verification_process(
        family["target"], port, free_port(), drafters={"servers": SERVERS}
    ) as verifier:
        await verifier.start()
        for name in SERVERS:
            with await started(family, port, name) as server:
                body = {"prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True}
                answers = await asyncio.gather(*(complete(url_of(server), body) for _ in range(4)))
                for answer in answers:
                    usage = answer.json()["usage"]
                    assert usage["completion_tokens"] == 120
                    assert usage["speculation"]["drafter"] == name
                    assert usage["speculation"]["num_accepted_tokens"] > 20
                assert len({a.json()["choices"][0]["text"] for a in answers}) == 4


async def test_the_edge_answers_as_the_centre(family: dict[str, Path]) -> None:
    """The target's name and its log-probabilities, with the drafter as a detail."""
    port = free_port()
    with verification_process(
        family["target"], port, free_port(), served_model_name="big"
    ) as verifier:
        await verifier.start()
        with draft_process(family["near"], port) as server:
            await server.start(2)
            body = {"model": "big", "prompt": "Tell me", "max_tokens": 60, "temperature": 0.7}
            body |= {"seed": 5, "logprobs": 3, "ignore_eos": True}
            made = [(await complete(url_of(s), body)).json() for s in (server, verifier)]
            async with httpx.AsyncClient() as http:
                models = [
                    (await http.get(f"{url_of(s)}/v1/models")).json()["data"][0]
                    for s in (server, verifier)
                ]
    edge, centre = (m["choices"][0]["logprobs"] for m in made)
    assert made[0]["usage"]["speculation"]["num_accepted_tokens"] > 10
    assert edge["tokens"] == centre["tokens"]
    assert edge["token_logprobs"] == pytest.approx(centre["token_logprobs"], abs=1e-3)
    for own, known in zip(edge["top_logprobs"], centre["top_logprobs"], strict=True):
        assert list(own.values()) == pytest.approx(list(known.values()), abs=1e-3)
    assert [m["id"] for m in models] == [m["model"] for m in made] == ["big", "big"]
    assert models[0]["draft_model"] == "near"
    assert "draft_model" not in models[1]
