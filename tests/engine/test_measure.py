"""Step times of an engine: measured, written, and read again instead of measuring."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.config import parse_config, read_profile
from penstock.engine import calibrate
from penstock.engine.build import Engine, load_engine
from penstock.engine.measure import ProfileGrid, measure, num_measurements

GRID = ProfileGrid((1, 2, 4), (0, 3), (16, 64), (1, 8, 64), repeats=3, together_s=0.01)


@pytest.fixture(scope="module")
def settings(family: dict[str, Path]) -> dict[str, Any]:
    return {
        "target": family["target"],
        "drafters": {"near": str(family["near"]), "far": str(family["far"])},
        "dtype": "float32",
        "num_threads": 1,
        "kv_tokens": 2048,
    }


def load(settings: dict[str, Any], *, calibrated: bool = True, **more: Any) -> Engine:
    config = parse_config({"engine": {**settings, **more}}).engine
    return load_engine(config, calibrated=calibrated)


def test_every_model_is_measured(settings: dict[str, Any]) -> None:
    engine = load(settings, calibrated=False)
    calls = []
    measured = measure(engine, GRID, lambda: calls.append(1))
    assert len(calls) == num_measurements(engine, GRID)
    assert len(measured.steps) == 2 * 3 * 2 + 2 * 3
    assert all(seconds > 0 for _, seconds in measured.steps)
    assert [d.name for d in measured.drafters] == ["near", "far"]
    for known in measured.drafters:
        assert known.batch_counts == (1, 2, 4)
        assert known.batch_seconds[0] > 0
        assert min(known.slowdown, known.target_slowdown) >= 1
    assert measured.drafters[0].per_catch_up_token > 0
    # Nothing is left behind that a request could stumble over.
    assert engine.scheduler.pool.num_used_blocks == 0


def test_served_steps_are_of_whole_requests_with_drafts_and_without(
    settings: dict[str, Any],
) -> None:
    engine = load(settings, calibrated=False, drafters={"suffix": "suffix"})
    measured = measure(engine, GRID)
    assert len(measured.served) == GRID.repeats
    for own in measured.served:
        for drafts in (False, True):
            works = [step.work for step in own if step.drafts is drafts]
            assert sum(work.num_prefill_tokens for work in works) == 24 * 48
            assert any(work.num_prefill_tokens and work.num_decodes for work in works)
            assert any(work.num_draft_tokens for work in works) <= drafts
        assert max(step.work.num_decodes for step in own) > 4
        assert min(step.seconds for step in own) > 0
    assert any(step.work.num_draft_tokens for own in measured.served for step in own)
    assert engine.scheduler.pool.num_used_blocks == 0


def test_a_grid_stays_within_memory_and_context(settings: dict[str, Any]) -> None:
    engine = load(settings, calibrated=False, kv_tokens=512, max_model_len=96)
    measured = measure(engine, replace(GRID, batches=(1, 4, 8)))
    works = [work for work, _ in measured.steps]
    assert {w.num_decodes for w in works if w.num_kv_tokens == 64 * w.num_decodes} == {0, 1, 4}
    assert {w.num_decodes for w in works if w.num_kv_tokens == 16 * w.num_decodes} == {0, 1, 4, 8}
    assert measured.drafters[0].batch_counts == (1, 4)
    assert not any(w.num_prefill_tokens == 64 and w.prefill_context > 64 * 32 for w in works)


@pytest.mark.slow
def test_measured_by_command_and_read_by_the_engine(settings, tmp_path) -> None:
    out = tmp_path / "toy.json"
    drafters = [f"--drafter={name}={path}" for name, path in settings["drafters"].items()]
    result = CliRunner().invoke(
        app,
        [
            *("profile", "measure", str(settings["target"]), *drafters, "--out", str(out)),
            *(
                "--set=num_threads=1",
                "--batch=1,4",
                "--contexts=16",
                "--repeats=1",
                "--dtype=float32",
            ),
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    profile = read_profile(out)
    assert told["name"] == profile.name == "toy"
    assert [d.name for d in profile.drafters] == ["near", "far"]
    assert "median of 1" in profile.origin
    assert "1 thread" in profile.origin

    data = json.loads(out.read_text())
    data |= {"pace": 1.0, "host_fixed": 0.5}
    data["drafters"][1].update(batch_counts=[1], batch_seconds=[7.0], per_catch_up_token=3.0)
    out.write_text(json.dumps(data))
    times = load(settings, profile=out).scheduler.learn.times
    assert times.curve_of("far")(1) == 7.0, "believed, not measured"
    assert times.catch_up_of("far") == 3.0
    assert times.target(8) == pytest.approx(profile.linear(8) + 0.5), "of whole served steps"


def test_without_a_profile_reading_is_measured_too(settings: dict[str, Any]) -> None:
    times = load(settings).scheduler.learn.times
    assert 0 < times.catch_up_of("near") < times.curve_of("near")(1)


def test_auto_gives_drafters_on_the_targets_cores_no_lane(settings, monkeypatch) -> None:
    """Nor measures them beside the target. Control: with `async` each has one."""
    monkeypatch.setattr(calibrate, "slowdowns", None)
    lanes = {name: load(settings, pipeline=name).scheduler.lanes for name in ("auto", "async")}
    assert lanes == {"auto": ("target",), "async": ("near", "far", "target")}
