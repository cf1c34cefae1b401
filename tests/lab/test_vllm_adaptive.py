"""vLLM's adaptive verification in the simulator, and the comparison with it."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lab.bench.never_behind_scenes import one_drafter
from lab.bench.vllm_adaptive import Cell, verdicts
from lab.common.clients import second_half
from lab.common.families import closed_loop
from lab.common.vllm_adaptive import (
    LONGEST,
    AcceptanceEstimator,
    AdaptiveVerification,
    Cutter,
    CuttingExecutor,
    Drafts,
    Known,
    Signal,
    verify_seconds,
)
from penstock.core.types import VerifyItem
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import GeometricAcceptance

FLAT = StepProfile("flat", 10**6, (0, 4096), (0.01, 0.01))
STEEP = StepProfile("steep", 10**6, (0, 4096), (0.001, 4.0))
SURE, DOUBTFUL = 4.0, -2.0


def drafts(log_odds: list[float], limit: int = 4, right: int = 0) -> Drafts:
    """Drafts of which every token has the same confidence."""
    num = len(log_odds)
    items = [VerifyItem(str(i), 0, 0, 10, 1, True) for i in range(num)]
    confidences = np.repeat(np.array(log_odds)[:, None], LONGEST, axis=1)
    return Drafts(items, np.full(num, limit), confidences, np.full(num, right), num, num)


def test_costs_are_stairs_up_to_the_largest_graph_and_know_one_context() -> None:
    line = StepProfile("line", 10**6, (0, 4096), (0.0, 4.096), per_kv_token=1e-6)
    seconds = verify_seconds(line, context=1000)
    assert seconds[9] == seconds[16] == pytest.approx(16e-3 + 16e-3)
    assert seconds[513] == seconds[768] == pytest.approx(768e-3 + 256e-3)
    assert seconds[800] == pytest.approx(800e-3 + 256e-3)
    assert (np.diff(seconds) >= 0).all()


@pytest.mark.parametrize(("profile", "verified"), [(FLAT, 4), (STEEP, 0)])
def test_the_budget_follows_costs_and_all_is_drafted(profile: StepProfile, verified: int) -> None:
    rule = AdaptiveVerification(profile, lambda n: 0.001, 0)
    for _ in range(2):  # a new request's survival is taken to be 1
        lengths, made = rule.cut(drafts([0.0] * 64))
    assert (lengths.tolist(), made.tolist()) == ([verified] * 64, [4] * 64)


def test_slots_compete_across_requests() -> None:
    profile = StepProfile("p", 10**6, (0, 64, 4096), (0.01, 0.012, 2.0))
    rule = AdaptiveVerification(profile, lambda n: 0.0, 0)
    both = drafts([SURE] * 8 + [DOUBTFUL] * 8)
    rule.cut(both)
    lengths, _ = rule.cut(both)
    assert lengths[:8].min() > lengths[8:].max()


def test_the_estimator_learns_what_a_confidence_means_in_steps_of_100() -> None:
    estimator, rng = AcceptanceEstimator(), np.random.default_rng(0)
    first = estimator.predict(np.zeros((1, LONGEST)))[0, 0]
    for step in range(600):
        if step == 99:
            assert estimator.predict(np.zeros((1, LONGEST)))[0, 0] == first
        log_odds = rng.normal(0, 2, (16, LONGEST))
        is_right = rng.random(log_odds.shape) < 1 / (1 + np.exp(-1.5 * log_odds - 1))
        accepted = np.where(is_right.all(axis=1), LONGEST, is_right.argmin(axis=1))
        estimator.learn(log_odds, accepted, np.full(16, LONGEST))
    found = estimator.predict(np.array([[-2.0] * LONGEST, [0.0] * LONGEST]))
    assert found[:, 0] == pytest.approx([1 / (1 + np.exp(2)), 1 / (1 + np.exp(-1))], abs=0.05)


def test_confidences_tell_right_tokens_from_wrong_ones() -> None:
    keys, right = [str(i) for i in range(4000)], np.arange(4000) % 2
    told = Signal(1.35, 0).log_odds(keys, right)[:, 0]
    assert 0.5 < np.corrcoef(told, right)[0, 1] < 0.62
    assert np.ptp(Signal(0.0, 0).log_odds(keys, right)) == 0


def test_a_rule_gains_over_whole_drafts_and_a_known_future_over_the_rule() -> None:
    setup = one_drafter(0.1, "vllm_v1, fixed 4", GeometricAcceptance({"eagle": 0.3}))
    one = partial(setup.profile.drafters[0].seconds, num_steps=1)
    rule = AdaptiveVerification(setup.profile, lambda n: 4 * one(n), 200)
    made = []
    for cutter in (Cutter(), rule, Known(setup.profile, one)):
        kind = partial(CuttingExecutor, cutter=cutter, signal=Signal(1.35, 0))
        load = closed_loop(np.full(400, 60), 100)
        made.append(second_half(setup, load, 64, 3.0, kind)["default"])
    assert made[0] < made[1] < made[2]


def test_random_lengths_fail_and_only_cells_worth_choosing_count(tmp_path: Path) -> None:
    one = {"drafters": 1, "auto": 1.1, "oracle": 1.3, "random": 0.8, "worth": 1.0}
    several = {"drafters": 2, "auto": 1.05, "oracle": 1.2, "random": 0.9}
    assert [v.outcome for v in verdicts([one, {**several, "worth": 1.1}])] == ["holds"]
    found = verdicts([one, {**several, "worth": 1.2}])
    assert [v.outcome for v in found] == ["holds", "does not hold"]
    cell = Cell(("eagle", "ngram"), "gsm8k", 4, tmp_path)
    assert {"clairvoyant", "priced/ngram", "none/", *cell.rivals(4096)} < set(cell.systems)
