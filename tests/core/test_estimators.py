from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.acceptance import AcceptanceEstimator
from penstock.core.learn.times import Times
from penstock.core.types import TARGET, DraftTime, PhaseTimes, StepResult, Verdict
from penstock.fluid.step_profile import StepProfile, StepWork


def verdict(num_accepted: int, num_proposed: int, request_id: str = "r") -> Verdict:
    return Verdict(
        request_id,
        0,
        0,
        drafter="d",
        num_proposed=num_proposed,
        num_accepted=num_accepted,
        num_decided=min(num_accepted + 1, num_proposed),
        evidence=float(num_accepted),
    )


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_acceptance_is_learned_from_positions_up_to_the_first_rejection(rate: float) -> None:
    """An estimator that counted every position behind a rejection as rejected would end far
    below."""
    estimator = AcceptanceEstimator()
    accepted = [s for s in range(5) for _ in range(round(200 * rate**s * (1 - rate * (s < 4))))]
    for i in range(len(accepted)):
        estimator.on_verdict(verdict(accepted[i * 7919 % len(accepted)], 4))
    assert estimator.mean("r", "d") == pytest.approx(rate, abs=0.12)


def test_overlaps_are_finer_evidence() -> None:
    estimator = AcceptanceEstimator()
    for _ in range(200):
        estimator.on_verdict(
            Verdict("r", 0, 0, drafter="d", num_proposed=2, num_decided=2, evidence=1.2)
        )
    assert estimator.mean("r", "d") == pytest.approx(0.6, abs=0.02)


def test_a_new_request_starts_from_what_the_drafter_has_shown() -> None:
    estimator = AcceptanceEstimator()
    before = estimator.mean("new", "d")
    for _ in range(100):
        estimator.on_verdict(verdict(0, 4, "old"))
    assert estimator.mean("new", "d") < 0.1 < before
    assert estimator.mean("new", "another drafter") == before


def test_what_was_not_drafted_says_nothing() -> None:
    estimator = AcceptanceEstimator()
    before = estimator.mean("r", "d")
    estimator.on_verdict(Verdict("r", 0, 0))
    estimator.on_verdict(verdict(0, 0))
    assert estimator.mean("r", "d") == before


def test_looked_up_tokens_say_nothing_of_the_model_behind_them() -> None:
    estimator = AcceptanceEstimator()
    before = estimator.mean("r", "d")
    for _ in range(50):
        right = Verdict("r", 0, 0, (), "d", 6, 6, num_looked_up=6)
        estimator.on_verdict(right)
    assert estimator.mean("r", "d") == before
    for _ in range(64):
        estimator.on_verdict(right._replace(num_accepted=4, num_looked_up=4, num_decided=1))
    assert estimator.mean("r", "d") < 0.1
    assert estimator.shape_of("d").factors[1] == 1.0, "the model's second token was never decided"


def test_a_draft_that_is_not_there_is_no_rejection() -> None:
    estimator = AcceptanceEstimator()
    before = estimator.mean("r", "d")
    assert estimator.found("r", "d") == 1
    for _ in range(50):
        estimator.observe_empty("r", "d")
    assert estimator.mean("r", "d") == before
    assert estimator.found("r", "d") < 0.1
    assert estimator.found("another", "d") < 0.2
    estimator.release_request("r")
    assert estimator.found("r", "d") == estimator.found("another", "d")
    estimator.fade_drafter("d", 2000)
    assert estimator.found("another", "d") > 0.9


def test_the_more_a_trial_takes_the_more_slowly_estimates_fade() -> None:
    def faded(trial: float) -> float:
        estimator = AcceptanceEstimator()
        for _ in range(100):
            estimator.on_verdict(verdict(0, 4))
        estimator.fade("r", "d", 100, trial)
        estimator.fade_drafter("d", 100, trial)
        return estimator.mean("r", "d")

    assert faded(0.0) == faded(0.3) > faded(10.0) > faded(100.0)


