"""Drafts from elsewhere: held, verified by the distributions that were sent, never left over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.sampling_toys import Loop as ToyLoop
from tests.engine.sampling_toys import joint_p_value, sampling_rows, toy_table
from tests.engine.small_family import VOCAB

from penstock.config import EngineConfig, PolicyConfig
from penstock.core.types import (
    Arrive,
    Cancel,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    DraftReady,
    DraftSource,
    Event,
    Request,
    SamplingParams,
    VerifyItem,
)
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.drafts import Draft
from penstock.engine.sampling import SamplingRows
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sampling.noise import Salt, draft_seeds, row_keys, uniform
from penstock.engine.sampling.params import IntArray
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import HeldDrafts
from penstock.transport.wire import WEIGHT_SUM, truncate

PROMPT = tuple(b"from elsewhere ")
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def loaded(family: dict[str, Path]) -> Engine:
    return load_engine(
        EngineConfig(
            target=family["target"],
            dtype="float32",
            backend="eager",
            kv_tokens=4096,
            num_threads=1,
            allocation=PolicyConfig(name="fixed", options={"k": 4}),
            pipeline="async",
        ),
        calibrated=False,
    )


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    loaded.loop.turn([Cancel("a"), Cancel("b"), DrafterDown("far")])
    loaded.loop.turn([])


Answer = Callable[[DraftOrder, list[int]], list[Event]]


def run(engine: Engine, requests: Sequence[Request], answer: Answer) -> dict[str, list[int]]:
    """Outputs, where a draft server `far` answers every order with the events that `answer` makes
    of the order and the text."""
    orders: list[DraftOrder] = []
    engine.executor.remote.connect(lambda new, news: orders.extend(new))
    events: list[Event] = [DrafterUp("far"), *map(Arrive, requests)]
    texts = {r.id: list(r.prompt_token_ids or ()) for r in requests}
    unfinished = set(texts)
    while unfinished:
        turn = engine.loop.turn(events)
        for output in turn.outputs:
            texts[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
        events = [e for o in orders for e in answer(o, texts[o.request_id])]
        orders.clear()
    engine.loop.turn(events)
    return {r.id: texts[r.id][r.prompt_len :] for r in requests}


def request(request_id: str, **changes: object) -> Request:
    sampling = SamplingParams(temperature=0.8, seed=5, **changes)  # type: ignore[arg-type]
    return Request(request_id, len(PROMPT), NUM_TOKENS, prompt_token_ids=PROMPT, sampling=sampling)


def hold(engine: Engine, order: DraftOrder, tokens: list[int], times: int = 1) -> list[Event]:
    key = (order.request_id, order.epoch, order.round)
    for _ in range(times):
        engine.executor.hold_remote(*key, tokens, None)
    return [DraftReady(*key, order.drafter, len(tokens))] * times


def test_an_order_is_answered_at_once_and_says_nothing(engine: Engine) -> None:
    """The lane goes on; without the event the request goes on when the deadline has passed."""
    sent: list[tuple[Sequence[DraftOrder], Mapping[str, TokenBuffer]]] = []
    engine.executor.remote.connect(lambda new, news: sent.append((new, dict(news))))
    engine.loop.turn([DrafterUp("far"), Arrive(request("a"))])
    turns = [engine.loop.turn([]) for _ in range(3)]
    ((orders, news),) = sent
    assert [o.request_id for o in orders] == ["a"]
    assert news["a"].length == len(PROMPT) + 1
    assert engine.loop.num_plans_in_flight == 0
    assert [t.collected for t in turns] == [1, 0, 0]
    assert turns[-1].wake_at == orders[0].deadline


@pytest.mark.parametrize("times", [1, 3])
def test_output_is_the_targets_own(engine: Engine, times: int) -> None:
    alone = run(engine, [request("alone")], lambda order, text: hold(engine, order, []))["alone"]

    def answer(order: DraftOrder, text: list[int]) -> list[Event]:
        at = len(text) - len(PROMPT)
        tokens = alone[at : at + order.max_draft_tokens]
        if order.round % 3 == 2:
            tokens = [(t + 1) % VOCAB for t in tokens]
        return hold(engine, order, tokens, times)

    before = engine.executor.totals.num_target_steps
    made = run(engine, [request("a"), request("b")], answer)
    assert made == {"a": alone, "b": alone}
    assert engine.executor.totals.num_target_steps - before < NUM_TOKENS - 5
    assert len(engine.executor._held) == 0


def test_nothing_is_left_over(engine: Engine) -> None:
    """Drafts held behind the engine's back: late, early, for nobody, for a request that ends."""
    held: list[DraftOrder] = []

    def answer(order: DraftOrder, text: list[int]) -> list[Event]:
        for stale in held[-3:]:
            hold(engine, stale, [1, 2, 3])
        held.append(order)
        engine.executor.hold_remote("nobody", 1, 1, [1], None)
        if len(text) > len(PROMPT) + NUM_TOKENS // 2:
            hold(engine, order, [1, 2])
            return [Cancel(order.request_id)]
        return hold(engine, order, [7])

    run(engine, [request("a"), request("b")], answer)
    engine.loop.turn([])
    assert len(engine.executor._held) == 0
    assert not engine.executor.remote._known
    assert not engine.executor.remote._sent_at


