"""Draft servers that send ahead, on the virtual clock."""

from typing import Any

import pytest
from tests.sim.test_links import ROW_S, VERIFY_S, rates, report, server

from penstock.core.types import DraftOrder, VerifyItem
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.ranks import RankedAcceptance

RIGHT, SECOND, NEITHER = [0], [1], [2]


def rate(ranks: list[int], *, sends_ahead: bool = True, **more: Any) -> float:
    """Tokens a second of one server, with drafts of three."""
    servers = [server("a", sends_ahead=sends_ahead, **more)]
    return rates(report(servers, RankedAcceptance({"a": ranks})))[0]


@pytest.mark.slow
def test_with_a_perfect_drafter_there_is_no_round_trip() -> None:
    """Drafting is what takes longest: a token in 10 ms."""
    step = VERIFY_S + 4 * ROW_S
    assert rate(RIGHT) == pytest.approx(100, rel=0.02)
    assert rate(RIGHT, draft_s=0.001) == pytest.approx(4 / step, rel=0.02)
    waiting = 4 / (2 * 0.02 + 3 * 0.01 + step)
    assert rate(RIGHT, sends_ahead=False) == pytest.approx(waiting, rel=0.02)


def test_where_a_drafter_is_never_right_nothing_is_gained() -> None:
    assert rate(NEITHER) == pytest.approx(rate(NEITHER, sends_ahead=False), rel=0.1)


@pytest.mark.slow
def test_runners_up_are_found() -> None:
    """Every fourth token is the second choice, with which the drafter goes on; or it is neither."""
    assert rate([0, 0, 0, 1]) > 1.15 * rate([0, 0, 0, 2])


@pytest.mark.slow
def test_further_lines_take_time() -> None:
    assert rate([0, 0, 1], row_seconds=0.01) < rate([0, 0, 1])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    ranks = [0, 0, 1, 0, 2, 0, 0, 0, 1]
    assert rate(ranks) == rate(ranks)


def test_ranks_must_be_known() -> None:
    with pytest.raises(ValueError, match="'a' sends ahead: ranks must be known"):
        report([server("a", sends_ahead=True)], GeometricAcceptance({"a": 0.5}))


def test_ranks_are_read_position_by_position() -> None:
    model = RankedAcceptance({"a": [0, 0, 1, 0, 2, 0]})
    begin = next(
        p for p in range(6) if [model.rank("a", "r", p + i) for i in range(3)] == [0, 0, 1]
    )
    item = VerifyItem("r", 0, 0, 9, 1, True, drafter="a", num_draft_tokens=4)
    assert model.num_accepted(item, begin) == 2
    assert model.num_right_behind(item, begin, 2) == 1
    assert model.num_accepted(item._replace(num_draft_tokens=2), begin) == 2
    order = DraftOrder("r", 0, 0, "a", 0, 6, 0)
    assert model.num_matched(order, range(begin, begin + 6)) == 4
    # 0 0 1 | 0 2 | 0 and round to the beginning: 3, 2 and 4 tokens.
    assert model.tokens_per_step("a", 8) == pytest.approx(9 / 3)
