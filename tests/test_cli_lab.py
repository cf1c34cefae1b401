"""The laboratory's commands: there in a clone, one line that says where they are without one."""

from pathlib import Path

import pytest
import typer

from penstock import cli
from penstock.cli import lab


def run(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("other")(lambda: None)
    return app


@pytest.mark.parametrize(
    "arguments", [("reproduce", "all", "--quick"), ("zoo", "train"), ("zoo", "--help")]
)
def test_without_a_clone_they_say_where_they_are(
    app: typer.Typer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.setattr(lab, "_CLONE", tmp_path)
    lab.add_commands(app)
    assert run(app, monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"`penstock {arguments[0]}` runs from a clone" in err


def test_in_a_clone_they_run(app, monkeypatch, capsys) -> None:
    lab.add_commands(app)
    assert run(app, monkeypatch, "reproduce", "list") == 0
    assert "spin_fig12" in capsys.readouterr().out
