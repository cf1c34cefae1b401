"""Drafts that begin as look-up and go on with a model: exact whatever is taken of either."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.engine.drafters.chain import ChainDrafter
from penstock.engine.drafters.lookup import LookupDrafter, Match
from penstock.engine.drafters.sources import (
    Parts,
    SourceEvidence,
    best_together,
    expected_tokens,
    round_seconds,
)
from tests.engine.sampling_toys import PROMPT, joint_p_value, sampling_rows, toy_table
from tests.engine.small_family import make_unreliable
from tests.engine.test_exactness import SAMPLINGS, Alone, lenient, make_loop, make_requests, run
from tests.products import covering, slow

from penstock.config import EngineConfig
from penstock.core.types import DraftOrder, Request, RoundCosts, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.drafts import Draft
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import VerifyBatch, sample_coupled, verify
from penstock.engine.sequences import TokenBuffer
from penstock.engine.verifier import Verifier

BACKENDS = ("eager", "native")
CHAINS = {"perfect": "ngram+{same}", "near": "suffix+{near}", "far": "ngram+{far}"}
KV_TOKENS = 32 * 256


@pytest.fixture(scope="module")
def engines(family: dict[str, Path]) -> Callable[[str], Engine]:
    chains = {name: path.format_map(family) for name, path in CHAINS.items()}

    def loaded(backend: str) -> Engine:
        config = EngineConfig(
            target=family["target"],
            drafters={**chains, "suffix": "suffix"},
            dtype="float32",
            backend=backend,
            kv_tokens=KV_TOKENS,
            num_threads=1,
        )
        return load_engine(config, calibrated=False)

    return cache(loaded)


@pytest.fixture(params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


class Switching:
    """Other parts in every round, by the request and its length. Where it is told what requests
    will put out, look-up finds that, with a wrong token every now and then.

    seen: the lengths of the parts that were drafted
    """

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self._known: dict[str, tuple[int, ...]] = {}

    def tell(self, requests: Sequence[Request], outputs: Sequence[tuple[int, ...]]) -> None:
        for request, output in zip(requests, outputs, strict=True):
            assert request.prompt_token_ids is not None
            self._known[request.id] = (*request.prompt_token_ids, *output)

    def parts(self, order: DraftOrder, match: Match) -> Parts:
        text, most = self._known.get(order.request_id), order.max_draft_tokens
        begin = order.start + order.num_catch_up_tokens
        turn = zlib.crc32(f"{text or order.request_id} {begin}".encode())
        if text is not None:
            found = list(text[begin : begin + most])
            if turn % 5 == 4 and found:
                found[turn % len(found)] ^= 1
            match = Match(found, 8)
        kept = turn % (min(len(match.token_ids), most) + 1)
        guessed = turn // 7 % (most - kept + 1)
        self.seen.add((kept, guessed))
        return Parts(match, kept, guessed)


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> Switching:
    switching = Switching()
    monkeypatch.setattr(
        SourceEvidence,
        "best_parts",
        lambda _, orders, matches, left: list(map(switching.parts, orders, matches)),
    )
    return switching


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
        *covering(["native"], SAMPLINGS, [*CHAINS, "suffix", "rotating"], [1, 8], strength=1),
        *slow(["eager"], SAMPLINGS, [*CHAINS, "suffix", "rotating"], [1, 8]),
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
def test_other_sources_in_every_round_change_nothing(
    engine: Engine, alone: Alone, switching: Switching, sampling: str, pipeline: str
) -> None:
    requests = repeating_requests(SAMPLINGS[sampling], 8, "near")
    switching.tell(requests, alone[sampling][:8])
    outputs, accepted = run(make_loop(engine, pipeline=pipeline), requests)
    assert outputs == alone[sampling][:8]
    assert accepted
    seen = switching.seen
    assert any(kept and guessed for kept, guessed in seen), "one behind the other"
    assert any(kept and not guessed for kept, guessed in seen), "look-up alone"
    assert any(guessed and not kept for kept, guessed in seen), "the model alone"


def test_the_model_has_read_what_it_goes_on_from(engine, alone, switching, monkeypatch) -> None:
    """The target's twin is right behind every looked-up token that is, however often it was not
    asked: nothing of its KV is missing or stale."""
    drafted: list[tuple[TokenBuffer, int, Parts, list[int]]] = []
    noted = SourceEvidence.drafted

    def note(sources: SourceEvidence, text: TokenBuffer, parts: Parts, guessed: list[int]) -> None:
        drafted.append((text, text.length, parts, guessed))
        noted(sources, text, parts, guessed)

    monkeypatch.setattr(SourceEvidence, "drafted", note)
    requests = repeating_requests(SAMPLINGS["coupled"], 8, "perfect")
    switching.tell(requests, alone["coupled"][:8])
    run(make_loop(engine), requests)
    num_behind = 0
    for text, start, parts, guessed in drafted:
        truth = text.tokens(start, text.length)
        kept = parts.match.token_ids[: parts.num_kept]
        if guessed and truth[: len(kept)] == kept:
            rest = truth[len(kept) : len(kept) + len(guessed)]
            assert guessed[: len(rest)] == rest
            num_behind += bool(kept)
    assert num_behind


def test_small_memory_preempts_and_changes_nothing(engine, alone, switching) -> None:
    loop = make_loop(engine, rotating=True, kv_tokens=20 * 16)
    requests = repeating_requests(SAMPLINGS["coupled"], 16, "auto")
    switching.tell(requests, alone["coupled"])
    outputs, _ = run(loop, requests)
    assert loop.scheduler.table.counters.preemptions > 0
    assert outputs == alone["coupled"]


@pytest.mark.parametrize("pipeline", ["off", "2"])
def test_a_model_that_fails_midway_changes_nothing(
    engine: Engine,
    alone: Alone,
    switching: Switching,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: str,
) -> None:
    chain = engine.executor.drafters["near"]
    assert isinstance(chain, ChainDrafter)
    calls = make_unreliable(monkeypatch, chain.timed, ["draft"], {1, 4, 5})
    outputs, _ = run(
        make_loop(engine, pipeline=pipeline), repeating_requests(SAMPLINGS["greedy"], 8, "near")
    )
    assert next(calls) > 5
    assert outputs == alone["greedy"][:8]


def test_a_cached_prefix_holds_only_what_the_model_has_read(engine, alone, monkeypatch) -> None:
    """What was drafted without the model must not be taken for its KV by the next request."""
    num_guessed = 0
    monkeypatch.setattr(
        SourceEvidence,
        "best_parts",
        lambda _s, orders, matches, _n: [
            Parts(match, 0, min(num_guessed, order.max_draft_tokens))
            for order, match in zip(orders, matches, strict=True)
        ],
    )
    loop = make_loop(engine)
    outputs, accepted = run(loop, repeating_requests(SAMPLINGS["greedy"], 8, "perfect"))
    assert not accepted
    num_guessed = 4
    outputs, accepted = run(loop, repeating_requests(SAMPLINGS["greedy"], 8, "perfect"))
    assert outputs == alone["greedy"][:8]
    # Greedy twins: whatever was drafted was right, but for what a request's end has cut off.
    assert accepted > 0.6 * sum(len(output) for output in outputs)


def test_negative_control_accepting_everything_is_caught(
    engine: Engine, alone: Alone, switching: Switching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equalities above must be able to fail."""
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    outputs, _ = run(make_loop(engine), repeating_requests(SAMPLINGS["coupled"], 8, "near"))
    assert outputs != alone["coupled"][:8]


