"""Verdicts can come out either way."""

import os
from pathlib import Path

import numpy as np
import pytest

from lab.common.loads import SHIPPED, TUNED, Point, Scene, gain_verdict
from lab.papers import newer
from lab.papers import wait_fig1_known as known
from lab.papers import wait_fig1_nested as nested
from lab.papers import wait_linear_model as linear
from lab.papers import wait_theorems as theorems
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.capacity import Estimate, LoadVerdict

LOW, NESTED = Scene(PAPER_LINEAR, "low"), Scene(PAPER_LINEAR, "nested")
DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))


def seeds(tokens: float) -> np.ndarray:
    return tokens * np.array([0.99, 1.0, 1.01])


@pytest.mark.parametrize(
    ("gain", "bound", "outcome", "side"),
    [
        (1.25, 200, "holds", "within"),
        (2.2, 250, "does not hold", "above"),
        (1.03, 200, "does not hold", "below"),
        (1.03, 125, "inconclusive", "below"),
    ],
)
def test_a_gain_lies_in_its_interval(gain: float, bound: float, outcome: str, side: str) -> None:
    peaks = {"vllm_v0": seeds(90), "vllm_v1": seeds(100), "sarathi": seeds(115)}
    found = {**peaks, TUNED: seeds(150), "wait": seeds(115 * gain)}
    verdict = gain_verdict("WAIT", "wait", found, bound)
    assert (verdict.outcome, verdict.measured.partition(":")[0]) == (outcome, side)
    assert "over sarathi;" in verdict.measured
    assert verdict.control.outcome == "does not hold"


def points_of(tokens: dict[str, float], latency: dict[str, float]) -> list[Point]:
    """At a light load and at a heavy one, where policies make a share of what is offered."""
    return [
        Point(policy, rate, seed, 10 * rate, 10 * rate * tokens[policy], latency[policy])
        for policy in tokens
        for rate in (1.0, 9.0, 10.0)
        for seed in (0, 1)
    ]


def test_figure_1_is_judged_by_what_its_points_are() -> None:
    names = ("wait", *SHIPPED, TUNED, known._BEST)

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
    assert outcomes(0.7, 3.0)[0] == "inconclusive"  # nobody comes near the bound
    assert outcomes(0.7, 3.0)[2:] == ["does not hold", "does not hold"]
    assert outcomes(1.2, 1.0)[1] == "does not hold"  # more than is offered


def test_the_high_workload_must_gain_more() -> None:
    def outcome(low: float, high: float, bound: float) -> str:
        rivals = dict.fromkeys(SHIPPED, seeds(100))
        best = {
            f"{name}, here": {**rivals, "wait": seeds(w)}
            for name, w in (("low", low), ("high", high))
        }
        limits = {"low, here": 140.0, "high, here": bound}
        return known.high_load_verdict("here", best, limits).outcome

    assert outcome(110, 130, 150) == "holds"
    assert outcome(130, 110, 150) == "does not hold"
    assert outcome(130, 110, 120) == "inconclusive"


def test_ten_segments_are_judged_by_whether_they_fit() -> None:
    best = {"a scene": {**dict.fromkeys(SHIPPED, seeds(100)), "nested_wait, gated": seeds(125)}}
    ten, literal, gated = nested.verdicts(best, {}, {"a scene": 200.0})
    assert [v.outcome for v in (ten, literal, gated)] == ["does not hold", "does not hold", "holds"]
    assert "156,312" in ten.measured
    assert "none that fit" in literal.claim


def test_eq_1_is_judged_on_both_kinds_of_batches() -> None:
    tokens = np.linspace(100, 100_000, 200)
    prefill = np.tile([0.0, 500.0], 100)
    decode = np.column_stack([0 * tokens, tokens, 9.35e-3 + 4.1e-7 * tokens])
    mixed = np.column_stack([prefill, tokens, 9.35e-3 + 4.1e-7 * tokens + 1e-4 * prefill])
    same = np.column_stack([prefill, tokens, 9.35e-3 + 4.1e-7 * (tokens + prefill)])
    assert [v.outcome for v in linear.verdicts(decode, mixed)] == ["holds", "does not hold"]
    assert [v.outcome for v in linear.verdicts(decode, same)] == ["holds", "holds"]


def _samples(power: float, latency_growth: float) -> list[theorems.AtHorizon]:
    return [
        theorems.AtHorizon(
            t, tuple(g * t**power for g in (990, 1000, 1010)), 1 + latency_growth * t, 10, 9000.0
        )
        for t in (1.0, 2.0, 4.0, 8.0)
    ]


def test_decay_is_judged_on_each_side_of_its_power() -> None:
    flat, root, fast = _samples(0.0, 1.0), _samples(-0.5, 0.0), _samples(-1.0, 0.0)
    faster = _samples(-2.0, 0.0)
    assert theorems.slopes(root).mean == pytest.approx(-0.5)

    def outcomes(*curves: list[theorems.AtHorizon]) -> list[str]:
        return [v.outcome for v in theorems.verdicts(*curves, fast)]

    assert outcomes(fast, root, flat, root) == ["holds"] * 5
    assert outcomes(root, flat, flat, flat) == [
        "does not hold",
        "holds",
        "inconclusive",
        "holds",
        "inconclusive",
    ]
    assert outcomes(faster, root, flat, root)[1] == "does not hold"
    assert outcomes(fast, flat, flat, root)[2::2] == ["does not hold"] * 2
    assert outcomes(fast, root, fast, root)[3] == "not shown"


def test_in_zeta_a_reading_that_no_policy_can_meet_cannot_be_told() -> None:
    def in_zeta(power: float) -> list[theorems.AtHorizon]:
        return [
            theorems.AtHorizon(2.0, (99 * z**power, 101 * z**power), 1.0, 10, 3000.0 * z)
            for z in theorems._ZETAS
        ]

    found = {theorems._FASTER: in_zeta(0.0), theorems._FASTER_ABOVE: in_zeta(1.0)}
    found |= dict.fromkeys((theorems._SAME, theorems._WIDER), in_zeta(1.0))
    faster, *others = [v.outcome for v in theorems.zeta_verdicts(found)]
    assert faster == "holds"
    assert others == ["inconclusive"] * 3


def test_a_stability_threshold_is_judged_on_both_sides() -> None:
    def outcomes(growth_above: float, completed: float) -> list[str]:
        loads = {
            share: LoadVerdict(Estimate(growth, 0.01), Estimate(made, 0.1), (), 1.0)
            for share, growth, made in (
                (newer._FAR_BELOW, 0.0, 50.0),
                (newer._BELOW, 0.0, 90.0),
                (newer._ABOVE, growth_above, completed),
                (newer._FAR_ABOVE, 0.33, completed),
            )
        }
        found = {LOW: newer.Threshold(100.0, 0.01, 0.05, loads)}
        return [v.outcome for v in newer.verdicts(found)]

    assert outcomes(0.09, 100.0) == ["holds"] * 3
    assert outcomes(0.0, 130.0) == ["does not hold", "holds", "does not hold"]


def test_the_threshold_of_full_memory_is_the_fluid_bound() -> None:
    high = Scene(PAPER_LINEAR, "high")
    assert newer.threshold(high, 4000).requests_per_s == pytest.approx(high.bound, rel=0.05)
