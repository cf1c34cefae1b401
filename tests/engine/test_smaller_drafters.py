"""Drafters with a shorter context, or fewer or more token ids, than the target; and those that fail
inside a step: a request is then decoded without, and nobody notices."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small_family import VOCAB, make_unreliable, write_family, write_tokenizer
from tests.engine.test_exactness import BACKENDS, SAMPLINGS, Alone, make_loop, make_requests, run
from tests.products import covering, slow
from transformers import LlamaForCausalLM

from penstock.config import EngineConfig
from penstock.core.types import Request, SamplingParams
from penstock.engine.build import Engine, load_engine

FEWER, MORE, SHORT = 200, 300, 40
DRAFTERS = ("short", "fewer", "more")
PIPELINES = ("off", "2", "async")
FAILING = (frozenset({2, 3, 5}), range(1000))
RATIO = SamplingParams(temperature=0.9, verification="ratio")


def write_drafters(near: Path, root: Path) -> dict[str, Path]:
    """Copies of a drafter with other limits. What one knows beyond the target it likes best."""
    paths = {name: root / name for name in DRAFTERS}
    for name, rows in (("short", VOCAB), ("fewer", FEWER), ("more", MORE)):
        model = LlamaForCausalLM.from_pretrained(near)
        model.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            head = model.lm_head.weight
            head[VOCAB:] = 2 * head[: max(0, rows - VOCAB)]
        model.save_pretrained(paths[name])
        write_tokenizer(paths[name])
    config = paths["short"] / "config.json"
    changed = json.loads(config.read_text()) | {"max_position_embeddings": SHORT}
    config.write_text(json.dumps(changed))
    return paths


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    root = tmp_path_factory.mktemp("family")
    family = write_family(root)
    drafters = {n: str(p) for n, p in write_drafters(family["near"], root).items()}

    def loaded(backend: str) -> Engine:
        config = EngineConfig(
            target=family["target"],
            drafters=drafters,
            dtype="float32",
            backend=backend,
            kv_tokens=32 * 256,
            num_threads=1,
        )
        return load_engine(config, calibrated=False)

    return cache(loaded)


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


@pytest.fixture(scope="module")
def alones(engines: Callable[[str], Engine]) -> Callable[[str], Alone]:
    return cache(
        lambda backend: Alone(
            engines(backend), lambda sampling, _, drafter: some_requests(sampling, drafter)
        )
    )


@pytest.fixture
def alone(engine: Engine, alones: Callable[[str], Alone]) -> Alone:
    return alones(engine.backend)


@pytest.fixture(autouse=True)
def _nobody_has_failed(engine: Engine) -> Iterator[None]:
    for name in engine.executor.drafters:
        engine.executor._failures.note(name, has_failed=False)
    yield
    engine.executor.take_broken()


def some_requests(sampling: SamplingParams, *drafters: str) -> list[Request]:
    """For each drafter in turn. Half of them with prompts that all drafters know, though not what
    follows. Most become longer than the shortest context; some are longer from the start."""
    requests = make_requests(sampling, 6, "auto", tokens=40)
    for i, request in enumerate(requests):
        prompt = request.prompt_token_ids or ()
        if i % 2:
            prompt = tuple(t % FEWER for t in prompt)
        name = drafters[i % len(drafters)]
        requests[i] = dataclasses.replace(request, prompt_token_ids=prompt, drafter=name)
    return requests


def test_limits_are_where_the_target_can_read_more(engine: Engine) -> None:
    limits = {n: (d.max_len, d.vocab_size) for n, d in engine.scheduler.table.drafters.items()}
    assert limits == {"short": (SHORT, None), "fewer": (None, FEWER), "more": (None, None)}


@pytest.mark.parametrize(
    ("engine", "pipeline", "sampling", "drafters"),
    covering(
        BACKENDS, PIPELINES, ["greedy", "coupled-filtered"], [DRAFTERS, ("auto",)], strength=1
    ),
    indirect=["engine"],
)
def test_output_is_the_targets_own(engine, alone, pipeline, sampling, drafters, caplog) -> None:
    requests = some_requests(SAMPLINGS[sampling], *drafters)
    outputs, accepted = run(make_loop(engine, pipeline=pipeline, rotating=True), requests)
    assert outputs == alone[sampling]
    assert accepted > 0
    assert " failed: " not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "pipeline", "drafters"),
    [
        *covering(["native"], PIPELINES, [DRAFTERS, ("auto",)], strength=1),
        *slow(["eager"], PIPELINES, [DRAFTERS, ("auto",)]),
    ],
    indirect=["engine"],
)
def test_distributions_of_another_size(engine, pipeline, drafters, caplog) -> None:
    outputs, accepted = run(
        make_loop(engine, pipeline=pipeline, rotating=True), some_requests(RATIO, *drafters)
    )
    assert [len(o) for o in outputs] == [r.max_tokens for r in some_requests(RATIO, *drafters)]
    assert all(t < VOCAB for o in outputs for t in o)
    assert accepted > 0
    assert " failed: " not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "asked", "failing"),
    [
        *covering(["native"], ["draft", "replay"], FAILING, strength=1),
        *slow(["eager"], ["draft", "replay"], FAILING),
    ],
    indirect=["engine"],
)
def test_a_drafter_that_fails_inside_a_step_loses_no_request(
    engine: Engine,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    failing: Collection[int],
    asked: str,
) -> None:
    """Some of its steps, or all: before and after it has taken note of new blocks."""
    drafter: Any = engine.executor.drafters["more"]
    methods = [asked]
    if asked == "draft" and hasattr(drafter, "start"):
        methods.append("start")
    calls = make_unreliable(monkeypatch, drafter, methods, failing)
    name = "more" if asked == "draft" else "auto"
    outputs, accepted = run(
        make_loop(engine, rotating=True), some_requests(SAMPLINGS["coupled"], name)
    )
    assert outputs == alone["coupled"]
    assert next(calls) > 3
    if asked == "draft":
        assert (accepted > 0) == (len(failing) < 10)
        assert engine.executor.take_broken() == (["more"] if len(failing) > 10 else [])
