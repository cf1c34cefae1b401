import random

import pytest

from penstock.core.learn.streams import (
    Evidence,
    Population,
    Smoothed,
    Steady,
    StreamModel,
    Switching,
    switching_or_steady,
)
from penstock.core.types import Verdict


def drafted(num_proposed: int, num_accepted: int) -> Evidence:
    return Evidence(num_proposed, min(num_proposed, num_accepted + 1), float(num_accepted))


NOTHING = Evidence(0, 0, 0.0)


def feed(model: StreamModel, rate: float, rounds: int, length: int, rng: random.Random) -> None:
    for _ in range(rounds):
        accepted = 0
        while accepted < length and rng.random() < rate:
            accepted += 1
        model.add_evidence(drafted(length, accepted))


def models() -> dict[str, StreamModel]:
    steady, switching = Steady(Population()), Switching()
    both = switching_or_steady(Population())
    return {"steady": steady, "switching": switching, "both": both}


def test_evidence_is_what_the_verdict_decided() -> None:
    verdict = Verdict("r", 0, 0, (1, 2, 3), "d", 5, 2, 3, 2.4)
    assert Evidence.from_verdict(verdict) == Evidence(5, 3, 2.4)
    over_all = Evidence.from_verdict(verdict._replace(evidence_all=3.1))
    assert over_all == Evidence(5, 3, 2.4, successes_all=3.1)


def test_smoothing_is_equation_3() -> None:
    shown = drafted(4, 2)._replace(successes_all=2.7)
    decided = Smoothed(0.5, 0.1, decided_only=True)
    decided.add_evidence(shown)
    assert decided.rate() == pytest.approx(0.9 * 0.5 + 0.1 * 2 / 3)
    model = Smoothed(0.5, 0.1)
    model.add_evidence(shown)
    assert model.rate() == pytest.approx(0.9 * 0.5 + 0.1 * 2.7 / 4)
    held = model.rate()
    model.add_evidence(NOTHING)
    assert model.rate() == held
    counted = Smoothed(0.5, 0.1, on_empty=0.0)
    counted.add_evidence(NOTHING)
    assert counted.rate() == pytest.approx(0.45)


def test_a_steady_stream_is_counted_by_tokens_from_the_population_on() -> None:
    prior = Population()
    model = Steady(prior)
    assert model.rate() == 0.5
    model.add_evidence(drafted(10, 10))
    model.add_evidence(drafted(1, 0))
    assert model.rate() == pytest.approx((10 + 3) / (10 + 1 + 6))


@pytest.mark.parametrize("name", sorted(models()))
@pytest.mark.parametrize("rate", [0.15, 0.5, 0.85])
def test_estimates_are_right_although_drafts_are_cut_at_rejections(name: str, rate: float) -> None:
    model = models()[name]
    feed(model, rate, 1500, 3, random.Random(2))
    assert model.rate() == pytest.approx(rate, abs=0.1)


def test_both_are_calm_when_steady_and_quick_after_a_jump() -> None:
    errors = {}
    late = {}
    for name, model in models().items():
        rng = random.Random(3)
        wrong = []
        for _ in range(600):
            feed(model, 0.8, 1, 4, rng)
            wrong.append(abs(model.rate() - 0.8))
        errors[name] = sum(wrong[100:]) / 500
        feed(model, 0.3, 25, 4, rng)
        late[name] = abs(model.rate() - 0.3)
    assert errors["both"] < 0.05
    assert late["both"] < 0.5 * late["steady"]


def test_switching_finds_the_way_back_to_a_level_it_had() -> None:
    rng = random.Random(5)
    back, fresh = Switching(), Switching()
    for _ in range(6):
        feed(back, 0.3, 60, 3, rng)
        feed(back, 0.9, 60, 3, rng)
    feed(fresh, 0.9, 720, 3, rng)
    for model in (back, fresh):
        for accepted in (0, 1, 0, 0, 1):
            model.add_evidence(drafted(3, accepted))
    assert back.rate() == pytest.approx(0.3, abs=0.06)
    assert abs(fresh.rate() - 0.3) > abs(back.rate() - 0.3)
