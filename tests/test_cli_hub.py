"""The program with models of a hub: fetched, listed, served, and paired with small ones."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.conftest import Cli
from tests.engine.small_gguf import write_gguf
from tests.engine.test_gguf_tokenizer import ORIGINALS
from tests.hub import Hub, hub
from tests.serving.program import LONG, START
from tests.test_cli_gguf import CASE

from penstock.cli import drafters
from penstock.cli.models import drafter_checkpoint, with_models
from penstock.config import ConfigError
from penstock.engine.models import pairs
from penstock.engine.models.pairs import small_models
from penstock.zoo.registry import model_path

__all__ = ["hub"]

TARGET, SMALL, OTHER = "lab/Qwen2.5-9B", "lab/small", "lab/other"
SHORT = ("--raw", "--max-tokens", "6", "--dtype", "float32")


@pytest.fixture
def family(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A target, and a small model that the table has for it."""
    hub.add(TARGET, model_path("target-large"))
    hub.add(SMALL, model_path("draft-tiny"))
    other = tmp_path / "other.gguf"
    write_gguf(other, CASE, "F32", ORIGINALS["gpt-2"](), "gpt-2")
    hub.add(OTHER, {"other-F32.gguf": other.read_bytes()})
    monkeypatch.setitem(pairs.FAMILIES, r"qwen2\.5", {SMALL: 0.001})
    return hub


@pytest.fixture
def resolved(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, str], str]]:
    """Drafters by name, and what was said."""

    def run(**engine: object) -> tuple[dict[str, str], str]:
        found = with_models({"target": TARGET, **engine})["drafters"]
        return found, capsys.readouterr().err

    return run


@pytest.mark.slow
def test_serve_a_model_of_the_hub(hub: Hub) -> None:
    hub.add("lab/tiny", model_path("draft-base"))
    command = [*START, "lab/tiny", "--port", "0", "--state", "none", "--kv-tokens", "2048"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().removeprefix("penstock: ") for _ in range(5)]
        try:
            assert lines[0].startswith("lab/tiny: safetensors, ")
            assert lines[2].startswith("serving on http://127.0.0.1:")
            url = lines[2].split()[-1]
            _, asked, *_, body = shlex.split(lines[4])
            assert json.loads(body)["model"] == "lab/tiny"
            kind = {"Content-Type": "application/json"}
            answer = httpx.post(asked, content=body, headers=kind, timeout=LONG)
            assert answer.json()["usage"]["completion_tokens"] > 0
            (model,) = httpx.get(f"{url}/v1/models", timeout=LONG).json()["data"]
            assert model["id"] == "lab/tiny"
        finally:
            process.terminate()
        assert process.wait(LONG) == 0


