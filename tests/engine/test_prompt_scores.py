"""Log-probabilities of a prompt's tokens: the model's own, however the prompt is computed."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.engine.test_exactness import load, make_loop, make_requests
from tests.products import slow
from transformers import LlamaForCausalLM

from penstock.core.loop import Loop
from penstock.core.types import Arrive, Request, SamplingParams, TokenLogprob
from penstock.engine.build import Engine

SCORED = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, family: dict[str, Path]) -> Engine:
    return load(family, request.param)


@pytest.fixture(scope="module")
def model(family: dict[str, Path]) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(family["target"], dtype=torch.float32)


def long_requests(params: SamplingParams, num: int, tokens: int = 6) -> list[Request]:
    """Prompts of more than one pass of logits."""
    requests = []
    for r in make_requests(params, num, "near", tokens):
        prompt = (r.prompt_token_ids or ()) * 20
        prompt = prompt[: 90 + 40 * (len(requests) % 4)]
        requests.append(dataclasses.replace(r, prompt_token_ids=prompt, prompt_len=len(prompt)))
    return requests


def told(loop: Loop, requests: Sequence[Request]) -> list[tuple[TokenLogprob, ...]]:
    """By request; each is told once, with the first tokens."""
    found: dict[str, tuple[TokenLogprob, ...]] = {}
    begun: set[str] = set()
    events = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished:
        for output in loop.turn(events).outputs:
            assert output.error is None
            if output.prompt_logprobs:
                assert output.request_id not in begun
                found[output.request_id] = output.prompt_logprobs
            begun.add(output.request_id)
        events = []
    loop.turn([])
    return [found.get(r.id, ()) for r in requests]


def check(
    model: LlamaForCausalLM, requests: Sequence[Request], found: list[tuple[TokenLogprob, ...]]
) -> None:
    for request, scores in zip(requests, found, strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            expected = model(prompt).logits[0, :-1].log_softmax(-1)
        own = expected.gather(-1, prompt[0, 1:, None])[:, 0]
        assert len(scores) == request.prompt_len - 1
        assert [s.logprob for s in scores] == pytest.approx(own.tolist(), abs=1e-3)
        best = [value for s in scores for _, value in s.top]
        assert best == pytest.approx(expected.topk(2).values.flatten().tolist(), abs=1e-3)


@pytest.mark.parametrize("budget", [2048, 50])
def test_they_are_the_models_own(engine: Engine, model: LlamaForCausalLM, budget: int) -> None:
    """In one pass and in chunks, of prompts that the prefix cache has by then."""
    loop = make_loop(engine, max_num_batched_tokens=budget)
    requests = long_requests(SCORED, 4)
    assert told(loop, long_requests(PLAIN, 4)) == [()] * 4
    check(model, requests, told(loop, requests))


def test_neighbours_and_outputs_are_as_ever(engine: Engine) -> None:
    def texts(*params: SamplingParams) -> list[tuple[int, ...]]:
        loop = make_loop(engine)
        requests = [long_requests(p, i + 1)[i] for i, p in enumerate(params)]
        found: dict[str, list[int]] = {r.id: [] for r in requests}
        events = [Arrive(r) for r in requests]
        while events or loop.scheduler.num_unfinished:
            for output in loop.turn(events).outputs:
                found[output.request_id] += output.token_ids
            events = []
        loop.turn([])
        return [tuple(v) for v in found.values()]

    assert texts(PLAIN, SCORED, PLAIN) == texts(PLAIN, PLAIN, PLAIN)


def test_after_preemptions(engine: Engine, model: LlamaForCausalLM) -> None:
    loop = make_loop(engine, kv_tokens=24 * 16, max_num_batched_tokens=40)
    requests = long_requests(SCORED, 6, tokens=60)
    check(model, requests, told(loop, requests))
    assert loop.scheduler.table.counters.preemptions > 0
