"""What the simulator's commands say of drafters."""

import functools
import json
from pathlib import Path

import pytest
from tests.conftest import Cli

LOAD = ("--workload", "low", "--profile", "zoo-large", "--admission", "vllm_v1", "--rate", "20")


@pytest.fixture
def simulate(cli: Cli) -> Cli:
    """Runs `penstock simulate` with that load and more options."""
    return functools.partial(cli, "simulate", *LOAD, "--requests", 60)


def test_requests_by_domain_with_every_fitted_drafter(simulate: Cli) -> None:
    code, out, err = simulate("--acceptance", "zoo", "--selection", "lbss", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {"ngram", "draft-tiny", "draft-base"} <= set(told["drafters"])
    assert told["switches_per_request"] > 0
    assert sum(d["accepted"] for d in told["drafters"].values()) == told["draft_tokens_accepted"]


def test_times_and_capacities_are_the_drafters_own(simulate: Cli) -> None:
    common = ("--acceptance", "zoo", "--drafter", "draft-tiny", "--drafter", "draft-base", "--json")
    names = ("--selection", "single", "--set", "selection.drafter=draft-base")
    names += ("--set", "allocation.k=4")
    code, out, err = simulate(
        *common, *names, "--allocation", "fixed", "--drafter-seconds", "draft-base=0.5:0.25"
    )
    assert code == 0, err
    base = json.loads(out)["drafters"]["draft-base"]
    assert base["seconds"] > 0.5 * base["rounds"] / 60
    # Prompts of 62 tokens are read first, at a quarter of a second each.
    assert base["seconds"] > 60 * 61 * 0.25
    code, out, err = simulate(
        *common, *names, "--allocation", "fixed", "--drafter-capacity", "draft-base=2x3"
    )
    assert code == 0, err
    assert {f"draft-base/{i}" for i in (1, 2, 3)} >= set(json.loads(out)["drafters"])


def test_bare_names_need_an_acceptance(simulate: Cli) -> None:
    code, _, err = simulate("--drafter", "draft-tiny")
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
def test_bad_drafters_are_one_line(simulate: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = simulate(*arguments)
    assert code == 2
    assert not out
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_file_with_fits_serves_as_the_bundled_one(simulate: Cli, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    fit = {"drafters": ["a"], "domains": {"d": {"mean": [1.0], "covariance": [[0.1]]}}}
    path.write_text(json.dumps({"origin": "a test", "fits": {"sampled": fit}}))
    code, out, err = simulate("--acceptance", str(path), "--json")
    assert code == 0, err
    assert set(json.loads(out)["drafters"]) == {"a"}
