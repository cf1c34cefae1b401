"""Where settings come from, what is in force, and what is wrong with a file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli
from typer.testing import CliRunner

from penstock.cli import app
from penstock.config import ConfigError, ServeConfig, hash_of_key, mistakes_in, read_settings

SECRET = "sk-planted-secret"


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", *arguments], env=env)
    return result.exit_code, result.output


def shown(*arguments: str, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    code, output = run("show", "--json", *arguments, env=env)
    assert code == 0, output
    return {row["setting"]: (row["value"], row["from"]) for row in json.loads(output)}


@pytest.mark.parametrize(
    ("name", "value", "where", "read"),
    [
        ("PORT", "80", ("port",), "80"),
        ("ENGINE__KV_TOKENS", "64", ("engine", "kv_tokens"), "64"),
        ("ENGINE__PIPELINE", "off", ("engine", "pipeline"), "off"),
        ("DRAFTERS__LISTEN", "[::]:8100", ("drafters", "listen"), "[::]:8100"),
        ("CORS_ORIGINS", '["*"]', ("cors_origins",), ["*"]),
        ("ENGINE__DRAFTERS", '{"a": "ngram"}', ("engine", "drafters"), {"a": "ngram"}),
        ("ENGINE__ALLOCATION__OPTIONS__K", "3", ("engine", "allocation", "options", "k"), 3),
        ("ENGINE__VLLM__ARGS__LOAD_FORMAT", "x", ("engine", "vllm", "args", "load_format"), "x"),
    ],
)
def test_variables(name: str, value: str, where: tuple[str, ...], read: Any) -> None:
    found = read_settings(None, {f"PENSTOCK_{name}": value, "PENSTOCKS": "1", "HOME": "/"})
    values: Any = found.values
    for part in where:
        values = values[part]
    assert values == read
    assert set(found.origins.values()) == {f"PENSTOCK_{name}"}
    assert found.origin(where) in (f"PENSTOCK_{name}", None)


def test_variables_of_others_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes sets this one for a service of the name `penstock`."""
    found = read_settings(None, {"PENSTOCK_SERVICE_HOST": "10.0.0.1", "PENSTOCK_API_KEY": SECRET})
    assert found.values == {}
    (message,) = caplog.messages
    assert message == "the variable PENSTOCK_SERVICE_HOST is no setting, and is ignored"


def test_variables_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nengine:\n  kv_tokens: 64\n  dtype: float32\n")
    env = {"PENSTOCK_ENGINE__KV_TOKENS": "128", "PENSTOCK_HOST": "::1"}
    found = read_settings(path, env)
    assert found.values == {
        "port": 1,
        "host": "::1",
        "engine": {"kv_tokens": "128", "dtype": "float32"},
    }
    assert found.origin(("engine", "dtype")) == f"{path}:4"
    assert found.origin(("engine", "kv_tokens")) == "PENSTOCK_ENGINE__KV_TOKENS"
    assert found.origin(("metrics_keys",)) is None


def test_what_is_in_force_and_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    key = hash_of_key("another")
    path.write_text(
        f"port: 1\nengine:\n  kv_tokens: 64\n  dtype: float32\n"
        f"  tenants: {{a: {{api_keys: ['{key}']}}}}\n"
        f"  vllm: {{args: {{hf_token: {SECRET}}}}}\nmetrics_keys: ['{key}']\n"
    )
    env = {"PENSTOCK_ENGINE__KV_TOKENS": "128", "PENSTOCK_API_KEY": SECRET, "PENSTOCK_PORT": "2"}
    options = ("--port", "3", "--no-speculation", "--policy", "spin")
    found = shown("--config", str(path), *options, env=env)
    assert found["port"] == (3, "option")
    assert found["engine.kv_tokens"] == (128, "PENSTOCK_ENGINE__KV_TOKENS")
    assert found["engine.dtype"] == ("float32", f"{path}:4")
    assert found["engine.block_size"] == (16, "default")
    assert found["engine.drafters"] == ({}, "option")
    assert found["engine.policy"] == ("spin", "option")
    assert found["engine.selection.name"] == ("lbss", "policy spin")
    assert found["engine.tenants.a.api_keys"] == (["(hidden)"], f"{path}:5")
    assert found["engine.tenants.default.api_keys"] == (["(hidden)"], "option")
    assert found["engine.vllm.args.hf_token"] == ("(hidden)", f"{path}:6")
    code, text = run("show", "--config", str(path), "--no-speculation", env=env)
    assert code == 0
    assert re.search(rf'engine\.dtype +"float32"  # {re.escape(str(path))}:4\n', text)
    assert SECRET not in text
    assert key not in text


def test_mistakes_in_variables_and_files_say_where(cli: Cli, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nmax_body_bytes: 3\n")
    code, _, err = cli("config", "show", "--config", path)
    told = f"{path}:2: max_body_bytes: Input should be greater than or equal to 1024"
    assert (code, err.startswith(f"penstock: {told}"), err.count("\n")) == (2, True, 1)
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:8000")
    code, _, err = cli("config", "show")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("penstock: PENSTOCK_PORT: port: Input should be a valid")


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "port: 99999\n"
        "prot: 3\n"
        "engine:\n"
        "  kv_token: 3\n"
        "  target: nope\n"
        "  kv_tokens: 4\n"
        "  admission: {name: vllm_v2}\n"
        "  tenants:\n"
        "    a: {weight: 0}\n"
        "    b:\n"
        f"      api_keys: [{SECRET}]\n"
        "      wait: 3\n"
    )
    code, output = run("check", str(path))
    lines = output.splitlines()
    assert code == 2
    assert [int(line.split(":")[1]) for line in lines] == [1, 2, 4, 5, 6, 7, 9, 11, 12]
    assert "unknown setting 'prot' (did you mean 'port'?); settings: models, engine" in lines[1]
    assert "does not exist; bundled targets are" in lines[3]
    assert "an API key is kept as sha256: and what `printf %s KEY | sha256sum` prints" in lines[7]
    assert SECRET not in output


def test_a_file_without_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nengine: {kv_tokens: 64}\n")
    assert run("check", str(path)) == (0, f"{path}: nothing is wrong\n")


def test_unknown_settings_do_not_hide_other_mistakes() -> None:
    found = mistakes_in(ServeConfig, {"engine": {"target": "a", "x": 1, "kv_tokens": 1}, "y": 1})
    assert [m.where for m in found] == [("y",), ("engine", "x"), ("engine", "kv_tokens")]
    assert all(isinstance(m, ConfigError) for m in found)


def test_a_new_key_is_printed_once_and_opens() -> None:
    result = CliRunner().invoke(app, ["key", "new", "--tenant", "team a", "--json"])
    made = json.loads(result.output)
    assert made["hash"] == hash_of_key(made["key"])
    assert len(made["key"]) > 40
    text = CliRunner().invoke(app, ["key", "new", "--tenant", "team a"]).output
    assert "'sha256:" in text.splitlines()[-1]
    assert text.count("sk-") == 1
