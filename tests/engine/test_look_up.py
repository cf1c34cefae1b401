"""Drafts that begin with looked-up tokens and go on with a model: exact whatever their parts."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.sampling_toys import PROMPT, joint_p_value, sampling_rows, toy_table
from tests.engine.small_family import make_unreliable
from tests.engine.test_exactness import SAMPLINGS, Alone, lenient, make_loop, make_requests, run
from tests.products import covering, slow

from penstock.config import EngineConfig
from penstock.core.lookup import TextIndex, TextLookUp
from penstock.core.loop import Loop
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.state import Grant, RequestState
from penstock.core.types import (
    DraftOrder,
    DraftSource,
    Match,
    Request,
    SamplingParams,
    Verdict,
    VerifyItem,
)
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows, VerifyBatch, sample_coupled, verify
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import DraftsAtHand
from penstock.engine.verifier import Verifier

BACKENDS = ("eager", "native")
MODELS = {"perfect": "same", "near": "near", "far": "far"}
LONGEST = 4


@pytest.fixture(scope="module")
def engines(family: dict[str, Path]) -> Callable[[str], Engine]:
    drafters = {name: str(family[path]) for name, path in MODELS.items()}

    def loaded(backend: str) -> Engine:
        config = EngineConfig(
            target=family["target"],
            drafters={**drafters, "suffix": "suffix"},
            dtype="float32",
            backend=backend,
            kv_tokens=32 * 256,
            num_threads=1,
        )
        return load_engine(config, calibrated=False)

    return cache(loaded)


@pytest.fixture(params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


class Told(TextLookUp):
    """Look-up that is told what requests will put out, and finds it, with a wrong token every now
    and then; a text that it was not told is looked up."""

    def __init__(self) -> None:
        super().__init__("suffix")
        self._known: dict[str, tuple[int, ...]] = {}

    def tell(self, requests: Sequence[Request], outputs: Sequence[tuple[int, ...]]) -> None:
        for request, output in zip(requests, outputs, strict=True):
            assert request.prompt_token_ids is not None
            self._known[request.id] = (*request.prompt_token_ids, *output)

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        text = self._known.get(state.request.id)
        if text is None:
            return super().match(state, num_tokens)
        begin = state.num_known_tokens
        found = list(text[begin : begin + min(num_tokens, LONGEST)])
        turn = zlib.crc32(f"{text} {begin}".encode())
        if turn % 5 == 4 and found:
            found[turn % len(found)] ^= 1
        return Match(tuple(found), 8, "own") if found else None


class Switching(AllocationPolicy):
    """Other parts in every round, by the request's text; or always the same ones.

    seen: the lengths of the parts that were granted."""

    name = "switching"

    def __init__(self, parts: tuple[int, int] | None = None) -> None:
        self.seen: set[tuple[int, int]] = set()
        self._parts = parts

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        left, grants = view.room.budget, []
        for candidate in candidates:
            known = candidate.state.request.prompt_token_ids
            turn = zlib.crc32(f"{known} {candidate.state.num_known_tokens}".encode())
            found, most = min(LONGEST, len(candidate.survival)), min(left, candidate.most)
            wanted = self._parts or (turn % (found + 1), turn // 7 % (LONGEST + 1))
            looked_up = min(wanted[0], found, most)
            drafted = min(wanted[1], candidate.limit, most - looked_up)
            left -= looked_up + drafted
            self.seen.add((looked_up, drafted))
            grants.append(Grant(drafted, num_looked_up=looked_up))
        return grants

    def reserve(self, state: RequestState) -> int:
        return 2 * LONGEST


def switching_loop(engine: Engine, look_up: Told, **options: Any) -> tuple[Loop, Switching]:
    policy = Switching()
    return make_loop(engine, allocation=policy, look_up=look_up, **options), policy


def repeating_requests(sampling: SamplingParams, num: int, drafter: str) -> list[Request]:
    """Prompts of few different tokens, whose ends have occurred before, so that look-up finds."""
    requests = []
    for i, request in enumerate(make_requests(sampling, num, drafter)):
        prompt = tuple(np.random.default_rng(i).integers(0, 3, 40).tolist())
        changed = dataclasses.replace(request, prompt_len=len(prompt), prompt_token_ids=prompt)
        requests.append(changed)
    return requests


@pytest.fixture(scope="module")
def alones(engines: Callable[[str], Engine]) -> Callable[[str], Alone]:
    return cache(lambda backend: Alone(engines(backend), repeating_requests, 16))


@pytest.fixture
def alone(engine: Engine, alones: Callable[[str], Alone]) -> Alone:
    return alones(engine.backend)


@pytest.mark.parametrize(
    ("engine", "sampling", "drafter", "batch"),
    [
        *covering(["native"], SAMPLINGS, [*MODELS, "suffix", "rotating"], [1, 8], strength=1),
        *slow(["eager"], SAMPLINGS, [*MODELS, "suffix", "rotating"], [1, 8]),
    ],
    indirect=["engine"],
)
def test_output_is_the_targets_own(engine, alone, sampling, drafter, batch) -> None:
    loop = make_loop(engine, rotating=drafter == "rotating")
    name = "auto" if drafter == "rotating" else drafter
    outputs, _ = run(loop, repeating_requests(SAMPLINGS[sampling], batch, name))
    assert outputs == alone[sampling][:batch]


@pytest.mark.parametrize(
    ("engine", "sampling", "pipeline"),
    covering(BACKENDS, ["greedy", "coupled"], ["off", "2", "async"], strength=1),
    indirect=["engine"],
)
def test_other_parts_in_every_round_change_nothing(engine, alone, sampling, pipeline) -> None:
    requests, look_up = repeating_requests(SAMPLINGS[sampling], 8, "near"), Told()
    look_up.tell(requests, alone[sampling][:8])
    loop, policy = switching_loop(engine, look_up, pipeline=pipeline)
    outputs, accepted = run(loop, requests)
    assert outputs == alone[sampling][:8]
    assert accepted
    seen = policy.seen
    assert any(looked_up and drafted for looked_up, drafted in seen), "one behind the other"
    assert any(looked_up and not drafted for looked_up, drafted in seen), "look-up alone"
    assert any(drafted and not looked_up for looked_up, drafted in seen), "the model alone"


@pytest.mark.parametrize("pipeline", ["off", "2"])
def test_the_model_has_read_what_it_goes_on_from(engine, alone, monkeypatch, pipeline) -> None:
    """The target's twin is right behind every looked-up token that is, however often it was not
    asked: nothing of its KV is missing or stale."""
    drafter, drafted = engine.executor.drafters["perfect"], []
    honest = drafter.draft

    def note(orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafts = honest(orders, texts)
        for order, text, draft in zip(orders, texts, drafts.drafts, strict=True):
            front = order.front_token_ids
            drafted.append((order.request_id, text.length, front, tuple(draft.token_ids)))
        return drafts

    monkeypatch.setattr(drafter, "draft", note)
    requests, look_up = repeating_requests(SAMPLINGS["coupled"], 8, "perfect"), Told()
    look_up.tell(requests, alone["coupled"][:8])
    loop, _ = switching_loop(engine, look_up, pipeline=pipeline)
    assert run(loop, requests)[0] == alone["coupled"][:8]
    whole = {
        r.id: (*r.prompt_token_ids, *output)
        for r, output in zip(requests, alone["coupled"][:8], strict=True)
    }
    num_behind = num_wrong = 0
    for request_id, start, front, tokens in drafted:
        truth = whole[request_id][start:]
        num_wrong += truth[: len(front)] != front
        if truth[: len(front)] == front:
            rest = truth[len(front) :][: len(tokens)]
            assert tokens[: len(rest)] == rest
            num_behind += bool(front and rest)
    assert num_behind
    assert num_wrong


def test_small_memory_preempts_and_changes_nothing(engine: Engine, alone: Alone) -> None:
    requests, look_up = repeating_requests(SAMPLINGS["coupled"], 16, "auto"), Told()
    look_up.tell(requests, alone["coupled"])
    loop, policy = switching_loop(engine, look_up, rotating=True, kv_tokens=20 * 16)
    outputs, _ = run(loop, requests)
    assert loop.scheduler.table.counters.preemptions > 0
    assert outputs == alone["coupled"]
    assert any(looked_up and drafted for looked_up, drafted in policy.seen)


@pytest.mark.parametrize("pipeline", ["off", "2"])
def test_a_model_that_fails_midway_changes_nothing(engine, alone, monkeypatch, pipeline) -> None:
    calls = make_unreliable(monkeypatch, engine.executor.drafters["near"], ["draft"], {1, 4, 5})
    requests, look_up = repeating_requests(SAMPLINGS["greedy"], 8, "near"), Told()
    look_up.tell(requests, alone["greedy"][:8])
    loop, _ = switching_loop(engine, look_up, pipeline=pipeline)
    outputs, accepted = run(loop, requests)
    assert next(calls) > 5
    assert outputs == alone["greedy"][:8]
    assert accepted


def test_a_cached_prefix_holds_only_what_the_model_has_read(engine: Engine, alone: Alone) -> None:
    """Neither what was drafted without the model nor wrong tokens that it has read."""
    look_up = Told()
    loop, policy = switching_loop(engine, look_up)
    for policy._parts in ((LONGEST, 0), None, (0, LONGEST)):
        requests = repeating_requests(SAMPLINGS["greedy"], 8, "perfect")
        look_up.tell(requests, alone["greedy"][:8])
        outputs, accepted = run(loop, requests)
        assert outputs == alone["greedy"][:8]
    # Greedy twins: whatever was drafted was right, but for what a request's end has cut off.
    assert accepted > 0.6 * sum(len(output) for output in outputs)


def test_negative_control_accepting_everything_is_caught(engine, alone, monkeypatch) -> None:
    """The equalities above must be able to fail."""
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    requests, look_up = repeating_requests(SAMPLINGS["coupled"], 8, "near"), Told()
    look_up.tell(requests, alone["coupled"][:8])
    outputs, _ = run(switching_loop(engine, look_up)[0], requests)
    assert outputs != alone["coupled"][:8]


NUM_SAMPLES = 50_000
VOCAB = 6
LOOKED_UP = (5, *PROMPT, 3, 2, 4, 5, *PROMPT)
"""Behind its last tokens look-up finds 3, 2, 4."""


class ToyRunner:
    """A model whose next token depends on the last one alone: no KV."""

    num_blocks, block_size = 1 << 20, 16
    num_slots = None
    config = type("Config", (), {"vocab_size": VOCAB})()
    vocab_size = VOCAB
    sample = staticmethod(sample_coupled)

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        return self._table[torch.from_numpy(batch.token_ids[batch.logits_rows].astype(np.int64))]

    def propose(self, *_: object) -> None:
        return None

    def blocks_for(self, num_tokens: int) -> int:
        return 1


def first_order(seed: int) -> torch.Tensor:
    return toy_table(VOCAB, seed)[0]


def toy_drafter(seed: int) -> ModelDrafter:
    runner: Any = ToyRunner(first_order(seed))
    return ModelDrafter("toy", runner, 64)


Parts = Callable[[int, int], tuple[int, int]]
"""Looked-up tokens and the model's, by the number of the request and the length of its text."""


