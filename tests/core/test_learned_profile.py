"""A step-time profile drawn from noisy steps."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from penstock.core.learn.profile import LearnedProfile
from penstock.fluid.step_profile import StepProfile, StepWork

BEFORE = StepProfile("before", 5440, (0,), (0.01,))
LINE = StepProfile("line", 5440, (1, 2048), (0.0026, 0.127), 1, 0.0, 1.25e-4, 5.7e-7, 0.0, 3.6e-8)


def learned(seconds: Callable[[StepWork], float], noise: float, seed: int = 0) -> StepProfile:
    """From steps of decoding requests alone, and of such with prompts, as they come in turn."""
    rng = np.random.default_rng(seed)
    found = LearnedProfile()
    profile = BEFORE
    for i in range(3000):
        decodes = int(rng.integers(1, 31))
        prompt = int(rng.integers(16, 600)) if i % 3 == 0 else 0
        work = StepWork(prompt, prompt**2 / 2, decodes, decodes * int(rng.integers(80, 240)))
        found.add_step(work, seconds(work) * float(np.exp(rng.normal(0, noise))))
        if i % 250 == 0:
            profile = found.drawn(profile)
    return found.drawn(profile)


def test_noise_draws_no_stairs_and_a_decoding_request_is_no_prompt_token() -> None:
    """The machine's cost of a position is the same everywhere, so a prompt is to be cut nowhere."""
    profile = learned(LINE.seconds, 0.12)
    slopes = [
        (profile.linear(b) - profile.linear(a)) / (b - a)
        for a, b in itertools.pairwise(range(10, 1400, 60))
    ]
    # Some of it may be taken for a kink, from which on each position costs a little more.
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=0.1)
    assert slopes[0] == pytest.approx(6.08e-5, rel=0.05)
    for work in (StepWork(0, 0.0, 24, 24 * 160), StepWork(300, 45_000.0, 10, 1600)):
        assert profile.seconds(work) == pytest.approx(LINE.seconds(work), rel=0.05)


def test_a_clear_stair_is_found() -> None:
    """As of kernels that compute 256 positions at once."""

    def stairs(work: StepWork) -> float:
        return 0.004 + 0.008 * -(-work.num_positions // 256)

    profile = learned(stairs, 0.03)
    assert profile.linear(240) < 1.15 * profile.linear(120)
    assert profile.linear(300) > 1.4 * profile.linear(240)
    assert profile.linear(480) < 1.15 * profile.linear(300)


def test_a_size_that_was_never_tried_is_worth_a_try_and_then_known() -> None:
    """400 positions take hardly more than 40, which steps of 2 and of 2,000 do not tell."""

    def seconds(num: int) -> float:
        return 0.004 if num <= 400 else 1e-4 * num

    found = LearnedProfile()
    for _ in range(20):
        for num in (2, 2000):
            found.add_step(StepWork(num), seconds(num))
    hoped = found.drawn(BEFORE)
    line = np.interp(362, [2, 2000], [hoped.linear(2), hoped.linear(2000)])
    assert hoped.linear(362) < 0.95 * line
    for num in (2, 2000, 362) * 20:
        found.add_step(StepWork(num), seconds(num))
    known = found.drawn(BEFORE)
    assert known.linear(362) == pytest.approx(0.004, rel=0.1)
    assert known.linear(362) / 362 < known.linear(2000) / 2000


def test_a_machine_that_is_slower_from_now_on_is_followed_by_the_shorter_memory() -> None:
    """After 3,000 steps: with a memory of 1,000 steps 192 more would leave 0.8 of the error."""
    rng = np.random.default_rng(0)
    found = LearnedProfile()
    profile = BEFORE
    for i in range(3000 + 192):
        work = StepWork(int(rng.integers(4, 400)))
        slower = 1.0 if i < 3000 else 2.0
        found.add_step(work, slower * LINE.seconds(work) * float(np.exp(rng.normal(0, 0.1))))
        if i % 64 == 63:
            profile = found.drawn(profile)
    assert profile.linear(200) > 1.6 * LINE.linear(200)


def test_one_stall_changes_little() -> None:
    found = LearnedProfile()
    for _ in range(50):
        for size in (4, 40, 400):
            found.add_step(StepWork(size), 0.002 + 6e-5 * size)
    found.drawn(BEFORE)
    found.add_step(StepWork(40), 5.0)
    assert found.drawn(BEFORE).linear(40) < 1.15 * (0.002 + 6e-5 * 40)


def test_what_fits_no_step_is_left_out() -> None:
    found = LearnedProfile()
    found.add_step(StepWork(8), 0.004)
    before = found.drawn(BEFORE)
    found.add_step(StepWork(), 0.004)
    found.add_step(StepWork(8), 0.0)
    assert found.drawn(BEFORE) == before
    assert before.kv_tokens == BEFORE.kv_tokens
