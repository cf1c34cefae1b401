"""Replays: a drafter that reads verified text says how often its own first guess was right."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.world import replace_policies
from tests.engine.small_family import VOCAB
from tests.engine.test_exactness import MODELS, SAMPLINGS, load, make_loop, make_requests, run
from tests.products import covering, slow

from lab.rivals import policy_named
from penstock.core.policies.base import ReplayProposal, SelectionPolicy, View
from penstock.core.state import RequestState
from penstock.core.types import Arrive, DraftOrder, Replayed, Request, SamplingParams
from penstock.engine.build import Engine
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.sequences import TokenBuffer

BLOCK = 16
PROMPT, OUTPUT = 9, 50
RATIO = SamplingParams(temperature=0.9, verification="ratio")


@pytest.fixture(scope="module", params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, family: dict[str, Path]) -> Engine:
    return load(family, request.param)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_text(engine: Engine, sampling: SamplingParams, seed: int = 0) -> TokenBuffer:
    """A text that the target itself wrote, as one request has it."""
    prompt = tuple(np.random.default_rng(seed).integers(0, VOCAB, PROMPT).tolist())
    request = Request(
        f"text{seed}", PROMPT, OUTPUT, prompt_token_ids=prompt, sampling=sampling, drafter="none"
    )
    (written,), _ = run(make_loop(engine), [dataclasses.replace(request, id=f"w{seed}")])
    text = TokenBuffer(request)
    text.append(written)
    return text


def order(text: TokenBuffer, drafter: str, start: int, end: int, **fields: Any) -> DraftOrder:
    """Read from `start` to `end`; the text's seed says which blocks are its own."""
    first = 8 * int(text.request.id[4:])
    had, has = -(-start // BLOCK), -(-(end + 1) // BLOCK)
    had = had if start % BLOCK else -(-(start + 1) // BLOCK) if start else 0
    blocks = tuple(range(first + had, first + max(had, has)))
    return DraftOrder(text.request.id, 0, 0, drafter, start, end - start, 0, blocks, **fields)


def really_drafted(drafter: Any, text: TokenBuffer, first: int, end: int) -> list[bool]:
    """Whether the first token of a draft at each output position is the text's."""
    right = []
    for position in range(first, end):
        known = TokenBuffer(text.request)
        known.append(text.span(PROMPT, position).tolist())
        one = order(text, drafter.name, 0, position)._replace(max_draft_tokens=1)
        drafted = drafter.draft([one], [known]).drafts[0].token_ids
        right.append(drafted == text.span(position, position + 1).tolist())
        drafter.release_request(text.request.id)
    return right


def replay(drafter: Any, text: TokenBuffer, cuts: Sequence[int]) -> list[Replayed]:
    """One replay from each cut to the next."""
    replays = []
    for start, end in itertools.pairwise(cuts):
        one = order(text, drafter.name, start, end, evaluate=True)
        replays += drafter.replay([one], [text])
    drafter.release_request(text.request.id)
    return replays


@pytest.mark.parametrize(("sampling", "name"), covering(SAMPLINGS, MODELS, strength=1))
def test_evaluation_counts_what_real_drafts_would_have_had_accepted(engine, sampling, name) -> None:
    drafter = engine.executor.drafters[name]
    text = make_text(engine, SAMPLINGS[sampling])
    right = really_drafted(drafter, text, PROMPT, text.length)
    found = replay(drafter, text, [0, text.length])
    assert [(r.num_tokens, r.num_matched) for r in found] == [(OUTPUT, sum(right))]
    if name == "same":
        assert all(right)
    if name == "near":
        assert sum(right) > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_counted_once_however_the_text_is_cut(engine: Engine, name: str) -> None:
    drafter = engine.executor.drafters[name]
    text = make_text(engine, SAMPLINGS["coupled"])
    right = really_drafted(drafter, text, PROMPT, text.length)
    cuts = [0, 5, PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 6, 31, 32, 33, text.length]
    found = replay(drafter, text, cuts)
    for start, end, part in zip(cuts, cuts[1:], found, strict=False):
        counted = right[max(start - PROMPT, 0) : max(end - PROMPT, 0)]
        assert (part.num_tokens, part.num_matched) == (len(counted), sum(counted))


def test_a_position_that_was_drafted_at_is_left_to_its_verdict(engine: Engine) -> None:
    """A replay that goes on where drafts ended has not seen the guess at the first token."""
    drafter = engine.executor.drafters["near"]
    text = make_text(engine, SAMPLINGS["greedy"])
    drafter.draft([order(text, "near", 0, 20)._replace(max_draft_tokens=2)], [text])
    found = drafter.replay([order(text, "near", 20, 30, evaluate=True)], [text])[0]
    drafter.release_request(text.request.id)
    assert found.num_tokens == 9


@pytest.mark.parametrize("name", MODELS)
def test_ratio_requests_and_plain_catch_ups_are_not_counted(engine: Engine, name: str) -> None:
    drafter = engine.executor.drafters[name]
    text = make_text(engine, RATIO)
    assert replay(drafter, text, [0, text.length])[0][-2:] == (0, 0)
    text = make_text(engine, SAMPLINGS["greedy"])
    one = order(text, name, 0, text.length)
    assert drafter.replay([one], [text])[0][-2:] == (0, 0)
    drafter.release_request(text.request.id)


def test_a_batch_of_replays_is_the_same_as_each_alone(engine: Engine) -> None:
    drafter = engine.executor.drafters["near"]
    samplings = (SAMPLINGS["greedy"], SAMPLINGS["coupled"], RATIO, SAMPLINGS["coupled-filtered"])
    texts = [make_text(engine, s, seed) for seed, s in enumerate(samplings)]
    ends = [30, 41, 25, 59]
    orders = [
        order(t, "near", 0, end, evaluate=i != 1)
        for i, (t, end) in enumerate(zip(texts, ends, strict=True))
    ]
    together = drafter.replay(orders, texts)
    for text in texts:
        drafter.release_request(text.request.id)
    alone = []
    for one, text in zip(orders, texts, strict=True):
        alone += drafter.replay([one], [text])
        drafter.release_request(text.request.id)
    assert list(together) == alone
    assert [r.num_tokens for r in together] == [30 - PROMPT, 0, 0, 59 - PROMPT]


class Reading(SelectionPolicy):
    """Another drafter, or none, in every round; all the others read along."""

    name = "reading"

    def __init__(self, drafter: str | None = None) -> None:
        self._drafter = drafter
        self.answers: list[Replayed] = []

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        names = [*view.drafters, None]
        if self._drafter is not None:
            names = [self._drafter if s.round % 2 else None for s in states]
        return {s.request.id: names[(s.order + s.round) % len(names)] for s in states}

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        return [
            ReplayProposal(s, n, (s.round + i) % 3 > 0)
            for s in states
            for i, n in enumerate(view.drafters)
        ]

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        self.answers.append(replayed)


def loop_with(engine: Engine, policy: SelectionPolicy, **options: Any) -> Any:
    loop = make_loop(engine, **options)
    replace_policies(loop.scheduler, selection=policy)
    return loop


@pytest.mark.parametrize(("sampling", "batch"), covering(SAMPLINGS, [1, 8], strength=1))
def test_replays_in_every_round_change_no_token(engine: Engine, sampling: str, batch: int) -> None:
    requests = make_requests(SAMPLINGS[sampling], batch, "none")
    alone, _ = run(make_loop(engine), requests)
    policy = Reading()
    outputs, accepted = run(
        loop_with(engine, policy), make_requests(SAMPLINGS[sampling], batch, "auto")
    )
    assert outputs == alone
    assert accepted > 0
    by_drafter = {name: [r for r in policy.answers if r.drafter == name] for name in MODELS}
    assert all(sum(r.num_tokens for r in found) > 0 for found in by_drafter.values())
    assert all(r.num_matched == r.num_tokens for r in by_drafter["same"])
    far = by_drafter["far"]
    assert sum(r.num_matched for r in far) < sum(r.num_tokens for r in far)


@pytest.mark.parametrize(
    ("name", "own_lane"), covering(["greedy", "epsilon_greedy", "lbss"], [False, True], strength=1)
)
def test_no_selection_changes_a_token(engine: Engine, name: str, own_lane: bool) -> None:
    sampling = SAMPLINGS["coupled"]
    alone, _ = run(make_loop(engine), make_requests(sampling, 8, "none"))
    loop = loop_with(engine, policy_named(name).make("selection"), own_lane=own_lane)
    outputs, _ = run(loop, make_requests(sampling, 8, "auto"))
    assert outputs == alone


def test_what_a_drafter_has_replayed_it_drafts_from(engine, monkeypatch) -> None:
    """KV that replays wrote is right: a perfect drafter is always accepted."""

    def accepted_share(which: int) -> float:
        proposed = accepted = 0
        loop = loop_with(engine, Reading("same"))
        # Another text, so that the right KV is not there from the time before.
        events = [Arrive(make_requests(SAMPLINGS["coupled"], 4, "auto")[which])]
        while events or loop.scheduler.num_unfinished:
            for output in loop.turn(events).outputs:
                if output.finish_reason is None:
                    proposed += output.num_proposed
                    accepted += output.num_accepted
            events = []
        assert proposed > 10
        return accepted / proposed

    assert accepted_share(2) == 1.0

    def only_tables(self: ModelDrafter, orders: Any, texts: Any) -> tuple[Replayed, ...]:
        for one in orders:
            self._tables.extend(one.request_id, one.epoch, one.new_blocks)
        return tuple(Replayed(o.request_id, o.epoch, self.name) for o in orders)

    monkeypatch.setattr(ModelDrafter, "replay", only_tables)
    assert accepted_share(3) < 1.0
