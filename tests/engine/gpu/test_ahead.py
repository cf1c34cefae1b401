"""Rounds that are begun before they are planned change nothing but when the host does its work.

On the CPU each of them is over when the next one begins; on a GPU they are queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.world import replace_policies
from tests.engine.small_family import write_family
from tests.engine.test_exactness import DRAFTERS, SAMPLINGS, make_loop, make_requests, run
from tests.products import covering

from penstock.config import NGRAM, EngineConfig
from penstock.core.loop import Loop
from penstock.core.policies.allocation import AllocationPolicy, Grant
from penstock.core.policies.selection import SelectionPolicy
from penstock.core.types import (
    NO_DRAFTER,
    Arrive,
    Cancel,
    DraftOrder,
    DraftSource,
    Request,
    SamplingParams,
    VerifyItem,
)
from penstock.core.view import DraftCandidate, View
from penstock.engine.build import Engine, load_engine
from penstock.engine.gpu import graphs
from penstock.engine.gpu.executor import GraphExecutor
from penstock.engine.gpu.graphs import GraphRunner
from penstock.engine.gpu.operations import VerifyOutcome
from penstock.engine.gpu.rounds import Entry


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    before = torch.get_num_threads()
    paths = write_family(tmp_path_factory.mktemp("family"))
    drafters = {name: str(paths[name]) for name in DRAFTERS[:3]} | {"ngram": NGRAM}
    config = EngineConfig(
        target=paths["target"],
        drafters=drafters,
        dtype="float32",
        backend="graphs",
        kv_tokens=32 * 256,
        num_threads=1,
    )
    yield load_engine(config, calibrated=False)
    torch.set_num_threads(before)


@pytest.fixture
def executor(engine: Engine) -> Iterator[GraphExecutor]:
    """With rounds ahead."""
    assert isinstance(engine.executor, GraphExecutor)
    engine.executor.runs_ahead = True
    yield engine.executor
    engine.executor.runs_ahead = False


class Whimsical(AllocationPolicy):
    """Draft lengths by lot, often none."""

    name = "whimsical"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        lengths = self._rng.integers(0, 6, len(candidates)).tolist()
        return [Grant(min(n, c.limit)) for n, c in zip(lengths, candidates, strict=True)]

    def reserve(self, state: Any) -> int:
        return 5


class Switching(SelectionPolicy):
    """One drafter for some rounds, then another."""

    name = "switching"

    def select(self, states: Sequence[Any], view: View) -> dict[str, str | None]:
        names = ["near", "same", None, "far"]
        return {s.request.id: names[(s.order + s.round // 3) % 4] for s in states}


def whimsical_loop(engine: Engine, seed: int, **settings: Any) -> Loop:
    loop = make_loop(engine, **settings)
    replace_policies(loop.scheduler, allocation=Whimsical(seed))
    if not settings.get("rotating"):
        replace_policies(loop.scheduler, selection=Switching())
    return loop


def run_in_time(
    loop: Loop, arrivals: Iterable[tuple[int, Request]], cancelled: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Requests that arrive, and are cancelled, in given turns; what each has come to."""
    arrivals = sorted(arrivals, key=lambda a: a[0])
    texts: dict[str, list[int]] = {r.id: [] for _, r in arrivals}
    last = max(t for t, _ in arrivals)
    for turn in range(10_000):
        events: list[Any] = [Arrive(r) for t, r in arrivals if t == turn]
        events += [Cancel(id_) for id_, t in cancelled.items() if t == turn]
        for output in loop.turn(events).outputs:
            texts[output.request_id] += output.token_ids
            assert output.error is None
        if turn > last and not loop.scheduler.num_unfinished:
            break
    loop.turn([])
    for pool in loop.scheduler.table.memory.pools.values():
        pool.check()
        assert pool.num_used_blocks == 0
    return {id_: tuple(text) for id_, text in texts.items()}


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    covering([NO_DRAFTER, "same", "near", "far"], ["greedy", "coupled"], strength=1),
)
def test_mostly_the_next_round_is_under_way_when_it_is_planned(
    engine: Engine, executor: GraphExecutor, drafter: str, sampling: str
) -> None:
    """And comes to the same, in as many steps."""
    found = []
    for ahead in (False, True):
        executor.runs_ahead = ahead
        totals = executor.totals
        before = (totals.num_target_steps, executor.num_rounds_ahead)
        texts, accepted = run(make_loop(engine), make_requests(SAMPLINGS[sampling], 8, drafter))
        steps = totals.num_target_steps - before[0]
        rounds = executor.num_rounds_ahead - before[1]
        assert rounds == (steps - 2 if ahead else 0), "all but the prompts and the first round"
        found.append((texts, accepted, steps))
    assert found[0] == found[1]


def test_ratio_requests_without_drafts_have_rounds_ahead_and_those_with_drafts_have_not(
    engine: Engine, executor: GraphExecutor
) -> None:
    """Without a draft the target's own sample is all that there is to `ratio`."""
    ratio = SamplingParams(temperature=0.9, verification="ratio")

    def rounds_ahead(drafter: str) -> tuple[Any, int]:
        before = executor.num_rounds_ahead
        texts, _ = run(make_loop(engine), make_requests(ratio, 8, drafter))
        return texts, executor.num_rounds_ahead - before

    texts, rounds = rounds_ahead(NO_DRAFTER)
    assert rounds > 20
    executor.runs_ahead = False
    assert rounds_ahead(NO_DRAFTER) == (texts, 0)
    assert run(make_loop(engine), make_requests(SAMPLINGS["coupled"], 8, NO_DRAFTER))[0] == texts
    executor.runs_ahead = True
    assert rounds_ahead("near")[1] <= 8, "only where nobody has a draft"


