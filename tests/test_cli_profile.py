"""`penstock profile`."""

import functools
import json
from pathlib import Path

import pytest
from tests.conftest import Cli

from penstock.sim.profiles import load_profile

STEPS = (
    "num_prefill_tokens,prefill_context,num_decodes,num_kv_tokens,num_draft_tokens,seconds\n"
    "8,32,0,0,0,0.01\n16,128,0,0,0,0.01\n0,0,4,400,0,0.012\n0,0,4,800,0,0.013\n"
)


@pytest.fixture
def profile(cli: Cli) -> Cli:
    """Runs `penstock profile`."""
    return functools.partial(cli, "profile")


def test_show_prints_a_profile(profile: Cli) -> None:
    code, out, _ = profile("show", "a100-llama2-7b")
    assert code == 0
    assert "111,580 KV tokens" in out
    assert "a100-llama2-7b" in out


def test_show_as_json_is_a_profile_file(profile: Cli, tmp_path: Path) -> None:
    code, out, _ = profile("show", "a100-llama2-7b", "--json")
    assert code == 0
    path = tmp_path / "copy.json"
    path.write_text(out)
    assert load_profile(path) == load_profile("a100-llama2-7b")


def test_fit_writes_a_profile(profile: Cli, tmp_path: Path) -> None:
    steps, out_file = tmp_path / "steps.csv", tmp_path / "mine.json"
    steps.write_text(STEPS)
    code, out, _ = profile("fit", steps, "--out", out_file, "--kv-tokens", 900, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["profile"] == "mine"
    assert report["fit"][0]["num_measurements"] == 4
    assert report["fit"][0]["max_relative_error"] < 0.01
    fitted = load_profile(out_file)
    assert fitted.kv_tokens == 900
    assert fitted.per_kv_token == pytest.approx(0.001 / 400, rel=0.01)
    code, out, _ = profile("fit", steps, "--out", out_file, "--kv-tokens", 900)
    assert code == 0
    assert "mine.json" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("show", "v100"), "unknown profile 'v100'"),
        (("fit", "none.csv", "--out", "x.json", "--kv-tokens", "1"), "cannot be read"),
        (("fit", "none.csv", "--out", "x.json", "--kv-tokens", "0"), "--kv-tokens"),
        (("fit", "steps.csv", "--out", "no/such/x.json", "--kv-tokens", "1"), "No such file"),
    ],
)
def test_bad_input_is_one_line(profile, tmp_path, monkeypatch, arguments, complaint) -> None:
    monkeypatch.chdir(tmp_path)
    Path("steps.csv").write_text(STEPS)
    code, out, err = profile(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("penstock: ")
    assert complaint in err
    assert err.count("\n") == 1
