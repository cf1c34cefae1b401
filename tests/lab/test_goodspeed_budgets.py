"""Verdicts of the live GoodSpeed comparison, on known runs."""

from typing import Any

import numpy as np
import pytest

from lab.bench import goodspeed_live as live

MOST = 32
ACCEPTED = np.array([0.9, 0.8, 0.4, 0.3])
"""Acceptance of each client, at every position."""


def run(goodput: list[float], noise: float = 0.02) -> live.Run:
    """A thousand rounds, a poll each five, with so many tokens of each client in the mean."""
    rng = np.random.default_rng(0)
    rounds = np.arange(0, 1105, 5)
    made = np.array(goodput) * (1 + noise * rng.standard_normal((len(rounds), 4)))
    tokens = np.vstack([np.zeros(4), 5 * made[1:]]).cumsum(axis=0)
    polls: list[dict[str, Any]] = [
        {"seconds": r / 20, "rounds": float(r), "tokens": t.tolist(), "estimates": goodput}
        for r, t in zip(rounds, tokens, strict=True)
    ]
    kept = 1100 * ACCEPTED[:, None] ** np.arange(1, live.LONGEST + 1)
    kept[:, MOST // 4 :] = 0
    return live.Run({"polls": polls, "drafts": [1100.0] * 4, "accepted": kept.tolist()})


def scene(ours: list[float], fixed: list[float], random: list[float]) -> live.Scene:
    runs = {MOST: {"goodspeed": [run(ours)], "fixed": [run(fixed)], "random": [run(random)]}}
    return live.scene_of(runs, [run(ours)])


def best() -> list[float]:
    found: list[float] = scene([1] * 4, [1] * 4, [1] * 4).optima[MOST].tolist()
    return found


def test_survival_goes_on_as_it_began() -> None:
    found = live.survival([run([1, 1, 1, 1])], MOST // 4)
    assert found == pytest.approx(ACCEPTED[:, None] ** np.arange(1, live.LONGEST + 1))


def test_x_star_counts_the_rounds_that_requests_lose() -> None:
    free, busy = run([4, 4, 2, 2]), run([4, 4, 2, 2])
    busy.drafts = busy.drafts * 0.8
    busy.accepted = busy.accepted * 0.8  # the same drafts are accepted as often
    found = [live.scene_of({MOST: {"fixed": [r]}}, [r]).optima[MOST] for r in (free, busy)]
    steps = 1 / found[1] - 1 / found[0]
    assert steps == pytest.approx(220 / busy.tokens[-1], rel=0.01)


def test_spans_begin_behind_the_first_rounds() -> None:
    spans = run([4, 4, 2, 2], noise=0).spans()
    assert len(spans) == 10
    for per_round, per_second in spans:
        assert per_round == pytest.approx([4, 4, 2, 2])
        assert per_second == pytest.approx([80, 80, 40, 40])


def test_the_bar_wants_intervals_apart_and_a_world_that_can_tell() -> None:
    top = best()
    less, least = [0.8 * x for x in top], [0.6 * x for x in top]

    def outcomes(*goodput: list[float]) -> list[str]:
        return [v.outcome for v in live.verdicts(scene(*goodput))]

    assert outcomes(top, less, least) == ["holds", "met", "holds"]
    assert outcomes(less, less, least)[:2] == ["holds in part", "missed"]
    assert outcomes(least, less, less)[:2] == ["does not hold", "missed"]
    assert outcomes(top, less, top)[0] == "inconclusive"  # x* is not above `random` either
    assert outcomes(least, [1.1 * x for x in top], less)[0] == "inconclusive"


def test_differences_are_of_the_same_texts() -> None:
    """However many rounds they took: hard texts at the end count no more than easy ones."""
    runs = [run([4, 4, 2, 2], noise=0), run([2, 2, 2, 2], noise=0)]
    found = live.differences(runs[:1], runs[1:])
    assert found == pytest.approx([2 * np.log(2)] * live.PARTS)
    assert live.differences(runs[1:], runs[1:]) == pytest.approx([0.0] * live.PARTS)


def test_a_trajectory_that_ends_elsewhere_is_not_near() -> None:
    top = best()
    away = [1.3 * top[0], top[1], 0.7 * top[2], top[3]]
    assert live.verdicts(scene(away, away, away))[-1].outcome == "does not hold"
    as_fixed = live.verdicts(scene(top, top, away))[-1]
    assert as_fixed.control is not None
    assert as_fixed.outcome == "not shown"


def test_the_estimate_is_compared_with_what_follows() -> None:
    middle, real, told = run([4, 3, 2, 1], noise=0).moving()
    assert real == pytest.approx(np.full(len(middle), 10.0))
    assert told == pytest.approx(real)


def test_auto_is_served_without_a_budget() -> None:
    found = live.settings_of("auto", 0, "coupled", 1)["engine"]
    assert "allocation" not in found
    assert live.settings_of("random", 8, "ratio", 1)["engine"]["allocation"]["options"] == {
        "total": 8
    }