def test_unused_estimates_fade_back() -> None:
    estimator = AcceptanceEstimator()
    for _ in range(100):
        estimator.on_verdict(verdict(0, 4))
    own, everybody = estimator.mean("r", "d"), estimator.mean("another", "d")
    for _ in range(2000):
        estimator.fade("r", "d")
    assert own < estimator.mean("r", "d") == pytest.approx(everybody)
    for _ in range(2000):
        estimator.fade_drafter("d")
    assert estimator.mean("r", "d") > everybody + 0.4


def result(lane: str, rows: int, verify: float, *times: DraftTime) -> StepResult:
    phases = PhaseTimes(verify=verify, sample=0.001)
    return StepResult(0, lane, 0.0, 0.0, phases=phases, draft_times=times, num_rows=rows)


def test_step_times_of_target_and_drafters() -> None:
    times = Estimators().times
    times.observe_drafting(result(TARGET, 5, 0.004, DraftTime("d", 3, 4, 3, 0.008)))
    assert times.target(5) == pytest.approx(0.005)
    assert times.curve_of("d")(3) == pytest.approx(0.002)
    assert times.curve_of("unknown").is_empty


def test_only_drafting_tells_the_price_of_a_draft_token() -> None:
    times = Estimators().times
    times.observe_drafting(result(TARGET, 5, 0.0, DraftTime("d", 1, 0, 90, 0.5)))
    times.observe_drafting(result("d", 0, 0.0, DraftTime("d", 1, 4, 90, 0.5)))
    assert times.curve_of("d").is_empty
    assert times.target.points() == [(5, pytest.approx(0.001))]


@pytest.mark.parametrize("num_unread", [3, 8, 16])
def test_a_draft_behind_a_short_catch_up_tells_the_price_of_its_tokens(num_unread: int) -> None:
    """0.1 ms for each token of a text, and a draft of four at 1 ms each."""
    times = Estimators().times
    times.note_catch_up("d", 1e-4)
    for batch in (1, 4):
        seconds = 4 * 1e-3 + 1e-4 * (num_unread - 2) * batch
        timed = DraftTime("d", batch, 4, num_unread * batch, seconds)
        times.observe_drafting(result(TARGET, 5, 0.004, timed))
        assert times.curve_of("d")(batch) == pytest.approx(1e-3)


def test_where_reading_may_be_most_of_it_nothing_is_said_of_drafting() -> None:
    times = Estimators().times
    times.note_catch_up("d", 1e-3)
    times.observe_drafting(result(TARGET, 5, 0.004, DraftTime("d", 1, 3, 9, 0.004)))
    assert times.curve_of("d").is_empty


def steps_of(times: Times, rows: list[int], seconds: Callable[[int], float]) -> None:
    for num in rows:
        work = StepWork(num_prefill_tokens=num)
        step = StepResult(0, TARGET, 0.0, 0.0, work=work, work_seconds=seconds(num))
        times.on_result(step, may_wait=False)


def test_a_profile_is_drawn_anew_from_the_steps_where_it_is_to_be_learned() -> None:
    """Whatever was known before, even of sizes that never come."""
    before = StepProfile("before", 4096, (1, 8, 64), (0.02, 0.04, 0.3))
    rows = [1, 4, 16, 60, 200, 600] * 50
    for learns in (True, False):
        times = Estimators(before).times
        times.target.learns_profile = learns
        steps_of(times, rows, lambda num: 0.003 + 1e-4 * num)
        known = [times.profile.linear(num) for num in (1, 60, 600, 4096)]
        assert (known == pytest.approx([0.0031, 0.009, 0.063, 0.4126], rel=0.02)) is learns
        assert (times.profile is before) is not learns
        assert times.profile.kv_tokens == 4096


def test_steps_larger_than_any_that_was_seen_are_worth_a_try() -> None:
    """Up to 30 rows a step gets longer and longer; larger ones are in truth more efficient."""
    times = Estimators(StepProfile("before", 4096, (0,), (0.01,))).times
    times.target.learns_profile = True
    steps_of(times, list(range(1, 31)) * 20, lambda num: 0.004 if num < 25 else 0.008)
    profile = times.profile
    best = min(profile.linear(num) / num for num in range(1, 31))
    assert profile.linear(2048) / 2048 < best


