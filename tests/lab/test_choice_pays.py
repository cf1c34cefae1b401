"""The map of where a choice of drafter pays."""

from dataclasses import replace

import numpy as np
import pytest

from lab.common.experiment import QUICK
from lab.common.families import AS_PRINTED, SPECIALISTS, WITH_ADDITIONS, specialists_acceptances
from lab.papers.choice_pays import CHOOSERS, Gains, Machine, MapGrid, Requests, Spot, verdicts
from penstock.core.policies.registry import policies

INSIDE = Machine(own_devices=False, batch=2)
ALONE = Machine(own_devices=False, batch=1)
SMALL = replace(MapGrid.from_effort(QUICK), warm=4, counted=8)


@pytest.mark.parametrize("contrast", [0.0, 0.1, 0.4])
def test_contrast_leaves_the_mean_acceptance_alone(contrast: float) -> None:
    fit = specialists_acceptances(contrast)
    rates = {d: 1 / (1 + np.exp(-np.array(f.mean))) for d, f in fit.domains.items()}
    assert np.mean(list(rates.values()), axis=0) == pytest.approx(0.6)
    for column, name in enumerate(SPECIALISTS):
        assert rates[name][column] - min(rates[name]) == pytest.approx(contrast)


@pytest.mark.slow
def test_specialists_gain_where_drafters_differ_and_one_request_is_live() -> None:
    requests = Requests(Spot(ALONE, 0.05, 0.4), SMALL)
    one = requests.tokens_per_s("single")
    assert requests.specialists(4) > 1.5 * one
    assert one < requests.specialists(2) < requests.specialists(4)
    assert "assigned" not in policies("selection")


def rates(**gains: float) -> Gains:
    """Over one drafter for all, which is twice as good as none. lbss: as printed."""
    gains = {AS_PRINTED: gains.get("lbss", 1.0), **gains}
    chosen = {c: 100.0 * gains.get(c.split(",")[0], 1.0) for c in CHOOSERS}
    return Gains(50.0, 100.0, {**chosen, "at random": 100.0 * gains.get("random", 0.9)})


def test_verdicts_say_where_it_pays_and_who_gains() -> None:
    found = {
        Spot(INSIDE, 0.05, 0.0): rates(lbss=0.8),
        Spot(INSIDE, 0.05, 0.2): rates(clairvoyant=1.2, auto=1.15, lbss=1.05),
        Spot(INSIDE, 0.5, 0.2): rates(clairvoyant=1.05, auto=0.96, lbss=0.9),
    }
    told = verdicts(found)
    clairvoyant, words, words_elsewhere = told[:3]
    lbss, lbss_elsewhere = (v for v in told if v.claim.startswith(AS_PRINTED))
    assert [v.outcome for v in told if v.claim.startswith(WITH_ADDITIONS)] == [
        *["does not hold", "holds"]
    ]
    # Where drafters differ most, nobody gains a tenth with the slow ones.
    assert clairvoyant.outcome == "inconclusive"
    assert "1 of 3" in clairvoyant.measured
    assert "one device, batch 2: contrast 0.2 at 0.05, never at 0.5" in clairvoyant.measured
    assert (words.outcome, words_elsewhere.outcome) == ("holds", "holds")
    assert (lbss.outcome, lbss_elsewhere.outcome) == ("does not hold", "does not hold")
    assert (lbss.oracle.outcome, lbss_elsewhere.oracle.outcome) == ("holds", "holds")