def test_generate_with_a_gguf_target_and_drafter(hub: Hub, cli: Cli, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m", CASE, "F32", ORIGINALS["qwen2"](), "qwen2")
    hub.add("lab/gguf", {"m-F32.gguf": (tmp_path / "m").read_bytes()})
    given = ("generate", "def reverse", *SHORT, "--json")
    code, out, err = cli(*given, "--target", "lab/gguf:F32", "--no-speculation")
    assert (code, err) == (0, "")
    alone = json.loads(out)["token_ids"]
    code, out, err = cli(
        *given, "--target", "lab/gguf", "--drafter", "small=ngram+lab/gguf/m-F32.gguf"
    )
    assert code == 0, err
    assert json.loads(out)["token_ids"] == alone
    assert err.startswith("penstock: lab/gguf: no Q4_K_M, so m-F32.gguf is taken: the nearest")


def test_pull_and_models(family: Hub, cli: Cli) -> None:
    code, out, err = cli("pull", TARGET)
    assert code == 0, err
    assert (Path(out.strip()) / "config.json").is_file()
    code, out, _ = cli("models", "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert next(iter(rows)) == TARGET
    assert (rows[TARGET]["format"], rows[TARGET]["drafters"]) == ("safetensors", [])
    assert (
        rows[TARGET]["bytes"] > model_path("target-large").joinpath("tokenizer.json").stat().st_size
    )
    assert "draft-tiny" in rows["target-large"]["drafters"]
    for name in (SMALL, OTHER):
        assert cli("pull", name)[0] == 0
    code, out, _ = cli("models", "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert rows[TARGET]["drafters"] == [SMALL]
    assert rows[f"{OTHER}/other-F32.gguf"]["format"] == "GGUF F32"
    assert TARGET in cli("models")[1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "nothing",
            "'nothing' is no name on the hub; allowed: owner/name[@revision], owner/name:Q",
        ),
        ("lab/nothing", "lab/nothing is neither a file or folder here nor a model of http://127"),
    ],
)
def test_a_name_that_is_none(hub: Hub, cli: Cli, name: str, told: str) -> None:
    code, out, err = cli("pull", name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    for command in (
        ["serve"],
        ["draft", "--connect", "127.0.0.1:1", "--model"],
        ["bench", "engine"],
    ):
        code, _, err = cli(*command, name)
        assert (code, err.count("\n")) == (2, 1)
        assert name in err


def test_a_local_path_comes_first(hub, tmp_path, monkeypatch) -> None:
    hub.add("lab/tiny", model_path("draft-tiny"))
    monkeypatch.chdir(tmp_path)
    assert drafter_checkpoint("lab/tiny")[0] == "lab/tiny"
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "tiny").symlink_to(model_path("draft-tiny"))
    assert drafter_checkpoint("lab/tiny") == ("tiny", Path("lab/tiny"))


def test_settings_are_shown_without_a_download(hub: Hub, cli: Cli, tmp_path: Path) -> None:
    hub.add("lab/tiny", model_path("draft-base"))
    code, out, err = cli("config", "show", "lab/tiny", "--json")
    assert (code, err, hub.asked) == (0, "", [])
    rows = {row["setting"]: row["value"] for row in json.loads(out)}
    assert (rows["engine.target"], rows["served_model_name"]) == ("lab/tiny", ["lab/tiny"])
    file = tmp_path / "x.yaml"
    file.write_text("engine: {target: 'lab/tiny:Q8_0', drafters: {auto: auto, a: lab/b}}")
    assert cli("config", "check", file)[0] == 0
    _, out, _ = cli("doctor", "lab/tiny", "--json")
    found = [f["remedy"] for f in json.loads(out) if f["what"] == "target"]
    assert found == ["`penstock pull lab/tiny` fetches it"]
    assert hub.asked == []


def test_a_drafter_by_itself(family: Hub, resolved) -> None:
    found, said = resolved()
    assert found == {"suffix": "suffix"}
    assert f"penstock: {SMALL} would help as a drafter: --drafter auto fetches it\n" in said
    assert resolved(drafters={})[0] == {}
    found, said = resolved(drafters={"auto": "auto", "ngram": "ngram"})
    assert [*found] == ["small", "ngram"]
    assert f"penstock: {SMALL} drafts\n" in said
    again, said = resolved()
    assert again == {"small": found["small"]}
    assert said == f"penstock: {SMALL} drafts; it was in the cache\n"
    assert resolved(drafters={}) == ({}, "")


def test_a_drafter_of_another_tokenizer_does_not_draft(family, resolved, monkeypatch) -> None:
    monkeypatch.setitem(pairs.FAMILIES, r"qwen2\.5", {OTHER: 0.001})
    found, said = resolved(drafters={"auto": "auto"})
    assert found == {"suffix": "suffix"}
    assert f"{OTHER} has another tokenizer than {TARGET}, so it does not draft\n" in said
    assert resolved() == ({"suffix": "suffix"}, "")


def test_a_drafter_that_does_not_fit(family, resolved, monkeypatch) -> None:
    monkeypatch.setattr(drafters, "free_memory", lambda *_: 25_000_000)
    assert resolved()[0] == {"suffix": "suffix"}
    found, said = resolved(drafters={"auto": "auto"})
    assert (found, SMALL in family.downloads()) == ({"suffix": "suffix"}, False)
    assert "no small model of its family that is known fits; --drafter NAME=MODEL names" in said
    monkeypatch.undo()


def test_a_family_without_a_small_model(family: Hub, resolved) -> None:
    family.add("lab/unknown", model_path("draft-base"))
    found, said = resolved(target="lab/unknown", drafters={"auto": "auto"})
    assert found == {"suffix": "suffix"}
    assert "no small model of its family is known; --drafter NAME=MODEL names one" in said
    with pytest.raises(ConfigError, match="does not exist"):
        resolved(drafters={"auto": "elsewhere"})


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/Llama-3.2-1B-Instruct"),
        ("google/gemma-3-4b-it", "unsloth/gemma-3-270m-it"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("mistralai/Mistral-Small-24B", "alamios/Mistral-Small-3.1-DRAFT-0.5B"),
        ("microsoft/phi-4", "rdsm/QwenPhi-4-0.5b-Draft"),
        ("Qwen/Qwen3.5-9B", None),
        ("microsoft/Phi-4-mini-instruct", None),
    ],
)
def test_families(tmp_path: Path, name: str, small: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = small_models(tmp_path, name)
    assert (found[0].name if found else None) == small


def test_the_family_of_a_local_file(tmp_path: Path) -> None:
    """Small models are found by name or by metadata; small models of its own format come first."""
    path = tmp_path / "my_Qwen2.5 Coder.gguf"
    path.write_bytes(b"")
    assert [m.name.endswith(":Q8_0") for m in small_models(path, str(path))] == [True, False]
    named = tmp_path / "model.gguf"
    write_gguf(named, CASE, "F32")
    assert small_models(named, str(named)) == []
