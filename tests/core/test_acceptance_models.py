import pytest

from penstock.core.learn.streams import Evidence, Smoothed


def test_smoothing_is_equation_3() -> None:
    shown = Evidence(4, 3, 2.0, successes_all=2.7)
    decided = Smoothed(0.5, 0.1, decided_only=True)
    decided.add_evidence(shown)
    assert decided.rate() == pytest.approx(0.9 * 0.5 + 0.1 * 2 / 3)
    model = Smoothed(0.5, 0.1)
    model.add_evidence(shown)
    assert model.rate() == pytest.approx(0.9 * 0.5 + 0.1 * 2.7 / 4)
    held = model.rate()
    model.add_evidence(Evidence(0, 0, 0.0))
    assert model.rate() == held
