"""Choosing the engine on the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli

from penstock.cli.engines import with_engine
from penstock.config import ConfigError, parse_config


def test_the_command_line_goes_before_the_file() -> None:
    file = {"vllm": {"tensor_parallel": 4, "args": {"seed": 1, "swap": 2}}}
    args = {"seed": 1, "swap": [1, "a"], "enforce_eager": True}
    assert with_engine(file, None, 2, None, ["swap=[1, a]", "enforce-eager=true"]) == {
        "vllm": {"tensor_parallel": 2, "args": args}
    }
    assert with_engine(file, "native", None, None, None) == {}


def test_nothing_is_said() -> None:
    assert with_engine({"dtype": "auto"}, None, None, None, None) == {"dtype": "auto"}
    assert with_engine({"dtype": "auto"}, "vllm", None, None, ()) == {"dtype": "auto", "vllm": {}}


def test_the_settings_are_the_engines() -> None:
    settings = with_engine({"target": "x"}, "vllm", 2, "awq", ["max_num_seqs=9"])
    vllm = parse_config({"engine": settings}).engine.vllm
    assert vllm is not None
    assert (vllm.tensor_parallel, vllm.quantization, vllm.args) == (2, "awq", {"max_num_seqs": 9})
    assert parse_config({"engine": {"target": "x"}}).engine.vllm is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("other", None, None, None), "--engine is 'other'; allowed: native, vllm"),
        ((None, 2, None, None), "add --engine vllm"),
        (("native", None, "awq", None), "add --engine vllm"),
        (("vllm", None, None, ["seed"]), "--engine-arg is 'seed'; allowed: KEY=VALUE"),
        (("vllm", None, None, ["seed={"]), "--engine-arg seed: '{' is not a value of YAML"),
    ],
)
def test_what_cannot_be(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_engine({}, *given)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm(cli: Cli) -> None:
    code, out, err = cli("generate", "hello", "--engine", "vllm")
    assert (code, out) == (2, "")
    assert err.startswith("penstock: engine vllm needs vLLM, which is not installed: pip install")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "serve", "bench engine", "profile measure"])
def test_commands_that_take_an_engine(cli: Cli, command: str, tmp_path: Path) -> None:
    prompt = ["hello"] if command == "generate" else []
    out = ["--out", tmp_path / "p.json"] if command == "profile measure" else []
    code, _, err = cli(*command.split(), *prompt, *out, "--engine", "no")
    assert (code, err) == (2, "penstock: --engine is 'no'; allowed: native, vllm\n")
