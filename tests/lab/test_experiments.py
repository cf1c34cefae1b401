"""Every experiment in a tiny version: it runs, and writes its table and its picture."""

import csv
import json
import os
import sys
from pathlib import Path

import pytest
from tests.products import first_fast

from lab.common import loads
from lab.common.claims import ClaimVerdict, Measurement, bar, check, summary
from lab.common.experiment import Effort, Experiment, LabError, Skipped, Trial
from lab.papers import experiments, experiments_named, spin_fig12
from penstock.cli import main
from penstock.sim.capacity import MeasuredCapacity
from penstock.sim.parallel import workers
from penstock.sim.run import Setup

pytest.importorskip("matplotlib")

TINY = Effort(arrivals=250, tolerance=0.5, curve_arrivals=60, shares=(0.3, 1.0), tries=0, seeds=1)
MEASURED = {"wait_linear_model"}
FAST = "wait_lemmas"
UNTOLD = ("utility is steady", "gains 1.1× ")
"""Parts of claims whose controls pass in runs as small as these, or at any length."""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of PyTorch wait for each other where another test has one of the cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture
def expected_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fluid expects instead of a search, which so few arrivals would not allow."""

    def expected(setup: Setup, at: object, low: float, high: float, **_: float) -> MeasuredCapacity:
        return MeasuredCapacity(high / 1.1, low, high)

    monkeypatch.setattr(loads, "capacity", expected)


@pytest.fixture
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the figures with most cells: those that their claims are about."""
    monkeypatch.setattr(spin_fig12, "_BATCHES", (16, 32))
    monkeypatch.setattr(spin_fig12, "_ROUNDS", 24)
    monkeypatch.setattr(spin_fig12, "_LAYERS", 1)
    monkeypatch.setattr(spin_fig12, "_HEADS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("expected_capacities", "few_cells")
@pytest.mark.parametrize(
    "name", [FAST, *first_fast(sorted(set(experiments()) - MEASURED - {FAST}), 0)]
)
def test_an_experiment_writes_its_files_and_judges_every_claim(name: str, tmp_path: Path) -> None:
    is_whole(name, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("expected_capacities")
def test_figure_12_of_spin_does_with_all_its_cells(tmp_path: Path) -> None:
    is_whole("spin_fig12", tmp_path)


def is_whole(name: str, tmp_path: Path) -> None:
    """A tiny run tells what it does, writes its files and judges every claim against a control, and
    what does not hold against an oracle."""
    told: list[str] = []
    verdicts = experiments()[name].run(Trial(tmp_path, TINY, tell=told.append))
    assert verdicts
    assert all(v.claim and v.measured for v in verdicts)
    for v in verdicts:
        if v.outcome != "not measured":
            assert v.control is not None, v.claim
            assert v.control.measured, v.claim
            # What the claim is false of must not pass for it; but so few live turns are noise.
            untold = experiments()[name].is_live or any(part in v.claim for part in UNTOLD)
            assert v.control.outcome != "holds" or untold, v.claim
            # And what does not hold must be able to.
            assert v.oracle is not None or v.outcome != "does not hold", v.claim
    assert told
    assert all(what.startswith(name) for what in told)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    with (tmp_path / f"{name}.csv").open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert rows
    assert all(len(row) == len(header) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["goodspeed_fig2", FAST]))
def test_the_same_command_writes_the_same_csv_again(name: str, tmp_path: Path) -> None:
    written = []
    for again in ("first", "second"):
        out = tmp_path / again
        out.mkdir()
        experiments()[name].run(Trial(out, TINY))
        written.append((out / f"{name}.csv").read_bytes())
    assert written[0] == written[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["goodspeed_theorems", "goodspeed_fig4", "wait_theorems", "spin_fig13"]
)
def test_two_workers_write_what_one_writes(name: str, tmp_path: Path) -> None:
    found = []
    for num in (1, 2):
        out = tmp_path / str(num)
        out.mkdir()
        with workers(num) as pool:
            verdicts = experiments()[name].run(Trial(out, TINY, workers=pool))
        found.append((verdicts, (out / f"{name}.csv").read_text(encoding="utf-8")))
    assert found[0] == found[1]


def test_a_missing_data_folder_skips_with_a_message(tmp_path: Path) -> None:
    entry = experiments()["wait_linear_model"]
    with pytest.raises(Skipped, match="PENSTOCK_DATA"):
        entry.run(Trial(tmp_path, TINY))
    with pytest.raises(Skipped, match="which is not in"):
        entry.run(Trial(tmp_path, TINY, data=tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_unknown_entry_names_the_known_ones() -> None:
    with pytest.raises(LabError, match=r"choose from all, .*wait_theorems"):
        experiments_named("wait_fig9")
    assert [e.name for e in experiments_named("all")] == sorted(experiments())


def above_three(numbers: list[int]) -> Measurement:
    return Measurement(f"the least is {min(numbers)}", (min(numbers) > 3,))


def test_a_bar_is_met_or_missed_or_only_told() -> None:
    found = [bar("speed", "2 (bar 1)", True), bar("memory", "9", None)]
    assert [v.line() for v in found] == ["[met] speed: 2 (bar 1)", "[for information] memory: 9"]
    assert summary(found) == {"met": True, "lines": ["speed: 2 (bar 1)", "memory: 9"]}
    assert summary([*found, bar("errors", "1", False)])["met"] is False


def test_a_claim_that_its_control_passes_is_not_shown() -> None:
    shown = check("all are above 3", above_three, [4, 5], "ones", [1, 1])
    assert shown.outcome == "holds"
    assert shown.line() == (
        "[holds] all are above 3: the least is 4. Control, ones [does not hold]: the least is 1"
    )
    assert check("all are above 3", above_three, [4], "fives", [5]).outcome == "not shown"
    assert check("all are above 3", above_three, [2], "ones", [1]).outcome == "does not hold"


def test_a_claim_that_its_oracle_fails_cannot_be_told() -> None:
    def outcome(data: list[int], best: list[int]) -> str:
        return check("above 3", above_three, data, "ones", [1], ("fives", best)).outcome

    assert outcome([2], [5]) == "does not hold"
    assert outcome([2], [3]) == "inconclusive"
    assert outcome([4], [3]) == "holds"
    told = check("above 3", above_three, [2], "ones", [1], ("fives", [5])).line()
    assert told.endswith("Oracle, fives [holds]: the least is 5")


def test_a_part_is_no_verdict_where_the_oracle_fails() -> None:
    def outcome(found: tuple[bool, ...], best: tuple[bool, ...]) -> str:
        oracle = "hindsight", best
        return check("", lambda p: Measurement("", p), found, "", (False,), oracle).outcome

    assert outcome((True, False), (True, True)) == "holds in part"
    for best in ((True, False), (False, True), (False, False)):
        assert outcome((True, False), best) == "inconclusive"
    assert outcome((True, True), (True, False)) == "holds"


def test_runs_are_counted_as_they_end(tmp_path: Path) -> None:
    told: list[str] = []
    job = Trial(tmp_path, TINY, tell=told.append)
    found = job.by_cell(lambda cell, seed: seed, [("a",), ("b",)], range(3), what=lambda c, _: c)
    assert found == {("a",): [0, 1, 2], ("b",): [0, 1, 2]}
    assert told == ["a (0 of 6 runs done)", "b (3 of 6 runs done)"]


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["penstock", "reproduce", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with an entry that writes a file and one that is skipped."""

    def run(job: Trial) -> list[ClaimVerdict]:
        job.tell("half of [it]")
        (job.out / "toy.csv").write_text("a\n1\n", encoding="utf-8")
        return [ClaimVerdict("claim", f"{job.effort.arrivals} arrivals", "does not hold")]

    def skip(job: Trial) -> list[ClaimVerdict]:
        raise Skipped("no data")

    found = {"toy": Experiment("toy", "A toy", run), "toyless": Experiment("toyless", "None", skip)}
    monkeypatch.setattr("lab.papers.experiments", lambda: found)


@pytest.mark.usefixtures("one_entry")
def test_json_has_verdicts_files_and_reasons(monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "new" / "folder"
    assert _call(monkeypatch, "all", "--quick", "--json", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert printed.err == "[1/2] half of [it]\n"
    toy, toyless = json.loads(printed.out)["entries"]
    assert toy["verdicts"][0]["outcome"] == "does not hold"
    assert toy["verdicts"][0]["line"] == "[does not hold] claim: 20000 arrivals"
    assert toy["files"] == [str(out / "toy.csv"), str(out / "toy.json")]
    result = json.loads((out / "toy.json").read_text(encoding="utf-8"))
    assert (result["title"], result["command"]) == ("A toy", "penstock reproduce toy --quick")
    assert result["verdicts"] == ["[does not hold] claim: 20000 arrivals"]
    assert (toyless["skipped"], toyless["verdicts"]) == ("no data", [])


def test_an_unknown_name_is_one_line_and_code_2(monkeypatch, capsys, tmp_path) -> None:
    assert _call(monkeypatch, "fig0", "--out", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: unknown reproduction 'fig0'")
    assert error.count("\n") == 1


def test_without_matplotlib_it_says_so(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _call(monkeypatch, "wait_fig4_6", "--out", str(tmp_path)) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
