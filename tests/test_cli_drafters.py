"""What the simulator's commands say of drafters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main

Cli = Callable[..., tuple[int, str, str]]
LOAD = ("--workload", "low", "--profile", "zoo-large", "--admission", "vllm_v1", "--rate", "20")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`penstock simulate` with more options: exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        whole = ["penstock", "simulate", *LOAD, "--requests", "60", *arguments]
        monkeypatch.setattr(sys, "argv", whole)
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_requests_by_domain_with_every_fitted_drafter(cli: Cli) -> None:
    code, out, err = cli("--acceptance", "zoo", "--selection", "epsilon_greedy", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {"ngram", "draft-tiny", "draft-base"} <= set(told["drafters"])
    assert told["switches_per_request"] > 0
    assert sum(d["accepted"] for d in told["drafters"].values()) == told["draft_tokens_accepted"]


def test_times_and_capacities_are_the_drafters_own(cli: Cli) -> None:
    common = ("--acceptance", "zoo", "--drafter", "draft-tiny", "--drafter", "draft-base", "--json")
    names = ("--set", "selection.drafter=draft-base", "--set", "allocation.k=4")
    code, out, err = cli(
        *common, *names, "--allocation", "fixed", "--drafter-seconds", "draft-base=0.5:0.25"
    )
    assert code == 0, err
    base = json.loads(out)["drafters"]["draft-base"]
    assert base["seconds"] > 0.5 * base["rounds"] / 60
    # Prompts of 62 tokens are read first, at a quarter of a second each.
    assert base["seconds"] > 60 * 61 * 0.25
    code, out, err = cli(
        *common, *names, "--allocation", "fixed", "--drafter-capacity", "draft-base=2x3"
    )
    assert code == 0, err
    assert {f"draft-base/{i}" for i in (1, 2, 3)} >= set(json.loads(out)["drafters"])


def test_bare_names_need_an_acceptance(cli: Cli) -> None:
    code, _, err = cli("--drafter", "draft-tiny")
    assert code == 2
    assert "a drafter is NAME=RATE" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--acceptance", "nowhere"), "choose from zoo, zoo-greedy, or name a file"),
        (("--acceptance", "zoo", "--drafter", "x"), "no acceptance was fitted for drafter 'x'"),
        (("--acceptance", "zoo", "--drafter-capacity", "x=3"), "unknown drafter 'x'"),
        (("--acceptance", "zoo", "--drafter-seconds", "x"), "NAME=SECONDS"),
    ],
)
def test_bad_drafters_are_one_line(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert not out
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_file_with_fits_serves_as_the_bundled_one(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    fit = {"drafters": ["a"], "domains": {"d": {"mean": [1.0], "covariance": [[0.1]]}}}
    path.write_text(json.dumps({"origin": "a test", "fits": {"sampled": fit}}))
    code, out, err = cli("--acceptance", str(path), "--json")
    assert code == 0, err
    assert set(json.loads(out)["drafters"]) == {"a"}
