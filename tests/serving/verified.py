"""A verification server with the real engine over a tiny random family, and what it should say."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.engine.small_family import VOCAB
from tests.serving.harness import RunningServer, running_server
from tests.serving.scripted import Guess, free_port

from penstock.config import parse_config
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.fork_context import LOAD_ENGINE
from penstock.serving.offline import complete
from penstock.transport.v1 import drafting_pb2 as pb

PROMPT = list(b"Several machines draft for one. ")
NUM_TOKENS = 40


@dataclass
class World:
    server: RunningServer
    address: str
    digest: str
    settings: dict[str, Any]
    _known: dict[bytes, list[int]] = field(default_factory=dict)

    def alone(self, sampling: pb.Sampling) -> list[int]:
        """What the target says by itself, in this process."""
        key = sampling.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = self._complete(sampling)
        return self._known[key]

    def _complete(self, sampling: pb.Sampling) -> list[int]:
        engine = load_engine(parse_config({"engine": self.settings}).engine)
        params = SamplingParams(sampling.temperature, sampling.top_p, seed=sampling.seed)
        request = Request(
            "alone",
            len(PROMPT),
            NUM_TOKENS,
            prompt_token_ids=tuple(PROMPT),
            sampling=params,
            drafter=NO_DRAFTER,
        )
        return complete(engine.loop, [request], 1)[0].token_ids


@contextmanager
def verified_world(
    family: dict[str, Path],
    local: tuple[str, ...] = (),
    engine: dict[str, Any] | None = None,
    **drafters: Any,
) -> Iterator[World]:
    """local: drafters of the engine's own. engine: other settings of it. drafters: further
    settings of where draft servers connect."""
    settings: dict[str, Any] = {
        "target": family["target"],
        "drafters": {name: str(family[name]) for name in local},
        "dtype": "float32",
        "num_threads": 1,
        "kv_tokens": 4096,
        "allocation": {"name": "fixed"},
        "pipeline": "async",
        "verification": "coupled",
        **(engine or {}),
    }
    address = f"127.0.0.1:{free_port()}"
    listen = {"listen": address, **drafters}
    config = parse_config({"engine": settings, "port": 0, "drafters": listen})
    digest = load_tokenizer(family["target"]).digest
    with running_server(config, LOAD_ENGINE) as server:
        yield World(server, address, digest, settings)


def guess_from(expected: list[int], prompt_len: int, wrong_every: int) -> Guess:
    """Foresees `expected`, but every so manieth token wrongly; 0: never wrongly."""

    def guess(text: list[int], num_tokens: int) -> list[int]:
        at = len(text) - prompt_len
        tokens = expected[at : at + num_tokens]
        return [
            (t + 1) % VOCAB if wrong_every and (at + i) % wrong_every == 0 else t
            for i, t in enumerate(tokens)
        ]

    return guess


async def complete_by_http(world: World, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    async with httpx.AsyncClient(base_url=world.server.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def metrics_of(world: World) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=world.server.url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in map(_split, lines)}


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.rpartition(" ")
    return name, value


async def until(world: World, name: str, value: float) -> None:
    """Wait for a metric."""
    for _ in range(500):
        if (await metrics_of(world))[f"penstock:{name}"] == value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} never came to {value}")
