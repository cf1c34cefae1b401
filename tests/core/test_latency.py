"""How much time a request has left for its target."""

from typing import Any

import pytest

from penstock.core.latency import remaining
from penstock.core.state import RequestState
from penstock.core.types import LatencyTarget, Request

MEAN = 40.0


def decoding(num_output: int, first_at: float = 2.0, **fields: Any) -> RequestState:
    """A request that came at 1 s, with its first token at 2 s."""
    state = RequestState(Request("r", 10, 100, arrival_time=1.0, **fields), 0)
    state.num_output_tokens = num_output
    state.first_token_at = first_at
    return state


def test_without_a_target_there_is_nothing_to_meet() -> None:
    assert remaining(decoding(3), 5.0, MEAN) is None


def test_tpot_counts_from_the_first_token_wherever_the_request_may_end() -> None:
    """Ten tokens after the first in 0.5 s each would have taken 5 s; 3 have passed."""
    left = remaining(decoding(11, latency=LatencyTarget(tpot=0.5)), 5.0, MEAN)
    assert left is not None
    assert left == pytest.approx((2.0 + 0.5 * MEAN, MEAN))
    assert left.rate == pytest.approx(MEAN / 22.0)
    told = decoding(11, latency=LatencyTarget(tpot=0.5), expected_output_tokens=12)
    assert remaining(told, 5.0, MEAN) == left


@pytest.mark.parametrize(
    ("fields", "tokens"), [({}, MEAN), ({"expected_output_tokens": 30}, 19.0), ({}, 89.0)]
)
def test_a_deadline_is_for_the_tokens_that_are_expected(fields, tokens) -> None:
    state = decoding(11, latency=LatencyTarget(deadline=10.0), **fields)
    left = remaining(state, 5.0, 1000.0 if tokens == 89.0 else MEAN)
    assert left == (6.0, tokens)


def test_of_two_targets_the_stricter_counts() -> None:
    both = decoding(1, latency=LatencyTarget(tpot=0.5, deadline=2.0), expected_output_tokens=41)
    left = remaining(both, 2.0, MEAN)
    assert left == (1.0, 40.0)


def test_what_is_missed_already_needs_nothing() -> None:
    left = remaining(decoding(1, latency=LatencyTarget(deadline=1.0)), 5.0, MEAN)
    assert left.rate == 0


def test_whether_a_target_was_met() -> None:
    assert LatencyTarget().is_met(1e9, 1e9)
    assert LatencyTarget(0.1, 2.0).is_met(0.1, 2.0)
    assert not LatencyTarget(0.1, 2.0).is_met(0.11, 2.0)
    assert not LatencyTarget(0.1, 2.0).is_met(0.1, 2.1)
