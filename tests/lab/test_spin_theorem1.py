"""What Spin's theorem 1 makes of losses that are known, and slots that can be counted by hand."""

import numpy as np
import pytest

from lab.common.families import AS_PRINTED, SPIN, spin_profile
from lab.common.slots import Slots
from lab.common.statistics import FloatArray
from lab.papers import spin_theorem1
from lab.papers.spin_theorem1 import LBSS, POLICIES, PRINTED, RANDOM, SINGLE, SLOW, Losses, knowing
from lab.rivals import policy_named
from penstock.config import PolicyConfig

SLOTS = [2**k for k in range(4, 12)]
LOG, LINEAR = np.log2(SLOTS), np.array(SLOTS) / 16


def seeds(lost: FloatArray) -> FloatArray:
    """Three of them, a little different from each other."""
    return lost * np.array([[1.0], [1.02], [0.98]])


def losses(goodput: FloatArray, reading: FloatArray, best: float = 0.3) -> Losses:
    """Of LBSS; a drafter at random loses as much in every slot, and is the best in a fifth."""

    def by_policy(own: FloatArray) -> dict[str, FloatArray]:
        return {name: seeds(LINEAR if name == RANDOM else own) for name in POLICIES}

    share = dict.fromkeys(POLICIES, seeds(np.linspace(0.2, best, len(SLOTS))))
    share[RANDOM] = seeds(np.full(len(SLOTS), 0.2))
    found = Losses(
        SLOTS, by_policy(goodput), by_policy(reading), by_policy(goodput), by_policy(LOG), share
    )
    found.switches[SINGLE] = 2 * found.switches[SLOW]
    found.reading[SLOW] = 2 * found.reading[PRINTED]
    return found


def outcomes(found: Losses) -> list[str]:
    return [v.outcome for v in spin_theorem1.verdicts(found)]


def test_a_logarithm_is_told_from_a_line() -> None:
    assert set(outcomes(losses(LOG, LOG))) == {"holds"}
    assert spin_theorem1.exponent(seeds(LOG)).mean == pytest.approx(0, abs=0.01)
    assert spin_theorem1.exponent(seeds(LINEAR)).mean == pytest.approx(1, abs=0.01)


def test_what_known_goodput_does_not_reach_cannot_be_told() -> None:
    line = losses(LINEAR, LOG)
    total = len(LBSS)
    assert set(outcomes(line)[:total]) == {"inconclusive"}
    # Each has an oracle of its own.
    for number, name in enumerate(LBSS.values()):
        line.goodput[knowing(name)] = seeds(LOG)
        told = outcomes(line)[:total]
        assert told[number] == "does not hold"
        assert told.count("does not hold") == number + 1


def test_what_changes_nothing_does_not_hold() -> None:
    same = losses(LOG, LOG, best=0.2)
    same.switches[SINGLE] = same.switches[SLOW]
    same.reading[SLOW] = same.reading[PRINTED]
    assert outcomes(same)[-3:] == ["inconclusive", *["does not hold"] * 2]


def slots(policy: PolicyConfig, rates: FloatArray) -> Slots:
    prompts = np.full(len(rates), 50)
    return Slots(policy.make("selection"), spin_profile("7B"), rates, prompts, length=4, seed=0)


def test_a_switch_reads_what_the_drafter_lacks() -> None:
    rates = np.full((2, 5), 0.5)
    random = policy_named("epsilon_greedy", explore=1.0, seed=1)
    found = slots(random, rates).play([64, 128])
    # Four of five draws are of another drafter than the one before.
    assert found.switches[1] == pytest.approx(0.8 * 128, rel=0.2)
    # Whoever drafted a few slots ago lacks less than a prompt.
    assert 0 < found.reading[0] < found.reading[1] < found.if_constant[1]
    again = slots(random, rates).play([64, 128])
    assert (found.reading == again.reading).all()


def test_a_policy_that_goes_by_the_clock_learns_each_requests_own_goodput() -> None:
    """Drafts of the last drafter are always accepted, of the others never. Without a clock of its
    own nothing is learned as printed."""
    rates = np.array([[*[0.01] * 4, 0.99]] * 2)
    printed = SPIN[AS_PRINTED]
    assert slots(printed, rates).play([64, 256], is_timed=True).best[1] > 0.8
    assert slots(printed, rates).play([64, 256]).best[1] < 0.4


def test_who_drafts_nothing_is_verified_all_the_same() -> None:
    none = slots(PolicyConfig.from_name("single", drafter="none"), np.full((3, 5), 0.5))
    assert none.tokens_per_s(4, lambda loads: loads["none"] / 6) == pytest.approx(3 / 0.5)
