"""Choosing the engine, and settings of the file on the command line."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli

from penstock.cli.settings import engine_with, put_options
from penstock.config import ConfigError, Settings


def put(file: dict[str, Any], *sets: str, **options: Any) -> dict[str, Any]:
    """Settings of a file with these options in their places."""
    settings = Settings(file)
    put_options(settings, {"settings": sets, **options})
    return settings.values


def test_the_command_line_goes_before_the_file() -> None:
    vllm = {"tensor_parallel": 4, "args": {"seed": 1, "swap": 2}}
    sets = ("vllm.args.swap=[1, a]", "vllm.args.enforce_eager=true", "vllm.tensor_parallel=2")
    args = {"seed": 1, "swap": [1, "a"], "enforce_eager": True}
    assert put({"engine": {"vllm": vllm}}, *sets) == {
        "engine": {"vllm": {"tensor_parallel": 2, "args": args}}
    }
    assert put({"engine": {"vllm": vllm}}, engine="native") == {"engine": {"vllm": None}}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("port=80", {"port": 80}),
        ("engine.kv_tokens=64", {"engine": {"kv_tokens": 64}}),
        ("kv_tokens=64", {"engine": {"kv_tokens": 64}}),
        ("drafters.tls.key=a.pem", {"drafters": {"tls": {"key": "a.pem"}}}),
        ("engine.drafters.a=ngram", {"engine": {"drafters": {"a": "ngram"}}}),
        ("cors_origins=[https://a, https://b]", {"cors_origins": ["https://a", "https://b"]}),
        ("tenants.team-a.weight=2", {"engine": {"tenants": {"team-a": {"weight": 2}}}}),
        ("pipeline=off", {"engine": {"pipeline": False}}),
        ("selection=lbss", {"engine": {"selection": {"name": "lbss"}}}),
        ("admission.max_num_seqs=4", {"engine": {"admission": {"options": {"max_num_seqs": 4}}}}),
        ("allocation.options.k_max=4", {"engine": {"allocation": {"options": {"k_max": 4}}}}),
        ("kv_tokens=", {"engine": {"kv_tokens": None}}),
    ],
)
def test_settings_by_key(text: str, values: dict[str, Any]) -> None:
    assert put({}, text) == values


def test_a_policy_keeps_its_options_where_it_is_named_again() -> None:
    file = {"engine": {"admission": {"name": "sarathi", "options": {"max_num_seqs": 2}}}}
    assert put(file, "admission=sarathi") == file
    assert put({}, "admission.max_num_seqs=2", "admission=sarathi") == file
    assert put(file, "admission.max_num_seqs=3", admission="vllm_v1") == {
        "engine": {"admission": {"name": "vllm_v1", "options": {"max_num_seqs": 3}}}
    }


def test_the_settings_are_the_engines(tmp_path: Path) -> None:
    options = {"target": tmp_path, "settings": ["vllm.args.max_num_seqs=9"]}
    vllm = engine_with(options).vllm
    assert vllm is not None, "its settings choose it"
    assert vllm.args == {"max_num_seqs": 9}
    assert engine_with({"target": tmp_path, "engine": "vllm"}).vllm is not None
    assert engine_with({"target": tmp_path}).vllm is None


@pytest.mark.parametrize(
    ("engine", "sets", "message"),
    [
        ("other", (), "--engine is 'other'; allowed: native, vllm"),
        ("native", ("vllm.node_rank=0",), "--set vllm.node_rank: for vLLM's engine alone"),
        (None, ("port",), "--set takes KEY=VALUE, as in vllm.tensor_parallel=2, not 'port'"),
        (None, ("=3",), "--set takes KEY=VALUE"),
        (None, ("kv_blocks={",), "--set kv_blocks: unknown setting 'kv_blocks' "),
        (None, ("vllm.args.seed={",), "--set vllm.args.seed: '{' is not a value of YAML"),
        (None, ("port=1", "port=2"), "--set: 'port' is given twice"),
        (None, ("host=a", "host.name=b"), "host must be a mapping of settings"),
    ],
)
def test_what_cannot_be(engine: str | None, sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        put({}, *sets, engine=engine)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("vllm.distributed_backend=slurm", "distributed_backend: Input should be 'mp' or 'ray'"),
        ("vllm.node_rank=1", "node_rank and master are for several nodes; add nodes"),
        ("vllm.nodes=2 vllm.node_rank=2 vllm.master=a:1", "node_rank is 2; allowed: 0 to 1"),
        ("vllm.nodes=2", "nodes is 2, so master is needed: HOST:PORT of node 0"),
        ("vllm.nodes=2 vllm.master=a", "master: 'a' is not HOST:PORT, as in 127.0.0.1:8100"),
        ("vllm.nodes=2 vllm.master=a:0", "master: 'a:0' has port 0; allowed: 1 to 65535"),
        ("vllm.nodes=2 vllm.master=a:1", "nodes is 2, which does not divide the 1 workers"),
        (
            "vllm.nodes=2 vllm.master=a:1 vllm.tensor_parallel=2 vllm.distributed_backend=ray",
            "nodes is for mp: a Ray cluster knows its own nodes",
        ),
        ("vllm.tensor=2", "--set vllm.tensor: engine.vllm: unknown setting 'tensor'; settings: te"),
        ("vllm.nodes=many", "--set vllm.nodes: engine.vllm.nodes: Input should be a valid integer"),
        ("prot=1", "--set prot: unknown setting 'prot' (did you mean 'port'?); settings: "),
        ("port=[1]", "--set port: port: Input should be a valid integer"),
        ("selection=best", "unknown selection policy 'best'; choose from "),
    ],
)
def test_settings_that_cannot_be(cli: Cli, tmp_path: Path, sets: str, message: str) -> None:
    options = [part for text in sets.split() for part in ("--set", text)]
    code, out, err = cli("serve", tmp_path, *options)
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


@pytest.mark.parametrize(
    ("command", "most_options"),
    [
        ("serve", 17),
        ("generate", 16),
        ("doctor", 20),
        ("simulate", 31),
        ("capacity", 30),
        ("plan", 17),
    ],
)
def test_help_fits_on_a_screen_and_a_half(cli, monkeypatch, command, most_options) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli(command, "--help")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= 75
    assert max(map(len, lines)) <= 80
    options = [line for line in lines if line.startswith("  --") and "--help" not in line]
    assert 1 < len(options) <= most_options
