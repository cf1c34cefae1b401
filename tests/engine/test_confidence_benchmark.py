"""What `lab.bench.confidence` records and replays, and `lab.bench.confidence_speed` times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.bench.confidence import JUDGES, Equal, Judge, replay, steps
from lab.bench.confidence_record import DraftedText, record
from lab.bench.confidence_speed import (
    Costs,
    Fixed,
    Kept,
    Learned,
    Machine,
    OnePrice,
    Played,
    Rows,
    Rule,
    Together,
    play,
    shuffled,
)
from lab.bench.live_engine import TargetText
from lab.common.hindsight import LONGEST
from penstock.engine.batch import RaggedBatch
from penstock.engine.native.runner import NativeRunner
from penstock.fluid.step_profile import StepProfile
from penstock.zoo.registry import model_path

TOKENS = 60


def drafted_texts(num: int, *, tells: bool) -> list[DraftedText]:
    """Drafts whose tokens are accepted with their own confidence, or always by half."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(num):
        confidence = rng.beta(0.5, 0.5, (TOKENS, LONGEST))
        agrees = rng.random((TOKENS, LONGEST)) < (confidence if tells else 0.5)
        accepted = np.cumprod(agrees, axis=1).sum(1)
        nothing = np.zeros((TOKENS, LONGEST))
        found.append(DraftedText(accepted, confidence, nothing, nothing))
    return found


def accepted_by(texts: list[DraftedText], positions: int) -> dict[str, float]:
    """A position, by judge."""
    found = {"equal": replay(texts, Equal(), 16, positions, range(len(texts)))[0] / positions}
    for name, make in JUDGES.items():
        judge: Judge = make(np.random.default_rng(2))
        accepted, verified = replay(texts, judge, 16, positions, range(len(texts)))
        if name != "one price":
            assert verified == positions
        found[name] = accepted / verified
    return found


@pytest.mark.parametrize("positions", [1, 3])
def test_who_knows_more_has_more_accepted_of_as_many_positions(positions: int) -> None:
    found = accepted_by(drafted_texts(96, tells=True), positions)
    assert found["hindsight"] > found["confidence"]
    assert found["confidence"] > 1.1 * found["equal"]
    assert found["one price"] > 1.1 * found["equal"]
    assert found["regression"] > 1.1 * found["equal"]
    assert found["placebo"] < 1.02 * found["equal"]


def test_confidence_that_tells_nothing_gains_nothing() -> None:
    found = accepted_by(drafted_texts(96, tells=False), 2)
    for name in ("confidence", "placebo", "regression"):
        assert found[name] < 1.03 * found["equal"]
    assert found["hindsight"] > 1.3 * found["equal"]


def costs_of(row: float, drafting: float, batch: int) -> Costs:
    """A step of the target takes a second, and `row` for each row; one of the drafter `drafting`
    of the smallest of them."""
    profile = StepProfile("made up", 1, (0, 1000), (1.0, 1 + 1000 * row))
    return Costs(Machine(profile, drafting / (1 + row)), "any", batch)


def test_a_step_takes_what_its_rows_and_the_drafters_steps_take() -> None:
    costs = costs_of(0.01, 0.1, batch=8)
    assert costs.plain_rate == pytest.approx(8 / 1.08)
    step = Played(num_drafted=4, num_steps=3, num_tokens=10)
    assert costs.of(step) == pytest.approx(1.12 + 3 * costs.drafting)
    assert costs.rate([step, step]) == pytest.approx(10 / costs.of(step))
    assert costs.drafting == pytest.approx(0.1)


@pytest.mark.parametrize("price", [0.0, 0.5, 1.0])
def test_a_draft_that_ends_by_itself_takes_a_step_more_than_it_proposes(price: float) -> None:
    texts, rule = drafted_texts(8, tells=True), OnePrice(price)
    for lengths, _ in steps(texts, rule.decide, rule.learn, 4, range(8)):
        assert rule.num_steps == min(lengths.max() + 1, LONGEST)


@pytest.mark.parametrize("rule", [Learned, Kept, Together, Rows])
def test_learned_prices_are_ahead_of_every_length_where_rows_are_dear(rule: type[Learned]) -> None:
    texts, order, costs = drafted_texts(96, tells=True), range(96), costs_of(0.03, 0.02, batch=16)

    def rate(texts: list[DraftedText], rule: Rule) -> float:
        return costs.rate(play(texts, rule, 16, order))

    fixed = max(rate(texts, Fixed(n)) for n in range(LONGEST + 1))
    assert rate(texts, rule(costs)) > 1.03 * fixed
    assert rate(shuffled(texts, np.random.default_rng(3)), rule(costs)) < 1.02 * fixed


def test_a_drafters_step_is_not_bought_for_one_request_alone() -> None:
    """A step as dear as a third of the target's, in a batch in which somebody always is sure."""
    texts, order, costs = drafted_texts(96, tells=True), range(96), costs_of(0.001, 0.3, batch=16)
    rates = {
        rule: costs.rate(play(texts, rule(costs), 16, order)) for rule in (Learned, Kept, Together)
    }
    assert rates[Together] > 1.05 * rates[Kept]
    assert rates[Together] > 1.05 * costs.plain_rate


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_drafter_wrote_itself_it_would_draft(temperature: float) -> None:
    """Texts of two lengths behind prompts of two lengths, by the drafter; then one that is not."""
    runner = NativeRunner.load(model_path("draft-tiny"), torch.float32, 64, 16, 1)
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3)]
    blank = [TargetText("", p, seed, (1,)) for seed, p in enumerate(prompts)]
    texts: list[TargetText] = []
    for text, length in zip(blank, (20, 12), strict=True):
        written: list[int] = []
        while len(written) < length:
            # Behind what is written the drafter is asked again: its KV is computed anew.
            asked = text._replace(prompt=(*text.prompt, *written))
            written += first_tokens(runner, asked, temperature)
        texts.append(text._replace(text=tuple(written[:length])))
    for text, drafts in zip(texts, record(runner, texts, temperature), strict=True):
        left = len(text.text) - np.arange(len(text.text))
        assert drafts.accepted.tolist() == np.minimum(left, LONGEST).tolist()
        assert drafts.confidence.shape == (len(text.text), LONGEST)
        assert ((drafts.confidence > 0) & (drafts.confidence <= 1)).all()
        assert (drafts.margin >= 0).all()
        assert (drafts.entropy >= 0).all()
    wrong = texts[0]._replace(text=tuple(t + 1 for t in texts[0].text))
    assert record(runner, [wrong], temperature)[0].accepted.sum() < len(wrong.text) / 2


def first_tokens(runner: NativeRunner, text: TargetText, temperature: float) -> list[int]:
    """The first draft behind a text."""
    size = len(text.prompt)
    batch = RaggedBatch(
        np.array(text.prompt, np.int32),
        np.arange(size, dtype=np.int32),
        np.array([0, size], np.int32),
        np.array([size], np.int32),
        np.arange(8, dtype=np.int32)[None],
        np.array([size - 1], np.int32),
    )
    drafted = runner.draft(
        batch,
        np.array([4], np.int32),
        np.array([temperature]),
        np.array([text.seed], np.uint64),
        np.zeros(1, np.int32),
    )
    return drafted.token_ids[0].tolist()