def text_of(name: str, prompt: Sequence[int], max_tokens: int = 200) -> TokenBuffer:
    sampling = SamplingParams(temperature=0.0)
    return TokenBuffer(
        Request(name, len(prompt), max_tokens, prompt_token_ids=tuple(prompt), sampling=sampling)
    )


def order_of(text: TokenBuffer, most: int, costs: RoundCosts | None) -> DraftOrder:
    return DraftOrder(text.request.id, 0, 0, "chain", text.length - 1, 1, most, costs=costs)


def costs_of(most: int, *, row: float = 0.0, step: float = 0.0, read: float = 0.0) -> RoundCosts:
    """Of a round that takes a second by itself."""
    return RoundCosts(tuple(1.0 + row * n for n in range(most + 1)), step, read)


def parts_of(evidence: SourceEvidence, order: DraftOrder, match: Match, num_left: int) -> Parts:
    """Of a round with nobody else."""
    (parts,) = evidence.best_parts([order], [match], [num_left])
    return parts


def teach(evidence: SourceEvidence, match: Match, model_is_right: bool, rounds: int = 40) -> None:
    """Rounds in which look-up was always right, and the model always or never."""
    text = text_of("teacher", [1] * 4, max_tokens=rounds * 8)
    for _ in range(rounds):
        guessed = [50, 51]
        evidence.drafted(text, Parts(match, len(match.token_ids), 2), guessed)
        text.append([*match.token_ids, *(guessed if model_is_right else [60]), 70])
        evidence.on_text(text)


