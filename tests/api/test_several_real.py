"""Several real models behind one address."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.serving.program import LONG, Program, program

from penstock.config import EngineConfig
from penstock.serving.planning import plan_engine

FOLDER = Path.home() / ".cache/penstock/models"
FILES = {
    "large": FOLDER / "qwen2.5-coder-1.5b-q4_k_m.gguf",
    "small": FOLDER / "smollm2-135m-q4_1.gguf",
}
EMBEDDER = FOLDER / "qwen2.5-coder-0.5b.gguf"
NAMES = {name: path.stem for name, path in FILES.items()}
KV = ("--kv-tokens", "4096")
PROMPTS = ["def add(a, b):", "The capital of France is", "Once upon a time", "import os\n"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(p.exists() for p in (*FILES.values(), EMBEDDER)), reason="no real models"
    ),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What servers of one model say, by model and prompt."""
    texts = {}
    for name, path in FILES.items():
        log = tmp_path_factory.mktemp("alone") / "log"
        with program(log, str(path), *KV) as server:
            texts[name] = [server.text(prompt) for prompt in PROMPTS]
    return texts


@pytest.fixture(params=["two", "one"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    """A server with memory for both models, or for one at a time."""
    both = sum(map(memory_of, FILES.values()))
    most = both if request.param == "two" else both - 1
    arguments = (*map(str, FILES.values()), *KV, "--set", f"memory_bytes={most}")
    with program(tmp_path / "log", *arguments) as running:
        yield running


def memory_of(path: Path) -> int:
    """Bytes of weights and KV, which has two bytes a value or four, as the processor likes."""
    return plan_engine(EngineConfig(target=path, kv_tokens=4096), num_engines=2).num_bytes


def starts(server: Program) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=LONG).text.splitlines()
    return sum(
        float(li.split()[-1]) for li in lines if li.startswith("penstock:model_starts_total")
    )


def test_in_turn_and_at_once_texts_are_those_of_one_model(
    server: Program, alone: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    for index, prompt in enumerate(PROMPTS):
        for name in FILES:
            assert server.text(prompt, model=NAMES[name]) == alone[name][index]
    in_turn = starts(server)
    holds_both = "two" in request.node.name
    assert in_turn == (2 if holds_both else 8)
    asked = [(name, index) for index in range(len(PROMPTS)) for name in FILES]
    with ThreadPoolExecutor(len(asked)) as pool:
        made = [pool.submit(server.text, PROMPTS[i], model=NAMES[n]) for n, i in asked]
        assert [each.result() for each in made] == [alone[name][i] for name, i in asked]
    # All that wait for a model are served in its turn.
    assert starts(server) - in_turn <= (0 if holds_both else 3)


def test_a_swap_costs_the_start_and_nothing_else(server: Program) -> None:
    """Printed with -s: seconds of a request that starts its model, and of the next ones."""
    for name in ("small", "large", "small", "large"):
        seconds = []
        for _ in range(3):
            began_at = time.monotonic()
            server.text(PROMPTS[0], model=NAMES[name])
            seconds.append(round(time.monotonic() - began_at, 2))
        print(name, seconds)
        assert seconds[-1] < 60


def embedding(server: Program, text: str) -> list[float]:
    body = {"model": EMBEDDER.stem, "input": text}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=LONG)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


def test_two_write_and_one_embeds_in_memory_for_two(
    alone: dict[str, list[str]], tmp_path: Path
) -> None:
    with program(tmp_path / "alone", str(EMBEDDER), *KV) as one:
        embeddings = [embedding(one, prompt) for prompt in PROMPTS]
    assert len({*map(tuple, embeddings)}) == len(PROMPTS)
    largest = memory_of(FILES["large"]) + memory_of(EMBEDDER)
    files = (*map(str, FILES.values()), str(EMBEDDER))
    arguments = (*files, *KV, "--set", f"memory_bytes={largest}")
    with program(tmp_path / "log", *arguments) as server:
        for index, prompt in enumerate(PROMPTS):
            for name in FILES:
                assert server.text(prompt, model=NAMES[name]) == alone[name][index]
            assert embedding(server, prompt) == embeddings[index]
        in_turn = starts(server)
        assert in_turn > len(files), "there is no memory for three"
        with ThreadPoolExecutor(3 * len(PROMPTS)) as pool:
            made = [
                [pool.submit(server.text, prompt, model=NAMES[name]) for prompt in PROMPTS]
                for name in FILES
            ]
            vectors = [pool.submit(embedding, server, prompt) for prompt in PROMPTS]
            for name, each in zip(FILES, made, strict=True):
                assert [one.result() for one in each] == alone[name]
            assert [one.result() for one in vectors] == embeddings
        # All that wait for a model are served in its turn.
        assert starts(server) - in_turn <= len(files)