def test_a_draft_among_ratio_requests_is_looked_at(engine: Engine, executor: GraphExecutor) -> None:
    """Some have a drafter; those without come to what they are alone."""
    ratio = SamplingParams(temperature=0.9, verification="ratio")
    alone = run(make_loop(engine), make_requests(ratio, 8, NO_DRAFTER))[0]
    requests = make_requests(ratio, 8, NO_DRAFTER)
    mixed = [replace(r, drafter="near") if i % 3 == 0 else r for i, r in enumerate(requests)]
    texts, accepted = run(make_loop(engine), mixed)
    assert accepted > 0
    assert [t for i, t in enumerate(texts) if i % 3] == [t for i, t in enumerate(alone) if i % 3]


@pytest.mark.parametrize(
    ("drafter", "kv_tokens", "seed"),
    covering(["near", "switching", "rotating"], [32 * 256, 30 * 16], range(2), strength=1),
)
def test_whatever_the_plan_asks_for(
    engine: Engine, executor: GraphExecutor, drafter: str, seed: int, kv_tokens: int
) -> None:
    """Other draft lengths, other drafters, drafters that only read, new requests, requests that are
    gone, scarce memory."""
    rng = np.random.default_rng(seed)
    sampling = SAMPLINGS["coupled" if seed % 2 else "greedy"]
    alone = run(make_loop(engine), make_requests(sampling, 12, NO_DRAFTER))[0]
    requests = make_requests(sampling, 12, drafter if drafter == "near" else "auto")
    rotating = drafter == "rotating"
    loop = whimsical_loop(engine, seed, rotating=rotating, kv_tokens=kv_tokens)
    arrivals = [(int(rng.integers(0, 20)), r) for r in requests]
    cancelled = {requests[i].id: int(rng.integers(10, 25)) for i in (3, 8)}
    before = executor.num_rounds_ahead
    texts = run_in_time(loop, arrivals, cancelled)
    assert executor.num_rounds_ahead > before or rotating, "which reads in every round"
    for request, text in zip(requests, alone, strict=True):
        mine = texts[request.id]
        assert mine == text[: len(mine)]
        assert len(mine) == len(text) or request.id in cancelled


def test_a_new_request_joins_a_round_that_is_under_way(
    engine: Engine, executor: GraphExecutor
) -> None:
    """What is under way is used, and its prompt is read besides."""
    sampling = SAMPLINGS["greedy"]
    alone = run(make_loop(engine), make_requests(sampling, 3, NO_DRAFTER))[0]
    requests, before = make_requests(sampling, 3, "near"), executor.num_rounds_ahead
    loop = make_loop(engine)
    loop.turn([Arrive(requests[0]), Arrive(requests[1])])
    for _ in range(3):
        loop.turn([])
    num = executor.num_rounds_ahead
    assert num > before
    outputs = loop.turn([Arrive(requests[2])]).outputs
    assert {o.request_id for o in outputs} == {r.id for r in requests}
    assert executor.num_rounds_ahead == num + 1
    for request in requests:
        loop.turn([Cancel(request.id)])
    loop.turn([])
    requests = make_requests(sampling, 3, "near")
    arrivals = [(0, requests[0]), (0, requests[1]), (4, requests[2])]
    assert list(run_in_time(make_loop(engine), arrivals, {}).values()) == alone


@pytest.mark.parametrize("breakage", ["all is accepted", "nothing is accepted", "old noise"])
def test_negative_control(
    engine: Engine, executor: GraphExecutor, monkeypatch: pytest.MonkeyPatch, breakage: str
) -> None:
    sampling = SAMPLINGS["coupled"]
    alone = run(make_loop(engine), make_requests(sampling, 8, NO_DRAFTER))[0]
    outcome, send = GraphRunner.outcome, graphs._Step.send

    def wrong(self: GraphRunner, before: Any, rows: Any, limits: Any) -> VerifyOutcome:
        short, known = outcome(self, before, rows, limits)
        return VerifyOutcome(
            0 * short if breakage.startswith("all") else torch.from_numpy(limits), known
        )

    def with_old_noise(self: graphs._Step, late: graphs.Late | None) -> None:
        self.host.keys[:] = self.host.keys[:, :1].clone()
        send(self, late)

    if breakage == "old noise":
        monkeypatch.setattr(graphs._Step, "send", with_old_noise)
    else:
        monkeypatch.setattr(GraphRunner, "outcome", wrong)
    assert run(make_loop(engine), make_requests(sampling, 8, "near"))[0] != alone


ITEM = VerifyItem("r", 3, 5, 40, 1, samples=True)
ORDER = DraftOrder("r", 3, 5, "near", 39, 2, 4)
INLINE = ITEM._replace(source=DraftSource.INLINE, drafter="near", num_draft_tokens=4, draft=ORDER)


@pytest.mark.parametrize(
    ("item", "is_answered"),
    [
        (ITEM, True),
        (INLINE, True),
        (INLINE._replace(draft=ORDER._replace(start=40, num_catch_up_tokens=1)), True),
        (INLINE._replace(draft=ORDER._replace(start=38, num_catch_up_tokens=3)), False),
        (INLINE._replace(draft=ORDER._replace(drafter="far")), False),
        (ITEM._replace(source=DraftSource.HELD, num_draft_tokens=4, drafter="edge"), False),
        (ITEM._replace(epoch=4), False),
        (ITEM._replace(start=39), False),
        (ITEM._replace(start=40, num_scheduled_tokens=2), False),
    ],
)
def test_what_an_entry_answers(item: VerifyItem, is_answered: bool) -> None:
    assert Entry("r", 3, 40, 0, [7, 8], "near", 0).answers(item) is is_answered
    undrafted = Entry("r", 3, 40, 0, [], None)
    assert undrafted.answers(item) is (is_answered and item.draft is None)
