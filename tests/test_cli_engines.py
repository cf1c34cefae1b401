"""Choosing the engine on the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.conftest import Cli

from penstock.cli.engines import with_engine
from penstock.config import ConfigError, parse_config


def test_the_command_line_goes_before_the_file() -> None:
    file = {"vllm": {"tensor_parallel": 4, "args": {"seed": 1, "swap": 2}}}
    given = ["swap=[1, a]", "enforce-eager=true"]
    args = {"seed": 1, "swap": [1, "a"], "enforce_eager": True}
    assert with_engine(file, None, given, tensor_parallel=2, quantization=None) == {
        "vllm": {"tensor_parallel": 2, "args": args}
    }
    assert with_engine(file, "native") == {}


def test_nothing_is_said() -> None:
    assert with_engine({"dtype": "auto"}, None, None, nodes=None) == {"dtype": "auto"}
    assert with_engine({"dtype": "auto"}, "vllm", ()) == {"dtype": "auto", "vllm": {}}


def test_the_settings_are_the_engines() -> None:
    settings = with_engine({"target": "x"}, "vllm", ["max_num_seqs=9"], tensor_parallel=2)
    vllm = parse_config({"engine": settings}).engine.vllm
    assert vllm is not None
    assert (vllm.tensor_parallel, vllm.args) == (2, {"max_num_seqs": 9})
    assert parse_config({"engine": {"target": "x"}}).engine.vllm is None


@pytest.mark.parametrize(
    ("engine", "args", "options", "message"),
    [
        ("other", (), {}, "--engine is 'other'; allowed: native, vllm"),
        (None, (), {"tensor_parallel": 2}, "^--tensor-parallel: .*; add --engine vllm"),
        ("native", ["seed=1"], {"node_rank": 0}, "^--node-rank, --engine-arg: .*add --engine vllm"),
        ("vllm", ["seed"], {}, "--engine-arg is 'seed'; allowed: KEY=VALUE"),
        ("vllm", ["seed={"], {}, "--engine-arg seed: '{' is not a value of YAML"),
    ],
)
def test_what_cannot_be(
    engine: str | None, args: list[str], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_engine({}, engine, args, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--distributed-backend slurm", "distributed_backend: Input should be 'mp' or 'ray'"),
        ("--node-rank 1", "node_rank and master are for several nodes; add nodes"),
        ("--nodes 2 --node-rank 2 --master a:1", "node_rank is 2; allowed: 0 to 1"),
        ("--nodes 2", "nodes is 2, so master is needed: HOST:PORT of node 0"),
        ("--nodes 2 --master a", "master: 'a' is not HOST:PORT, as in 127.0.0.1:8100"),
        ("--nodes 2 --master a:0", "master: 'a:0' has port 0; allowed: 1 to 65535"),
        ("--nodes 2 --master a:1", "nodes is 2, which does not divide the 1 workers"),
        (
            "--nodes 2 --master a:1 --tensor-parallel 2 --distributed-backend ray",
            "nodes is for mp: a Ray cluster knows its own nodes",
        ),
    ],
)
def test_nodes_that_cannot_be(cli: Cli, tmp_path: Path, options: str, message: str) -> None:
    code, out, err = cli("serve", tmp_path, "--engine", "vllm", *options.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


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
