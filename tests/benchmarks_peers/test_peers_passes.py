"""Which passes count."""

from __future__ import annotations

import pytest

from lab.bench.peers.passes import Pass, is_finished, kept
from lab.bench.peers.report import equal_share

CLEAN = Pass(100.0, 1.98, 0.01)
DISTURBED = Pass(50.0, 1.2, 0.7)
IDLE = Pass(80.0, 1.4, 0.02)


def test_a_share_of_1_85_is_clean_and_less_is_not() -> None:
    assert Pass(1.0, 1.85, 0.0).is_clean
    assert not Pass(1.0, 1.849, 0.0).is_clean


def test_disturbed_passes_are_thrown_out_and_made_again() -> None:
    passes = [CLEAN, DISTURBED, CLEAN, CLEAN]
    assert not is_finished(passes, 4)
    passes.append(CLEAN)
    assert is_finished(passes, 4)
    assert kept(passes, 4) == ([CLEAN] * 4, "")


def test_repeats_are_bounded() -> None:
    assert not is_finished([DISTURBED] * 9, 5)
    assert is_finished([DISTURBED] * 10, 5)


def test_an_engine_that_leaves_cores_idle_is_kept_and_flagged() -> None:
    assert not is_finished([IDLE] * 4, 5)
    assert is_finished([IDLE] * 5, 5)
    assert kept([IDLE] * 5, 5) == ([IDLE] * 5, "leaves cores idle")


def test_disturbed_passes_do_not_pass_for_idle_ones() -> None:
    assert not is_finished([IDLE] * 3 + [DISTURBED] * 2, 5)
    assert kept([IDLE] * 5 + [DISTURBED], 5)[0] == [IDLE] * 5


@pytest.mark.parametrize(
    ("passes", "counted", "flag"),
    [
        ([CLEAN] * 2 + [DISTURBED] * 8, [CLEAN] * 2, "too few undisturbed passes"),
        ([DISTURBED] * 10, [DISTURBED] * 10, "disturbed"),
        ([CLEAN] * 3 + [IDLE] * 7, [CLEAN] * 3 + [IDLE] * 7, "leaves cores idle"),
    ],
)
def test_what_is_kept_when_the_bound_is_reached(
    passes: list[Pass], counted: list[Pass], flag: str
) -> None:
    assert is_finished(passes, 5)
    assert kept(passes, 5) == (counted, flag)


def test_share_of_equal_tokens() -> None:
    assert equal_share([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 5, 6]]) == pytest.approx(5 / 6)
    assert equal_share([[1]], []) is None
