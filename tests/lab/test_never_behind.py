"""The comparison of the default bundle with all others, and what takes a price away."""

from pathlib import Path

import numpy as np

from lab.bench.never_behind import WITHOUT, Cell, closed, compare, decisions, four_tenants, measured
from lab.common.cells import Cells
from lab.common.families import closed_loop
from penstock.sim.parallel import HERE
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup

VALUES = {"auto": 2.0, "wait": 1.0, "vllm_v1, priced": 1.6}


def test_systems_are_bundles_or_an_admission_with_lengths() -> None:
    assert [decisions("auto", remote)["pipeline"] for remote in (False, True)] == ["off", "auto"]
    parts = decisions("sarathi, fixed 3")
    assert (parts["admission"].name, parts["allocation"].options) == ("sarathi", {"k": 3})


def test_rows_and_verdicts_name_the_best_other(tmp_path: Path) -> None:
    cell = Cell("c", lambda name, seed: {"value": VALUES[name] + seed}, ("wait", "vllm_v1, priced"))
    results = compare([cell], range(2), Cells(tmp_path / "out"), HERE)
    (row,) = results.runs["cells"]
    assert row["best"] == "vllm_v1, priced"
    assert 1.15 < row["mean"] < 1.25
    assert [v.outcome for v in results.verdicts] == ["met", "missed", "met", "met"]


def test_a_client_sends_again_when_it_has_its_answer() -> None:
    setup = Setup(load_profile("a100-llama2-7b"), **decisions("vllm_v1, none"))
    made = closed(setup, closed_loop(np.full(400, 100), 50), 2, 8.0)
    assert 700 < made["default"] < 900  # 2 tokens in about 10 ms, for 4 s


def test_a_second_that_costs_nothing_loses() -> None:
    cell = Cell("c", four_tenants, ())
    with_price = measured(cell, "auto", 0)["value"]
    assert measured(cell, f"auto without {next(iter(WITHOUT))}", 0)["value"] < 0.9 * with_price
