"""Algorithms 1 and 2 by counts do what the scheduler does; their verdicts come out either way."""

import numpy as np
import pytest

from lab.common.wait_paths import wait_runs
from lab.papers import wait_lemmas as lemmas
from lab.papers import wait_nested_theorems as nested
from penstock.config import PolicyConfig
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload


def test_algorithm_1_serves_as_many_as_the_scheduler() -> None:
    slack, _ = lemmas.policies()
    found = wait_runs(slack, PAPER_LINEAR, 4.0, 1, seed=3)
    waits = [np.searchsorted(found.arrived[0, j], [4.0]).item() for j in range(2)]
    at = np.concatenate([found.arrived[0, j, :n] for j, n in enumerate(waits)])
    output = np.repeat([kind.output_len for kind in slack.traffic], waits)
    order = np.argsort(at)
    at, output = at[order], output[order]
    workload = Workload("the same", np.full(len(at), 62), output, at - at[0])
    options = {
        "output_lens": tuple(kind.output_len for kind in slack.traffic),
        "thresholds": tuple(int(n) for n in slack.thresholds),
    }
    setup = Setup(PAPER_LINEAR, PolicyConfig.from_name("wait", **options), counted=False)
    report = run(setup, workload, until=float(at[-1] - at[0]))
    prefills = [
        2 * np.searchsorted(found.ended[0, j], at[-1], side="right").item() for j in range(2)
    ]
    assert np.isfinite(report.first_token_at).sum() == pytest.approx(sum(prefills), abs=8)


def test_dominance_fails_with_one_violation() -> None:
    queue, above = np.array([[1, 5], [2, 2]]), np.array([[2.0, 4.0], [2.0, 2.0]])
    found = lemmas.Dominance.from_queue(queue, above)
    assert found == lemmas.Dominance(2, 1, 1.0)
    never, once = lemmas.Dominance(9, 0, 0.0), lemmas.Dominance(9, 1, 1.0)
    good, bad = {1: once, 2: never, 3: never}, {1: once, 2: once, 3: once}

    def outcomes(by_floor: lemmas.ByFloor) -> list[str]:
        both = {"ends": by_floor, "begins": by_floor}
        d1 = {0: once, 1: by_floor[2]}
        return [v.outcome for v in lemmas.verdicts(by_floor, both, d1)]

    assert outcomes(good) == ["holds"] * 4
    assert outcomes(bad) == ["does not hold", "inconclusive", "does not hold", "holds"]
    assert outcomes({1: never, 2: never, 3: never})[:2] == ["not shown"] * 2


def test_exceedance_is_judged_against_delta() -> None:
    peaks = np.linspace(0, 1, 1000)
    rare = nested.Exceedance(peaks, dict.fromkeys(nested._DELTAS, 2.0))
    often = nested.Exceedance(peaks, dict.fromkeys(nested._DELTAS, 0.7))
    assert nested.exceedance_verdict("t", rare, often).outcome == "holds"
    assert nested.exceedance_verdict("t", often, often).outcome == "does not hold"
    assert nested.exceedance_verdict("t", rare, rare).outcome == "not shown"


def grown(power: float, latency: float) -> nested.Growth:
    t = np.array([1.0, 2.0, 4.0])
    noise = np.array([[0.99], [1.0], [1.01]])
    return nested.Growth(t.tolist(), noise * t**power, noise * (1 + latency * t))


def test_growth_is_judged_by_power_and_latency() -> None:
    good, bad = grown(-1.0, 0.0), grown(-0.3, 1.0)
    assert [v.outcome for v in nested.growth_verdicts("t", good, bad)] == ["holds", "holds"]
    assert {v.outcome for v in nested.growth_verdicts("t", bad, bad)} == {"does not hold"}
    assert {v.outcome for v in nested.growth_verdicts("t", good, good)} == {"not shown"}


def test_waves_are_judged_by_what_runs_hold() -> None:
    def runs(power: float, latency: float, peak: int) -> list[nested.Varying]:
        return [
            nested.Varying(t, (1 + 0.01 * i) * t**power, 1 + latency * t, peak, 100.0)
            for t in (1.0, 2.0, 4.0)
            for i in range(3)
        ]

    good, bad = runs(-1.0, 0.0, 90), runs(-0.3, 1.0, 110)
    assert [v.outcome for v in nested.varying_verdicts(good, bad)] == ["holds"] * 3
    assert [v.outcome for v in nested.varying_verdicts(bad, bad)] == ["does not hold"] * 3
    assert nested.worst_segments().rate > 24.0
