"""What GoodSpeed's entries make of known curves, and rounds that can be counted by hand."""

import numpy as np
import pytest

from lab.common.oracles import Fastest, Told
from lab.common.rounds import GeometricClients, play
from lab.papers import goodspeed_fig2, goodspeed_fig3, goodspeed_fig4, goodspeed_theorems
from penstock.core.policies.registry import make_policy


def test_all_policies_meet_the_same_luck() -> None:
    world = GeometricClients(np.full((50, 3), 0.6), seed=2)
    two = [
        play(make_policy("allocation", "fixed", {"k": k}), world.clients(), 30, 50).tokens
        for k in (3, 6)
    ]
    assert (np.minimum(two[1], 4) == two[0]).all()
    assert two[1].mean() == pytest.approx((1 - 0.6**7) / 0.4, abs=0.4)


def drifting(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 15 + 4 * np.sin(np.arange(600) / 40) + rng.normal(0, 1, 600)


def curve(forecast: np.ndarray, real: np.ndarray) -> goodspeed_fig2.Forecast:
    return goodspeed_fig2.Forecast(real, forecast, real)


def test_figure_2_knows_a_forecast_from_what_contains_the_round() -> None:
    """Smoothed goodput that changes at random says nothing of the next round, though it follows
    every round that it contains."""
    real = [drifting(seed) for seed in range(5)]
    good = goodspeed_fig2.verdict(16, [curve(np.roll(r, 1), r) for r in real])
    assert good.outcome == "holds"
    assert good.control.outcome == "holds in part"
    biased = goodspeed_fig2.verdict(16, [curve(1.5 * np.roll(r, 1), r) for r in real])
    assert biased.outcome == "holds in part"
    noise = [np.random.default_rng(seed).normal(15, 3, 600) for seed in range(5)]
    smoothed = [curve((np.roll(r, 1) + np.roll(r, 2)) / 2, r) for r in noise]
    assert goodspeed_fig2.forecasts(smoothed).parts == (True, False, False)


WHERE = goodspeed_fig4.Setting(8, 16)
FLAT = np.full((5, 600), 5.0)
NOISE = np.array([[1.0], [1.01], [0.99]])


def figure_4(means: list[float] | None = None, **utilities: np.ndarray) -> list[str]:
    """Outcomes for utilities over the rounds and goodput of two clients; Fixed-S has 2, 1.5."""
    rising = FLAT + np.arange(600) / 300
    known = {"fixed": FLAT - 1, "random": rising - 3, "goodspeed_misled": FLAT - 4}
    known |= {"goodspeed": FLAT, "goodspeed_told": FLAT, "x*": FLAT[:, :1]} | utilities
    curves = {name.replace("_", ", "): values for name, values in known.items()}
    goodput = dict.fromkeys(goodspeed_fig4._POLICIES, np.array([2.0, 1.5]) * NOISE)
    goodput |= dict.fromkeys(goodspeed_fig4._TOLD, np.array([3.0, 3.0]) * NOISE)
    goodput |= {"goodspeed": np.array(means or [2.1, 2.2]) * NOISE}
    found = goodspeed_fig4.verdicts({WHERE: curves}, {WHERE: goodput})
    return [v.outcome for v in found]


def test_figure_4_sees_a_baseline_that_wins_and_a_curve_that_moves() -> None:
    rising = FLAT + np.arange(600) / 300
    assert figure_4() == ["holds"] * 5
    assert figure_4(random=FLAT - 3)[0] == "not shown"
    assert figure_4(goodspeed=rising)[0] == "does not hold"
    assert figure_4(fixed=FLAT + 1)[1] == "inconclusive"
    assert figure_4(fixed=FLAT + 1, goodspeed_told=FLAT + 2)[1] == "holds in part"
    assert figure_4(goodspeed_misled=FLAT)[1] == "not shown"
    assert figure_4(goodspeed=FLAT - 0.5)[2] == "does not hold"


def test_figure_4_tells_goodput_from_fairness() -> None:
    assert figure_4([3.0, 1.0])[3:] == ["holds", "does not hold"]
    assert figure_4([1.6, 1.6])[3:] == ["does not hold", "holds"]


def figure_3(**scales: tuple[float, float, float]) -> list[str]:
    """Outcomes where a policy's receiving, verification and sending are so many times Fixed-S's."""

    def spent(policy: str, luck: float) -> goodspeed_fig3.Spent:
        receive, verify, send = scales.get(policy.replace(" ", "_"), (1, 1, 1))
        return goodspeed_fig3.Spent(2 * receive * luck, verify * luck, 1e-3 * send * luck, 10)

    lucks = np.random.default_rng(0).uniform(0.99, 1.01, 5).tolist()
    by_policy = {p: [spent(p, luck) for luck in lucks] for p in goodspeed_fig3.POLICIES}
    where = goodspeed_fig3.BANDWIDTH, goodspeed_fig3.TABLE_I[0].name, 24
    return [v.outcome for v in goodspeed_fig3.verdicts({where: by_policy})]


def test_figure_3_sees_who_waits_longer() -> None:
    paper = {"random": (1.25, 1.0, 1.0), "goodspeed": (0.95, 0.94, 1.0), "no_drafts": (1, 2, 1)}
    assert figure_3(**paper)[:3] == ["holds"] * 3
    paper["goodspeed"] = (1.05, 0.94, 1.0)
    assert figure_3(**paper)[1] == "inconclusive"
    paper["fastest"] = (0.9, 0.9, 1.0)
    assert figure_3(**paper) == ["holds", "holds in part", *["holds"] * 5]
    quick = {"fastest": (0.5, 1.0, 1.0), "most_tokens": (2.0, 0.9, 1.0)}
    slow = {"random": (1.25, 1.0, 1.0), "goodspeed": (1.3, 0.99, 9.0), **quick}
    assert figure_3(**slow) == [
        "does not hold",
        "does not hold",
        "holds",
        "holds",
        "holds in part",
        "does not hold",
        "does not hold",
    ]
    level = figure_3()
    assert level == [*["not shown"], *4 * ["inconclusive"], "holds", "inconclusive"]


def test_figure_3_as_printed_takes_what_its_axes_say() -> None:
    for where in goodspeed_fig3.TABLE_I[1:]:
        times = where.times(20)[goodspeed_fig3.FIGURE]
        equal = np.resize([3, 2], (1, 8))
        drafted = goodspeed_fig3.spent(goodspeed_fig3.PlayedRounds(equal, equal + 1), times)
        receiving, verification = where.printed
        assert drafted.receiving / drafted.rounds == pytest.approx(receiving, rel=0.35)
        assert drafted.verification / drafted.rounds == pytest.approx(verification)


def test_oracles_know_what_pays() -> None:
    rates = np.tile([0.9, 0.3], (50, 1))
    times = goodspeed_fig3.BarrierTimes(np.zeros(2), np.array([1e-3, 1e-3]), 0.02, 0.0)
    slow = goodspeed_fig3.BarrierTimes(np.zeros(2), np.array([1.0, 1.0]), 0.02, 0.0)

    def lengths(policy: goodspeed_fig3.AllocationPolicy) -> list[int]:
        world = GeometricClients(rates, seed=2)
        return [int(n) for n in play(policy, world.clients(), 8, 50).lengths[-1]]

    assert lengths(Fastest(rates, slow, 8)) == [0, 0]
    fast = lengths(Fastest(rates, times, 8))
    assert fast[0] > fast[1] > 0
    goodput = lengths(Told(rates, total=8, fairness=0.0))
    assert goodput[0] > lengths(Told(rates, total=8))[0]


def test_theorems_see_what_does_not_converge() -> None:
    sample = goodspeed_theorems.AtBeta
    good = [sample(0.5, 1.0, 0.1), sample(0.1, 0.2, 0.03), sample(0.01, 0.0, 0.005)]
    stuck = [sample(0.5, 0.5, 0.01), sample(0.1, 0.8, 0.05)]
    for claim in (goodspeed_theorems.concentration, goodspeed_theorems.averages):
        assert claim(good, good).outcome == "holds"
        assert claim(stuck, good).outcome == "does not hold"
        assert claim(stuck, stuck).outcome == "inconclusive"
    near = [sample(0.5, 0.01, 0.01), sample(0.1, 0.0, 0.005)]
    assert goodspeed_theorems.concentration(near, good).outcome == "not shown", (
        "the control is near, too"
    )