@pytest.mark.parametrize("is_right", [True, False])
def test_more_rows_take_what_the_profile_says_while_it_is_right(is_right: bool) -> None:
    """Rows take 50 µs, attention of a decoding request 1 ms: by rows alone both are mixed."""
    true = StepProfile("true", 10**6, (1, 1001), (0.01, 0.06), per_decode=1e-3)
    given = true if is_right else replace(true, token_seconds=(0.05, 0.05))
    learn = Estimators()
    seed_estimators(learn, given)
    for num in [4, 8, 16, 32, 64] * 40:
        work = StepWork(num_decodes=num, num_draft_tokens=num)
        seconds = true.seconds(work)
        step = result(TARGET, 2 * num, seconds)._replace(work=work, work_seconds=seconds)
        learn.times.on_result(step, may_wait=False)
        learn.times.observe_drafting(step)
    added = learn.times.added(32, np.array([32, 64, 96]))
    by_rows = learn.times.target.at(np.array([32, 64, 96])) - learn.times.target(32)
    assert added == pytest.approx([0.0, 0.0016, 0.0032] if is_right else by_rows)
    assert by_rows[2] > 0.01  # with attention, which drafts do not add


@pytest.mark.parametrize("is_right", [True, False])
def test_a_step_takes_what_predicts_steps_better(is_right: bool) -> None:
    """A profile from a file, or the rows; without a measured row the profile alone, put right."""
    true = StepProfile("true", 10**6, (1, 1001), (0.01, 0.06), per_decode=1e-3)
    given = true if is_right else replace(true, token_seconds=(0.5, 0.5))
    work = StepWork(num_decodes=32, num_draft_tokens=32)
    for has_rows in (True, False):
        times = Estimators(given).times
        for num in [4, 8, 16, 32, 64] * 60:
            done = StepWork(num_decodes=num, num_draft_tokens=num)
            seconds = true.seconds(done)
            step = result(TARGET, 2 * num, seconds - 0.001)
            step = step._replace(work=done, work_seconds=seconds)
            times.on_result(step, may_wait=False)
            if has_rows:
                times.observe_drafting(step)
        within = 0.02 if is_right or has_rows else 0.5
        assert times.step_seconds(work) == pytest.approx(true.seconds(work), rel=within)


def test_more_rows_never_take_less_time_by_what_is_learned() -> None:
    """Beside a long prompt it could be more than all that the step's other requests take."""
    faster = StepProfile("faster", 10**6, (1, 100, 128, 500), (0.01, 0.1, 0.05, 0.2))
    times = Estimators(faster).times
    assert times.added(100, np.array([100, 128])) == pytest.approx([0.0, -0.05])
    times.target.learns_profile = True
    assert times.added(100, np.array([100, 128])).tolist() == [0.0, 0.0]


def test_a_measured_profile_follows_the_steps_without_drafters_too() -> None:
    """It was measured while all took three times as long."""
    times = Estimators().times
    for rows in (1, 8, 64):
        times.target.add_measurement(rows, 0.003 * (9 + rows))
    times.target.use_rows(4096)
    times.doubt_all()
    assert times.profile.kv_tokens == 4096
    before = times.profile.linear(8)
    for i in range(256):
        rows = (1, 1, 1, 64)[i % 4]
        seconds = 0.001 * (9 + rows)
        work = StepWork(num_prefill_tokens=rows - 1, num_decodes=1)
        result = StepResult(
            i, TARGET, i, i + seconds, phases=PhaseTimes(verify=seconds), num_rows=rows, work=work
        )
        times.on_result(result, may_wait=False)
    assert times.profile.linear(8) == pytest.approx(before / 3, rel=0.15)
    assert times.profile.linear(64) == pytest.approx(0.073, rel=0.1)
