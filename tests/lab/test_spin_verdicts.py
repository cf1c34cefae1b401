"""What figure 11 of Spin makes of figures that are known."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from lab.common.families import AS_PRINTED, SPIN, WITH_ADDITIONS
from lab.common.hindsight import best_subset
from lab.common.statistics import interval, ratio
from lab.papers import spin_fig10_simulated, spin_fig11, spin_fig13
from lab.papers.spin_fig11 import Goodput, differ, goodput, verdicts, worth


def test_a_ratio_is_within_its_interval() -> None:
    found = ratio(np.array([2.0, 2.2, 1.8, 2.0]), np.ones(4))
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(1.99, abs=0.01)
    same = ratio(np.full(3, 1.5), np.ones(3))
    assert same.low == pytest.approx(same.high) == pytest.approx(1.5)


def test_nothing_can_be_said_of_a_single_value() -> None:
    one = interval([3.0])
    assert (one.mean, one.low, one.high, one.half) == (3.0, -np.inf, np.inf, 0.0)
    # Student's t with two degrees of freedom: 4.303 standard errors.
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.3027 / np.sqrt(3), abs=1e-4)


TEXTS = {spin_fig11.HARD: "all alike", spin_fig11.EASY: "all alike"}


def figures(**rates: float) -> Goodput:
    """The same in every cell, with a little noise."""
    noise = np.array([1.0, 1.01, 0.99])
    return {
        (t, x, p): rates.get(p, 100.0) * noise
        for t in spin_fig11.TARGETS
        for x in TEXTS
        for p in (*spin_fig11.POLICIES, spin_fig11.HINDSIGHT, *spin_fig11.singles(x))
    }


def told(**rates: float) -> list[str]:
    return [v.outcome for v in verdicts(figures(**rates), TEXTS)[:-1]]


def test_verdicts_say_who_is_ahead_and_what_hindsight_could_not_reach() -> None:
    best = {spin_fig11.HINDSIGHT: 140.0}
    found = told(**best, **{AS_PRINTED: 90.0, WITH_ADDITIONS: 130.0})
    assert found[:8] == ["does not hold", "holds"] * 4
    assert found[8:] == ["does not hold", *["inconclusive"] * 4]
    assert set(told(**dict.fromkeys(SPIN, 90.0))) == {"inconclusive"}
    far = {spin_fig11.HINDSIGHT: 230.0, "greedy": 95.0, "ε-greedy, printed": 130.0}
    assert told(**far, **dict.fromkeys(SPIN, 190.0))[10::2] == ["holds", "holds"]


def test_spin_as_printed_has_no_additions() -> None:
    printed, added = (config.make("selection").options.corrections for config in SPIN.values())
    assert printed == ()
    assert len(added) == 4


def test_the_oracle_of_a_barrier_waits_for_the_slowest_it_chooses() -> None:
    """The slow drafter is the best of half of the requests, but two more tokens are not worth twice
    the time of all."""
    tokens = np.array([[3.0, 4.0], [3.0, 2.0]])
    barrier = {"fast": 1.0, "slow": 2.0}
    assert best_subset(["fast", "slow"], tokens, lambda loads: max(map(barrier.get, loads))) == [
        *["fast", "fast"]
    ]
    assert best_subset(["fast", "slow"], tokens, lambda loads: 1.0) == ["slow", "fast"]


def test_the_oracle_of_figure_10_is_behind_no_single_drafter() -> None:
    """A batch of 8, in which each request's own best drafter would wait for the slowest."""
    singles = [f"{spin_fig10_simulated.ALL_ELSE}{name}" for name in spin_fig11.FAMILY]
    rates = [
        spin_fig10_simulated.rate(name, 8, np.full(8, 200), 64, 0)
        for name in (spin_fig10_simulated.IDEAL, *singles)
    ]
    assert rates[0] >= 0.99 * max(rates)


def test_records_say_how_requests_differ(tmp_path: Path) -> None:
    rows = [{"ngram": [6] * 60, "eagle": [1] * 60}, {"ngram": [1] * 60, "eagle": [5] * 60}]
    for file in spin_fig11.RECORDS.values():
        with gzip.open(tmp_path / file, "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    found = worth("7B", "gsm8k", tmp_path, range(40))
    assert set(found.argmax(axis=1)) == {0, 1}
    assert differ("gsm8k", found).startswith("gsm8k 2")
    chosen, eagle = (
        goodput("7B", "gsm8k", policy, tmp_path, 2.0, 1)
        for policy in (spin_fig11.HINDSIGHT, "Vanilla eagle")
    )
    assert chosen > 1.2 * eagle


def test_a_run_keeps_eight_requests_live_and_is_reproducible() -> None:
    rate = goodput("7B", "easy", AS_PRINTED, None, 1.0, 0)
    assert rate == goodput("7B", "easy", AS_PRINTED, None, 1.0, 0)
    assert rate != goodput("7B", "easy", AS_PRINTED, None, 1.0, 1)
    # Eight requests, at least a token in each step of 23 ms, and at most five.
    assert 150 < rate < 8 * 5 / 0.02


def curve(gains: dict[int, float], spin: int = 9, planned: int = 4) -> spin_fig13.ByMicroBatches:
    """Gains over no micro-batches; of the others 0.8."""
    return spin_fig13.ByMicroBatches(
        {1: 100.0} | {n: 100.0 * gains.get(n, 0.8) for n in range(2, 10)},
        135.0,
        {0.05: spin, 0.1: spin},
        planned,
    )


def figure_13(hard: spin_fig13.ByMicroBatches, easy: spin_fig13.ByMicroBatches) -> list[str]:
    names = [f"{times}, {text}" for times in ("rows", "streaming") for text in ("hard", "easy")]
    curves = dict(zip(names, (hard, easy, hard, easy), strict=True))
    flat = dict.fromkeys(names, curve({}))
    extremes = curve({5: 1.3}), curve({2: 1.1})
    return [v.outcome for v in spin_fig13.verdicts(curves, flat, extremes)]


def test_figure_13_wants_the_papers_gain_and_not_just_any() -> None:
    easy = curve({2: 1.1, 3: 1.2, 4: 1.1}, planned=3)
    assert figure_13(curve({4: 1.29}), easy) == [
        *["holds", "holds", "holds"],
        *["does not hold", "does not hold", "holds"],
    ]
    assert figure_13(curve({4: 1.17}), easy)[1] == "holds in part"
    assert figure_13(curve({2: 1.1, 4: 0.95}), easy)[1] == "does not hold"
    assert figure_13(curve({4: 1.17, 9: 1.0}), easy)[1] == "inconclusive", "9 do not lose"
    assert figure_13(easy, easy)[2] == "does not hold"
