"""Drafting sessions against the plain definition: a draft is a function of the text before it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB

from penstock.core.drafting.lines import SessionOrder, TopWeights
from penstock.core.drafting.sessions import DraftingSessions, SessionDraft
from penstock.core.types import SamplingParams
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.proposers import LookupProposer, ModelProposer
from penstock.engine.eager import EagerRunner
from penstock.engine.runner import RaggedBatch

PROMPT = tuple(range(40, 60))
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=7)
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11)
RATIO = SamplingParams(temperature=0.9, seed=5, verification="ratio")
MODES = [GREEDY, SEEDED, FILTERED, RATIO]
WEIGHT_SUM = 1 << 12


def quantise(probs: torch.Tensor) -> list[TopWeights]:
    """The eight likeliest tokens; what rounding leaves goes to the first."""
    rows = []
    for row in probs:
        top = row.topk(8)
        weights = (top.values / top.values.sum() * WEIGHT_SUM).floor().long()
        weights[0] += WEIGHT_SUM - weights.sum()
        kept = weights > 0
        rows.append(TopWeights(tuple(top.indices[kept].tolist()), tuple(weights[kept].tolist())))
    return rows


class CountingRunner:
    """A runner that counts its forward passes and the rows in them."""

    def __init__(self, runner: EagerRunner) -> None:
        self._runner = runner
        self.num_passes = 0
        self.num_rows = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        self.num_passes += 1
        self.num_rows += batch.num_tokens
        return self._runner.forward(batch)


@pytest.fixture
def make(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    # Random models are sure of nothing; what they would draft ahead is drafted all the same.
    monkeypatch.setattr("penstock.core.drafting.sessions.LEAST_CHANCE", 0.0)

    def build(
        model: str = "near", num_blocks: int = 256, max_draft_tokens: int = 16
    ) -> tuple[DraftingSessions, CountingRunner]:
        runner = CountingRunner(
            EagerRunner.load(family[model], torch.float32, torch.device("cpu"), num_blocks, 16)
        )
        drafter = ModelDrafter("small", runner, 16 * num_blocks)  # type: ignore[arg-type]
        proposer = ModelProposer(drafter, quantise)
        return DraftingSessions(proposer, max_draft_tokens), runner

    return build


def settle(sessions: DraftingSessions) -> list[SessionDraft]:
    """Everything that comes until there is nothing left to do, draft-ahead included."""
    drafts = []
    for _ in range(1000):
        if not sessions.is_busy:
            return drafts
        drafts += sessions.step()
    raise AssertionError("the sessions never come to rest")


def draft(sessions: DraftingSessions, key: str, prefix_len: int, size: int) -> SessionDraft:
    sessions.order(key, SessionOrder("tag", prefix_len, size))
    for _ in range(1000):
        for made in sessions.step():
            assert (made.key, made.tag, made.prefix_len) == (key, "tag", prefix_len)
            return made
    raise AssertionError("no draft came")


class Fresh:
    """Drafts by a session of their own, with nothing drafted ahead and nothing to roll back."""

    def __init__(self, make) -> None:
        self.sessions = make()[0]

    def draft(self, text: list[int], sampling: SamplingParams, size: int) -> SessionDraft:
        self.sessions.begin("fresh", text, sampling)
        return draft(self.sessions, "fresh", len(text), size)


@pytest.mark.parametrize("sampling", MODES, ids=["greedy", "seeded", "filtered", "ratio"])
def test_a_draft_is_a_function_of_its_text(make, sampling: SamplingParams) -> None:
    sessions, _ = make()
    fresh = Fresh(make)
    text = list(PROMPT)
    sessions.begin("r", text, sampling)
    rng = np.random.default_rng(3)
    num_ahead = 0
    for number in range(24):
        if number % 3:
            settle(sessions)
        size = int(rng.integers(1, 7))
        made = draft(sessions, "r", len(text), size)
        expected = fresh.draft(text, sampling, size)
        assert made.token_ids == expected.token_ids
        assert made.sources == expected.sources
        assert len(made.token_ids) == size
        if number % 2:
            settle(sessions)
        # What verification could say: all kept, some kept, none, or never used.
        accepted = size if number % 3 else int(rng.integers(0, size + 1))
        session = sessions._sessions["r"]
        bonus = (
            session.guesses[accepted].token_id
            if number % 4 and len(session.guesses) > accepted
            else int(rng.integers(0, VOCAB))
        )
        news = [*made.token_ids[:accepted], bonus]
        sessions.extend("r", news, accepted)
        num_ahead += bool(session.guesses)
        text += news
    assert num_ahead > 3


@pytest.mark.parametrize("sampling", MODES, ids=["greedy", "seeded", "filtered", "ratio"])
def test_a_draft_made_ahead_is_sent_at_once(make, sampling: SamplingParams) -> None:
    sessions, runner = make()
    sessions.begin("r", PROMPT, sampling)
    first = draft(sessions, "r", len(PROMPT), 4)
    settle(sessions)
    session = sessions._sessions["r"]
    assert len(session.guesses) == 4 + 1 + 4
    bonus = session.guesses[4].token_id
    sessions.extend("r", (*first.token_ids, bonus), 4)
    before = runner.num_passes
    second = draft(sessions, "r", len(PROMPT) + 5, 4)
    assert runner.num_passes == before
    assert len(second.token_ids) == 4


def test_drafters_that_are_right_are_fully_accepted(make, family: dict[str, Path]) -> None:
    """`same` is the target itself: its coupled drafts must be the target's own samples."""
    for sampling in (GREEDY, SEEDED, FILTERED):
        whole = Fresh(lambda: make("same")).draft(list(PROMPT), sampling, 12).token_ids
        sessions, _ = make("same")
        sessions.begin("r", PROMPT, sampling)
        text = list(PROMPT)
        for _ in range(3):
            made = draft(sessions, "r", len(text), 3)
            settle(sessions)
            done = len(text) - len(PROMPT)
            assert made.token_ids == whole[done : done + 3]
            news = whole[done : done + 4]
            sessions.extend("r", news, 3)
            text += news


