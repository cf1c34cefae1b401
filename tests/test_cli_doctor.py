"""What `penstock doctor` finds: with nothing wrong, and with one thing wrong at a time."""

import dataclasses
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from tests.conftest import Cli
from tests.engine.small_gguf import write_gguf
from tests.engine.small_models import CASES
from tests.engine.test_gguf_tokenizer import ORIGINALS
from typer.testing import CliRunner

from penstock.cli import app
from penstock.engine import backends
from penstock.engine.memory import free_memory
from penstock.engine.native import loading
from penstock.zoo.registry import bundled_models

doctor = sys.modules["penstock.cli.doctor"]
"""The module: the package has its command under the same name."""

TARGET = bundled_models()["draft-base"].path


def findings(*arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    rows = json.loads(result.output)
    assert all(row["remedy"] or row["state"] == "ok" for row in rows), "each says how to mend it"
    return result.exit_code, {row["what"]: (row["state"], row["message"]) for row in rows}


def test_nothing_is_wrong() -> None:
    code, found = findings(str(TARGET), "--port", "0")
    assert code == 0
    assert {state for state, _ in found.values()} <= {"ok", "warning"}
    assert found["target"][0] == found["port"][0] == found["packages"][0] == "ok"
    text = CliRunner().invoke(app, ["doctor", str(TARGET), "--port", "0"]).output
    assert "\nok       target" in text


def test_a_broken_model(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(TARGET, broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    code, found = findings(str(broken), "--port", "0", "--no-speculation")
    assert code == 1
    assert found["target"][0] == "failure"
    assert str(broken) in found["target"][1]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe", "gemma3"])
def test_a_gguf_file(name: str, tmp_path: Path) -> None:
    path, case = tmp_path / "model.gguf", CASES[name]
    case = dataclasses.replace(case, changes=case.changes | {"vocab_size": 512})
    write_gguf(path, case, "F32", ORIGINALS["qwen2"](), "qwen2")
    code, found = findings(str(path), "--port", "0", "--no-speculation")
    assert (code, found["target"]) == (0, ("ok", f"{path} can be read"))
    write_gguf(path, case, "F32", **{"attention.key_length": 64, "attention.value_length": 64})
    code, found = findings(str(path), "--port", "0", "--no-speculation")
    assert (code, found["target"][0]) == (1, "failure")
    assert "blk.0.attn_q.weight has shape" in found["target"][1]


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("drafters", ["--no-speculation", "--drafter=draft-tiny"])
def test_memory_that_serve_would_not_get(backend: str, drafters: str, cli: Cli) -> None:
    """The doctor's line is the one with which the command ends."""
    given = ("--set", f"kv_tokens={10**12}", "--set", f"backend={backend}", drafters)
    code, found = findings(str(TARGET), "--port", "0", *given)
    assert (code, found["memory"][0]) == (1, "failure")
    said = found["memory"][1].partition(";")[0]
    code, _, err = cli("generate", "a", "--target", TARGET, *given)
    assert (code, err.count("\n"), err.startswith(f"penstock: {said}; ")) == (2, 1, True)
    assert err.endswith(
        "GiB are free: smaller or quantised models, a lower kv_tokens or more memory would do\n"
    )


def test_settings_and_ports(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("prot: 1\n")
    code, found = findings(str(TARGET), "--port", "0", "--max-model-len", "99999")
    assert (code, found["settings"][0]) == (1, "failure"), "it does not suit the model"
    code, found = findings("--config", str(path))
    assert code == 1
    assert f"{path}:1: unknown setting 'prot'" in found["settings"][1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = findings(str(TARGET), "--port", str(port), "--no-speculation")
    assert code == 1
    assert found["port"] == ("failure", f"127.0.0.1:{port}: Address already in use")


def test_kernels_that_were_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loading.load_library.cache_clear()
    monkeypatch.setattr(loading, "FOLDER", tmp_path)
    try:
        code, found = findings(str(TARGET), "--port", "0", "--no-speculation")
    finally:
        loading.load_library.cache_clear()
    assert code == 0, "PyTorch's own operations do"
    assert found["kernels"][0] == "warning"
    assert "was not built" in found["kernels"][1]


def test_limits_of_control_groups(tmp_path: Path) -> None:
    assert doctor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert doctor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.cpu_quota(tmp_path) is None

    meminfo = tmp_path / "meminfo"
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_memory(meminfo, tmp_path) == everything, "nothing else is known"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert free_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_memory(meminfo, tmp_path) == 2_000_000


def test_more_threads_than_may_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(backends, "free_memory", lambda: 999)
    code, found = findings(str(TARGET), "--port", "0", "--no-speculation")
    assert found["threads"][0] == "warning"
    assert "a quota of 0.5 cores" in found["threads"][1]
    assert found["memory"][0] == "failure"
    assert code == 1


def test_several_numa_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = min(os.sched_getaffinity(0))
    (tmp_path / "node0" / f"cpu{mine}").mkdir(parents=True)
    (tmp_path / "node1" / "cpu4095").mkdir(parents=True)
    assert doctor.num_memory_nodes(tmp_path) == 1, "the other node is not this process's"
    assert doctor.num_memory_nodes(tmp_path / "node0") == 0
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {mine, 4095})
    assert doctor.num_memory_nodes(tmp_path) == 2
    monkeypatch.setattr(doctor, "num_memory_nodes", lambda _: 2)
    code, found = findings(str(TARGET), "--port", "0", "--no-speculation")
    assert code == 0
    assert found["nodes"] == ("warning", "the cores are on 2 NUMA nodes")
