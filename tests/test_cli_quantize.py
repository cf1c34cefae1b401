"""`penstock quantize`: what it writes is served, and bad input ends it with one line."""

import json
from pathlib import Path

import pytest
from tests.conftest import Cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.mark.slow
def test_a_quantised_pair_speculates(folders: Path, cli: Cli) -> None:
    """A target in 8 bits and a drafter in 4: the target's own tokens."""
    for name, weights in (("target-small", "int8"), ("draft-tiny", "int4")):
        out = folders / name
        code, stdout, err = cli("quantize", name, out, "--weights", weights, "--json")
        assert code == 0, err
        row = json.loads(stdout)
        assert row["out"] == str(out)
        assert row["bytes"] < row["bytes_before"]
        on_disk = (out / "model.safetensors").stat().st_size
        assert 0 < on_disk - row["bytes"] < 30_000

    def tokens(*options: str) -> list[int]:
        target = ("--target", str(folders / "target-small"), "--json", "--max-tokens", "32")
        code, stdout, err = cli("generate", "What is the sum of 3 and 4?", *target, *options)
        assert code == 0, err
        made: list[int] = json.loads(stdout)["token_ids"]
        return made

    assert tokens("--drafter", f"small={folders / 'draft-tiny'}") == tokens()


def test_the_table_says_what_was_written(cli: Cli, tmp_path: Path) -> None:
    code, stdout, err = cli("quantize", "draft-tiny", tmp_path / "out", "--weights", "int8")
    assert code == 0, err
    assert "matrices in int8" in stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nowhere", "out", "--weights", "int4"), "model 'nowhere' is neither"),
        (("draft-tiny", "out"), "--weights"),
        (("draft-tiny", "out", "--weights", "int3"), "'int3'"),
        (("draft-tiny", ".", "--weights", "int8"), "choose another"),
    ],
)
def test_bad_input(arguments, reason, cli, tmp_path, monkeypatch) -> None:
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("quantize", *arguments)
    assert code == 2
    assert reason in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
