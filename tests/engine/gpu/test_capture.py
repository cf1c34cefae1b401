"""Captured steps, replayed on a GPU that is none: see `pretend_gpu`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.core.world import replace_policies
from tests.engine.gpu.pretend_gpu import FakeGraph, pretended_gpu, queued
from tests.engine.gpu.test_ahead import Whimsical
from tests.engine.gpu.test_gpu_benchmark import QWEN, SMALL, TINY
from tests.engine.small_family import write_family
from tests.engine.test_exactness import SAMPLINGS, make_requests
from typer.testing import CliRunner

from lab.bench.gpu import report as gpu
from penstock.cli import app
from penstock.config import EngineConfig, PolicyConfig, read_profile
from penstock.core.types import NO_DRAFTER
from penstock.engine import calibrate
from penstock.engine.build import Engine, load_engine
from penstock.engine.gpu import graphs
from penstock.engine.gpu.executor import GraphExecutor
from penstock.engine.gpu.graphs import GraphRunner
from penstock.engine.models import random as random_models
from penstock.serving.offline import complete

pytestmark = pytest.mark.slow  # `test_graphs` and `test_ahead` run the same code uncaptured

DRAFTERS = ("same", "near", "far")


@pytest.fixture
def engine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    paths = write_family(tmp_path_factory.mktemp("family"))
    monkeypatch.setattr(graphs, "why_not_triton", lambda device: "it would not be on the CPU")
    with pretended_gpu(monkeypatch):
        yield load_engine(
            EngineConfig(
                target=paths["target"],
                drafters={name: str(paths[name]) for name in DRAFTERS},
                dtype="float32",
                device="cuda",
                attention="packed",
                kv_tokens=32 * 256,
                allocation=PolicyConfig(name="fixed"),
            ),
            calibrated=False,
        )


def texts(engine: Engine, sampling: str, drafter: str) -> tuple[list[list[int]], int]:
    """And the number of accepted draft tokens."""
    done = complete(engine.loop, make_requests(SAMPLINGS[sampling], 4, drafter, 16), 4)
    return [c.token_ids for c in done], sum(c.usage.num_accepted_tokens for c in done)


def test_output_is_the_targets_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every step replayed many times, most of them begun before they are planned, and all
    work of the device put off until it is waited for."""
    assert engine.backend == "graphs"
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    assert executor.runs_ahead
    alone, _ = texts(engine, "coupled", NO_DRAFTER)
    at_once = {drafter: texts(engine, "coupled", drafter) for drafter in DRAFTERS}
    assert all(text == alone for text, _ in at_once.values())
    assert at_once["same"][1] > at_once["near"][1] > at_once["far"][1]
    with queued(monkeypatch):
        assert texts(engine, "coupled", NO_DRAFTER)[0] == alone
        assert texts(engine, "coupled", "near") == at_once["near"]
        replace_policies(engine.scheduler, allocation=Whimsical(1))
        assert texts(engine, "coupled", "near")[0] == alone
    assert executor.num_rounds_ahead > 0.5 * executor.totals.num_target_steps
    target = executor.target
    assert isinstance(target, GraphRunner)
    assert target.graphs
    assert all(graph._captured is not None for graph in target.graphs)


def test_the_usual_sizes_are_recorded_before_they_are_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: it is not part of any measurement, nor of the time for them."""
    clock, capture = engine.clock, graphs.CudaGraph._capture
    now, slept = clock.now, [0.0]

    def slowly(self: graphs.CudaGraph) -> FakeGraph:
        slept[0] += 60.0
        return capture(self)  # type: ignore[return-value]

    monkeypatch.setattr(graphs.CudaGraph, "_capture", slowly)
    monkeypatch.setattr(type(clock), "now", lambda self: now() + slept[0])
    monkeypatch.setattr(calibrate, "_ROWS", (1, 2, 7))
    monkeypatch.setattr(calibrate, "_BATCHES", (1, 3))
    calibrate.calibrate(engine.executor, engine.scheduler.learn, clock, budget_s=200.0)
    assert slept[0] > 60.0 * (1 + len(DRAFTERS))
    times = engine.scheduler.learn.times
    assert [rows for rows, _ in times.target.points()] == [1, 2, 7]
    for name in DRAFTERS:
        assert [n for n, _ in times.curve_of(name).points()] == [1, 3]
    assert all(seconds < 60.0 for _, seconds in times.target.points())


def test_negative_control_a_length_kept_from_the_host_is_caught(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that takes a number from the host gives it for ever."""
    alone, _ = texts(engine, "greedy", NO_DRAFTER)
    settle = GraphRunner._settle

    def kept(self: GraphRunner, step: graphs._Step, *, by_row: bool) -> None:
        settle(self, step, by_row=by_row)
        step.settled.seq_lens.copy_(torch.tensor(step.settled.seq_lens.numpy().copy()))

    monkeypatch.setattr(GraphRunner, "_settle", kept)
    for runner in (engine.executor.target, *(d.runner for d in engine.executor.drafters.values())):
        runner._forwards.clear()
        runner._drafts.clear()
    assert texts(engine, "greedy", NO_DRAFTER)[0] != alone


def test_negative_control_a_host_that_does_not_wait_is_caught(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it writes where the device has yet to read."""
    alone, _ = texts(engine, "greedy", NO_DRAFTER)
    monkeypatch.setattr(graphs._Step, "writable", lambda self: None)
    with queued(monkeypatch):
        assert texts(engine, "greedy", "near")[0] != alone


def test_negative_control_a_look_at_the_device_is_caught(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = GraphRunner._settle

    def looking(self: GraphRunner, step: graphs._Step, *, by_row: bool) -> None:
        settle(self, step, by_row=by_row)
        assert int(step.settled.seq_lens.sum()) >= 0

    monkeypatch.setattr(GraphRunner, "_settle", looking)
    with pytest.raises(AssertionError, match="looks at what is not there yet"):
        texts(engine, "greedy", NO_DRAFTER)


def test_the_benchmark_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, as on a GPU; its times mean nothing."""
    monkeypatch.setattr(random_models, "_shapes", lambda: {"tiny": TINY, "qwen": QWEN})
    monkeypatch.setattr(graphs, "why_not_triton", lambda device: "it would not be on the CPU")
    setting = dataclasses.replace(SMALL, device=torch.device("cuda"))
    with pretended_gpu(monkeypatch):
        gpu.report(setting, gpu.ITEMS, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["item"] for row in rows} == set(gpu.ITEMS)
    assert not [row for row in rows if row["case"] == "failed"]
    assert all(row["passed"] is not False for row in rows if row["item"] == "numerics")


def test_a_profile_is_measured(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_family(tmp_path_factory.mktemp("family"))
    monkeypatch.setattr(graphs, "why_not_triton", lambda device: "it would not be on the CPU")
    made = tmp_path / "profile.json"
    options = "--device cuda --dtype float32 --batch 1,4 --contexts 32 --repeats 2 --kv-tokens 4096"
    drafter = f"near={paths['near']}"
    command = ["profile", "measure", str(paths["target"]), "--drafter", drafter, "--out", str(made)]
    with pretended_gpu(monkeypatch):
        result = CliRunner().invoke(app, [*command, *options.split()])
    assert result.exit_code == 0, result.output
    assert [d.name for d in read_profile(made).drafters] == ["near"]
