"""Settings of several models: names on the command line, and `models` in the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli

from penstock.cli.settings import in_force, of_pulled
from penstock.config import ConfigError, ServeConfig, seconds_in
from penstock.zoo.registry import bundled_models

LARGE = "target-large"
PATH = bundled_models()["draft-base"].path
SMALL, NAME = str(PATH), PATH.name


def configured(tmp_path: Path, text: str, *targets: str, **options: Any) -> ServeConfig:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    return in_force({"config": file, "targets": targets, **options})


def test_several_targets_have_their_own_names_and_drafters() -> None:
    config = in_force({"targets": [LARGE, SMALL], "drafter": ["ngram"], "dtype": "float32"})
    assert list(config.models) == [LARGE, NAME]
    assert config.engine == config.models[LARGE]
    assert list(config.models[LARGE].drafters) == ["ngram"]
    # As if it were alone.
    assert (
        config.models[NAME].drafters.keys() == in_force({"targets": [SMALL]}).engine.drafters.keys()
    )
    assert {model.dtype for model in config.models.values()} == {"float32"}
    assert {model.state for model in config.models.values()} == {config.engine.state}


def test_one_target_is_no_list_of_models() -> None:
    config = in_force({"targets": [SMALL]})
    assert config.models == {}
    assert config.model_names == (NAME,)


def test_no_speculation_is_for_all() -> None:
    config = in_force({"targets": [LARGE, SMALL], "no_speculation": True})
    assert [model.drafters for model in config.models.values()] == [{}, {}]


def test_models_share_what_is_under_engine(tmp_path: Path) -> None:
    text = f"""
engine: {{kv_tokens: 1024, tenants: {{a: {{weight: 2}}}}}}
models:
  x: {{target: {SMALL}, kv_tokens: 2048, drafters: {{}}}}
  y: {{target: {LARGE}}}
preload: x
keep_alive: 1h30m
"""
    config = configured(tmp_path, text)
    assert {name: model.kv_tokens for name, model in config.models.items()} == {
        "x": 2048,
        "y": 1024,
    }
    assert config.models["x"].drafters == {}
    assert all("a" in model.tenants for model in config.models.values())
    assert (config.preload, config.keep_alive) == (("x",), 5400)
    assert list(configured(tmp_path, text, SMALL).models) == [NAME, "x", "y"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("{x: {target: nowhere}}", "models.x: target 'nowhere' does not exist"),
        (f"{{x: {{target: {SMALL}, kv_token: 1}}}}", "models.x: unknown setting 'kv_token'"),
        (f"{{x: {{target: {SMALL}, tenants: {{}}}}}}", "models.x: tenants and state are under"),
        ("{x: 7}", "models.x must be a mapping"),
        (f"{{{NAME}: {{target: {LARGE}}}}}", f"models: '{NAME}' is given twice"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, models: str, message: str) -> None:
    targets = [SMALL] if NAME + ":" in models else []
    with pytest.raises(ConfigError) as error:
        configured(tmp_path, f"models: {models}\n", *targets)
    assert message in str(error.value)


def test_origins_of_several(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"engine: {{kv_tokens: 512}}\nmodels:\n  x: {{target: {SMALL}}}\n")
    code, out, _ = cli("config", "show", "--config", file, "--dtype", "float32", "--json")
    assert code == 0
    origins = {row["setting"]: row["from"] for row in json.loads(out)}
    assert origins["models.x.target"] == f"{file}:3"
    assert origins["models.x.kv_tokens"] == f"{file}:1"
    assert origins["models.x.dtype"] == "option"
    assert origins["models.x.block_size"] == "default"


def test_clients_have_no_paths_fetched(tmp_path: Path) -> None:
    given = {"targets": [SMALL], "drafter": ["ngram"], "dtype": "float32"}
    pulled = of_pulled(given, LARGE, lambda *_: None)
    assert pulled.target == bundled_models()[LARGE].path
    assert pulled.dtype == "float32"
    for name in (str(tmp_path), SMALL, "./x", "x"):
        with pytest.raises(ConfigError, match="is no model; bundled are"):
            of_pulled(given, name, lambda *_: None)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0), (300, 300), (1.5, 1.5), ("0", 0), ("0s", 0), ("10m", 600), ("1h30m", 5400),
        ("1.5h", 5400), ("250ms", 0.25), (-1, float("inf")), ("-1m", float("inf")),
    ],
)  # fmt: skip
def test_durations(given: Any, seconds: float) -> None:
    assert seconds_in(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["soon", "", "10 minutes", "5x", "m", "1m2", True, [], "nan"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        seconds_in(given)
