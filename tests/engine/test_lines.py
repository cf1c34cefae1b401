"""Lines of drafting sessions: what is sent ahead is what would be drafted after the verdict."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB
from tests.engine.test_sessions import (
    FILTERED,
    GREEDY,
    PROMPT,
    RATIO,
    SEEDED,
    CountingRunner,
    Fresh,
    draft,
    quantise,
)

from penstock.core.ahead import MAX_AHEAD_TOKENS, MAX_LINES, LinesAhead, Text
from penstock.core.drafting.lines import SessionOrder
from penstock.core.drafting.sessions import DraftingSessions
from penstock.core.types import SamplingParams
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.proposers import LookupProposer, ModelProposer
from penstock.engine.eager import EagerRunner
from penstock.engine.runner import RaggedBatch

COUPLED = [GREEDY, SEEDED, FILTERED]
Make = Callable[..., tuple[DraftingSessions, CountingRunner]]


@pytest.fixture
def make(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Make:
    # Random models are sure of nothing.
    monkeypatch.setattr("penstock.core.drafting.sessions.LEAST_LINE_CHANCE", 0.002)

    def build(
        model: str = "near", num_blocks: int = 256
    ) -> tuple[DraftingSessions, CountingRunner]:
        runner = CountingRunner(
            EagerRunner.load(family[model], torch.float32, torch.device("cpu"), num_blocks, 16)
        )
        drafter = ModelDrafter("small", runner, 16 * num_blocks)  # type: ignore[arg-type]
        return DraftingSessions(ModelProposer(drafter, quantise), 16), runner

    return build


class Verifier:
    """The other end: keeps what is sent, and checks each token of it against a fresh session."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.lines = LinesAhead("far")
        self.text = list(PROMPT)
        self.whole: dict[int, dict[int, int]] = {}
        self.start: dict[int, int] = {}
        self.barred: dict[tuple[int, int], int] = {}

    @property
    def end(self) -> Text:
        return Text(len(PROMPT), self.text[len(PROMPT) :])

    def take(self, sessions: DraftingSessions) -> int:
        """What there is to be sent; returns the number of its tokens."""
        num = 0
        for key, pieces in sessions.take_lines():
            assert key == "r"
            self.lines.add_pieces(pieces, self.end)
            for name, start, tokens, parent in pieces:
                num += len(tokens)
                if parent is not None:
                    self.start[name] = start
                    above = self.whole.get(parent, dict(enumerate(self.text)))
                    self.whole[name] = {p: t for p, t in above.items() if p < start}
                    if parent != name:
                        self.barred[name, start] = above[start]
                self.whole[name].update(enumerate(tokens, start))
        return num

    def advance(self, sessions: DraftingSessions, news: list[int]) -> None:
        sessions.extend("r", news, 0)
        self.text += news
        self.lines.follow(self.end)


def grow(sessions: DraftingSessions, most: int = 1000) -> None:
    for _ in range(most):
        if not sessions.is_busy:
            return
        sessions.step()
    assert most < 1000, "the sessions never come to rest"


@pytest.mark.parametrize("sampling", COUPLED, ids=["greedy", "seeded", "filtered"])
def test_every_token_is_the_one_that_would_be_drafted_behind_its_line(make, sampling) -> None:
    """Whatever KV was shared, adopted or thrown away. A runner-up is the second choice."""
    sessions, _ = make()
    fresh, other = Fresh(make), Verifier(sampling)
    sessions.begin("r", PROMPT, sampling, sends_lines=True)
    rng = np.random.default_rng(5)
    checked: set[tuple[int, int]] = set()
    num_second = num_at_hand = 0
    for number in range(14):
        grow(sessions, int(rng.integers(1, 8)))
        other.take(sessions)
        for name, whole in other.whole.items():
            for at in sorted(whole):
                if at < max(len(other.text), other.start[name]) or (name, at) in checked:
                    continue
                checked.add((name, at))
                before = [whole.get(p, t) for p, t in enumerate(other.text)]
                before += [whole[p] for p in range(len(other.text), at)]
                (first,) = fresh.draft(before, sampling, 1).token_ids
                if (name, at) in other.barred:
                    num_second += 1
                    assert other.barred[name, at] == first
                    assert whole[at] != first
                elif before[: len(other.text)] == other.text:
                    assert whole[at] == first
        path = other.lines.path(len(other.text))
        num_at_hand += bool(path)
        if number % 4 == 3:
            news = [int(rng.integers(0, VOCAB)) for _ in range(2)]
        else:
            # Some of the path, or a line that leaves it, and one token more.
            wholes = [w for w in other.whole.values() if len(other.text) in w]
            whole = wholes[int(rng.integers(len(wholes)))]
            ahead = [whole[p] for p in range(len(other.text), max(whole) + 1)]
            news = ahead[: int(rng.integers(1, 5))]
        other.advance(sessions, news)
        other.whole = {n: w for n, w in other.whole.items() if max(w) >= len(other.text) - 1}
        if number % 3 == 1:
            made = draft(sessions, "r", len(other.text), 3)
            assert made.token_ids == fresh.draft(other.text, sampling, 3).token_ids
    assert num_second > 10
    assert num_at_hand > 5
    assert len(checked) > 60


