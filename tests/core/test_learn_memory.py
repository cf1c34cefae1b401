"""What the traffic seen so far takes of KV memory in the fluid."""

import numpy as np
import pytest

from penstock.core.learn import Estimators
from penstock.core.learn.memory import TokenPace, fluid_kv
from penstock.core.state import RequestState
from penstock.core.types import Request

TOKEN_S = 0.02


def seen(rate: float, prompt_len: int, output_lens: list[int], seconds: int = 200) -> Estimators:
    """After requests have come evenly, and outputs ended."""
    learn = Estimators()
    for i in range(int(rate * seconds)):
        learn.traffic.arrived(Request(str(i), prompt_len, 100), i / rate)
        learn.lengths.ended(output_lens[i % len(output_lens)])
    return learn


@pytest.mark.parametrize("output_lens", [[50], [10, 90], [1], [5000]])
def test_the_mean_is_that_of_littles_law(output_lens: list[int]) -> None:
    rate, prompt_len = 4.0, 100
    found = fluid_kv(seen(rate, prompt_len, output_lens), 200.0, TOKEN_S)
    assert found is not None
    held = [sum(prompt_len + k for k in range(n)) for n in output_lens]
    assert found.mean == pytest.approx(rate * TOKEN_S * np.mean(held), rel=0.03)
    assert found.bound > found.mean


def test_nothing_is_known_at_first() -> None:
    learn = Estimators()
    assert fluid_kv(learn, 1.0, TOKEN_S) is None
    learn.traffic.arrived(Request("a", 10, 10), 0.0)
    assert fluid_kv(learn, 1.0, TOKEN_S) is None
    learn.lengths.ended(5)
    assert fluid_kv(learn, 1.0, TOKEN_S) is not None
    assert fluid_kv(learn, 1.0, 0.0) is None


def test_seconds_of_a_token() -> None:
    states = [RequestState(Request(str(i), 10, 100), i) for i in range(3)]
    pace = TokenPace()
    pace.look(states, 9.0)
    assert pace.seconds is None
    for state, first_at, num in zip(states, (1.0, 3.0, 8.9), (5, 3, 1), strict=True):
        state.first_token_at, state.num_output_tokens = first_at, num
    pace.look(states, 9.0)
    assert pace.seconds == pytest.approx((8.0 + 6.0) / (4 + 2))
    pace.look([], 10.0)
    assert pace.seconds == pytest.approx((8.0 + 6.0) / (4 + 2))
    # One that has made little says little.
    states[2].num_output_tokens = 2
    pace.look(states[2:], 10.9)
    assert pace.seconds == pytest.approx((0.9 * 14.0 + 2.0) / (0.9 * 6 + 1))
