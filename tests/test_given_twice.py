"""A setting that is given twice is refused, wherever settings are given."""

import json
from pathlib import Path

import pytest
from tests.conftest import Cli

from penstock.config import ConfigError, read_settings

LOAD = ("--workload", "low", "--profile", "zoo-large", "--admission", "vllm_v1", "--rate", "20")
SHOW = ("config", "show")
SIMULATE = ("simulate", *LOAD, "--requests", "8")
DRAFTING = (*SIMULATE, "--drafter", "a=0.5")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ENGINE__DRAFTERS": '{"a": "ngram", "a": "suffix"}'}, "'a' is given twice"),
        ({"ENGINE__TENANTS": '{"t": {"weight": 1, "weight": 2}}'}, "'weight' is given twice"),
        ({"CORS_ORIGINS": '[{"a": 1, "a": 1}]'}, "'a' is given twice"),
        ({"ENGINE__ALLOCATION__OPTIONS": '{"k": 1, "k": 2}'}, "'k' is given twice"),
        ({"ENGINE__ALLOCATION__OPTIONS__K": '{"x": 1, "x": 2}'}, "'x' is given twice"),
        ({"PORT": "1", "port": "2"}, "PENSTOCK_PORT gives port, too"),
        (
            {"ENGINE__DRAFTERS": '{"a": "ngram"}', "ENGINE__DRAFTERS__A": "suffix"},
            "PENSTOCK_ENGINE__DRAFTERS gives engine.drafters.a, too",
        ),
    ],
)
def test_variables(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_settings(None, {f"PENSTOCK_{name}": text for name, text in variables.items()})
    assert "PENSTOCK_" in str(raised.value)


def test_variables_of_different_settings_go_together() -> None:
    given = {"ENGINE__DRAFTERS": '{"a": "ngram"}', "ENGINE__DRAFTERS__B": "suffix"}
    found = read_settings(None, {f"PENSTOCK_{name}": text for name, text in given.items()})
    assert found.values == {"engine": {"drafters": {"a": "ngram", "b": "suffix"}}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SHOW, "--drafter", "a=ngram", "--drafter", "a=suffix"), "--drafter: 'a'"),
        ((*SHOW, "--drafter", "ngram", "--drafter", "ngram=suffix"), "--drafter: 'ngram'"),
        (
            (
                "config",
                "show",
                "--engine",
                "vllm",
                *("--set", "vllm.args.a=1", "--set", "engine.vllm.args.a=2"),
            ),
            "--set: 'engine.vllm.args.a'",
        ),
        (
            (*SHOW, "--engine", "vllm", "--set", "vllm.args.a={x: 1, x: 2}"),
            "--set vllm.args.a: 'x'",
        ),
        ((*SIMULATE, "--set", "order=fcfs", "--set", "admission.order=fcfs"), "--set: 'order'"),
        (
            (
                *SIMULATE,
                "--fairness",
                "true",
                *("--tenant-weight", "a=1", "--tenant-weight", "a=2"),
            ),
            "--tenant-weight: 'a'",
        ),
        (
            (*DRAFTING, "--drafter-capacity", "a=1", "--drafter-capacity", "a=2"),
            "--drafter-capacity: 'a'",
        ),
        (
            (*DRAFTING, "--drafter-seconds", "a=1", "--drafter-seconds", "a=2"),
            "--drafter-seconds: 'a'",
        ),
        ((*SIMULATE, "--drafter", "a=0.5", "--drafter", "a=0.6"), "--drafter: 'a'"),
    ],
)
def test_options(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    code, out, error = cli(*arguments)
    assert (code, out) == (2, "")
    assert error == f"penstock: {said} is given twice\n"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--served-model-name a --served-model-name b", ["a", "b"]),
        ("--set served_model_name=[a,b]", ["a", "b"]),
        ("--set served_model_name=a", ["a"]),
        ("", ["kept"]),
    ],
)
def test_several_names_of_a_model(cli: Cli, tmp_path: Path, arguments, names) -> None:
    (tmp_path / "serve.yaml").write_text("served_model_name: [kept]")
    _, out, _ = cli(*SHOW, "--json", "--config", tmp_path / "serve.yaml", *arguments.split())
    assert {r["setting"]: r["value"] for r in json.loads(out)}["served_model_name"] == names


def test_several_drafters_generate(cli: Cli) -> None:
    """As they serve; the last was the only one."""
    model = ("--target", "target-large", "--drafter", "draft-nothing")
    code, _, err = cli("generate", "a", *model, "--drafter", "draft-tiny")
    assert (code, "'draft-nothing' does not exist" in err) == (2, True)


def test_an_option_of_one_value_is_overridden_by_a_later_one(cli: Cli) -> None:
    """As scripts do that add to a command which they did not write."""
    code, out, _ = cli("config", "show", "--json", "--port", "1", "--port", "2")
    assert code == 0
    assert '"setting": "port", "value": 2' in out