@cache
def looked_up(text: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    index = TextIndex(64)
    index.append(text)
    return tuple(index.continued(num_tokens)[0])


def drafts_of(
    drafter: ModelDrafter, numbers: Sequence[int], texts: Sequence[TokenBuffer], parts: Parts
) -> Drafts:
    """A round's drafts, as the executor puts them together."""
    orders, asked, items = [], [], []
    for number, text in zip(numbers, texts, strict=True):
        most, num_drafted = parts(number, text.length)
        front = looked_up(tuple(text.tokens(0, text.length)), most)
        key = text.request.id
        if num_drafted:
            read = text.length - 1, 1 + len(front)
            order = DraftOrder(key, 0, 0, "toy", *read, num_drafted, front_token_ids=front)
            text.foresee(front)
            orders.append(order)
            asked.append(text)
        source = DraftSource.INLINE if num_drafted else DraftSource.KNOWN
        item = VerifyItem(key, 0, 0, text.length - 1, 1, True, source, "toy")
        item = item._replace(num_draft_tokens=len(front) + num_drafted, token_ids=front)
        items.append(item)
    at_hand = DraftsAtHand()
    if orders:
        at_hand.add(orders, drafter.draft(orders, asked))
    return Drafts([Draft(*at_hand.draft_of(item)) for item in items], at_hand.joined_probs())


def generate(
    target: torch.Tensor, drafter: ModelDrafter, parts: Parts, falsify: bool, num_samples: int
) -> np.ndarray[Any, Any]:
    """Three tokens of every request through both sources and the sampler that verifies."""
    sampling = [SamplingParams(seed=i, verification="ratio") for i in range(num_samples)]
    texts = [
        TokenBuffer(Request(f"{i}", len(LOOKED_UP), 8, prompt_token_ids=LOOKED_UP, sampling=s))
        for i, s in enumerate(sampling)
    ]
    rows, begin = sampling_rows(num_samples), len(LOOKED_UP)
    while active := [i for i, t in enumerate(texts) if t.length < begin + 3]:
        mine = [texts[i] for i in active]
        drafts = drafts_of(drafter, active, mine, parts)
        if falsify:
            drafts = falsified(drafts)
        decide(target, mine, drafts, rows.select(np.array(active)))
    return np.array([t.tokens(begin, begin + 3) for t in texts])


def decide(
    target: torch.Tensor, texts: Sequence[TokenBuffer], drafts: Drafts, rows: SamplingRows
) -> None:
    tokens = [d.token_ids for d in drafts.drafts]
    before = [[t.tokens(t.length - 1, t.length)[0], *d] for t, d in zip(texts, tokens, strict=True)]
    flat = [t for row in before for t in row]
    result = verify(
        VerifyBatch(
            logits=target[torch.tensor(flat)],
            row_start=np.concatenate(([0], np.cumsum([len(row) for row in before]))),
            positions=np.array([t.length for t in texts]),
            params=rows,
            ratio=np.ones(len(texts), dtype=np.bool_),
            draft_tokens=np.array([t for row in tokens for t in row], dtype=np.int64),
            draft_probs=drafts.probs,
            draft_prob_row=np.array([r for d in drafts.drafts for r in d.prob_rows]),
        )
    )
    for i, text in enumerate(texts):
        text.append(result.tokens(i))


def falsified(drafts: Drafts) -> Drafts:
    """Looked-up tokens that are passed off as samples of the model."""
    changed = []
    for draft in drafts.drafts:
        first = max([-1, *draft.prob_rows])
        rows = [r if r >= 0 else first for r in draft.prob_rows]
        changed.append(Draft(draft.token_ids, rows))
    return Drafts(changed, drafts.probs)


def p_value(
    parts: Parts, drafter_seed: int = 1, falsify: bool = False, num_samples: int = NUM_SAMPLES
) -> float:
    target, drafter = first_order(0), toy_drafter(drafter_seed)
    samples = generate(target, drafter, parts, falsify, num_samples)
    joint = target.expand(VOCAB, VOCAB, VOCAB).contiguous()
    return joint_p_value(samples, joint, sampling_rows(num_samples))


def other_parts(number: int, length: int) -> tuple[int, int]:
    """Other ones in every round, whatever the tokens are."""
    turn = zlib.crc32(f"{number} {length}".encode())
    return turn % 4, turn // 7 % 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "drafter_seed"),
    [
        pytest.param(lambda *_: (1, 2), 1, id="one, then the model"),
        pytest.param(lambda *_: (1, 2), 0, id="one, then the target as drafter"),
        pytest.param(lambda *_: (3, 1), 2, id="look-up as far as it goes"),
        pytest.param(other_parts, 1, id="others in every round"),
    ],
)
def test_joint_of_three_positions_is_the_targets(parts: Parts, drafter_seed: int) -> None:
    assert p_value(parts, drafter_seed) > 1e-3


@pytest.mark.slow
def test_false_reports_are_caught() -> None:
    assert p_value(other_parts, num_samples=4_000) > 1e-3
    assert p_value(other_parts, falsify=True, num_samples=4_000) < 1e-9


def test_a_models_confidence_is_judged_by_its_own_tokens() -> None:
    """Not by the looked-up ones before them, which were right."""
    drafter, sampling = toy_drafter(1), SamplingParams(temperature=0.0)
    draft = Draft([3, 4], [-1, -1], confidences=[0.9, 0.9])
    verdict = Verdict("r", 0, 0, (1, 2, 5), "toy", 4, 2, num_decided=1, num_looked_up=2)
    for _ in range(20):
        drafter.learn(sampling, draft, verdict)
    assert drafter._calibrations.for_sampling(sampling, is_drawn=False).mean < 0.1
