import numpy as np
import pytest

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.stages import stages_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile, StepWork
from penstock.fluid.traffic import (
    Speculation,
    TrafficType,
    decode_len,
    scaled,
    traffic_from_lengths,
)

D0, D1 = 9.35e-3, 4.10e-7
LOW = (TrafficType(1.0, 62, 10), TrafficType(1.0, 62, 20))
HIGH = (TrafficType(6.0, 62, 100), TrafficType(4.0, 62, 200), TrafficType(2.0, 62, 300))
STAIRS = StepProfile(
    name="stairs",
    kv_tokens=20_000,
    token_counts=(1, 64, 128, 256, 512),
    token_seconds=(9e-3, 9.7e-3, 12.2e-3, 17.8e-3, 33.4e-3),
    granularity=8,
    decode_fixed=0.25e-3,
    per_decode=3.4e-5,
    per_kv_token=2.55e-7,
    per_prefill_token=5.8e-6,
    per_prefill_context=4.8e-9,
)


def test_a_stage_range_is_the_sum_of_its_stages() -> None:
    for wave in (1, 3, 8, 64):
        stages = stages_of(TrafficType(1.0, 62, 41), wave)
        for phase in range(wave):
            decodes = [k for k in range(phase, 42, wave) if k > 0]
            work = stages.work(3, phase)
            assert work.num_prefill_tokens == (3 * 62 if phase == 0 else 0)
            assert work.prefill_context == (3 * 62**2 / 2 if phase == 0 else 0)
            assert work.num_decodes == 3 * len(decodes)
            assert work.num_kv_tokens == 3 * sum(62 + k for k in decodes)
        assert stages.num_stages == -(-42 // wave)
    assert stages_of(LOW[1]).kv_tokens() == 21 * (62 + 10), "(l' + 1)(l + l'/2)"


def test_the_linear_profile_has_the_papers_closed_form() -> None:
    for traffic, factor in ((LOW, 100.0), (LOW, 800.0), (HIGH, 5.0)):
        mix = scaled(traffic, factor)
        load = sum(t.rate * (t.decode_len + 1) * (t.prompt_len + t.decode_len / 2) for t in mix)
        found = equilibrium(PAPER_LINEAR, mix)
        assert found.kv_tokens == pytest.approx(D0 * load / (1 - D1 * load)), "eq. 5"
        assert found.iteration_s == pytest.approx(D0 + D1 * found.kv_tokens)
        assert found.per_stage == pytest.approx([found.iteration_s * t.rate for t in mix]), "4"
        held = [(t.decode_len + 1) * (t.prompt_len + t.decode_len / 2) for t in mix]
        in_types = [n * kv for n, kv in zip(found.per_stage, held, strict=True)]
        assert sum(in_types) == pytest.approx(found.kv_tokens), "eq. 3: n_j* is the total"


def test_a_staircase_has_its_least_fixed_point() -> None:
    mix = scaled(HIGH, 0.7)
    found = equilibrium(STAIRS, mix)
    ranges = [stages_of(t) for t in mix]
    rng = np.random.default_rng(1)

    def seconds_of(per_second: float) -> float:
        """A step that has `per_second` seconds' arrivals at each stage, by whole prompts of a
        system a million times as large."""
        work = [t.rate * per_second * np.array(r.work()) for t, r in zip(mix, ranges, strict=True)]
        prefill, context, decodes, kv, drafts = np.sum(work, axis=0)
        tokens = prefill + decodes + drafts
        attention = STAIRS.seconds(StepWork(0, 0.0, 1, 0)) - STAIRS.linear(1)
        attention += STAIRS.per_decode * (decodes - 1) + STAIRS.per_kv_token * kv
        attention += STAIRS.per_prefill_token * prefill + STAIRS.per_prefill_context * context
        return STAIRS.linear(int(np.ceil(tokens))) + float(attention)

    assert seconds_of(found.iteration_s) == pytest.approx(found.iteration_s)
    for shorter in rng.uniform(0, found.iteration_s, 500):
        assert seconds_of(float(shorter)) > shorter, "nothing shorter keeps up"


def test_beyond_its_table_a_profile_goes_on_straight() -> None:
    slope = 21.2e-3 / 384
    per_token = slope + 5.8e-6 + 4.8e-9 * 250
    prompts = (TrafficType(1.0, 500, 0),)
    limit = 1 / (500 * per_token)
    found = equilibrium(STAIRS, scaled(prompts, 0.95 * limit))
    assert found.kv_tokens > 512
    past = 33.4e-3 - 512 * slope
    assert found.iteration_s == pytest.approx(past / 0.05, rel=1e-6)
    with pytest.raises(ValueError, match="unstable"):
        equilibrium(STAIRS, scaled(prompts, 1.001 * limit))
    with pytest.raises(ValueError, match="attention alone"):
        equilibrium(PAPER_LINEAR, scaled(prompts, 1e4))


def test_two_ways_to_count_an_output() -> None:
    assert decode_len(1) == 0, "the prefill step samples the first token"
    assert TrafficType(1.0, 5, decode_len(10)).output_len == 10
    with pytest.raises(ValueError, match="at least 1 token"):
        decode_len(0)


def test_bad_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="positive rate"):
        TrafficType(0.0, 62, 10)
    with pytest.raises(ValueError, match="prompt of at least 1"):
        TrafficType(1.0, 0, 10)
    with pytest.raises(ValueError, match="between 1 and 4 tokens"):
        Speculation(5.0, 3)


def test_lengths_become_types() -> None:
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 500, 4000), rng.geometric(0.01, 4000)
    types = traffic_from_lengths(prompts, outputs, rate=7.0, max_types=10)
    assert len(types) == 10
    assert sum(t.rate for t in types) == pytest.approx(7.0)
    assert max(t.rate for t in types) < 1.2 * 0.7, "about equally many each"
    assert types[-1].decode_len == outputs.max() - 1
    tops = np.array([t.decode_len for t in types])
    assert (np.diff(tops) > 0).all()
    held = tops[np.searchsorted(tops, outputs - 1)]
    assert (held >= outputs - 1).all(), "a type's stages hold all of its requests"
    mean = sum(t.rate * t.prompt_len for t in types) / 7.0
    assert prompts.mean() <= mean <= prompts.mean() + 1
    assert traffic_from_lengths([5, 7], [3, 3], 1.0) == (TrafficType(1.0, 6, 2),)
    with pytest.raises(ValueError, match="pairs"):
        traffic_from_lengths([5], [3, 3], 1.0)