def test_the_model_is_asked_where_it_pays() -> None:
    match = Match([7, 8, 9], length=8)
    for is_right, step, is_asked in ((True, 0.1, True), (True, 2.0, False), (False, 0.1, False)):
        evidence = SourceEvidence()
        teach(evidence, match, is_right)
        text = text_of("r", [1, 2, 3])
        parts = parts_of(evidence, order_of(text, 6, costs_of(6, step=step)), match, 200)
        assert parts.num_kept == 3
        assert bool(parts.num_guessed) == is_asked, (is_right, step)


def test_a_match_that_was_never_right_is_not_drafted() -> None:
    evidence, match = SourceEvidence(), Match([7, 8, 9], length=3)
    text = text_of("teacher", [1] * 4)
    for _ in range(40):
        evidence.drafted(text, Parts(match, 0, 0), [])
        text.append([60])
        evidence.on_text(text)
    text = text_of("r", [1, 2, 3])
    parts = parts_of(evidence, order_of(text, 6, costs_of(6, row=0.05, step=9.0)), match, 200)
    assert (parts.num_kept, parts.num_guessed) == (0, 0)
    longer = match._replace(length=20)
    parts = parts_of(evidence, order_of(text, 6, costs_of(6, row=0.05, step=9.0)), longer, 200)
    assert parts.num_kept == 3, "of other lengths nothing is known"


def tables_of(rng: np.random.Generator, num: int, most: int) -> Any:
    """Expected tokens of as many drafts, of which look-up knows different amounts."""
    found, guessed = rng.uniform(0.05, 0.95, (num, most)), rng.uniform(0.2, 0.95, (num, most))
    tables = expected_tokens(found, np.cumprod(guessed, axis=1))
    tables[:, np.isinf(round_seconds(costs_of(most)))] = -np.inf
    for table, num_found in zip(tables, rng.integers(0, most + 1, num), strict=True):
        table[num_found + 1 :] = -np.inf
    return tables


def rate_of(tables: Sequence[Any], parts: Sequence[tuple[int, int]], costs: RoundCosts) -> float:
    """Tokens per second of a round with these drafts."""
    tokens = costs.num_requests - len(tables)
    tokens += sum(t[p] for t, p in zip(tables, parts, strict=True))
    rows = sum(map(sum, parts)) / costs.num_requests
    seconds = np.interp(rows, range(len(costs.rounds)), costs.rounds)
    return float(tokens / (seconds + costs.step * max(g for _, g in parts)))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_drafts_of_a_round_are_the_best_of_all_that_there_are(num: int) -> None:
    rng, shares, alike = np.random.default_rng(num), [], []
    for _ in range(60):
        tables = tables_of(rng, num, most=3)
        rise = np.cumsum(rng.uniform(0.0, 0.5, 3))
        rounds = (1.0, *(1.0 + rise).tolist())
        costs = RoundCosts(rounds, float(rng.uniform(0.0, 0.5)), 0.0, num + rng.integers(0, 2))
        allowed = [list(zip(*np.nonzero(np.isfinite(t)), strict=True)) for t in tables]
        best = max(rate_of(tables, parts, costs) for parts in itertools.product(*allowed))
        shares.append(rate_of(tables, best_together(tables, costs), costs) / best)
        own = [best_together(t[None], costs._replace(num_requests=1))[0] for t in tables]
        alike.append(rate_of(tables, own, costs) / best)
    assert min(shares) > 0.97
    assert np.mean(shares) > 0.999
    if num > 1:
        assert np.mean(alike) < np.mean(shares) - 0.01, "each as if all were like it"


