"""Profiles that come with the program, profile files, and their fit to measurements."""

import csv
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lab.common.operators import linear_profile
from penstock.fluid.step_profile import DrafterProfile, ServedStep, StepProfile, StepWork
from penstock.sim.profiles import (
    Fit,
    ProfileError,
    fit_profile,
    load_profile,
    paces,
    save_profile,
    with_served,
)
from penstock.sim.profiles import fit_steps as fit_measured

DATA = Path(
    os.environ.get("PENSTOCK_DATA", Path(__file__).resolve().parents[2].parent / "shared/data")
)
TRUTH = StepProfile(
    name="truth",
    kv_tokens=5000,
    token_counts=(1, 8, 9, 64, 256),
    token_seconds=(0.004, 0.0042, 0.006, 0.0063, 0.02),
    decode_fixed=3e-4,
    per_decode=2e-5,
    per_kv_token=3e-7,
    per_prefill_token=5e-6,
    per_prefill_context=4e-9,
)


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not there; PENSTOCK_DATA names the data folder")
    return path


def write_rows(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


# By name


@pytest.mark.parametrize(
    ("tokens", "milliseconds"),
    [(1, 9.0), (64, 9.7), (128, 12.2), (256, 17.8), (384, 23.6), (512, 33.4)],
)
def test_the_a100_has_the_designs_figures(tokens: int, milliseconds: float) -> None:
    assert load_profile("a100-llama2-7b").linear(tokens) * 1e3 == pytest.approx(
        milliseconds, abs=0.06
    )


@pytest.mark.parametrize("gpu", ["a100", "h100", "a40"])
def test_what_is_shipped_agrees_with_the_measurements(gpu: str) -> None:
    measured = linear_profile(data_file(f"vidur_{gpu}_llama2_7b_mlp.csv.gz"), 32)
    shipped = load_profile(f"{gpu}-llama2-7b")
    ratios = [measured.linear(n) / shipped.linear(n) for n in range(1, 4097)]
    assert 0.999 < min(ratios) < max(ratios) < 1.001


# Files


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    for profile in (TRUTH, replace(TRUTH, state_slots=48)):
        save_profile(profile, tmp_path / "truth.json")
        assert load_profile(tmp_path / "truth.json") == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"speed": 1}, r"profile .*bad\.json: speed: unknown field"),
        ({"name": ""}, "a profile needs a name"),
        ({"kv_tokens": 1.5}, "kv_tokens: Input should be"),
        ({"per_decode": "fast"}, "per_decode: Input should be"),
        ({"per_decode": -1.0}, "no coefficient may be negative"),
        ({"state_slots": 0}, "a state needs a slot, not 0"),
        ({"token_seconds": [1.0]}, "as many times as token counts"),
        ({"token_seconds": [5.0, 4.0, 3.0, 2.0, 1.0]}, "cannot be faster"),
        ({"token_counts": [1, 2, 2, 3, 4]}, "must rise"),
        ({"per_kv_token": float("nan")}, "finite number"),
        (
            {"token_counts": [0], "token_seconds": [0.0], "per_prefill_token": 0.0},
            "token must take",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(asdict(TRUTH) | change))
    with pytest.raises(ProfileError, match=complaint) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"bad\.json"):
        load_profile(str(path))


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="choose from paper-linear, a100-llama2-7b"):
        load_profile("v100")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path)


# Whole steps


