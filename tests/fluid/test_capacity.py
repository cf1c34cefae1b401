import numpy as np
import pytest
from tests.fluid.test_equilibrium import HIGH, LOW, STAIRS

from penstock.fluid.capacity import RequestWork, capacity_bound, output_work, request_work
from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile, StepWork
from penstock.fluid.traffic import NO_SPECULATION, Speculation, Traffic, TrafficType, scaled

MEMORY = 111_580


def paper_linear_capacity(profile: StepProfile, traffic: Traffic, kv_tokens: int) -> float:
    """The closed form for a profile d0 + d1 × tokens: the factor by which `traffic` can grow until
    Σ λ_j (l'_j + 1)(l_j + l'_j/2) = C / (d0 + d1 C), where M* of eq. 5 fills the memory."""
    d0, d1 = profile.token_seconds[0], profile.per_kv_token
    load = sum(t.rate * (t.decode_len + 1) * (t.prompt_len + t.decode_len / 2) for t in traffic)
    return kv_tokens / (d0 + d1 * kv_tokens) / load


def traffic_work(traffic: Traffic, speculation: Speculation = NO_SPECULATION) -> RequestWork:
    """Of a mix of types."""
    columns = zip(*((t.prompt_len, t.decode_len, t.rate) for t in traffic), strict=True)
    return request_work(*columns, speculation)


def test_the_linear_profile_has_the_closed_form() -> None:
    for traffic, expected in ((LOW, 1800.9), (HIGH, 74.60)):
        factor = paper_linear_capacity(PAPER_LINEAR, traffic, MEMORY)
        rate = factor * sum(t.rate for t in traffic)
        assert rate == pytest.approx(expected, rel=1e-4)
        bound = capacity_bound(PAPER_LINEAR, traffic_work(traffic), MEMORY)
        assert bound == pytest.approx(rate)
        full = equilibrium(PAPER_LINEAR, scaled(traffic, factor))
        assert full.kv_tokens == pytest.approx(MEMORY), "M* of eq. 5 fills the memory there"


@pytest.mark.slow
@pytest.mark.parametrize("gain", [Speculation(), Speculation(2.0, 3)])
def test_no_schedule_beats_it(gain: Speculation) -> None:
    """A closed system that always has work: random budgets and caps, best of many."""
    rng = np.random.default_rng(3)
    prompts, decodes = rng.integers(20, 300, 4000), 2 * rng.integers(5, 100, 4000)
    memory = 8_000
    work = request_work(prompts, decodes, speculation=gain)
    bound = capacity_bound(STAIRS, work, memory)
    best = 0.0
    for budget in (64, 128, 256):
        for cap in (16, 24, 32):
            best = max(best, closed_system(prompts, decodes, gain, memory, budget, cap))
    assert 0.75 * bound < best <= 1.01 * bound, "an upper bound, and not far above"


def closed_system(
    prompts: np.ndarray, decodes: np.ndarray, gain: Speculation, memory: int, budget: int, cap: int
) -> float:
    """Requests/s of whole prefills in front of running decodes, within memory at all times."""
    context = np.empty(0, dtype=np.int64)
    left = np.empty(0, dtype=np.int64)
    reserved = np.empty(0, dtype=np.int64)
    advance, extra = int(gain.tokens_per_step), gain.num_draft_tokens
    clock, served, coming, pending = 0.0, 0, 0, 0
    while coming < 400:
        room = max(budget - len(context) * (1 + extra), 0)
        chunk = room
        started = []
        while len(context) + len(started) < cap and chunk > 0:
            needed = prompts[coming] + decodes[coming] + extra
            if reserved.sum() + needed + sum(prompts[i] + decodes[i] for i in started) > memory:
                break
            step = min(chunk, prompts[coming] - pending)
            pending += step
            chunk -= step
            if pending == prompts[coming]:
                started.append(coming)
                coming, pending = coming + 1, 0
        done = room - chunk
        context_cost = done * 40.0
        clock += STAIRS.seconds(
            StepWork(done, context_cost, len(context), int(context.sum()), len(context) * extra)
        )
        context, left = context + advance, left - advance
        served += int((left <= 0).sum())
        stay = left > 0
        context = np.append(context[stay], prompts[started] + 1)
        left = np.append(left[stay], decodes[started])
        reserved = np.append(reserved[stay], prompts[started] + decodes[started] + extra)
    return served / clock


def test_it_uses_the_corners_of_a_staircase() -> None:
    steps = StepProfile("one step", 10**6, (100, 101, 1000), (1.0, 2.0, 2.0))
    work = request_work([100], [0])
    assert capacity_bound(steps, work, 1000) == pytest.approx(5.0)
    assert capacity_bound(steps, work, 500) == pytest.approx(2.5), "memory"
    assert capacity_bound(steps, work, 150) == pytest.approx(1.0)


def test_memory_binds_and_is_refused_when_too_small() -> None:
    work = traffic_work(HIGH)
    bounds = [capacity_bound(STAIRS, work, m) for m in (400, 2000, 20_000)]
    assert bounds[0] < bounds[1] < bounds[2]
    with pytest.raises(ValueError, match="cannot hold the longest request"):
        capacity_bound(STAIRS, work, 300)


def test_what_a_request_costs() -> None:
    work = request_work([10, 20], [0, 4], [1.0, 3.0])
    assert work.prefill_tokens == pytest.approx(17.5)
    assert work.prefill_context == pytest.approx((50 + 3 * 200) / 4)
    assert work.decode_steps == pytest.approx(3.0)
    assert work.kv_token_steps == pytest.approx(0.75 * (21 + 22 + 23 + 24))
    assert (work.min_context, work.max_context) == (21, 24)
    ours = output_work(np.array([10, 20]), np.array([1, 5]))
    assert ours == request_work([10, 20], [0, 4]), "the first token comes from the prefill"
    for wrong in ([1.0], [-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="weights"):
            request_work([10, 20], [0, 4], wrong)
    with pytest.raises(ValueError, match="pairs"):
        request_work([10], [0, 4])


def test_speculation_that_always_hits_pays_and_that_never_hits_does_not() -> None:
    plain = capacity_bound(STAIRS, traffic_work(HIGH), 20_000)
    good = capacity_bound(STAIRS, traffic_work(HIGH, Speculation(2.0, 1)), 20_000)
    bad = capacity_bound(STAIRS, traffic_work(HIGH, Speculation(1.0, 1)), 20_000)
    assert bad < plain < good


def test_types_and_lengths_agree() -> None:
    mix = (TrafficType(1.0, 30, 5), TrafficType(2.0, 40, 9))
    assert traffic_work(mix) == request_work([30, 40, 40], [5, 9, 9])