def test_an_older_draft_never_replaces_a_newer_one(engine: Engine) -> None:
    held = HeldDrafts()
    held.hold("a", 2, 1, Draft([1], [-1]))
    held.hold("a", 1, 9, Draft([2], [-1]))
    item = VerifyItem("a", 2, 1, 0, 1, True, DraftSource.HELD)
    taken = held.pop_draft(item, engine.executor.target)
    assert taken[0].token_ids == [1]
    assert held.pop_draft(item, engine.executor.target) is None


def test_weights_become_the_distribution(engine: Engine) -> None:
    held = HeldDrafts()
    weights = [((3, 250), (WEIGHT_SUM // 4, 3 * WEIGHT_SUM // 4)), ((9,), (WEIGHT_SUM,))]
    held.hold("a", 0, 0, Draft([250, 9], [-1, -1]), weights=weights)
    taken = held.pop_draft(
        VerifyItem("a", 0, 0, 0, 1, True, DraftSource.HELD), engine.executor.target
    )
    assert taken is not None
    draft, probs = taken
    assert draft.prob_rows == [0, 1]
    assert probs.shape == (2, VOCAB)
    assert probs[0, [3, 250]].tolist() == [0.25, 0.75]
    assert probs.sum(dim=1).tolist() == [1, 1]


def test_weighted_drafts_from_end_to_end(engine: Engine) -> None:
    def answer(order: DraftOrder, text: list[int]) -> list[Event]:
        key = (order.request_id, order.epoch, order.round)
        weights = [((7, 8), (WEIGHT_SUM // 2, WEIGHT_SUM // 2))]
        engine.executor.hold_remote(*key, [7], weights)
        return [DraftReady(*key, order.drafter, 1)]

    made = run(engine, [request("a", verification="ratio")], answer)
    assert len(made["a"]) == NUM_TOKENS
    assert len(engine.executor._held) == 0


def over_the_wire(
    logits: torch.Tensor,
    rows: SamplingRows,
    positions: IntArray,
    starts: IntArray,
    k: int,
    *,
    honest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut to k tokens, draw from the integers and report them. Not honest: draws from the whole
    distribution, as a drafter does that truncates only what it sends."""
    probs = filtered_probs(logits, rows).numpy()
    reported = truncate(probs, k)
    token_ids, weights = reported if honest else truncate(probs, probs.shape[1])
    draws = uniform(row_keys(draft_seeds(rows.seed, starts), positions, Salt.DRAFT))
    below = (
        np.cumsum(weights, axis=1)
        <= (draws.astype(np.float64) * WEIGHT_SUM).astype(np.int64)[:, None]
    )
    tokens = np.take_along_axis(token_ids, below.sum(axis=1)[:, None], axis=1)[:, 0]
    dense = np.zeros_like(probs)
    np.put_along_axis(dense, reported[0], (reported[1] / WEIGHT_SUM).astype(np.float32), axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(dense)


def p_value(k: int, *, honest: bool) -> float:
    vocab, num = 6, 50_000
    params = sampling_rows(num)
    loop = ToyLoop(
        target=toy_table(vocab, seed=0),
        drafter=toy_table(vocab, seed=0) + 0.3 * toy_table(vocab, seed=1),
        params=params,
        draft_params=params,
        ratio=True,
        draft_step=lambda *drafting: over_the_wire(*drafting, k, honest=honest),
    )
    return joint_p_value(loop.generate(3), loop.target, loop.params)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_truncated_drafts_keep_the_joint_of_three_positions(k: int) -> None:
    assert p_value(k, honest=True) > 1e-3


def test_truncating_only_what_is_sent_is_found_out() -> None:
    assert p_value(3, honest=False) < 1e-9
