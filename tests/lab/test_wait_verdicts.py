"""Verdicts can come out either way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.common.experiment import QUICK, Trial
from lab.common.loads import (
    Candidate,
    Point,
    Scene,
    best_of,
    capacity_of,
    gain_verdict,
    peaks,
    setup_of,
)
from lab.common.thresholds import (
    nested_choices,
    nested_kv,
    planned_wait,
    unit_traffic,
    wait_choice,
    wait_neighbours,
)
from lab.papers import experiments
from lab.papers import wait_fig1_known as known
from lab.papers import wait_fig1_nested as nested
from lab.papers import wait_fig4_6 as memory
from lab.papers import wait_linear_model as linear
from lab.papers import wait_theorems as theorems
from penstock.fluid.step_profile import PAPER_LINEAR, StepWork
from penstock.sim.capacity import Criterion, TooShort, capacity
from penstock.sim.run import run
from penstock.sim.workloads import make_workload

LOW, NESTED = Scene(PAPER_LINEAR, "low"), Scene(PAPER_LINEAR, "nested")
DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))


def seeds(tokens: float) -> np.ndarray:
    return tokens * np.array([0.99, 1.0, 1.01])


def test_a_gain_is_over_every_rival() -> None:
    for ratio, outcome in ((1.25, "holds"), (1.1, "does not hold")):
        found = {"vllm_v0": seeds(100), "wait": seeds(100 * ratio)}
        verdict = gain_verdict("ahead", "wait", found)
        assert verdict.outcome == outcome
        assert verdict.control is not None
        assert verdict.control.outcome == "does not hold"
    found = {"vllm_v0": seeds(100), "sarathi": seeds(115), "wait": seeds(125)}
    assert gain_verdict("ahead", "wait", found).outcome == "holds in part"


def test_peaks_are_the_most_of_any_load_seed_by_seed() -> None:
    points = [
        Point("wait", rate, seed, rate, tokens, 1.0)
        for rate, seed, tokens in ((1, 0, 5.0), (2, 0, 4.0), (1, 1, 2.0), (2, 1, 3.0))
    ]
    assert peaks(points)["wait"].tolist() == [5.0, 3.0]


def points_of(tokens: dict[str, float], latency: dict[str, float]) -> list[Point]:
    """At a light load and at a heavy one, where policies make a share of what is offered."""
    return [
        Point(policy, rate, seed, 10 * rate, 10 * rate * tokens[policy], latency[policy])
        for policy in tokens
        for rate in (1.0, 9.0, 10.0)
        for seed in (0, 1)
    ]


def test_figure_1_is_judged_by_what_its_points_are() -> None:
    names = ("wait", *known._SHIPPED, known._BEST)

    def outcomes(wait_tokens: float, wait_latency: float) -> list[str]:
        tokens = dict.fromkeys(names, 0.8) | {"vllm_v0": 0.75, "wait": wait_tokens}
        latency = dict.fromkeys(names, 1.0) | {"wait": wait_latency, known._BEST: 9.0}
        points = {"a scene": points_of(tokens, latency)}
        best = {"a scene": {p: seeds(100 * tokens[p]) for p in names}}
        found = (
            known.limit_verdict(best, {"a scene": 100.0}),
            known.benchmark_verdict(points),
            known.balance_verdict(points),
            known.latency_verdict(points),
        )
        return [v.outcome for v in found]

    assert outcomes(1.0, 0.9)[:2] == ["holds", "holds"]
    assert outcomes(1.0, 0.9)[3] == "holds"
    assert outcomes(0.7, 3.0)[0] == "does not hold"
    assert outcomes(0.7, 3.0)[2:] == ["does not hold", "does not hold"]
    # More than is offered, and less than is offered by all.
    assert outcomes(1.2, 1.0)[1] == outcomes(0.7, 1.0)[1] == "holds in part"


def test_the_high_workload_must_gain_more() -> None:
    def outcome(low: float, high: float) -> str:
        rivals = dict.fromkeys(known._SHIPPED, seeds(100))
        best = {
            f"{name}, here": {**rivals, "wait": seeds(w)}
            for name, w in (("low", low), ("high", high))
        }
        return known.high_load_verdict("here", best).outcome

    assert outcome(110, 130) == "holds"
    assert outcome(130, 110) == "does not hold"


def test_ten_segments_are_judged_by_whether_they_fit() -> None:
    best = {"a scene": {"vllm_v0": seeds(100), "nested_wait, gated": seeds(130)}}
    ten, literal, gated = nested.verdicts(best, {})
    assert (ten.outcome, literal.outcome, gated.outcome) == (
        "does not hold",
        "does not hold",
        "holds",
    )
    assert "156,312" in ten.measured
    assert "none that fit" in literal.claim


def test_a_monotone_bound_is_not_u_shaped() -> None:
    panel = memory.BoundCase(4, 50, 200, 0.1)
    by_segments = memory.bounds(panel, (1, 10, 500))
    assert memory.verdicts({panel: by_segments})[0].outcome == "holds"
    assert memory.verdicts({panel: by_segments[:2]})[0].outcome == "does not hold"


def test_the_terms_are_the_bound() -> None:
    panel = memory.BoundCase(4, 50, 200, 0.1)
    (bound,) = memory.bounds(panel, (10,))
    assert sum(memory.terms(bound)) == pytest.approx(bound.kv_bound_tokens)
    assert memory.terms(bound)[0] > 50 * 62


def test_eq_1_is_judged_on_both_kinds_of_batches() -> None:
    tokens = np.linspace(100, 100_000, 200)
    prefill = np.tile([0.0, 500.0], 100)
    decode = np.column_stack([0 * tokens, tokens, 9.35e-3 + 4.1e-7 * tokens])
    mixed = np.column_stack([prefill, tokens, 9.35e-3 + 4.1e-7 * tokens + 1e-4 * prefill])
    same = np.column_stack([prefill, tokens, 9.35e-3 + 4.1e-7 * (tokens + prefill)])
    assert [v.outcome for v in linear.verdicts(decode, mixed)] == ["holds", "does not hold"]
    assert [v.outcome for v in linear.verdicts(decode, same)] == ["holds", "holds"]


def test_eq_1_on_the_measurements(tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip("the data folder is not there (set PENSTOCK_DATA)")
    pytest.importorskip("matplotlib")
    decode, mixed = experiments()["wait_linear_model"].run(Trial(tmp_path, data=DATA))
    for verdict in (decode, mixed):
        assert verdict.control is not None
        assert verdict.control.outcome == "does not hold"
    assert (decode.outcome, mixed.outcome) == ("holds in part", "does not hold")
    assert (tmp_path / "wait_linear_model.png").exists()


def _samples(power: float, latency_growth: float) -> list[theorems.AtHorizon]:
    return [
        theorems.AtHorizon(
            t, (99 * t**power, 100 * t**power, 101 * t**power), 1 + latency_growth * t, 10, 1000.0
        )
        for t in (1.0, 2.0, 4.0, 8.0)
    ]


def test_decay_is_judged_on_each_side_of_its_power() -> None:
    flat, root, fast = _samples(0.0, 1.0), _samples(-0.5, 0.0), _samples(-1.0, 0.0)
    faster = _samples(-2.0, 0.0)
    assert theorems.slopes(root).mean == pytest.approx(-0.5)

    def outcomes(*curves: list[theorems.AtHorizon]) -> list[str]:
        return [v.outcome for v in theorems.verdicts(*curves, fast)]

    # A lower bound that is not proved holds in part at best.
    assert outcomes(fast, root, flat) == ["holds", "holds in part", "holds", "holds", "holds"]
    assert outcomes(root, flat, flat) == [
        "does not hold",
        "holds in part",
        "does not hold",
        "not shown",
        "holds in part",
    ]
    assert outcomes(faster, root, flat)[1] == "does not hold"
    assert outcomes(fast, fast, flat)[3] == "does not hold"
    assert outcomes(fast, root, fast)[4] == "not shown"


def test_a_gap_that_stays_in_zeta_is_seen() -> None:
    fast, root, flat = (_samples(power, 0.0)[:3] for power in (-1.0, -0.5, 0.0))
    readings = dict.fromkeys(theorems._READINGS, fast)
    zetas = readings | {theorems._FASTER_ABOVE: root, theorems._WIDER: flat}
    assert [v.outcome for v in theorems.zeta_verdicts(zetas)] == ["holds", "holds", "does not hold"]
    assert theorems.zeta_verdicts(readings)[0].outcome == "not shown"


def test_a_machine_that_is_twice_as_fast_takes_half_the_time() -> None:
    work = StepWork(num_prefill_tokens=62, num_decodes=3, num_kv_tokens=900)
    seconds = PAPER_LINEAR.seconds(work)
    assert theorems.faster(PAPER_LINEAR, 2).seconds(work) == pytest.approx(seconds / 2)
    wide = theorems.faster(PAPER_LINEAR, 1, 2)
    attention = seconds - PAPER_LINEAR.token_seconds[0]
    assert wide.seconds(work) == pytest.approx(seconds - attention / 2)
    assert wide.kv_tokens == 2 * PAPER_LINEAR.kv_tokens


def test_a_stall_at_the_last_arrival_is_no_failure() -> None:
    """Literal WAIT idles between thresholds, and so it may when the last request arrives."""
    setup = wait_choice(unit_traffic("low"), (2, 2)).setup
    stalled = 0
    for seed in range(4):
        workload = make_workload("low", num_requests=6_000, rate=100.0, seed=seed)
        assert workload.arrival_time is not None
        report = run(setup, workload, until=float(workload.arrival_time[-1]))
        stalled += report.result.stalled is not None
        assert Criterion().judge(report).sustained
    assert stalled


def test_thresholds_beyond_memory_are_not_tried() -> None:
    high = unit_traffic("high")
    tried = {c.setup.admission.options["thresholds"] for c in planned_wait(high, 75.0)}
    assert tried == {(1, 1, 1)}
    assert not list(wait_neighbours(high, wait_choice(high, (1, 1, 1)).setup))


def test_ten_segments_hold_more_than_the_memory() -> None:
    traffic = unit_traffic("ten_bins")
    assert not list(nested_choices(traffic, 10))
    ends = tuple(range(51, 502, 50))
    # One request at each of 501 stages: prompts of 62, and contexts that grow by one a stage.
    assert nested_kv(traffic, ends, (1,) * 10) == sum(62 + k for k in range(501))


@pytest.mark.slow
def test_the_search_follows_what_is_better() -> None:
    low = unit_traffic("low")
    effort = replace(QUICK, arrivals=8_000, tolerance=0.2)
    poor, good = wait_choice(low, (1, 1)), wait_choice(low, (3, 3))
    best = best_of([poor, good], lambda _: [], LOW, effort)
    assert best is not None
    assert best.setup.admission.options["thresholds"] == (3, 3)
    # The fluid is wrong about the first: it is measured, fails, and the other is taken.
    boasting = Candidate(setup_of("vllm_v0", max_num_seqs=1), 10_000.0)
    corrected = best_of([boasting, good], lambda _: [], LOW, effort)
    assert corrected is not None
    assert corrected.setup.admission.name == "wait"
    assert best_of([], lambda _: [], LOW, effort) is None


def test_a_policy_that_completes_unevenly_counts_as_estimated() -> None:
    """Literal Nested WAIT serves in waves: so few arrivals do not tell its capacity precisely."""
    options = {"segment_ends": (21, 41, 81, 161), "thresholds": (11, 8, 6, 3)}
    choice = Candidate(setup_of("nested_wait", **options), 240.0)
    effort = replace(QUICK, arrivals=3_000, tolerance=0.2)
    with pytest.raises(TooShort) as told:
        capacity(choice.setup, NESTED.at(3_000), 60.0, 264.0, tolerance=0.2)
    assert told.value.estimate is not None
    assert capacity_of(choice, NESTED, effort).requests_per_s > 0