NUM_SAMPLES = 50_000
VOCAB = 6
LOOKED_UP = (*PROMPT, 3, 2, 4, *PROMPT)
"""Behind its last two tokens look-up finds 3, 2, 4."""


class ToyRunner:
    """A model whose next token depends on the last one alone: no KV."""

    num_blocks, block_size = 1 << 20, 16
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


def generate(
    target: torch.Tensor,
    drafter: ChainDrafter,
    costs: RoundCosts | None,
    falsify: bool,
    num_samples: int,
) -> np.ndarray[Any, Any]:
    """Three tokens of every request through the chain and the sampler that verifies."""
    sampling = [SamplingParams(seed=i, verification="ratio") for i in range(num_samples)]
    texts = [
        TokenBuffer(Request(f"{i}", len(LOOKED_UP), 3, prompt_token_ids=LOOKED_UP, sampling=s))
        for i, s in enumerate(sampling)
    ]
    rows, begin = sampling_rows(num_samples), len(LOOKED_UP)
    while active := [i for i, t in enumerate(texts) if t.length < begin + 3]:
        mine = [texts[i] for i in active]
        orders = [
            DraftOrder(t.request.id, 0, 0, "chain", t.length - 1, 1, 3, costs=costs) for t in mine
        ]
        drafts = drafter.draft(orders, mine)
        if falsify:
            drafts = falsified(drafts)
        decide(target, mine, drafts, rows.select(np.array(active)))
    return np.array([t.tokens(begin, begin + 3) for t in texts])


def decide(target: torch.Tensor, texts: list[TokenBuffer], drafts: Any, rows: Any) -> None:
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
            draft_prob_row=np.array([max(r, -1) for d in drafts.drafts for r in d.prob_rows]),
        )
    )
    for i, text in enumerate(texts):
        text.append(result.tokens(i))


def falsified(drafts: Any) -> Any:
    """Looked-up tokens that are passed off as samples of the model."""
    for i, draft in enumerate(drafts.drafts):
        rows = [r for r in draft.prob_rows if r >= 0]
        if rows:
            drafts.drafts[i] = Draft(
                draft.token_ids, [r if r >= 0 else rows[0] for r in draft.prob_rows]
            )
    return drafts


def make_chain(table: torch.Tensor) -> ChainDrafter:
    runner: Any = ToyRunner(table)
    return ChainDrafter("chain", LookupDrafter("chain"), ModelDrafter("chain", runner, 64))


def p_value(
    costs: RoundCosts | None,
    drafter_seed: int = 1,
    falsify: bool = False,
    num_samples: int = NUM_SAMPLES,
) -> float:
    target = first_order(0)
    samples = generate(target, make_chain(first_order(drafter_seed)), costs, falsify, num_samples)
    joint = target.expand(VOCAB, VOCAB, VOCAB).contiguous()
    return joint_p_value(samples, joint, sampling_rows(num_samples))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "drafter_seed"),
    [
        pytest.param(costs_of(3, row=0.1, step=0.1), 1, id="chosen"),
        pytest.param(costs_of(3, row=0.1, step=0.1), 0, id="chosen, the target as drafter"),
        pytest.param(costs_of(3, row=0.4, step=0.01), 2, id="chosen, short"),
        pytest.param(None, 1, id="look-up as far as it goes"),
    ],
)
def test_joint_of_three_positions_is_the_targets(costs, drafter_seed) -> None:
    assert p_value(costs, drafter_seed) > 1e-3


@pytest.mark.slow
def test_other_parts_in_every_round_are_exact_and_false_reports_are_caught(switching) -> None:
    assert p_value(None, num_samples=4_000) > 1e-3
    assert {(0, 2), (1, 1), (2, 0)} <= switching.seen
    assert p_value(None, falsify=True, num_samples=4_000) < 1e-9