def test_in_ratio_mode_a_foreseen_token_is_never_sent(make) -> None:
    """The bonus token is guessed under other noise than a draft may be sampled with."""
    sessions, _ = make()
    sessions.begin("r", PROMPT, RATIO)
    draft(sessions, "r", len(PROMPT), 2)
    settle(sessions)
    session = sessions._sessions["r"]
    kinds = [guess.source is not None for guess in session.guesses]
    assert kinds == [True, True, False, True, True]
    # The first token alone is verified; the draft behind it now reaches over the foreseen one.
    sessions.extend("r", [session.guesses[0].token_id], 0)
    made = draft(sessions, "r", len(PROMPT) + 1, 4)
    assert len(made.sources) == len(made.token_ids) == 4
    for token, source in zip(made.token_ids, made.sources, strict=True):
        assert token in source.token_ids
        assert sum(source.weights) == WEIGHT_SUM


def test_ratio_tokens_are_sampled_from_what_is_sent(make) -> None:
    sessions, _ = make()
    num = 3000
    counts: Counter[int] = Counter()
    for batch in range(10):
        keys = [f"{batch}-{i}" for i in range(num // 10)]
        for i, key in enumerate(keys):
            seeded = replace(RATIO, temperature=2.0, seed=batch * num + i)
            sessions.begin(key, PROMPT[:3], seeded)
            sessions.order(key, SessionOrder(None, 3, 1))
        drafts = []
        while len(drafts) < len(keys):
            drafts += sessions.step()
        (source,) = drafts[0].sources
        for made in drafts:
            assert made.sources == (source,)
            counts[made.token_ids[0]] += 1
            sessions.release_session(made.key)
    expected = num * np.array(source.weights) / WEIGHT_SUM
    observed = np.array([counts[t] for t in source.token_ids])
    assert observed.sum() == num
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 29.9  # 0.9999 quantile for 7 degrees of freedom


def test_stopping_by_survival(make) -> None:
    sessions, _ = make()
    sessions.begin("r", PROMPT, SEEDED)
    sessions.order("r", SessionOrder(0, len(PROMPT), 8, min_survival=0.0))
    full = settle(sessions)[0].token_ids
    sizes = []
    for least in (0.01, 0.1, 0.2, 0.4, 0.9, 1.0):
        sessions.begin("r", PROMPT, SEEDED)
        sessions.order("r", SessionOrder(0, len(PROMPT), 8, min_survival=least))
        tokens = settle(sessions)[0].token_ids
        assert tokens == full[: len(tokens)]
        sizes.append(len(tokens))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 0


@pytest.mark.slow
def test_in_ratio_mode_stopping_ignores_the_sampled_token(make) -> None:
    """With every seed the first token comes from one distribution: all stop before it, or none."""
    for least in (0.05, 0.3, 0.5):
        sessions, _ = make()
        stops = set()
        for seed in range(40):
            sessions.begin("r", PROMPT, replace(RATIO, seed=seed))
            sessions.order("r", SessionOrder(0, len(PROMPT), 1, min_survival=least))
            stops.add(len(settle(sessions)[0].token_ids))
            sessions.release_session("r")
        assert len(stops) == 1


def test_a_full_cache_evicts_and_changes_nothing(make) -> None:
    """Eight texts of 2 to 4 blocks each, drafted in turn with memory for two."""
    small, small_runner = make(num_blocks=8)
    large, large_runner = make(num_blocks=256)
    texts = {f"r{i}": [*PROMPT, *range(i * 7, i * 7 + 20 + i)] for i in range(8)}
    for sessions in (small, large):
        for key, text in texts.items():
            sessions.begin(key, text, SEEDED)
    for _ in range(3):
        made = []
        for sessions in (small, large):
            for key, text in texts.items():
                sessions.order(key, SessionOrder(key, len(text), 5))
            drafts = settle(sessions)
            assert len(drafts) == 8
            made.append({d.key: d.token_ids for d in drafts})
        assert made[0] == made[1]
        for key, text in texts.items():
            news = [*made[0][key][:2], 99]
            text += news
            for sessions in (small, large):
                sessions.extend(key, news, 2)
    assert small_runner.num_rows > large_runner.num_rows
    for key in texts:
        small.release_session(key)
    assert small.proposer._kv.pool.num_used_blocks == 0


def test_a_text_that_cannot_fit_gets_an_empty_draft(make) -> None:
    sessions, _ = make(num_blocks=2)
    sessions.begin("r", range(100), GREEDY)
    assert draft(sessions, "r", 100, 5).token_ids == ()
    sessions.begin("s", range(20), GREEDY)
    assert len(draft(sessions, "s", 20, 5).token_ids) == 5


def test_a_long_text_is_read_in_pieces_beside_others(make) -> None:
    sessions, runner = make()
    sessions.begin("long", [i % VOCAB for i in range(500)], GREEDY)
    sessions.begin("short", PROMPT, GREEDY)
    sessions.order("long", SessionOrder(0, 500, 1))
    sessions.order("short", SessionOrder(0, len(PROMPT), 1))
    assert [d.key for d in sessions.step()] == ["short"]
    assert [d.key for d in sessions.step() or sessions.step()] == ["long"]
    assert runner.num_rows <= 500 + len(PROMPT) + 1


def test_tokens_that_the_target_does_not_have_are_never_guessed(make) -> None:
    sessions, _ = make()
    sessions.proposer.limit_vocab(50)
    for sampling in MODES:
        sessions.begin("r", PROMPT[:8], sampling)
        made = draft(sessions, "r", 8, 8)
        assert made.token_ids
        assert max(made.token_ids) < 50
        assert all(max(s.token_ids) < 50 for s in made.sources)


def test_tokens_that_the_drafter_does_not_have_stop_it(make) -> None:
    sessions, _ = make()
    sessions.begin("r", [1, 2, VOCAB], GREEDY)
    assert draft(sessions, "r", 3, 4).token_ids == ()
    sessions.begin("s", [1, 2], GREEDY)
    assert draft(sessions, "s", 2, 4).token_ids
    sessions.extend("s", [VOCAB + 5], 0)
    sessions.extend("s", [3], 0)
    assert draft(sessions, "s", 4, 4).token_ids == ()


def test_orders_for_another_text_or_request_are_ignored(make) -> None:
    sessions, _ = make()
    sessions.begin("r", PROMPT, GREEDY)
    sessions.order("r", SessionOrder(0, len(PROMPT) - 1, 4))
    sessions.order("nobody", SessionOrder(0, 3, 4))
    sessions.extend("nobody", [1], 0)
    sessions.release_session("nobody")
    assert settle(sessions) == []


def test_look_up() -> None:
    sessions = DraftingSessions(LookupProposer(VOCAB, WEIGHT_SUM), 16)
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    for sampling in MODES:
        sessions.begin("r", text, sampling)
        made = draft(sessions, "r", len(text), 4)
        assert made.token_ids == (4, 5, 6, 1)
        if sampling is RATIO:
            assert made.sources == tuple(TopWeights((t,), (WEIGHT_SUM,)) for t in made.token_ids)
        sessions.extend("r", [4, 5, 9], 2)
        assert draft(sessions, "r", len(text) + 3, 4).token_ids == ()
