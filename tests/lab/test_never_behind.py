"""The comparison of the default bundle with all others, and what takes a price away."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lab.bench import several_drafters
from lab.bench.never_behind import FAR, HELD_OUT, OPEN, _chosen, compare, main
from lab.bench.never_behind_cells import (
    BEFORE,
    CARELESS,
    STRANGER,
    added,
    cells,
    every_second,
    with_look_up,
)
from lab.bench.never_behind_scenes import KNOWING, beside_a_stranger, four_tenants, servers
from lab.bench.never_behind_systems import WITHOUT, Cell, decisions, measured
from lab.common.cells import Cells
from lab.common.clients import second_half, served
from lab.common.families import closed_loop
from penstock.sim.parallel import HERE
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup

VALUES = {"auto": 2.0, "wait": 1.0, "vllm_v1, priced": 1.6}


def cell_of(name: str, values: dict[str, float], **more: Any) -> Cell:
    return Cell(name, lambda system, seed: {"value": values[system] + seed}, [*values][1:], **more)


def test_systems_are_bundles_or_an_admission_with_lengths() -> None:
    assert [decisions("auto", remote)["pipeline"] for remote in (False, True)] == ["off", "auto"]
    parts = decisions("sarathi, fixed 3")
    assert (parts["admission"].name, parts["allocation"].options) == ("sarathi", {"k": 3})


def test_systems_name_a_selection_or_one_drafter() -> None:
    assert decisions("fluid_guided, priced, lbss")["selection"].name == "lbss"
    one = decisions("fluid_guided, fixed 3, draft-base")["selection"]
    assert (one.name, one.options) == ("single", {"drafter": "draft-base"})


def test_rows_and_verdicts_name_the_best_other(tmp_path: Path) -> None:
    results = compare([cell_of("c", VALUES)], range(2), Cells(tmp_path / "out"), HERE)
    (row,) = results.runs["cells"]
    assert row["best"] == "vllm_v1, priced"
    assert 1.15 < row["mean"] < 1.25
    assert [v.outcome for v in results.verdicts] == ["met", "met", "met"]


def test_a_system_far_behind_is_measured_with_no_more_seeds(tmp_path: Path) -> None:
    """All with the first seed; then those near the best other, and the default before."""
    values = {"auto": 200.0, "best": 100.0, "near": 90.0, "far": 80.0, BEFORE: 50.0}
    done = Cells(tmp_path / "out")
    results = compare([cell_of("c", values)], range(3), done, HERE)
    seeds = {name: len(done.values(f"c/{name}", "value")) for name in values}
    assert seeds == {"auto": 3, "best": 3, "near": 3, "far": 1, BEFORE: 3}
    (row,) = results.runs["cells"]
    assert row["over"]["far"] == 200 / 80


def test_held_out_cells_are_told_apart(tmp_path: Path) -> None:
    worse = VALUES | {"auto": 1.5}
    grid = [
        cell_of("a", VALUES),
        cell_of("b", VALUES, kind=FAR),
        cell_of("c", worse, held_out=True),
    ]
    results = compare(grid, range(1), Cells(tmp_path / "out"), HERE)
    told = {v.claim.partition(" against")[0]: v for v in results.verdicts}
    assert told[OPEN].measured.startswith("2 of 2 (1.00) at 0.98")
    assert told[HELD_OUT].measured.startswith("0 of 1 (0.00) at 0.98 (bar 0.8), least 0.938")
    assert (told[OPEN].outcome, told[HELD_OUT].outcome) == ("met", "missed")
    assert told["draft servers at 300 ms"].measured == "least 1.250 of 1 (bar 0.95)"
    assert [t.title.partition(", ")[2] for t in results.tables[:2]] == [OPEN, HELD_OUT]


def test_every_second_added_cell_is_held_out_and_runs_only_if_asked(tmp_path: Path) -> None:
    groups = (added(tmp_path), with_look_up(tmp_path))
    wanted = {name for group in groups for name in every_second(cell.name for cell in group)}
    assert {cell.name for cell in cells(tmp_path) if cell.held_out} == wanted
    asked = Namespace(data=tmp_path, only="", held_out=True, quick=False)
    assert {cell.name for cell in _chosen(asked)} >= wanted
    asked.held_out = False
    assert not {cell.name for cell in _chosen(asked)} & wanted
    asked.quick = True
    quick = [cell.kind for cell in _chosen(asked)]
    assert sorted(quick) == sorted({cell.kind for cell in cells(tmp_path)})


def test_every_cell_has_the_default_before_as_a_rival(tmp_path: Path) -> None:
    grid = cells(tmp_path)
    assert all(BEFORE in cell.rivals and cell.kind for cell in grid)
    assert len({cell.name for cell in grid}) == len(grid)


def test_a_client_sends_again_when_it_has_its_answer() -> None:
    setup = Setup(load_profile("a100-llama2-7b"), **decisions("vllm_v1, none"))
    made = second_half(setup, closed_loop(np.full(400, 100), 50), 2, 8.0)
    assert 700 < made["default"] < 900  # 2 tokens in about 10 ms, for 4 s


def test_draft_servers_serve_clients() -> None:
    scene = several_drafters.scene("servers", Path())
    rates = {}
    for names in ((), scene.draft_servers):
        more: dict[str, Any] = {"draft_servers": names, "pipeline": "async"}
        chosen = decisions("vllm_v1, fixed 4") | more
        setup = Setup(scene.profile, acceptance=scene.acceptance(0), block_size=16, **chosen)
        tokens = served(setup, closed_loop(np.full(60, 50), 100), 1, (1.0, 4.0))["default"]
        assert 2 < tokens[1] / tokens[0] < 4
        rates[bool(names)] = tokens[1]
    assert rates[True] > 1.1 * rates[False]


def test_words_of_prompts_tell_the_domain() -> None:
    acceptance = several_drafters.scene("specialists 0.05 0.4", Path()).acceptance(0)
    load = closed_loop(np.full(40, 60), 10)
    words = several_drafters.prompt_words(acceptance, load, 0)
    domains = [acceptance.domain_of(str(i)) for i in range(40)]  # type: ignore[attr-defined]
    alike = {
        same: np.mean(
            [
                len({*words[i]} & {*words[j]})
                for i in range(40)
                for j in range(i)
                if (domains[i] == domains[j]) is same
            ]
        )
        for same in (True, False)
    }
    assert alike[True] > 1.5 * alike[False]


@pytest.mark.parametrize("profile", ["a40-llama2-7b", "zoo-grown"])
def test_drafters_of_the_family_are_smaller_than_their_target(profile: str) -> None:
    made = several_drafters.family_profile(profile)
    seconds = [drafter.seconds(32, 1) / made.linear(32) for drafter in made.drafters]
    assert 0 < min(seconds) < max(seconds) < 0.2


@pytest.mark.slow
def test_a_second_that_costs_nothing_loses() -> None:
    cell = Cell("c", four_tenants, ())
    with_price = measured(cell, "auto", 0)["value"]
    assert measured(cell, f"auto without {next(iter(WITHOUT))}", 0)["value"] < 0.9 * with_price


def test_servers_without_drafts_are_as_fast_however_far() -> None:
    near, far = (servers(2, trip, 0.1, "vllm_v1, none", 0)["value"] for trip in (0.0, 0.3))
    assert near == far


def test_what_others_keep_beside_a_stranger(tmp_path: Path) -> None:
    """Met where `auto` keeps it and fixed lengths lose it; else missed."""
    values = {"auto": 99.0, BEFORE: 90.0, CARELESS: 80.0}
    values |= {f"auto{KNOWING}": 100.0, f"{CARELESS}{KNOWING}": 100.0}

    def outcome(**changed: float) -> str:
        cell = cell_of("s", values | changed, kind=STRANGER)
        results = compare([cell], range(1), Cells(tmp_path / str(changed)), HERE)
        (found,) = [v.outcome for v in results.verdicts if "what the others keep" in v.claim]
        return found

    assert outcome() == "met"
    assert outcome(auto=96.0) == "missed"
    assert outcome(**{CARELESS: 99.0}) == "missed"


def test_a_stranger_who_asks_for_none_drafts_nothing() -> None:
    """The others' tokens are those beside a tenant without a drafter: more, with fixed lengths."""
    scene = partial(beside_a_stranger, 0.05)
    with patch("lab.bench.never_behind_scenes._SECONDS", 2.0):
        careless, knowing = (scene(f"{CARELESS}{end}", 0)["value"] for end in ("", KNOWING))
    assert knowing > 1.05 * careless


def test_no_cell_of_that_name_is_said_in_one_line(tmp_path: Path, capsys: Any) -> None:
    asked = ["--only", "nosuch", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(asked) == 2
    assert capsys.readouterr().err == "never_behind: no cell that runs has 'nosuch' in its name\n"
