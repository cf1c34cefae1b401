"""What drafts of a drafter, and of a request, come to."""

from __future__ import annotations

import pytest

from penstock.core.policies.allocation.parts.yields import DraftYield, DraftYields

FREE, DEAR = 0.01, 0.6


def of(yields: DraftYields, request: str, price: float = FREE) -> DraftYield:
    return yields.of(request, yields.mean(price))


def test_before_anything_is_known_all_lengths_are_as_likely() -> None:
    yields = DraftYields(8)
    assert of(yields, "r").proposed == pytest.approx(4.0)
    assert 2.0 <= of(yields, "r").accepted <= 2.2
    assert yields.longest(FREE, 1) == pytest.approx(4.0)
    # Of two dice with nine sides from 0 on.
    two = sum(max(a, b) for a in range(9) for b in range(9)) / 81
    assert yields.longest(FREE, 2) == pytest.approx(two)
    assert yields.longest(FREE, 1000) == pytest.approx(8.0)


def test_drafts_are_shorter_the_higher_the_price() -> None:
    means = [DraftYields(8).mean(price) for price in (0.0, 0.3, 0.6, 0.99, 1.0)]
    lengths = [m.proposed for m in means]
    assert lengths == sorted(lengths, reverse=True)
    assert all(
        price * m.proposed <= m.accepted for price, m in zip((0, 0.3, 0.6), means, strict=False)
    )


def test_the_longest_of_drafts_of_one_length_is_that_length() -> None:
    yields = DraftYields(8)
    for i in range(10_000):
        yields.observe(f"r{i}", FREE, 3, 1)
    assert yields.mean(FREE) == pytest.approx((3.0, 1.0), abs=0.01)
    assert yields.longest(FREE, 1) == pytest.approx(3.0, abs=0.01)
    assert yields.longest(FREE, 8) == pytest.approx(3.0, abs=0.05)


def test_a_request_is_known_by_its_own_drafts_and_starts_like_the_others() -> None:
    yields = DraftYields(8)
    for i in range(1000):
        yields.observe(f"r{i}", FREE, 2, 1)
    assert of(yields, "new") == yields.mean(FREE)
    for _ in range(50):
        yields.observe("good", FREE, 6, 5)
    assert of(yields, "good").accepted > 3.5
    assert of(yields, "new").accepted < 1.2, "one request says little of others"
    yields.forget("good")
    assert of(yields, "good") == yields.mean(FREE)


def test_what_drafts_come_to_at_another_price_is_no_virtue_of_the_request() -> None:
    yields = DraftYields(8)
    for i in range(3000):
        yields.observe(f"r{i}", FREE, 6, 4)
        yields.observe(f"r{i}", DEAR, 1, 1)
    for _ in range(50):
        yields.observe("alike", FREE, 6, 4)
        yields.observe("half", FREE, 6, 2)
    assert of(yields, "alike", DEAR) == pytest.approx((1, 1), abs=0.1)
    assert of(yields, "half", DEAR).accepted == pytest.approx(0.55, abs=0.1)


def test_a_draft_tells_less_the_more_are_known() -> None:
    yields = DraftYields(8)
    told = [yields.information("r")]
    for _ in range(10):
        yields.observe("r", FREE, 2, 1)
        told.append(yields.information("r"))
    assert told == sorted(told, reverse=True)
    assert yields.information("new") == told[0]
