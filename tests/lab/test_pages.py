"""Pages of results: written from result files, and up to date."""

import json
import re
import sys
from pathlib import Path

import pytest

from lab.common.claims import Measurement, bar, check
from lab.common.pages import main, pages
from lab.common.results import Results, parser, save, table, tell
from lab.papers import experiments

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_pages_are_what_the_result_files_say() -> None:
    found = list(pages(DOCS))
    assert len(found) >= 6
    for path, text in found:
        assert path.read_text(encoding="utf-8") == text, "run python -m lab.common.pages"


def test_every_result_says_how_when_and_where() -> None:
    for path in DOCS.glob("results/*/*.json"):
        if path.name != "page.json":
            result = json.loads(path.read_text(encoding="utf-8"))
            assert all(result[key] for key in ("title", "command", "date", "machine")), path
            for one in result["tables"]:
                assert {len(row) for row in one["rows"]} == {len(one["header"])}, path


def test_what_a_command_names_is_there() -> None:
    paths = [ROOT / "README.md", ROOT / "Makefile", *DOCS.rglob("*.md"), *DOCS.rglob("*.json")]
    paths += [*(ROOT / "lab").rglob("*.py"), ROOT / "lab" / "README.md"]
    gone = {path: names_gone(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: names for path, names in gone.items() if names} == {}


def test_a_command_that_is_gone_is_found() -> None:
    """The control."""
    text = (
        "`python -m\nbenchmarks.tenants live`, `python -m lab.bench.nothing`, `benchmarks.wire`, "
        "`penstock reproduce\nspin_fig99 --quick`, `penstock reproduce spin_fig2`, "
        "`python -m lab.bench.soak`, `lab.zoo`, `python -m lab.bench.NAME`, `python -m pytest`"
    )
    gone = ["benchmarks.tenants", "benchmarks.wire", "lab.bench.nothing", "spin_fig99"]
    assert sorted(names_gone(text)) == gone


def names_gone(text: str) -> set[str]:
    """Modules and experiments that commands in a text name, and that are not there."""
    modules = set(re.findall(r"(?:python -m\s+|`)((?:lab|benchmarks)(?:\.\w+)+)", text))
    files = {name: ROOT / name.replace(".", "/") for name in modules - {"lab.bench.NAME"}}
    gone = {
        n for n, file in files.items() if not (file.with_suffix(".py").exists() or file.is_dir())
    }
    named = set(re.findall(r"penstock reproduce\s+([a-z]\w+)", text))
    return gone | named - {"list", "all"} - experiments().keys()


def results(speed: float) -> Results:
    rows = [{"name": "fast", "by": {"batch 1": speed}}]
    shown = table("Speed", rows, {"": "{name}", "tokens/s": "{by[batch 1]:.1f}"})
    return Results(rows, [bar("speed", f"{speed} (bar 1)", speed > 1)], [shown])


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "toys"
    folder.mkdir(parents=True)
    (folder / "page.json").write_text(json.dumps({"title": "Toys", "about": "What toys do."}))
    (folder / "top.json").write_text(json.dumps({"title": "A top", "about": "It spins."}))
    return tmp_path


def test_a_benchmark_writes_a_result_file_and_it_becomes_a_page(docs, monkeypatch, capsys) -> None:
    result = docs / "results" / "toys" / "top.json"
    monkeypatch.setattr(sys, "argv", ["top", "--quick", "--result", str(result)])
    assert tell(parser("Tops.", quick="short").parse_args(), results(2.0)) == 0
    assert "[met] speed: 2.0 (bar 1)" in capsys.readouterr().out
    kept = json.loads(result.read_text())
    assert (kept["title"], kept["tables"][0]["rows"]) == ("A top", [["fast", "2.0"]])
    assert kept["command"].endswith(" --quick")
    assert main(["--docs", str(docs)]) == 0
    page = (docs / "results" / "toys.md").read_text()
    assert "## A top\n\nIt spins." in page
    assert "| | tokens/s |\n| --- | --- |\n| fast | 2.0 |" in page
    assert "- [met] speed: 2.0 (bar 1)" in page


def test_of_a_control_and_an_oracle_a_page_tells_what_matters(docs: Path) -> None:
    def grows(by: tuple[int, int]) -> Measurement:
        return Measurement(f"by {by[0]} and {by[1]}", tuple(x > 1 for x in by))

    verdicts = [
        check("it grows", grows, (2, 2), "no growth", placebo) for placebo in ((0, 0), (0, 2))
    ]
    verdicts += [
        check("it grows", grows, found, "none", (0, 0), ("food", best))
        for found, best in (((0, 0), (2, 2)), ((0, 0), (2, 1)), ((3, 3), (2, 2)))
    ]
    save(
        docs / "results" / "toys" / "top.json", Results([], verdicts), command="top", machine="here"
    )
    (_, text), (data, claims) = pages(docs)
    line = "- [holds] it grows: by 2 and 2"
    assert f"{line}\n{line} (control: holds in part)\n" in text
    assert "- [does not hold] it grows: by 0 and 0\n" in text
    assert "- [inconclusive] it grows: by 0 and 0\n" in text
    assert "- [holds] it grows: by 3 and 3\n" in text
    assert data == docs / "results" / "claims.csv"
    whole = "toys,A top,top,inconclusive,it grows: by 0 and 0,none [does not hold]: by 0 and 0"
    assert f"{whole},food [holds in part]: by 2 and 1\n" in claims


def test_a_long_table_is_a_data_file_beside_the_result(docs: Path) -> None:
    path = docs / "results" / "toys" / "top.json"
    tables = [
        table(title, [{"turn": n} for n in range(rows)], {"turn": "{turn}"})
        for title, rows in (("Few", 8), ("Many", 9))
    ]
    save(path, Results([], [], tables), command="top", machine="here")
    (data, rows), (_, page), _ = pages(docs)
    assert data == path.with_name("top_table_2.csv")
    assert rows.splitlines() == ["turn", *map(str, range(9))]
    assert "Many\n\n[9 rows](toys/top_table_2.csv)\n" in page
    assert "| 7 |" in page
    assert "| 8 |" not in page


def test_a_stale_page_is_told(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = docs / "results" / "toys" / "top.json"
    save(result, results(2.0), command="top", machine="here")
    assert main(["--docs", str(docs)]) == 0
    assert main(["--docs", str(docs), "--check"]) == 0
    save(result, results(3.0), command="top", machine="here")
    capsys.readouterr()
    assert main(["--docs", str(docs), "--check"]) == 1
    assert "toys.md" in capsys.readouterr().out


def test_json_has_figures_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(parser(None).parse_args(["--json"]), results(0.5)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == {"met": False, "lines": ["speed: 0.5 (bar 1)"]}
    assert said["runs"][0]["by"] == {"batch 1": 0.5}
