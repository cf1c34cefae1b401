"""Verdicts can come out either way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.lab.experiment import QUICK, Trial, experiments
from penstock.lab.loads import (
    Candidate,
    Sustained,
    best_of,
    capacity_of,
    gain_verdict,
    requests_at,
    setup_of,
)
from penstock.lab.papers import wait_fig1_known as known
from penstock.lab.papers import wait_fig1_nested as nested
from penstock.lab.papers import wait_fig4_6 as memory
from penstock.lab.papers import wait_linear_model as linear
from penstock.lab.papers import wait_theorems as theorems
from penstock.lab.thresholds import (
    nested_choices,
    nested_kv,
    planned_wait,
    unit_traffic,
    wait_choice,
    wait_neighbours,
)
from penstock.sim.capacity import Criterion, TooShort, capacity
from penstock.sim.run import run
from penstock.sim.workloads import make_workload

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))


def test_the_ratio_is_judged_within_five_per_cent() -> None:
    vllm = Sustained(setup_of("vllm_v0"), 100.0)
    wait_setup = wait_choice(unit_traffic("high"), (1, 1, 1)).setup

    def outcome(ratio: float, sarathis: float) -> str:
        wait = Sustained(wait_setup, 100 * ratio)
        sarathi = Sustained(setup_of("sarathi"), 100 * sarathis)
        found = {"vllm_v0": vllm, "sarathi": sarathi, "wait": wait}
        return known.ratio_verdict("high", found, QUICK).outcome

    assert outcome(1.38, 1.2) == outcome(1.32, 1.2) == "holds"
    assert outcome(1.28, 1.2) == "does not hold"
    assert outcome(1.38, 1.4) == "not shown"


def test_a_gain_is_over_every_rival() -> None:
    rivals = {"vllm_v0": Sustained(setup_of("vllm_v0"), 100.0)}
    for ratio, outcome in ((1.25, "holds"), (1.1, "does not hold")):
        verdict = gain_verdict("ahead", Sustained(setup_of("wait"), 100 * ratio), rivals)
        assert verdict.outcome == outcome
        assert verdict.control is not None
        assert verdict.control.outcome == "does not hold"


def test_ten_segments_are_judged_by_whether_they_fit() -> None:
    traffic = unit_traffic("ten_bins")

    def outcomes(ten: float) -> list[str]:
        rates = {"vllm_v0": 10.0, "sarathi": 12.0, nested.literal(10): ten, nested.gated(10): 13.0}
        setup = setup_of("nested_wait", thresholds=(1, 1, 1))
        found = {policy: Sustained(setup, rate) for policy, rate in rates.items()}
        return [v.outcome for v in nested.verdicts(found, traffic)]

    assert outcomes(0.0) == ["does not hold", "does not hold", "does not hold", "holds in part"]
    assert outcomes(20.0) == ["does not hold", "holds", "holds", "holds in part"]


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
        theorems.AtHorizon(t, 100 * t**power, 1 + latency_growth * t, 10)
        for t in (1.0, 2.0, 4.0, 8.0)
    ]


def test_decay_is_judged_by_its_exponent() -> None:
    flat, root, fast = _samples(0.0, 1.0), _samples(-0.5, 0.0), _samples(-1.0, 0.0)
    assert theorems.slope(root) == pytest.approx(-0.5)

    def outcomes(*curves: list[theorems.AtHorizon]) -> list[str]:
        return [v.outcome for v in theorems.verdicts(*curves)]

    assert outcomes(fast, root, flat) == ["holds"] * 3
    assert outcomes(root, flat, flat) == ["does not hold", "not shown", "holds in part"]
    # What decays like 1/T does not decay like 1/√T, and without its control nothing is shown.
    assert outcomes(fast, fast, flat) == ["not shown", "does not hold", "holds"]
    assert outcomes(root, root, flat)[1] == "not shown"
    assert outcomes(fast, root, fast)[2] == "not shown"


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
    best = best_of([poor, good], lambda _: [], "low", effort)
    assert best is not None
    assert best.setup.admission.options["thresholds"] == (3, 3)
    # The fluid is wrong about the first: it is measured, fails, and the other is taken.
    boasting = Candidate(setup_of("vllm_v0", max_num_seqs=1), 10_000.0)
    corrected = best_of([boasting, good], lambda _: [], "low", effort)
    assert corrected is not None
    assert corrected.setup.admission.name == "wait"
    assert best_of([], lambda _: [], "low", effort) is None


def test_a_policy_that_completes_unevenly_counts_as_estimated() -> None:
    """Literal Nested WAIT serves in waves: so few arrivals do not tell its capacity precisely."""
    options = {"segment_ends": (21, 41, 81, 161), "thresholds": (11, 8, 6, 3)}
    choice = Candidate(setup_of("nested_wait", **options), 240.0)
    effort = replace(QUICK, arrivals=3_000, tolerance=0.2)
    with pytest.raises(TooShort) as told:
        capacity(choice.setup, requests_at("nested", 3_000), 60.0, 264.0, tolerance=0.2)
    assert told.value.estimate is not None
    assert capacity_of(choice, "nested", effort).requests_per_s > 0