def steps(num: int, seed: int, noise: float = 0.0) -> list[tuple[object, ...]]:
    """Random steps of `TRUTH`."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[object, ...]] = []
    while len(rows) < num:
        prefill = int(rng.integers(0, 200)) * int(rng.random() < 0.5)
        decodes = int(rng.integers(0, 40)) * int(rng.random() < 0.8)
        drafts = decodes * int(rng.integers(0, 4))
        context = prefill * float(rng.integers(0, 4000))
        work = StepWork(prefill, context, decodes, decodes * int(rng.integers(50, 900)), drafts)
        if seconds := TRUTH.seconds(work):
            rows.append((*work, seconds * (1 + noise * rng.standard_normal())))
    return rows


STEP_HEADER = (*StepWork._fields, "seconds")


def fit_steps(path: Path) -> Fit:
    return fit_profile(path, name="live", kv_tokens=5000)


def test_steps_without_noise_give_the_truth_back(tmp_path: Path) -> None:
    fitted = fit_steps(write_rows(tmp_path / "s.csv", STEP_HEADER, steps(3000, seed=0)))
    (quality,) = fitted.quality
    assert quality.num_measurements == 3000
    assert quality.max_relative_error < 0.003
    assert quality.r_squared > 0.9999
    found = fitted.profile
    for term in ("decode_fixed", "per_decode", "per_kv_token", "per_prefill_context"):
        assert getattr(found, term) == pytest.approx(getattr(TRUTH, term), rel=0.05)
    assert found.linear(8) == pytest.approx(TRUTH.linear(8), rel=0.01)
    assert found.linear(9) == pytest.approx(TRUTH.linear(9), rel=0.01)
    assert found.kv_tokens == 5000


def test_a_grid_tells_what_prompts_save() -> None:
    """Their logits, beside equal steps that verify."""
    truth = replace(TRUTH, per_decode=0.0, per_prefill_token=-0.2 * TRUTH.least_added)
    works = [StepWork(n, n * n / 2) for n in range(1, 257)]
    works += [StepWork(0, 0.0, 1, 90, n - 1) for n in range(1, 257)]
    grid = [(work, truth.seconds(work)) for work in works]
    for is_grid in (True, False):
        fit = fit_measured(grid, name="grid", kv_tokens=1, origin="", is_grid=is_grid)
        assert (fit.quality[0].max_relative_error < 0.01) is is_grid
    with pytest.raises(ValueError, match="no coefficient may be negative"):
        replace(TRUTH, per_prefill_token=-1.1 * TRUTH.least_added)


@pytest.mark.parametrize("num", [500, 3000])
def test_noise_draws_no_stairs(tmp_path: Path, num: int) -> None:
    """At which prompts would be cut, where the machine has none; a clear one stays."""
    rng = np.random.default_rng(num)
    sizes = rng.integers(1, 600, num)
    noise = np.exp(rng.normal(0, 0.12, num))

    def fitted(seconds: Callable[[int], float]) -> StepProfile:
        rows = [(n, 0, 0, 0, 0, seconds(n) * e) for n, e in zip(sizes.tolist(), noise, strict=True)]
        return fit_steps(write_rows(tmp_path / "s.csv", STEP_HEADER, rows)).profile

    line = fitted(lambda n: 0.003 + 6e-5 * n)
    assert len(line.token_counts) == 2
    assert [line.linear(n) for n in (64, 500)] == pytest.approx([0.00684, 0.033], rel=0.04)
    stair = fitted(lambda n: 0.004 + 0.008 * -(-n // 256))
    assert stair.linear(300) > 1.4 * stair.linear(230)
    assert stair.linear(230) < 1.15 * stair.linear(120)


def test_bad_measurements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        fit_steps(tmp_path / "none.csv")
    with pytest.raises(ProfileError, match="does not have the columns num_prefill_tokens, "):
        fit_steps(write_rows(tmp_path / "s.csv", STEP_HEADER[1:], [(1, 1, 1, 1, 1)]))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ((1, 0, 0, 0, 0, -1), "line 2: seconds '-1' is negative"),
        ((1, 0, 0, 0, 0, 0), "line 2: seconds '0' belongs to a step without"),
        ((0, 0, 0, 0, 0, 1), "line 2: num_prefill_tokens '0' belongs to a step without"),
        ((1, 0, 1.5, 0, 0, 1), "line 2: num_decodes '1.5' is not a whole number"),
        ((1, 0, 0, "inf", 0, 1), "line 2: num_kv_tokens 'inf' is not a finite number"),
    ],
)
def test_bad_steps_are_refused(tmp_path: Path, row: tuple[object, ...], complaint: str) -> None:
    path = write_rows(tmp_path / "s.csv", STEP_HEADER, [row])
    with pytest.raises(ProfileError, match=complaint):
        fit_steps(path)


def test_drafters_are_kept_in_the_file(tmp_path: Path) -> None:
    small = DrafterProfile("small", (1, 8), (1e-3, 2e-3), 1e-5, 1.5, 1.2)
    profile = replace(load_profile("zoo-large"), drafters=(small,))
    path = tmp_path / "with.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    data = json.loads(path.read_text())
    for wrong, message in (
        ({"batch_seconds": [2e-3, 1e-3]}, "a larger step cannot be faster"),
        ({"slowdown": 0.0}, "cannot be negative"),
        ({"speed": 1}, "drafters.0.speed"),
    ):
        broken = {**data, "drafters": [{**data["drafters"][0], **wrong}]}
        path.write_text(json.dumps(broken))
        with pytest.raises(ProfileError, match=message):
            load_profile(path)


def test_what_a_request_adds_to_well_filled_steps() -> None:
    """Its prompt in steps of the best size takes just that, any other way takes longer."""
    profile = load_profile("a100-llama2-7b")
    counts, seconds = profile.token_counts, profile.token_seconds
    best = min((s / c, c) for s, c in zip(seconds, counts, strict=True) if c)[1]
    steps = [StepWork(best, best * (i + 0.5) * best) for i in range(3)]
    assert profile.request_seconds(3 * best, 0) == pytest.approx(sum(map(profile.seconds, steps)))
    assert profile.request_seconds(100, 0) < profile.seconds(StepWork(100, 5000.0))
    # Another 50 tokens with about 1,025 of context each, in a step with 63 others like it.
    batch = profile.seconds(StepWork(0, 0.0, 64, 64 * 1025)) - profile.decode_fixed
    token = (profile.request_seconds(1000, 50) - profile.request_seconds(1000, 0)) / 50
    assert token < batch / 64 < 2.5 * token


# Served steps


def served_steps(
    pace: float, host: float, per_decode: float, factors: tuple[float, ...], per_drafting=0.0
) -> list[list[ServedStep]]:
    works = [
        StepWork(prefill, prefill * prefill / 2, decodes, decodes * 90)
        for prefill in (0, 0, 0, 48)
        for decodes in range(1, 17)
    ]
    each = {False: per_decode, True: per_decode + per_drafting}
    return [
        [
            ServedStep(w, f * (pace * TRUTH.seconds(w) + host + each[d] * w.num_decodes), d)
            for w in works
            for d in (False, True)
        ]
        for f in factors
    ]


def test_pace_and_host_of_served_steps_are_found() -> None:
    found = with_served(TRUTH, served_steps(1.3, 4e-4, 3e-5, (1.0, 1.0), 2e-5))
    assert found.pace == pytest.approx(1.3, rel=0.01)
    assert found.host_fixed == pytest.approx(4e-4, rel=0.05)
    assert found.host_per_decode == pytest.approx(3e-5, rel=0.05)
    assert found.host_per_drafting == pytest.approx(2e-5, rel=0.05)
    assert found.spread == pytest.approx(0, abs=1e-3)
    # The models' own times stay what they were.
    nothing = dict.fromkeys(("host_fixed", "host_per_decode", "host_per_drafting", "spread"), 0.0)
    assert replace(found, pace=1.0, **nothing) == TRUTH


def test_whole_served_steps_are_predicted_after_a_stall_too() -> None:
    measured = served_steps(1.1, 2e-4, 0.0, (1.0,))
    stalled = measured[0].pop(5)
    found = with_served(
        TRUTH, [[*measured[0], stalled._replace(seconds=40 * stalled.seconds)]]
    ).served()
    for work, seconds, _ in measured[0]:
        assert found.seconds(work) == pytest.approx(seconds, rel=0.02)
    assert TRUTH.seconds(measured[0][0].work) < 0.9 * measured[0][0].seconds


def test_steps_that_are_now_and_then_disturbed_take_their_mean() -> None:
    (even,) = served_steps(1.0, 0.0, 0.0, (1.0,))
    factors = itertools.cycle((0.9, 0.9, 0.9, 0.9, 2.4))
    measured = [s._replace(seconds=next(factors) * s.seconds) for s in even]
    found = with_served(TRUTH, [measured])
    expected = sum(found.served(drafts=s.drafts).seconds(s.work) for s in measured)
    assert sum(s.seconds for s in measured) == pytest.approx(expected, rel=0.02)


def test_steps_that_do_not_depend_on_the_work_are_the_hosts() -> None:
    """Of a tiny model: the pace of its passes cannot be told, and is not 0."""
    (measured,) = served_steps(1.0, 0.0, 0.0, (1.0,))
    longest = 2 * max(step.seconds for step in measured)
    found = with_served(TRUTH, [[step._replace(seconds=longest) for step in measured]])
    assert (found.pace, found.host_fixed > 0) == (1.0, True)


def test_the_spread_is_that_of_the_passes() -> None:
    found = with_served(TRUTH, served_steps(1.0, 0.0, 0.0, (0.9, 1.0, 1.1)))
    assert found.spread == pytest.approx(0.1, rel=0.05)


def test_served_steps_have_the_factor_on_all_times() -> None:
    drafter = DrafterProfile("small", (1, 4), (1e-3, 2e-3), 1e-5)
    host = {"host_fixed": 3e-4, "host_per_decode": 1e-5, "host_per_drafting": 2e-5}
    profile = replace(TRUTH, pace=1.2, drafters=(drafter,), **host)
    work = StepWork(10, 50.0, 3, 300, 6)
    whole = 1.2 * TRUTH.seconds(work) + 3e-4 + 3 * 1e-5
    assert profile.served().seconds(work) == pytest.approx(whole)
    assert profile.served(1.5).seconds(work) == pytest.approx(1.5 * whole)
    assert profile.served(drafts=True).seconds(work) == pytest.approx(whole + 3 * 2e-5)
    assert profile.served().served(1.5).seconds(work) == pytest.approx(1.5 * whole)
    assert profile.served(1.5).drafters[0].seconds(4, 2, 7) == pytest.approx(
        1.8 * drafter.seconds(4, 2, 7)
    )


def test_paces_are_as_likely_slow_as_fast() -> None:
    logs = np.log(paces(0.05, 20))
    assert logs.mean() == pytest.approx(0, abs=1e-12)
    assert logs.std() == pytest.approx(0.05, rel=0.1)
    assert paces(0.05, 1) == [1.0]


def test_a_pace_is_over_zero() -> None:
    with pytest.raises(ValueError, match="a pace is over 0, not 0"):
        replace(TRUTH, pace=0.0)