def test_a_second_choice_is_second_under_the_same_noise(make, family) -> None:
    """Compared with the logits themselves."""
    sessions, _ = make()
    sessions.begin("r", PROMPT, GREEDY, sends_lines=True)
    other = Verifier(GREEDY)
    grow(sessions)
    other.take(sessions)
    branches = [(n, s) for (n, s) in other.barred if s == len(PROMPT)]
    assert branches
    plain = EagerRunner.load(family["near"], torch.float32, torch.device("cpu"), 8, 16)
    size = len(PROMPT)
    logits = plain.forward(
        RaggedBatch(
            token_ids=np.array(PROMPT, dtype=np.int32),
            positions=np.arange(size, dtype=np.int32),
            query_start=np.array([0, size], dtype=np.int32),
            seq_lens=np.array([size], dtype=np.int32),
            block_tables=np.arange(8, dtype=np.int32)[None],
            logits_rows=np.array([size - 1], dtype=np.int32),
        )
    )
    best = logits[0].topk(2).indices.tolist()
    (name, start) = branches[0]
    assert [other.barred[name, start], other.whole[name][start]] == best


def test_memory_and_what_is_sent_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.drafting.sessions.LEAST_LINE_CHANCE", 0.0)
    sessions, _ = make()
    pool = sessions.proposer._kv.pool  # type: ignore[attr-defined]
    other = Verifier(SEEDED)
    sessions.begin("r", PROMPT, SEEDED, sends_lines=True)
    grow(sessions)
    assert other.take(sessions) <= MAX_AHEAD_TOKENS
    session = sessions._sessions["r"]
    assert len(session.branches) < MAX_LINES
    each = -(-(len(PROMPT) + MAX_AHEAD_TOKENS) // 16)
    assert pool.num_used_blocks <= each * (1 + len(session.branches))
    assert not sessions.take_lines(), "everything is sent once"
    sessions.release_session("r")
    assert pool.num_used_blocks == 0
    pool.check()


def test_where_memory_is_short_lines_give_way(make: Make) -> None:
    sessions, _ = make(num_blocks=4)
    pool = sessions.proposer._kv.pool  # type: ignore[attr-defined]
    sessions.begin("r", PROMPT, SEEDED, sends_lines=True)
    grow(sessions)
    fresh = Fresh(make)
    sessions.begin("s", PROMPT[:3], SEEDED, sends_lines=True)
    made = draft(sessions, "s", 3, 8)
    assert made.token_ids == fresh.draft(list(PROMPT[:3]), SEEDED, 8).token_ids
    grow(sessions)
    for key in "rs":
        sessions.release_session(key)
    assert pool.num_used_blocks == 0
    pool.check()


def test_a_new_stream_gets_everything_anew(make: Make) -> None:
    sessions, _ = make()
    sessions.begin("r", PROMPT, GREEDY, sends_lines=True)
    grow(sessions)
    sessions.take_lines()
    sessions.begin_stream()
    other = Verifier(GREEDY)
    assert other.take(sessions) > 0
    assert other.lines.path(len(PROMPT))
    grow(sessions)
    other.take(sessions)


def silent(make: Make) -> Iterator[DraftingSessions]:
    """Sessions of which nothing may be sent."""
    sessions, _ = make()
    sessions.begin("r", PROMPT, RATIO, sends_lines=True)
    yield sessions
    sessions, _ = make()
    sessions.begin("r", PROMPT, GREEDY)
    yield sessions


def test_what_needs_distributions_is_not_sent(make: Make) -> None:
    for sessions in silent(make):
        draft(sessions, "r", len(PROMPT), 2)
        grow(sessions)
        assert not sessions.take_lines()


def test_look_up_sends_its_one_line() -> None:
    sessions = DraftingSessions(LookupProposer(VOCAB, 1 << 16), 16)
    sessions.begin("r", [0, 1, 2, 3, 4, 0, 1, 2], GREEDY, sends_lines=True)
    grow(sessions)
    ((key, (piece,)),) = sessions.take_lines()
    assert (key, piece.start, piece.token_ids[:2]) == ("r", 8, (3, 4))
    sessions.extend("r", [3], 0)
    sessions.order("r", SessionOrder("tag", 9, 1))
    assert sessions.step()[0].token_ids == (4,)
